"""One call from models and data to a finished Hydra: searched, calibrated, judged and written down."""

import copy
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from .._io.files import written_whole
from .._io.folder_lock import only_writer
from .._version import __version__
from ..data.batches import batches
from ..data.fingerprints import fingerprint_of_data
from ..data.labels import model_classes
from ..data.loading import classes_in, load_if_named
from ..data.prediction import accepted_inputs, device_of
from ..data.rows import DataSource
from ..hub.card import check_names
from ..reports.gains import gains
from ..reports.report import UncertaintyReport
from ..training import Recipe, finetune_from_pretrained
from ..training.finetune import REFUSED_ARGUMENTS
from ..training.recipes import recipe_for
from .candidate_models import CandidateModels, Tuning
from .candidates import pareto_front
from .deadline import Deadline, in_words
from .held_out import HeldOut, held_out, rows_of
from .results import RECORD, Hydrated, write_results
from .sources import (
    Model,
    Source,
    check_training_data,
    divided_training_data,
    is_to_be_finetuned,
    read_source,
)
from .steps_folder import StepsFolder
from .strategy import Search
from .targets import choose, next_best, target_of, why


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
    finetune: bool | None = None,
    class_names: Sequence[str] | None = None,
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
    """Searches for the Hydra that fits a target best, and leaves it calibrated, judged and described in a folder.

    Args:
        model_or_models: one fine-tuned classifier, of which members are pruned copies; several fine-tunings of one
            pre-trained model, a list; or one pre-trained model, which is fine-tuned on `train_data` first. Models,
            folders or Hub names.
        train_data: a Dataset or list of dict rows, as Trainer takes it; or, as with all data here, the name, folder or file
            of a data set, which `load_data` reads for the model. It serves to fine-tune a pre-trained model, and pruned
            members where that can still win. Without it nothing is trained.
        data: labelled rows that no model was trained on: a DataLoader that does not shuffle, a list of dict
            batches, or a Dataset or list of dict rows. They are read once, held in memory, and divided at random: a
            third (at most 1,000) to search with, a third (at most 2,000) to calibrate on, the rest to judge by. Where
            a pre-trained model is fine-tuned it may be left out: then it is the validation split of `train_data`, where that is
            a name or folder that has one, or else a part that is held out of it. A note says which.
        ood_data: rows from elsewhere: `{"near": {name: data}, "far": {name: data}}`, `{name: data}` or one data set.
            Half of each (at most 1,000 rows in all) serves circuits, the rest judging. Without it detection is not
            measured.
        target: "balance", the fastest Hydra at most half a point of quality below the best; {"cost": 1.3}, the best
            quality for at most 1.3 times one model's measured time; {"accuracy_within": 0.5}, the best detection with
            an accuracy at most half a point below the best, for which "quality" is another word. Quality is the mean
            of accuracy and AUROC (a mean of near and far), or without OOD data the accuracy.
        output_dir: gets the Hydra, its processor, card, report, plots and the table of candidates, all at once.
            `output_dir`-steps beside it gets every finished step; the same call goes on from there after a stop, and
            another target chooses anew among what is judged already. Other models, data or settings are refused there.
        processor: the image processor or tokenizer, saved with the Hydra; a tokenizer also pads the rows of a training.
        num_members: the most members of a Hydra of one model, and how often a pre-trained model is fine-tuned. Of several
            fine-tunings each is a member. Fewer members are tried too.
        finetune: whether to fine-tune the one model first; by default where it has no classifier.
        class_names: for that, what the labels 0, 1, ... stand for.
        recipe, tuning_recipe: for fine-tuning, and for members after pruning, a `Recipe` or the name of one; by default
            `default_recipe`, which chooses the epochs by the rows of `train_data` and ends early.
        training_arguments: arguments of `TrainingArguments` that win over the recipes'.
        batch_size: rows per batch, also of trainings and of the measured times.
        seed: of how data is divided, of fine-tunings and of samples.
        seconds: for which each candidate's time is measured.
        device: where models that are named run, by default cuda where there is one; others run where they lie. Trainings run
            where `Trainer` puts them, and what they give comes back.
        time_limit: minutes, after which nothing new is begun and the best so far is chosen; there is always one. Candidates
            are tried from cheap to expensive. Fine-tunings of a pre-trained model get half of the limit and are shortened to
            fit into it; copies of one model are pruned by Taylor scores first. What was cut off is in the notes, and the same
            call goes on from there, with another limit or none; fine-tunings that were shortened stay so.
        card: arguments of `create_model_card`: base_model, dataset, license, repo_id, fine_tuning. With `dataset`, the
            name of the data on the Hub, results go into the card.
        progress: whether to say what is tried and how far it is, on a terminal with bars.

    What is tried. Several fine-tunings are fused whole, with what `fusion_report` says may be shared and with a quarter,
    half and three quarters of the layers merged; then each without a twelfth, a sixth and a third of its heads by a circuit
    of its own. Copies of one model lose as many heads by circuits, or without OOD data by Taylor scores. The best are tried
    with fewer members and, with `train_data`, tuned after pruning where that can still win. A cost target leaves out what
    would be too slow before its circuits are extracted. docs/choose-for-me.md has the details.

    The judging rows choose among many, so the best of them is a little too good there: to know what the Hydra reaches,
    judge it once more on rows that you kept apart.
    """
    deadline = Deadline(time_limit)
    say = (lambda line: print(line, flush=True)) if progress else (lambda line: None)
    target, output = target_of(target, ood_data is not None), Path(output_dir)
    settings = {"per_device_train_batch_size": batch_size, "report_to": "none", "disable_tqdm": not progress}
    settings |= training_arguments or {}
    _check_settings(output, batch_size, seconds, time_limit, training_arguments or {}, processor, card)
    if isinstance(train_data, (str, os.PathLike)):
        if class_names is None and is_to_be_finetuned(model_or_models, finetune):
            class_names = classes_in(DataSource(train_data, split=("train",)))
    elif train_data is not None:
        check_training_data(train_data)
    source = read_source(model_or_models, train_data is not None, finetune, num_members, class_names, seed, device)
    read = partial(load_if_named, model=source.models[0], processor=processor)
    if data is None and source.pretrained is not None and isinstance(train_data, (str, os.PathLike)):
        train_data, data = (read(train_data, part=part, labelled=True) for part in ("training", "validation"))
    train_data = read(train_data, split=("train",), labelled=True)
    data, ood_data = read(data, labelled=True), read(ood_data, labelled=False)
    given = {"train_data": train_data, "data": data}
    notes = [f"{name}: {'; '.join(each.notes)}." for name, each in given.items() if getattr(each, "notes", None)]
    if data is None:
        train_data, data = divided_training_data(source, train_data, seed)
        notes.append(
            f"There was no data beside train_data: {len(data):,} of its rows were held out, and not trained on."
        )
    classes = model_classes(source.config)
    rows = held_out(data, ood_data, len(classes), batch_size, seed, classes)
    notes += rows.notes
    recipes = None
    if train_data is not None:
        recipes = (
            recipe_for(recipe, source.config, train_data, is_pretrained=True),
            recipe_for(tuning_recipe, source.config, train_data, is_pretrained=False),
        )
    identity = _identity(source, rows, train_data, recipes, settings, batch_size, seed)
    output = output if output.name else output.resolve()
    folder = output.with_name(f"{output.name}-steps")
    with only_writer(folder):
        steps = StepsFolder(folder, identity)
        if output.exists() and any(output.iterdir()) and not steps.has_made(output / RECORD):
            raise ValueError(f"output_dir {output} holds something else already: pass another, or remove it")
        trainer = settings if processor is None else {**settings, "processing_class": processor}
        models = source.models
        if deadline.is_set:
            notes.append(
                f"Time limit {in_words(deadline.seconds)}: cheap candidates come first, then the best so far is taken."
            )
        if source.pretrained is not None:
            shortened, note = _shortened(source, recipes[0], train_data, settings, deadline, steps)
            notes += note
        for note in notes:
            say(note)
        if source.pretrained is not None:
            fine_tunings = finetune_from_pretrained(
                source.pretrained,
                source.num_members,
                recipes[0],
                train_data,
                list(rows_of(rows.search)),
                folder / "finetuned",
                class_names=class_names,
                seed=seed,
                **trainer | shortened,
            )
            models = [each.to(models[0].device) for each in fine_tunings]
        tuning = None if recipes is None else Tuning(recipes[1], train_data, trainer)
        make = CandidateModels(
            models, source.num_members, rows, steps, tuning, batch_size, seed, progress, deadline, deadline.check
        )
        search = Search(make, target, seconds, say, notes=notes)
        say(search.plan)
        search.run()
        found = _finished(search, output, processor, dict(card or {}), source)
    say(f"{found.choice} It is in {found.folder}, after {in_words(deadline.spent)}.")
    return found


def _check_settings(
    output: Path,
    batch_size: int,
    seconds: float,
    time_limit: float | None,
    training_arguments: Mapping[str, Any],
    processor: Any,
    card: Mapping[str, Any] | None,
) -> None:
    """Refuses, before any work, what would be refused after most of it."""
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
            f"training_arguments has {refused}, which is not for it to say: leave it out, or pass a recipe and a tuning_recipe of "
            "your own"
        )
    if processor is not None and not hasattr(processor, "save_pretrained"):
        raise TypeError(f"processor is a {type(processor).__name__}: pass an image processor or a tokenizer, loaded")
    unknown = [name for name in card or () if name not in CARD_ARGUMENTS]
    if unknown:
        raise ValueError(f"card has {unknown[0]!r}: pass some of {', '.join(CARD_ARGUMENTS)}")
    check_names(**{name: value for name, value in (card or {}).items() if name in CARD_ARGUMENTS[:3]})


def _identity(
    source: Source,
    data: HeldOut,
    train_data: Any,
    recipes: tuple[Recipe, Recipe] | None,
    settings: Mapping[str, Any],
    batch_size: int,
    seed: int,
) -> dict[str, Any]:
    """What steps depend on; not the target, nor how long times are measured."""
    cosmetic = ("disable_tqdm", "report_to")
    return {
        "models": source.fingerprints(),
        "num_members": source.num_members,
        "is_fine_tuned_here": source.pretrained is not None,
        "data": data.fingerprints,
        "train_data": None if train_data is None else fingerprint_of_data(train_data),
        "recipes": None if recipes is None else [asdict(each) for each in recipes],
        "training_arguments": {name: value for name, value in settings.items() if name not in cosmetic},
        "batch_size": batch_size,
        "seed": seed,
        "version": __version__,
    }


def _shortened(
    source: Source, recipe: Recipe, train_data: Any, settings: dict, deadline: Deadline, steps: StepsFolder
) -> tuple[dict[str, Any], list[str]]:
    """Arguments that let all fine-tunings end within half of the time limit, as far as a few steps tell, and a note of it.
    A search that goes on keeps those that it began with."""
    arguments = recipe.training_arguments(steps.folder / "unused", **settings)
    epoch = math.ceil(len(train_data) / arguments.train_batch_size)
    planned = arguments.max_steps if arguments.max_steps > 0 else math.ceil(arguments.num_train_epochs * epoch)
    known = steps.read("fine_tuning")
    if known is None:
        fit = math.inf
        if deadline.is_set:
            step = _seconds_of_a_step(source.models[0], train_data, arguments.train_batch_size)
            fit = SHARE_FOR_FINE_TUNING * deadline.seconds / (source.num_members * step)
        known = {"max_steps": int(max(1, min(planned, fit)))}
        steps.write(known, "fine_tuning")
    if known["max_steps"] >= planned:
        return {}, []
    warmup = arguments.warmup_steps
    shortened = {"max_steps": known["max_steps"], "warmup_steps": warmup if warmup < 1 else warmup / planned}
    return shortened, [
        f"For the time limit, each of the {source.num_members} fine-tunings takes {known['max_steps']:,} steps in place of "
        f"{planned:,}; to train longer, pass another output_dir."
    ]


def _seconds_of_a_step(model: PreTrainedModel, train_data: Any, batch_size: int) -> float:
    """Reading a batch and training on it; the model stays as it is, and so do everybody's random numbers."""
    device, count = device_of(model), min(batch_size, len(train_data))
    trained = copy.deepcopy(model).train()
    optimizer = torch.optim.AdamW(trained.parameters(), lr=0.0)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        for _ in range(STEPS_TO_TIME):  # of which the last one counts
            start = time.perf_counter()
            [batch] = batches([train_data[row] for row in range(count)], count, device)
            inputs = {name: tensor for name, tensor in batch.items() if name not in ("labels", "label")}
            labels = batch.get("labels", batch.get("label"))
            trained(**accepted_inputs(trained, inputs), labels=labels).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            next(trained.parameters()).flatten()[0].item()  # waits for an accelerator
    return time.perf_counter() - start


def _finished(search: Search, output: Path, processor: Any, card: dict[str, Any], source: Source) -> Hydrated:
    """The choice, made once more, calibrated and written."""
    candidates, make = sorted(search.candidates.values(), key=lambda each: each.time), search.make
    chosen = choose(candidates, search.target)
    mine = search.results[chosen.design.key]
    others = {each.name: gains(search.results[each.design.key], mine) for each in candidates if each is not chosen}
    above = {name: found.get("quality", found["accuracy"]) for name, found in others.items()}
    results = {"hydra": mine}
    results |= {each.name: search.results[each.design.key] for each in candidates if not each.is_hydra}
    found = Hydrated(
        hydra=search.calibrated(make.model_of(chosen.design), make.data.calibration).model,
        chosen=chosen,
        table=candidates,
        gains=above,
        front=pareto_front(candidates),
        choice=why(chosen, candidates, search.target, above),
        alternatives=next_best(candidates, search.target),
        report=UncertaintyReport("msp", results),
        notes=list(search.notes),
        folder=output,
    )
    circuits = make.circuits_of(chosen.design) or []
    is_one_each = len(circuits) > 1 and not make.is_one
    circuits = {f"member-{place}" if is_one_each else each.objective: each for place, each in enumerate(circuits)}
    trainings = ["Each member was fine-tuned from the pre-trained model with a seed of its own"] * bool(
        source.pretrained
    )
    if chosen.design.tuned:
        trainings.append(
            f"{'each' if trainings else 'Each'} was tuned after pruning (recipe {make.tuning.recipe.name})"
        )
    card = {"fine_tuning": f"{', and '.join(trainings)}." if trainings else None, **card}
    with written_whole(output) as folder:
        write_results(found, folder, make.steps.digest, str(search.target), circuits, not make.is_one, processor, card)
    return found
