"""One call from models and data to a finished Hydra: searched, calibrated, judged and written down."""

import importlib.util
import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel
from transformers.utils import logging

from .._io.files import write_atomically, written_whole
from .._io.folder_lock import only_writer
from .._version import __version__
from ..data.fingerprints import fingerprint_of_data
from ..data.labels import model_classes
from ..hub.card import check_names, create_model_card
from ..reports.report import UncertaintyReport
from ..training import Recipe, finetune_from_pretrained
from ..training.finetune import FINISHED, SETTLED_ELSEWHERE
from .candidates import HYDRA, Candidate, pareto_front
from .held_out import HeldOut, held_out, rows_of
from .plan import Estimate, estimate, in_words, measure
from .search import Search, Tuning, told
from .sources import (
    Model,
    Source,
    check_output,
    check_training_data,
    divided_training_data,
    read_source,
    recipe_of,
)
from .tables import candidate_table
from .targets import Target, choose, next_best, target_of, why
from .work import Work


logger = logging.get_logger(f"transformers.{__name__}")

OF_CARD = ("repo_id", "base_model", "dataset", "license", "fine_tuning")
RECORD, TABLE, REPORT_FOLDER, CIRCUITS = "candidates.json", "candidates.md", "evaluation", "circuits"


@dataclass(frozen=True)
class Hydrated:
    """What `hydrate` found.

    Attributes:
        hydra: the chosen Hydra, calibrated.
        chosen: its candidate.
        table: all candidates, fastest first; also one model, and of several fine-tunings their Deep Ensemble and soup.
        front: those that no other beats in quality, time and memory at once, fastest first.
        choice: what was chosen and why, in one sentence.
        alternatives: what the choice would have been without the chosen one, and without that, and so on.
        report: the chosen Hydra ("hydra") and what it is compared with on the judging rows, each calibrated.
        notes: how the data was divided, and what was left out and why.
        folder: where everything lies.
    """

    hydra: PreTrainedModel
    chosen: Candidate
    table: list[Candidate]
    front: list[Candidate]
    choice: str
    alternatives: list[Candidate]
    report: UncertaintyReport
    notes: list[str]
    folder: Path

    def __str__(self) -> str:
        return self.choice

    def to_markdown(self) -> str:
        """The choice, the table of candidates, the alternatives and the notes."""
        return _markdown(self.choice, self.table, self.front, self.chosen, self.alternatives, self.notes)

    def plot(self, folder: str | os.PathLike) -> list[Path]:
        """Draws quality against measured time and memory into a PNG file in `folder`, and returns its path."""
        from .plots import draw_candidates

        return draw_candidates(self.table, self.front, self.chosen, folder)


def hydrate(
    model_or_models: Model | Sequence[Model],
    train_data: Any = None,
    id_data: Any = None,
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
    device: str | None = None,
    card: Mapping[str, Any] | None = None,
    progress: bool = True,
) -> Hydrated:
    """Searches for the Hydra that fits a target best, and leaves it calibrated, judged and described in a folder.

    Args:
        model_or_models: one fine-tuned classifier, of which members are pruned copies; several fine-tunings of one
            pre-trained model, a list; or one pre-trained model, which is fine-tuned on `train_data` first. Models,
            folders or Hub names.
        train_data: a Dataset or list of dict rows, as Trainer takes it: to fine-tune a pre-trained model, and pruned
            members where that can still win. Without it nothing is trained.
        id_data: labelled rows that no model was trained on: a DataLoader that does not shuffle, a list of dict
            batches, or a Dataset or list of dict rows. They are read once, held in memory, and divided at random: a
            third (at most 1,000) to search with, a third (at most 2,000) to calibrate on, the rest to judge by. Where
            a pre-trained model is fine-tuned it may be left out: then a fifth of `train_data` (at most 3,000 rows) is
            held out.
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
        num_members: of a Hydra of one model at most, and how often a pre-trained model is fine-tuned; several fine-tunings
            make one each. Fewer of them, the first two, three, ..., are tried too.
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
        card: arguments of `create_model_card`: base_model, dataset, license, repo_id, fine_tuning. With `dataset`, the
            name of the data on the Hub, results go into the card.
        progress: whether to say how long it will take, and how far it is.

    What is tried. Of several fine-tunings: fused whole, with what `fusion_report` says may be shared and the first
    quarter, half and three quarters of the layers merged; then each without a twelfth, a sixth and a third of its
    heads by a circuit of its own, with the deepest trunk that costs less than half a point of quality, and without any
    where that is better by half a point or the target is the best detection. Of one model: copies without as many
    heads, by circuits for accuracy, detection and both, with half of the layers common and with none; without OOD data
    by Taylor scores, or where these make equal members by samples of a circuit for accuracy. The three best Hydras that
    no other beats, and what the target would choose, are then tried with fewer members. With `train_data`, at last the
    two best of the pruned ones are tuned, where they are within two points of the front. A cost target leaves out what
    would be too slow before its circuits are extracted. Every candidate is calibrated as the chosen one will be.

    The judging rows choose among many, so the best of them is a little too good there: to know what the Hydra reaches,
    judge it once more on rows that you kept apart.
    """
    say = (lambda line: print(line, flush=True)) if progress else (lambda line: None)
    started = time.perf_counter()
    wanted = target_of(target, ood_data is not None)
    output, settings = Path(output_dir), dict(training_arguments or {})
    check_output(output)
    _check_settings(batch_size, seconds, settings, processor, card)
    if train_data is not None:
        check_training_data(train_data)
    source = read_source(model_or_models, train_data is not None, finetune, num_members, class_names, seed, device)
    train_data, id_data = _divided(source, train_data, id_data, seed)
    classes = model_classes(source.config)
    data = held_out(id_data, ood_data, len(classes), batch_size, seed, classes)
    recipes = None
    if train_data is not None:
        recipes = (
            recipe_of(recipe, source.config, train_data, is_pretrained=True),
            recipe_of(tuning_recipe, source.config, train_data, is_pretrained=False),
        )
    settings = {
        "per_device_train_batch_size": batch_size,
        "report_to": "none",
        "disable_tqdm": not progress,
    } | settings
    identity = _identity(source, data, train_data, recipes, settings, batch_size, seed)
    output = output if output.name else output.resolve()
    steps = output.with_name(f"{output.name}-steps")
    with only_writer(steps):
        work = Work(steps, identity)
        _check_is_ours(output, work)
        say(data.sentence)
        tuning = None if recipes is None else Tuning(recipes[1], train_data, _trainer(settings, processor))
        search = Search(
            source.models,
            source.num_members,
            data,
            work,
            wanted,
            tuning,
            batch_size,
            seed,
            seconds,
            progress,
            say,
        )
        say(_estimate(source, search, recipes, settings, train_data, steps).sentence)
        if source.pretrained is not None:
            with told(progress):
                fine_tunings = finetune_from_pretrained(
                    source.pretrained,
                    source.num_members,
                    recipes[0],
                    train_data,
                    list(rows_of(data.search)),
                    steps / "finetuned",
                    class_names=class_names,
                    seed=seed,
                    **_trainer(settings, processor),
                )
            search.models = [each.to(source.models[0].device) for each in fine_tunings]
        search.notes.append(data.sentence)
        search.run()
        found = _finish(search, wanted, work, output, processor, dict(card or {}), source)
    say(f"{found.choice} It is in {found.folder}, after {in_words(time.perf_counter() - started)}.")
    return found


def _check_settings(batch_size: int, seconds: float, training: Mapping, processor: Any, card: Mapping | None) -> None:
    """Refuses, before any work, what would be refused after most of it."""
    if type(batch_size) is not int or batch_size < 1:
        raise ValueError(f"batch_size is {batch_size!r}: pass at least 1")
    if not (math.isfinite(seconds) and seconds >= 0):
        raise ValueError(f"seconds is {seconds!r}: pass 0 or more")
    settled = next((name for name in SETTLED_ELSEWHERE if name in training), None)
    if settled is not None:
        raise ValueError(
            f"training_arguments has {settled}, which is not for it to say: leave it out, or pass a recipe and a tuning_recipe of "
            "your own"
        )
    if processor is not None and not hasattr(processor, "save_pretrained"):
        raise TypeError(f"processor is a {type(processor).__name__}: pass an image processor or a tokenizer, loaded")
    unknown = [name for name in card or () if name not in OF_CARD]
    if unknown:
        raise ValueError(f"card has {unknown[0]!r}: pass some of {', '.join(OF_CARD)}")
    check_names(**{name: value for name, value in (card or {}).items() if name in OF_CARD[:3]})


def _divided(source: Source, train_data: Any, id_data: Any, seed: int) -> tuple[Any, Any]:
    if id_data is not None:
        return train_data, id_data
    if source.pretrained is None:
        raise ValueError(
            "id_data is missing: pass labelled rows that the models were not trained on, by which candidates are judged"
        )
    return divided_training_data(train_data, seed)


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


def _trainer(settings: Mapping[str, Any], processor: Any) -> dict[str, Any]:
    """What `finetune_members` takes beside models, data and recipe."""
    return dict(settings) if processor is None else {**settings, "processing_class": processor}


def _check_is_ours(output: Path, work: Work) -> None:
    """Refuses to replace a folder that this hydration did not make."""
    if not output.exists() or not any(output.iterdir()):
        return
    if work.is_made_here(output / RECORD):
        return
    raise ValueError(f"output_dir {output} holds something else already: pass another, or remove it")


def _estimate(
    source: Source, search: Search, recipes: tuple[Recipe, Recipe] | None, settings: dict, train_data: Any, steps: Path
) -> Estimate:
    """How long it will take, from a short measurement; what is finished takes no time."""
    plan = search.plan(is_one=source.is_one)
    rows, plan_of_training = 0, {}
    if recipes is not None:
        arguments = [each.training_arguments(steps / "unused", **settings) for each in recipes]
        rows = arguments[0].train_batch_size
        counts = [_steps(each, len(train_data)) for each in arguments]
        finished = len(list((steps / "finetuned").glob(f"member-*/{FINISHED}")))
        trainings = source.num_members - finished if source.pretrained is not None else 0
        plan_of_training = {"fine_tunings": trainings, "steps": counts[0], "tuning_steps": counts[1]}
    plan = replace(plan, **plan_of_training)
    speed = measure(
        source.models[0], search.data, bool(plan.extractions or plan.later_extractions), train_data, search.batch_size
    )
    return estimate(plan, speed, search.data, search.seconds, rows)


def _steps(arguments: Any, rows: int) -> int:
    if arguments.max_steps > 0:
        return arguments.max_steps
    return math.ceil(arguments.num_train_epochs * math.ceil(rows / arguments.train_batch_size))


# The end


def _finish(
    search: Search,
    target: Target,
    work: Work,
    output: Path,
    processor: Any,
    card: dict[str, Any],
    source: Source,
) -> Hydrated:
    candidates = sorted(search.candidates.values(), key=lambda each: each.time)
    chosen = choose(candidates, target)
    front, others = pareto_front(candidates), next_best(candidates, target)
    results = {"hydra": search.results[chosen.design.key]}
    results |= {each.name: search.results[each.design.key] for each in candidates if each.design.kind != HYDRA}
    report = UncertaintyReport("msp", results)
    choice = why(chosen, candidates, target)
    hydra = search.model_of(chosen.design)
    found = Hydrated(
        search.calibrated(hydra).model, chosen, candidates, front, choice, others, report, list(search.notes), output
    )
    with written_whole(output) as folder:
        _write(found, folder, search, work, processor, card, source)
    return found


def _write(
    found: Hydrated,
    folder: Path,
    search: Search,
    work: Work,
    processor: Any,
    card: dict[str, Any],
    source: Source,
) -> None:
    found.hydra.save_pretrained(folder)
    if processor is not None:
        processor.save_pretrained(folder)
    circuits = search.circuits_of(found.chosen.design)
    for place, circuit in enumerate(circuits or ()):
        is_own = len(circuits) > 1 and not search.is_one
        circuit.save(folder / CIRCUITS / f"{f'member-{place}' if is_own else circuit.objective}.json")
    found.report.to_json(folder / REPORT_FOLDER / "report.json")
    plots = {}
    if importlib.util.find_spec("matplotlib") is None:
        logger.warning("matplotlib is not installed: there will be no plots")
    else:
        found.report.plot(folder / REPORT_FOLDER)
        [path] = found.plot(folder / REPORT_FOLDER)
        plots = {"All candidates": f"{REPORT_FOLDER}/{path.name}"}
    write_atomically(folder / TABLE, found.to_markdown())
    has_results = "dataset" in card
    card = {"fine_tuning": _fine_tuning(found.chosen, search, source), **card}
    create_model_card(
        found.hydra,
        found.report if has_results else None,
        circuits=circuits,
        fine_tunings=not search.is_one,
        report_model="hydra" if has_results else None,
        plots=plots,
        **card,
    ).save(folder / "README.md")
    record = {
        "made_from": work.digest,
        "target": str(search.target),
        "chosen": found.chosen.name,
        "choice": found.choice,
        "alternatives": [each.name for each in found.alternatives],
        "front": [each.name for each in found.front],
        "candidates": [each.to_dict() for each in found.table],
        "notes": found.notes,
    }
    write_atomically(folder / RECORD, json.dumps(record, indent=1) + "\n")


def _fine_tuning(chosen: Candidate, search: Search, source: Source) -> str | None:
    """How members were trained here, for the card."""
    trainings = []
    if source.pretrained is not None:
        trainings.append("Each member was fine-tuned from the pre-trained model with a seed of its own")
    if chosen.design.tuned:
        trainings.append(f"each was tuned after pruning (recipe {search.tuning.recipe.name})")
    sentence = ", and ".join(trainings)
    return f"{sentence[0].upper()}{sentence[1:]}." if trainings else None


def _markdown(
    choice: str,
    table: Sequence[Candidate],
    front: Sequence[Candidate],
    chosen: Candidate,
    alternatives: Sequence[Candidate],
    notes: Sequence[str],
) -> str:
    parts = ["# The choice", choice, "## Candidates", candidate_table(table, front, chosen)]
    parts.append(
        "Costs are relative to one model; time and memory are measured on this machine. Every candidate is calibrated, and judged "
        "on rows that nothing was fitted on. ● marks the Pareto front of quality, time and memory."
    )
    if alternatives:
        parts += [
            "## Next best",
            "\n".join(f"{place}. {each.name}" for place, each in enumerate(alternatives, start=1)),
        ]
    parts += ["## Notes", "\n".join(f"- {note}" for note in notes)]
    return "\n\n".join(parts) + "\n"
