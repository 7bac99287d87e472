"""`hydrate`: one call from models and data to a finished Hydra: searched, calibrated, evaluated and described."""

import copy
import math
import os
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from .._io.files import written_whole
from .._io.folder_lock import only_writer
from .._version import __version__
from ..data.batches import batches, split_labels
from ..data.fingerprints import fingerprint_of_data
from ..data.labels import model_classes
from ..data.loading import classes_in, load_if_named
from ..data.prediction import accepted_inputs, device_of
from ..data.rows import DataSource
from ..data.tasks import ONE_CLASS, TOKENS, task_of_model
from ..hub.card import check_names
from ..reports.evaluation import EVALUATIONS
from ..reports.gains import Gain, gains
from ..reports.report import UncertaintyReport
from ..reports.task_report import TaskReport
from ..training import Recipe, finetune_from_pretrained
from ..training.finetune import REFUSED_ARGUMENTS
from ..training.from_pretrained import check_trainings, fine_tunings_within
from ..training.recipes import recipe_for
from .candidates import pareto_front
from .choice import choose, next_best, target_of, why
from .model_builder import ModelBuilder, Tuning
from .results import RECORD, Hydrated, write_results
from .resuming import Deadline, StepsFolder, in_words
from .sources import (
    Model,
    Source,
    check_training_data,
    divided_training_data,
    held_out,
    needs_finetuning,
    read_source,
    rows_of,
)
from .strategy import Search


CARD_ARGUMENTS = ("repo_id", "base_model", "dataset", "license", "fine_tuning")
SHARE_FOR_FINE_TUNING = 0.5  # of a time limit
STEPS_TO_TIME = 3


def hydrate(
    model_or_models: Model | Sequence[Model],
    train_data: Any = None,
    data: Any = None,
    ood_data: Any = None,
    target: str | Mapping[str, float] = "balance",
    output_dir: str | os.PathLike = "hydra",
    *,
    processor: Any = None,
    num_members: int = 3,
    trainings: float | None = None,
    finetune: bool | None = None,
    class_names: Sequence[str] | None = None,
    problem_type: str | None = None,
    recipe: Recipe | str | None = None,
    tuning_recipe: Recipe | str | None = None,
    training_arguments: Mapping[str, Any] | None = None,
    batch_size: int = 32,
    seed: int = 0,
    seconds: float = 2.0,
    time_limit: float | None = None,
    device: str | None = None,
    card: Mapping[str, Any] | None = None,
    progress: bool = True,
) -> Hydrated:
    """Searches for the Hydra that fits a target best, and leaves it calibrated, evaluated and described in a folder.

    Args:
        model_or_models: one fine-tuned classifier, whose pruned copies become members; a list of fine-tunings of one
            pre-trained model; or one pre-trained model, which is fine-tuned on `train_data` first. Models, folders or
            Hub names.
        train_data: a Dataset or list of dict rows, as Trainer takes it; or, as with all data here, the name, folder or file
            of a data set, which `load_data` reads for the model. Used to fine-tune a pre-trained model, and pruned members
            where that can still win. Without it nothing is trained.
        data: labelled rows that no model was trained on: a DataLoader that does not shuffle, a list of dict batches, or a
            Dataset or list of dict rows. They are read once, held in memory, and divided at random: a third (at most 1,000)
            to search with, a third (at most 2,000) to calibrate on, the rest to compare candidates. Optional for a pre-trained model:
            then it is the validation split of `train_data`, or a part held out of it; a note says which.
        ood_data: foreign rows: `{"near": {name: data}, "far": {name: data}}`, `{name: data}` or one data set. Half of each
            (at most 1,000 rows in all) is for circuits, the rest for evaluation. Without it detection is not measured.
        target: "balance", the fastest Hydra at most half a point of quality below the best; {"cost": 1.3}, the best
            quality for at most 1.3 times one model's measured time; {"accuracy_within": 0.5}, or "quality" for short, the
            best detection with an accuracy at most half a point below the best. Quality is the mean of accuracy and AUROC
            (a mean of near and far), or without OOD data the accuracy. Of other tasks than one class per row, accuracy stands
            for the task's own measure: R² of numbers, mAP of several labels, F1 of entities.
        output_dir: gets the Hydra, its processor, card, report, plots and the table of candidates, all at once.
            `output_dir`-steps beside it gets every finished step: the same call resumes from there, and another target
            chooses among the candidates evaluated already. Other models, data or settings are refused there.
        processor: the image processor or tokenizer, saved with the Hydra; a tokenizer also pads the rows in training.
        num_members: the most members of a Hydra of one model, and how often a pre-trained model is fine-tuned. Several
            fine-tunings are a member each. Fewer members are tried too.
        trainings: how many trainings of a pre-trained model to make, in place of one for each member. A multiple of
            `num_members`, such as 6: members that are means of two fine-tunings are tried, too. Less than one each, such as 1.5,
            as in `finetune_from_pretrained`: cheaper, and not as good.
        finetune: whether to fine-tune the one model first; by default where it has no classifier.
        class_names: for that, the names of the labels 0, 1, ...
        problem_type: for that, the task, as in `finetune_from_pretrained`; by default one class per row, or what the named
            data set shows.
        recipe, tuning_recipe: for fine-tuning, and for members after pruning, a `Recipe` or the name of one; by default
            `default_recipe`, which chooses the epochs by the rows of `train_data` and stops early.
        training_arguments: arguments of `TrainingArguments` that override the recipes'.
        batch_size: rows per batch, also in training and for the measured times.
        seed: for dividing data, fine-tuning and sampling.
        seconds: how long each candidate's time is measured.
        time_limit: minutes, after which nothing new begins and the best Hydra so far is chosen; there is always one.
            Candidates are tried from cheap to expensive. Fine-tunings of a pre-trained model are shortened to fit into half
            of the limit; copies of one model are pruned by Taylor scores first. The notes say what was cut off; the same
            call, with another limit or none, continues from there, but shortened fine-tunings stay short.
        device: for models given by name, by default cuda where there is one; others stay where they are. Training runs
            where `Trainer` puts it.
        card: arguments of `create_model_card`: base_model, dataset, license, repo_id, fine_tuning. With `dataset`, the
            name of the data on the Hub, the card shows the results.
        progress: whether to print what is tried and how far it is, on a terminal with bars.

    docs/choose-for-me.md says what is tried, and when.

    The evaluation rows choose among many candidates, so the best looks a little too good on them: evaluate the Hydra once
    more on rows that you kept apart.
    """
    deadline = Deadline(time_limit)
    say = (lambda line: print(line, flush=True)) if progress else (lambda line: None)
    target, output = target_of(target, ood_data is not None), Path(output_dir)
    training_arguments, card = dict(training_arguments or {}), dict(card or {})
    _check_settings(output, batch_size, seconds, time_limit, training_arguments, processor, card)
    settings = {"per_device_train_batch_size": batch_size, "report_to": "none", "disable_tqdm": not progress}
    settings |= training_arguments
    is_named = isinstance(train_data, (str, os.PathLike))
    if is_named and class_names is None and needs_finetuning(model_or_models, finetune):
        class_names, found = classes_in(DataSource(train_data, split=("train",)), problem_type == "regression")
        problem_type = problem_type or found
    if not is_named and train_data is not None:
        check_training_data(train_data)
    source = read_source(
        model_or_models, train_data is not None, finetune, num_members, class_names, seed, device, problem_type
    )
    if trainings is not None:
        if source.pretrained is None:
            raise ValueError("trainings is for a pre-trained model, and nothing is fine-tuned here: leave it out")
        check_trainings(trainings, source.num_members)
    read = partial(load_if_named, model=source.models[0], processor=processor)
    if data is None and source.pretrained is not None and is_named:
        train_data, data = (read(train_data, part=part, labelled=True) for part in ("training", "validation"))
    train_data = read(train_data, split=("train",), labelled=True)
    data, ood_data = read(data, labelled=True), read(ood_data, labelled=False)
    given = {"train_data": train_data, "data": data}
    notes = [f"{name}: {'; '.join(each.notes)}." for name, each in given.items() if getattr(each, "notes", None)]
    if data is None:
        train_data, data = divided_training_data(source, train_data, seed)
        notes += [f"There was no data beside train_data: {len(data):,} of its rows were held out, and not trained on."]
    classes = model_classes(source.config)
    task = task_of_model(source.models[0])
    rows = held_out(data, ood_data, len(classes), batch_size, seed, classes, task)
    notes += rows.notes
    recipes = None
    if train_data is not None:
        recipes = (
            recipe_for(recipe, source.config, train_data, is_pretrained=True),
            recipe_for(tuning_recipe, source.config, train_data, is_pretrained=False),
        )
    identity = {  # what the steps depend on: not the target, nor how long times are measured
        "models": source.fingerprints(),
        "num_members": source.num_members,
        "is_fine_tuned_here": source.pretrained is not None,
        **({} if trainings is None else {"trainings": trainings}),
        "data": rows.fingerprints,
        "train_data": None if train_data is None else fingerprint_of_data(train_data),
        "recipes": None if recipes is None else [each.identity for each in recipes],
        "training_arguments": {
            name: value for name, value in settings.items() if name not in ("disable_tqdm", "report_to")
        },
        "batch_size": batch_size,
        "seed": seed,
        "version": __version__,
    }
    output = output if output.name else output.resolve()
    folder = output.with_name(f"{output.name}-steps")
    with only_writer(folder):
        steps = StepsFolder(folder, identity)
        if output.exists() and any(output.iterdir()) and not steps.has_made(output / RECORD):
            raise ValueError(f"output_dir {output} holds something else already: pass another, or remove it")
        # A tokenizer would pad no tags; without one, rows are padded with them.
        is_stacked = processor is None or task == TOKENS
        trainer = settings if is_stacked else {**settings, "processing_class": processor}
        models = source.models
        if deadline.is_set:
            limit = in_words(deadline.seconds)
            notes += [f"Time limit {limit}: cheap candidates come first, then the best so far is taken."]
        if source.pretrained is not None:
            shortened, note = _shortened(source, recipes[0], train_data, settings, deadline, steps, trainings)
            notes += note
        for note in notes:
            say(note)
        if source.pretrained is not None:
            count = fine_tunings_within(trainings, source.num_members)
            # Padded with the token that these models go by.
            validation = [batch | accepted_inputs(source.models[0], split_labels(batch)[0]) for batch in rows.search]
            fine_tunings = finetune_from_pretrained(
                source.pretrained,
                count or source.num_members,
                recipes[0],
                train_data,
                list(rows_of(validation)),
                folder / "finetuned",
                class_names=class_names,
                problem_type=problem_type,
                seed=seed,
                trainings=None if count else trainings,
                **trainer | shortened,
            )
            models = [each.to(models[0].device) for each in fine_tunings]
        is_one_run = trainings is not None and trainings < source.num_members
        is_joint = not is_one_run and task == ONE_CLASS  # as teachers are for one class
        tuning = None if recipes is None else Tuning(recipes[1], train_data, trainer, is_joint)
        models, more = models[: source.num_members], models if len(models) > source.num_members else []
        builder = ModelBuilder(
            models, source.num_members, rows, steps, tuning, batch_size, seed, progress, deadline, deadline.check, more
        )
        search = Search(builder, target, seconds, say, notes=notes)
        say(search.plan)
        search.run()
        found = _finished(search, output, processor, card, source, is_one_run)
    say(f"{found.choice} It is in {found.folder}, after {in_words(deadline.spent)}.")
    return found


def _check_settings(
    output: Path,
    batch_size: int,
    seconds: float,
    time_limit: float | None,
    training_arguments: Mapping[str, Any],
    processor: Any,
    card: Mapping[str, Any],
) -> None:
    """Refuses settings that would otherwise fail only after hours of work."""
    if output.exists() and not output.is_dir():
        raise ValueError(f"output_dir {output} is a file: pass a folder")
    if type(batch_size) is not int or batch_size < 1:
        raise ValueError(f"batch_size is {batch_size!r}: pass at least 1")
    if not (math.isfinite(seconds) and seconds >= 0):
        raise ValueError(f"seconds is {seconds!r}: pass 0 or more")
    if time_limit is not None and not (math.isfinite(time_limit) and time_limit > 0):
        raise ValueError(f"time_limit is {time_limit!r}: pass minutes, more than 0, or None for no limit")
    refused = next((name for name in REFUSED_ARGUMENTS if name in training_arguments), None)
    if refused is not None:
        raise ValueError(
            f"training_arguments has {refused}, which a recipe sets: leave it out, or pass a recipe and a tuning_recipe of "
            "your own"
        )
    if processor is not None and not hasattr(processor, "save_pretrained"):
        raise TypeError(f"processor is a {type(processor).__name__}: pass an image processor or a tokenizer, loaded")
    unknown = next((name for name in card if name not in CARD_ARGUMENTS), None)
    if unknown is not None:
        raise ValueError(f"card has {unknown!r}: pass some of {', '.join(CARD_ARGUMENTS)}")
    check_names(**{name: value for name, value in card.items() if name in CARD_ARGUMENTS[:3]})


def _shortened(
    source: Source,
    recipe: Recipe,
    train_data: Any,
    settings: dict,
    deadline: Deadline,
    steps: StepsFolder,
    trainings: float | None = None,
) -> tuple[dict[str, Any], list[str]]:
    """Training arguments by which all fine-tunings should end within half of the time limit, and a note on it. A resumed
    search keeps the arguments that it began with."""
    arguments = recipe.training_arguments(steps.folder / "unused", **settings)
    together = arguments.gradient_accumulation_steps  # batches that make one step
    epoch = math.ceil(math.ceil(len(train_data) / arguments.train_batch_size) / together)
    planned = arguments.max_steps if arguments.max_steps > 0 else math.ceil(arguments.num_train_epochs * epoch)
    known = steps.read("fine_tuning")
    if known is None:
        fit = math.inf
        if deadline.is_set:
            step = together * _seconds_of_a_step(source.models[0], train_data, arguments.train_batch_size)
            fit = SHARE_FOR_FINE_TUNING * deadline.seconds / ((trainings or source.num_members) * step)
        known = {"max_steps": int(max(1, min(planned, fit)))}
        steps.write(known, "fine_tuning")
    if known["max_steps"] >= planned:
        return {}, []
    warmup = arguments.warmup_steps
    which = f"each of the {source.num_members} fine-tunings" if trainings is None else "a whole training"
    shortened = {"max_steps": known["max_steps"], "warmup_steps": warmup if warmup < 1 else warmup / planned}
    return shortened, [
        f"For the time limit, {which} takes {known['max_steps']:,} steps in place of "
        f"{planned:,}; to train longer, pass another output_dir."
    ]


def _seconds_of_a_step(model: PreTrainedModel, train_data: Any, batch_size: int) -> float:
    """The time to read a batch and train on it; changes neither the model nor the random state."""
    device, count = device_of(model), min(batch_size, len(train_data))
    trained = copy.deepcopy(model).train()
    optimizer = torch.optim.AdamW(trained.parameters(), lr=0.0)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        for _ in range(STEPS_TO_TIME):  # the last one counts
            start = time.perf_counter()
            [batch] = batches([train_data[row] for row in range(count)], count, device)
            inputs, labels = split_labels(batch)
            trained(**accepted_inputs(trained, inputs), labels=labels).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            next(trained.parameters()).flatten()[0].item()  # waits for an accelerator
    return time.perf_counter() - start


def _finished(
    search: Search, output: Path, processor: Any, card: dict[str, Any], source: Source, is_one_run: bool
) -> Hydrated:
    """Builds the choice again, calibrates it and writes the folder."""
    candidates, builder = sorted(search.candidates.values(), key=lambda each: each.time), search.builder
    chosen = choose(candidates, search.target)
    mine = search.results[chosen.design.key]
    above: dict[str, Gain] = {}
    if search.task == ONE_CLASS:
        rest = [each for each in candidates if each is not chosen]
        others = {each.name: gains(search.results[each.design.key], mine) for each in rest}
        above = {name: found.get("quality", found["accuracy"]) for name, found in others.items()}
    results = {"hydra": mine}
    results |= {each.name: search.results[each.design.key] for each in candidates if not each.is_hydra}
    found = Hydrated(
        hydra=search.calibrated(builder.model_of(chosen.design), builder.data.calibration).model,
        chosen=chosen,
        table=candidates,
        gains=above,
        front=pareto_front(candidates),
        choice=why(chosen, candidates, search.target, above),
        alternatives=next_best(candidates, search.target),
        report=UncertaintyReport("msp", results)
        if search.task == ONE_CLASS
        else TaskReport(search.task, results, dict(EVALUATIONS[search.task].columns)),
        notes=list(search.notes),
        folder=output,
    )
    circuits = builder.circuits_of(chosen.design) or []
    is_one_each = len(circuits) > 1 and not builder.is_one
    circuits = {f"member-{place}" if is_one_each else each.objective: each for place, each in enumerate(circuits)}
    trainings = []
    if source.pretrained is not None:
        means = f"each member is the mean of {chosen.design.averaged} fine-tunings of the pre-trained model"
        trainings += [
            "members are restarts of one fine-tuning of the pre-trained model"
            if is_one_run
            else means
            if chosen.design.averaged > 1
            else "each member was fine-tuned from the pre-trained model with a seed of its own"
        ]
    if chosen.design.tuned:
        how = (
            "each was tuned after pruning"
            if chosen.design.pruned_by
            else "the Hydra was tuned with them unmerged as teacher"
        )
        trainings += [f"{how} (recipe {builder.tuning.recipe.name})"]
    sentence = ", and ".join(trainings)
    card = {"fine_tuning": f"{sentence[0].upper()}{sentence[1:]}." if sentence else None, **card}
    with written_whole(output) as folder:
        write_results(
            found, folder, builder.steps.digest, str(search.target), circuits, not builder.is_one, processor, card
        )
    return found
