"""Says how a training goes where no bar is seen: one line for each evaluation."""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import PrinterCallback, Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from .._io.progress import in_words, shows_bars


TENSORBOARD_FOLDER = "TENSORBOARD_LOGGING_DIR"  # the environment variable that Transformers reads


class EpochLines(TrainerCallback):
    """Prints a line to stderr after each epoch or evaluation: losses, accuracy, the time left.

    For logs of batch jobs, containers and CI. Only the first of several processes prints.

    Args:
        run (`int`, defaults to 1): which of several equal trainings in a row this is, from 1 on.
        runs (`int`, defaults to 1): how many there are. Each line then names its run, and the time
            that is left is that of all runs.

    Example:

    ```py
    HydraTrainer(hydra, arguments, train_dataset=train, callbacks=[EpochLines()]).train()
    ```
    """

    def __init__(self, run: int = 1, runs: int = 1) -> None:
        self.run = run
        self.runs = runs
        self.started: float | None = None
        self.first_step = 0
        self.last_step = 0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.started = time.monotonic()
        self.first_step = state.global_step
        self.last_step = state.global_step

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.started = None  # an evaluation afterwards is none of the training's

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        if args.eval_strategy == "no" and "loss" in (logs or {}):
            self._print(args, state, {})

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        self._print(args, state, metrics or {})

    def _print(self, args: TrainingArguments, state: TrainerState, metrics: dict[str, float]) -> None:
        if self.started is None or not state.is_world_process_zero or state.global_step == self.last_step:
            return
        self.last_step = state.global_step

        # What was measured, and the last loss that Trainer has logged since
        losses = [entry["loss"] for entry in state.log_history if "loss" in entry]
        parts = []
        if self.runs > 1:
            parts.append(f"run {self.run} of {self.runs}")
        if args.max_steps > 0:
            parts.append(f"step {state.global_step:,} of {state.max_steps:,}")
        else:
            parts.append(f"epoch {state.epoch:.3g} of {args.num_train_epochs:g}")
        if losses:
            parts.append(f"loss {losses[-1]:.3g}")
        if "eval_loss" in metrics:
            parts.append(f"validation loss {metrics['eval_loss']:.3g}")
        if "eval_accuracy" in metrics:
            parts.append(f"validation accuracy {metrics['eval_accuracy']:.1%}")

        # The steps that are left take as long as those before, in this run and in the others
        steps_left = state.max_steps - state.global_step
        steps_left += (self.runs - self.run) * state.max_steps
        if steps_left > 0:
            seconds = time.monotonic() - self.started
            seconds_per_step = seconds / (state.global_step - self.first_step)
            parts.append(f"{in_words(seconds_per_step * steps_left)} left")
        print(", ".join(parts), file=sys.stderr, flush=True)


def show_progress(trainer: Trainer, progress: bool, run: int = 1, runs: int = 1) -> None:
    """Let a trainer show its bar where one is seen, else lines, or nothing.

    run, runs: of `EpochLines`
    """
    if progress and shows_bars():
        return
    trainer.remove_callback(PrinterCallback)  # it prints dicts
    if progress:
        trainer.add_callback(EpochLines(run, runs))


@contextmanager
def tensorboard_in(folder: Path) -> Iterator[None]:
    """Let trainers that are made meanwhile log there for TensorBoard.

    Their own folder is removed after the training. A folder that the user has chosen stays.
    """
    is_free = TENSORBOARD_FOLDER not in os.environ
    if is_free:
        os.environ[TENSORBOARD_FOLDER] = os.fspath(folder)
    try:
        yield
    finally:
        if is_free:
            del os.environ[TENSORBOARD_FOLDER]
