"""Passes rows that one model is unsure of on to the next, with one promise for all answers."""

import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .._io.files import write_atomically
from .._io.progress import progress_bar
from ..cost import readable_count
from ..data.rows import is_dataframe
from ..model_info import READS
from ..uncertainty.abstention import check_share
from ..uncertainty.calibration import halves_of
from ..uncertainty.cascade import MOST_STAGES, CascadeFit, coverage_alone, fit_cascade, is_answered
from .answerer import Answerer, require
from .cascade_files import SavedCascade, SavedStage, file_of, read_cascade, saved_stage, sources_of
from .cascade_rows import input_in, labelled_rows
from .cascade_stages import PERSON, FunctionStage, ModelStage, Stage, StageAnswer, stage_of
from .predictor import HydraPredictor


COLUMNS = {"label": "string", "confidence": "double", "abstain": "bool", "stage": "string", "reason": "string"}


@dataclass(frozen=True)
class CascadeCalibration:
    """The result of `Cascade.calibrate`. Printed, it says what stages do, and what is promised.

    Attributes:
        fit (`CascadeFit`): the thresholds, and what they do on the rows that make the promise.
        alone (`dict[str, float | None]`): by stage, the share of these rows that it answers by
            itself with the same promise; None where it cannot make it.
        sentences (`list[str]`): what is printed.
    """

    fit: CascadeFit
    alone: dict[str, float | None]
    sentences: list[str]

    def __str__(self) -> str:
        return "\n".join(self.sentences)


class Cascade(Answerer):
    """Several stages in a row: one that is unsure of a row passes it on to the next.

    Thresholds are found together, such that one promise holds for all final answers. It predicts
    for inputs, and takes the place of a `HydraPredictor` in `predict_data` and `create_app`.

    Args:
        stages (`list`): in the order in which they are asked, the cheapest first. Each is a folder
            or Hub name, a model or a (model, processor), a `HydraPredictor`, or a function from a
            list of inputs to a (label, confidence) for each. The last one may be "person": who gets
            the rows that no stage answers. At most four stages and a person.
        prices (`list[float]`, *optional*): of a row in each stage, in any unit. By default work is
            counted in multiply-adds; where a stage is a function, in calls of the stages behind the
            first.
        device (`str`, *optional*): of models that are loaded; by default cuda where there is one.
        batch_size (`int`, defaults to 32): rows per pass.

    Example:
        >>> cascade = Cascade(["my-hydra", "larger-model", "person"])  # doctest: +SKIP
        >>> print(cascade.calibrate("validation.csv", target={"risk": 0.05}))  # doctest: +SKIP
        >>> cascade.predict(["a text"])  # doctest: +SKIP
        >>> cascade.save("my-hydra")  # doctest: +SKIP
    """

    def __init__(
        self,
        stages: Sequence[Any],
        prices: Sequence[float] | None = None,
        *,
        device: str | None = None,
        batch_size: int = 32,
    ):
        # The stages.
        if isinstance(stages, (str, os.PathLike)) or len(stages) < 2:
            raise ValueError(f"stages is {repr(stages)[:100]}: pass a list of two or more")
        self.has_person = _is_person(stages[-1])
        machines = list(stages[:-1]) if self.has_person else list(stages)
        if any(_is_person(stage) for stage in machines):
            raise ValueError(f"stages has {PERSON!r} before others: pass a person last")
        if len(machines) > MOST_STAGES:
            raise ValueError(f"stages has {len(machines)} that answer: pass at most {MOST_STAGES}, and a person")
        self.stages: list[Stage] = [stage_of(stage, device=device, batch_size=batch_size) for stage in machines]
        _give_names_once(self.stages)
        models = [stage for stage in self.stages if isinstance(stage, ModelStage)]
        _check_fit_together(models)
        self.first_model = models[0].predictor if models else None  # it reads files, and requests

        # What a row costs in each.
        self.prices = _checked_prices(prices, len(stages))
        if self.prices is not None:
            self.unit = "price"
        else:
            self.unit = "multiply-adds" if len(models) == len(self.stages) else "calls"

        # What jobs and the server ask for.
        processor = None if self.first_model is None else self.first_model.processor
        kind = "text" if self.first_model is None else self.first_model.kind
        super().__init__(None, processor, kind)
        self.config = None if self.first_model is None else self.first_model.config
        self.name = " then ".join(self.names)
        self.columns = COLUMNS
        self.parameters: dict[str, Any] = {}
        self.batch_size = batch_size

        # What `calibrate` finds.
        self.fit: CascadeFit | None = None
        self.sentences: list[str] = []
        self.input_columns: tuple[str, ...] = ()
        self._loading: dict[str, Any] | None = None

    @property
    def names(self) -> list[str]:
        """The names of the stages, with the person."""
        return [stage.name for stage in self.stages] + [PERSON] * self.has_person

    def calibrate(
        self,
        rows: Any,
        target: Mapping[str, float],
        *,
        confidence: float = 0.9,
        column: str | Sequence[str] | None = None,
        label: str | None = None,
        seed: int = 0,
    ) -> CascadeCalibration:
        """Find the thresholds of all stages, with one promise for all final answers.

        All stages are asked about all rows. A random half of the rows chooses the candidates, the
        other half makes the promise.

        Args:
            rows (`str`, `os.PathLike`, `DataFrame`, `Dataset`, `list[dict]` or what `load_data`
                returns): labelled rows that no stage was trained on. Labels are compared by name.
            target (`dict`): {"risk": 0.05}: at most 5 % of all final answers are wrong.
            confidence (`float`, defaults to 0.9): of the promise.
            column (`str` or pair of `str`, *optional*): of the inputs; by default found.
            label (`str`, *optional*): the column of labels; by default found.
            seed (`int`, defaults to 0): of the halves.

        Returns:
            `CascadeCalibration`: what each stage does, and what is promised, in sentences.
        """
        if not isinstance(target, Mapping) or set(target) != {"risk"}:
            raise ValueError(f"target is {target!r}: a cascade promises a risk, pass {{'risk': 0.05}}")
        check_share(target["risk"], "risk")  # before stages are asked, which may cost money
        check_share(confidence, "confidence")
        data = labelled_rows(rows, self.first_model, column, label)

        # What every stage says of every row.
        scores = np.empty((len(self.stages), len(data.labels)))
        wrong = np.empty(scores.shape, dtype=bool)
        problems: dict[str, list[str]] = {stage.name: [] for stage in self.stages}
        with progress_bar(len(data.labels), "calibrate", "row") as bar:
            for place, values in data.batches(self.batch_size):
                part = slice(place, place + len(values))
                for number, stage in enumerate(self.stages):
                    answers = self._ask(stage, values)
                    problems[stage.name] += [answer.problem for answer in answers if answer.problem is not None]
                    scores[number, part] = [answer.score for answer in answers]
                    wrong[number, part] = [
                        answer.label != truth for answer, truth in zip(answers, data.labels[part], strict=True)
                    ]
                bar.update(len(values))

        # The thresholds, and each stage alone.
        work, work_of_rest = self._work()
        fit = fit_cascade(scores, wrong, work, target["risk"], confidence, seed, work_of_rest)
        second = halves_of(torch.zeros(len(data.labels)), seed)[1].numpy()
        alone = {
            stage.name: coverage_alone(scores[number, second], wrong[number, second], fit.risk, fit.confidence)
            for number, stage in enumerate(self.stages)
        }
        self.fit = fit
        self.input_columns = data.columns
        self.sentences = [*_sentences_of(problems, len(data.labels)), *self._sentences(fit, alone)]
        self._loading = None  # what was saved is another one
        return CascadeCalibration(fit, alone, self.sentences)

    def predict(self, rows: Any) -> list[dict[str, Any]]:
        """Predict for inputs, or for rows with the columns of the calibration.

        Args:
            rows (`list`, `DataFrame` or `Dataset`): texts, images or paths of images, or rows.

        Returns:
            `list[dict]`: for each row `label`, `stage` (which answered, "person", or None),
            `confidence` (of that stage), `abstain` and `reason`; or `error` where no stage has an
            answer.
        """
        if is_dataframe(rows):
            rows = rows.to_dict("records")
        if isinstance(rows, (str, bytes, Mapping)):
            raise TypeError(f"rows is a {type(rows).__name__}: pass a list of inputs or rows")
        return self.answers([self._value_of(row) for row in rows])

    # As a predictor of jobs and servers

    def answers(self, values: Sequence[Any]) -> list[dict[str, Any]]:
        """Return the prediction for each input; {"error": why} for one that no stage can answer.

        Args:
            values (`Sequence`): inputs, as for `HydraPredictor.answers`.
        """
        if self.fit is None:
            raise ValueError("the stages have no thresholds yet: call calibrate() first")
        answers: list[dict[str, Any]] = []
        for start in range(0, len(values), self.batch_size):
            answers += self._answers_of_batch(values[start : start + self.batch_size])
        return answers

    def answer(self, inputs: list[Any], parameters: dict[str, Any]) -> list[dict[str, Any]]:
        """Predict for the inputs of requests; abstain on one that no stage has an answer to.

        Args:
            inputs (`list`): as `read` returns them.
            parameters (`dict`): none.
        """
        answers = self.answers(inputs)
        unread = dict.fromkeys(COLUMNS) | {"abstain": True}
        return [answer if "error" not in answer else unread | {"reason": answer["error"]} for answer in answers]

    def read_parameters(self, parameters: Any) -> dict[str, Any]:
        """Check the parameters of a request: a cascade has none."""
        require(not parameters, "parameters is not empty: a cascade has none, leave it out")
        return {}

    @property
    def reads(self) -> str:
        """What it reads, in the plural: "images", "texts", "audio"."""
        return READS[self.kind]

    @property
    def calibration(self) -> dict[str, Any] | None:
        """The thresholds, and what they promise; None before `calibrate`."""
        if self.fit is None:
            return None
        return {"threshold": self.fit.thresholds, "risk": self.fit.risk, "confidence": self.fit.confidence}

    def digest(self) -> str:
        """Return a digest of all stages and their thresholds."""
        parts = [stage.digest() if isinstance(stage, ModelStage) else stage.place for stage in self.stages]
        text = json.dumps([*parts, self.names, self.calibration])
        return hashlib.sha256(text.encode()).hexdigest()

    # Files

    def save(self, file: str | os.PathLike) -> Path:
        """Write thresholds and promise into a small JSON file; models stay where they are.

        Args:
            file (`str` or `os.PathLike`): a folder, which gets cascade.json, or the file itself.
                Folders of stages are saved relative to it.
        """
        if self.fit is None:
            raise ValueError("the stages have no thresholds yet: call calibrate() first")
        file = file_of(file)
        stages = tuple(saved_stage(stage, file.parent) for stage in self.stages)
        if self.has_person:
            stages += (SavedStage(PERSON, PERSON),)
        saved = SavedCascade(stages, self.fit, self.prices, self.unit, self.input_columns, tuple(self.sentences))
        write_atomically(file, json.dumps(saved.to_dict(), indent=1) + "\n")
        self._loading = {"file": os.path.abspath(file), "functions": self._functions()}
        return file

    @classmethod
    def load(
        cls,
        file: str | os.PathLike,
        functions: Mapping[str, Callable] | None = None,
        *,
        then: Sequence[str] | None = None,
        device: str | None = None,
        batch_size: int = 32,
    ) -> "Cascade":
        """Load a cascade with its models; raise for models that have changed since.

        Args:
            file (`str` or `os.PathLike`): cascade.json, or its folder.
            functions (`dict`, *optional*): by name, the stages that are functions. No code that
                the file names is imported, and nobody can see whether a function has changed.
            then (`list[str]`, *optional*): the stages behind the first: folders, names on the Hub
                or "person"; by default those that the file names.
            device (`str`, *optional*), batch_size (`int`, defaults to 32): as for a new one.
        """
        file = file_of(file)
        saved = read_cascade(file)
        sources = sources_of(saved, file, then)
        functions = dict(functions or {})

        stages: list[Any] = []
        for stage, source in zip(saved.stages, sources, strict=True):
            if stage.kind == PERSON:
                stages.append(PERSON)
            elif stage.kind == "function":
                if stage.name not in functions:
                    raise ValueError(
                        f"{file} has the function {stage.source} as stage {stage.name}: "
                        f"pass functions={{{stage.name!r}: ...}}"
                    )
                stages.append(FunctionStage(functions[stage.name], stage.name))
            else:
                predictor = HydraPredictor(source, device=device, batch_size=batch_size)
                loaded = ModelStage(predictor, source, stage.name)
                if loaded.digest() != stage.digest:
                    raise ValueError(
                        f"{source} is not the model that was calibrated as stage {stage.name} of {file}: "
                        "calibrate the stages together again"
                    )
                stages.append(loaded)
        cascade = cls(stages, saved.prices, batch_size=batch_size)
        cascade.fit = saved.fit
        cascade.sentences = list(saved.sentences)
        cascade.input_columns = saved.columns
        settings = {"then": then, "device": device, "batch_size": batch_size}
        cascade._loading = {"file": os.path.abspath(file), "functions": functions} | settings
        return cascade

    def __reduce__(self) -> tuple[Any, ...]:
        if self._loading is None:
            raise TypeError(f"the cascade {self.name} holds models in memory: save it first")
        return partial(Cascade.load, **self._loading), ()

    # Inside

    def _ask(self, stage: Stage, values: Sequence[Any]) -> list[StageAnswer]:
        """Return what a stage says of each input; a function gets what the first model reads."""
        if isinstance(stage, ModelStage) or self.first_model is None:
            return stage.answers(values)
        read = [self.first_model.read_value(value) for value in values]
        answers = iter(stage.answers([value for value, problem in read if problem is None]))
        return [
            next(answers) if problem is None else StageAnswer(None, math.inf, None, f"it cannot be read ({problem})")
            for _, problem in read
        ]

    def _answers_of_batch(self, values: Sequence[Any]) -> list[dict[str, Any]]:
        """Ask stage after stage about the rows that none has answered yet."""
        found: list[list[tuple[Stage, StageAnswer]]] = [[] for _ in values]
        waiting = list(range(len(values)))
        for stage, threshold in zip(self.stages, self.fit.thresholds, strict=True):
            if threshold == -math.inf or not waiting:
                continue
            answers = self._ask(stage, [values[place] for place in waiting])
            remaining = []
            for place, answer in zip(waiting, answers, strict=True):
                found[place].append((stage, answer))
                if not is_answered(answer.score, threshold):
                    remaining.append(place)
            waiting = remaining
        unanswered = set(waiting)
        return [
            self._unanswered(stages) if place in unanswered else _answered(*stages[-1])
            for place, stages in enumerate(found)
        ]

    def _unanswered(self, found: Sequence[tuple[Stage, StageAnswer]]) -> dict[str, Any]:
        """Return the prediction for a row that no stage answers: what the last one would say."""
        thresholds = dict(zip(self.stages, self.fit.thresholds, strict=True))
        reasons = []
        for stage, answer in found:
            reason = answer.problem or f"its score is {answer.score:.3g}, above {thresholds[stage]:.3g}"
            reasons.append(f"{stage.name}: {reason.rstrip('.')}")
        reason = f"No stage is sure enough ({'; '.join(reasons)})."
        guesses = [answer for _, answer in found if answer.label is not None]
        if not guesses:
            return {"error": reason.rstrip(".")}
        return {
            "label": guesses[-1].label,
            "confidence": guesses[-1].confidence,
            "abstain": True,
            "stage": PERSON if self.has_person else None,
            "reason": reason,
        }

    def _value_of(self, row: Any) -> Any:
        """Return the input in a row with the columns of the calibration; an input as it is."""
        columns = self.input_columns
        is_row = isinstance(row, Mapping) and len(columns) > 0 and all(column in row for column in columns)
        return input_in(row, columns) if is_row else row

    def _work(self) -> tuple[list[float], float]:
        """Return what a row costs in each stage, and what one costs that none answers."""
        if self.prices is not None:
            of_person = self.prices[-1] if self.has_person else 0.0
            return list(self.prices[: len(self.stages)]), of_person
        if self.unit == "calls":
            return [0.0] + [1.0] * (len(self.stages) - 1), 0.0
        return [float(stage.work()) for stage in self.stages], 0.0

    def _sentences(self, fit: CascadeFit, alone: Mapping[str, float | None]) -> list[str]:
        """Say what each stage does, what all do together, and what is promised."""
        first, second = fit.rows
        sentences = [
            f"Of {first + second:,} rows, a random half ({first:,}) chose the thresholds. What follows is of the "
            f"other half ({second:,}), which makes the promise."
        ]
        for stage, shares in zip(self.stages, fit.stages, strict=True):
            if shares.reached == 0:
                sentences.append(f"{stage.name} is not asked.")
                continue
            sentence = f"{stage.name} is asked about {_percent(shares.reached)} of the rows"
            sentence += f", and answers {_percent(shares.answered)} of all rows"
            if shares.wrong is not None:
                sentence += f"; {_percent(shares.wrong)} of these answers are wrong"
            if shares.work > 0:
                sentence += f". It takes {self._work_in_words(shares.work)} per row"
            sentences.append(f"{sentence}.")
        if self.has_person:
            sentences.append(
                f"A person gets {_percent(1 - fit.answered)} of the rows. "
                "What people answer is not part of the promise."
            )
        sentences.append(
            f"All together, {_percent(fit.answered)} of the rows are answered, and {_percent(fit.wrong)} of these "
            f"answers are wrong. A row takes {self._work_in_words(fit.work)}."
        )
        by_itself = [
            f"{name} {'could not make it' if share is None else f'would answer {_percent(share)}'}"
            for name, share in alone.items()
        ]
        sentences.append(f"By itself with the same promise, {', '.join(by_itself)}.")
        sentences.append(fit.guarantee)
        return sentences

    def _work_in_words(self, work: float) -> str:
        if self.unit == "multiply-adds":
            return f"{readable_count(round(work))} multiply-adds"
        if self.unit == "calls":
            return f"{work:.3g} calls"
        return f"a price of {work:.4g}"

    def _functions(self) -> dict[str, Callable]:
        return {stage.name: stage.function for stage in self.stages if isinstance(stage, FunctionStage)}


def _answered(stage: Stage, answer: StageAnswer) -> dict[str, Any]:
    """Return the prediction for a row that a stage answers."""
    return {
        "label": answer.label,
        "confidence": answer.confidence,
        "abstain": False,
        "stage": stage.name,
        "reason": None,
    }


def _sentences_of(problems: Mapping[str, Sequence[str]], rows: int) -> list[str]:
    """Say to how many rows stages have no answer, such as a function that fails."""
    return [
        f"{name} has no answer to {len(reasons):,} of {rows:,} rows. Of the first: {reasons[0].rstrip('.')}."
        for name, reasons in problems.items()
        if reasons
    ]


def _is_person(stage: Any) -> bool:
    return isinstance(stage, str) and stage == PERSON


def _give_names_once(stages: Sequence[Stage]) -> None:
    """Number the names of stages that several have."""
    names: set[str] = {PERSON}
    for stage in stages:
        name = stage.name
        number = 2
        while stage.name in names:
            stage.name = f"{name} {number}"
            number += 1
        names.add(stage.name)


def _check_fit_together(models: Sequence[ModelStage]) -> None:
    """Raise for models that read other inputs than the first, or have other classes."""
    for stage in models[1:]:
        first = models[0].predictor
        other = stage.predictor
        if other.kind != first.kind:
            raise ValueError(f"stage {stage.name} reads {other.reads}, and {models[0].name} reads {first.reads}")
        if sorted(other.class_names) != sorted(first.class_names):
            raise ValueError(
                f"stage {stage.name} has other classes ({', '.join(other.class_names[:5])}) than {models[0].name} "
                f"({', '.join(first.class_names[:5])}): pass models with the same, set id2label in their configs"
            )


def _checked_prices(prices: Any, count: int) -> tuple[float, ...] | None:
    if prices is None:
        return None
    prices = list(prices)
    are_prices = all(
        isinstance(price, Real) and not isinstance(price, bool) and 0 <= price < math.inf for price in prices
    )
    if len(prices) != count or not are_prices:
        raise ValueError(f"prices is {prices!r}: pass a number of 0 or more for each of the {count} stages")
    return tuple(float(price) for price in prices)


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"
