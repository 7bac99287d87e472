"""Measures on data whether members may share the mean of their weights, before they are fused."""

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..data.batches import batches, split_labels
from ..data.fingerprints import fingerprints_of_rows
from ..data.loading import ood_groups
from ..data.prediction import classes_of, device_of, predict
from ..data.tasks import ONE_CLASS, check_task, task_of_model
from ..fusion import trunk_depth
from ..fusion.blending import PARTS, difference_cosines, has_equal_heads, moved, weight_cosines, weights_of
from ..fusion.building import build
from ..fusion.reading import read_members
from ..models.auto import AutoHydra, hydra_class, load_trained
from ..models.configuration_hydra import SHARED_PARTS
from ..uncertainty.metrics import exact_mean, expected_calibration_error, ood_metrics
from ..uncertainty.paired import Change, accuracy_change, auroc_change, mean_change
from ..uncertainty.streaming import UncertaintyAccumulator
from .evaluation import EVALUATIONS, evaluate_uncertainty, place_of
from .fusion_verdict import decide, safe_trunk
from .report_tables import COLUMNS, group_title, set_title
from .table import NO_VALUE, Part, Table, Title, to_html, to_markdown
from .task_report import TaskReport


STEPS = (0.25, 0.5, 0.75)  # of the way to the mean, between its ends
TRUNKS = (0.25, 0.5, 0.75)  # of the layers
METRICS = ("accuracy", "nll", "ece")
DIVERSITY = {
    "not fused": "everything (not fused)",
    "attention": "attention alone (fused)",
    "mlp": "MLPs alone (attention shared too)",
}
Cosines = dict[str, dict[str, float | None]]  # part -> pair of members -> cosine


@dataclass(frozen=True)
class ClassifierMetrics:
    """The results of a model, or of one member of it; fractions, not percentages.

    Attributes:
        auroc: group ("near") -> data set -> AUROC of the maximum softmax probability.
    """

    accuracy: float
    nll: float
    ece: float
    mutual_information: float
    disagreement: float
    auroc: dict[str, dict[str, float]] = field(default_factory=dict)

    def mean_auroc(self, group: str) -> float:
        return sum(self.auroc[group].values()) / len(self.auroc[group])

    def diversity(self) -> dict[str, float]:
        return {"mutual_information": self.mutual_information, "disagreement": self.disagreement}


@dataclass(frozen=True)
class Fused:
    """The effect of sharing some parts, against sharing nothing.

    Attributes:
        shared: the parts that are shared, as `from_pruned_members` takes them.
        trunk_layers: how many first layers are merged whole, attention too.
        ensemble, members: the results of the ensemble and of each member inside.
        nll, accuracy: the ensemble's changes.
        member_accuracies: each member's change.
        auroc: group -> the ensemble's change, a mean over the group's data sets.
        auroc_by_set: group -> data set -> the ensemble's change.
    """

    shared: tuple[str, ...]
    ensemble: ClassifierMetrics
    members: list[ClassifierMetrics]
    nll: Change
    accuracy: Change
    member_accuracies: list[Change]
    auroc: dict[str, Change]
    auroc_by_set: dict[str, dict[str, Change]]
    trunk_layers: int = 0


@dataclass(frozen=True)
class Step:
    """A point on the members' way to the mean, and their average results there."""

    t: float
    accuracy: float
    nll: float


@dataclass(frozen=True)
class FusionReport:
    """The effect of fusing members, and whether to do it. `fusion_report` makes it and documents the rule of the verdict.

    Attributes:
        verdict: "fuse", "fuse without embeddings" (or layernorm, or mlp), "do not fuse" or "cannot tell".
        sentence: the verdict with its reasons.
        shared: what to pass as `shared` to `from_pruned_members`; empty for "do not fuse" and "cannot tell".
        trunk_layers: what to pass as `trunk_layers`: the most of the tried numbers of first layers that can be merged whole
            without a loss; 0 where none can, or the verdict is not "fuse".
        trunk_sentence: the same in a sentence; empty where no layers were tried, or the verdict is not "fuse".
        num_rows, num_ood_rows: rows of `data`, and of each OOD set by group.
        guessing: accuracy of the most frequent class, and NLL of the class frequencies.
        beats_guessing: for each member alone, whether it is surely better than that, in accuracy or in NLL.
        alone: each member by itself.
        not_fused: the ensemble of the members as they are.
        fused: all three parts shared.
        soup: one model with the mean of all weights; None where members keep different heads.
        parts: the other choices of what to share: each part alone, and all but each.
        trunks: everything shared, and a quarter, a half and three quarters of the layers merged whole; none where members
            keep different heads there.
        num_layers: of the model.
        path: from the members (t = 0) to all shared parts at their mean (t = 1).
        rise: how far the members' mean NLL rises on that path above its start. The mean lies midway between the members, so
            this is the barrier between them in the sense of mode connectivity.
        barrier: how far it rises above the straight line between the path's two ends; 0 where the mean is the worst point.
        diversity: mutual_information and disagreement of the members where they differ in everything ("not fused"), in
            their attention ("attention") and in their MLPs ("mlp", where they keep the same heads); the classifiers are
            always each member's own.
        weight_cosines: part -> pair of members ("0-1") -> cosine between their weights. Those of LayerNorms are near 1
            whatever they learned: their scales begin at 1.
        difference_cosines: the same for the changes since `pretrained`; None where that was not given.
    """

    num_rows: int
    num_ood_rows: dict[str, dict[str, int]]
    guessing: dict[str, float]
    beats_guessing: list[bool]
    alone: list[ClassifierMetrics]
    not_fused: ClassifierMetrics
    fused: Fused
    soup: ClassifierMetrics | None
    parts: list[Fused]
    trunks: list[Fused]
    num_layers: int
    path: list[Step]
    rise: float
    barrier: float
    diversity: dict[str, dict[str, float]]
    weight_cosines: Cosines
    difference_cosines: Cosines | None
    verdict: str = field(init=False)
    sentence: str = field(init=False)
    shared: tuple[str, ...] = field(init=False)
    trunk_layers: int = field(init=False)
    trunk_sentence: str = field(init=False)

    def __post_init__(self) -> None:
        found = (*(verdict := decide(self)), *safe_trunk(self, verdict[0]))
        for name, value in zip(
            ("verdict", "sentence", "shared", "trunk_layers", "trunk_sentence"), found, strict=True
        ):
            object.__setattr__(self, name, value)

    @property
    def num_members(self) -> int:
        return len(self.alone)

    def __str__(self) -> str:
        return " ".join(filter(None, [self.sentence, self.trunk_sentence]))

    def to_markdown(self) -> str:
        """The sentence and all tables."""
        return to_markdown(self._sections())

    def _repr_html_(self) -> str:
        return to_html(self._sections())

    def to_dict(self) -> dict[str, Any]:
        """Everything in plain dicts, lists and numbers, for JSON."""
        return asdict(self) | {"shared": list(self.shared)}

    def plot(self, folder: str | os.PathLike) -> list[Path]:
        """Draws the way to the mean and the cost of each part into PNG files in `folder`, and returns their paths."""
        from .report_plots import fusion_figures, write_figures

        return write_figures(fusion_figures(self), folder)

    def _sections(self) -> list[Part]:
        groups = list(self.num_ood_rows)
        titles = [COLUMNS[metric].heading() for metric in METRICS]
        titles += [COLUMNS["auroc"].heading("" if group == "OOD" else group_title(group)) for group in groups]
        inside = [
            [str(index), *map(" → ".join, zip(_cells(alone), _cells(fused), strict=True))]
            for index, (alone, fused) in enumerate(zip(self.alone, self.fused.members, strict=True))
        ]
        ensembles = [["not fused", *_cells(self.not_fused), NO_VALUE]]
        ensembles += [["fused", *_cells(self.fused.ensemble), _change(self.fused.nll)]]
        if self.soup is not None:
            ensembles += [["soup (one model, all weights averaged)", *_cells(self.soup), NO_VALUE]]
        ensembles += [
            [f"fused, {p.trunk_layers} of {self.num_layers} layers merged", *_cells(p.ensemble), _change(p.nll)]
            for p in self.trunks
        ]
        ensembles += [[f"shared: {', '.join(p.shared)}", *_cells(p.ensemble), _change(p.nll)] for p in self.parts]
        detection = [
            [
                set_title(group, name),
                f"{count:,}",
                " → ".join(COLUMNS["auroc"].text(e.auroc[group][name]) for e in (self.not_fused, self.fused.ensemble)),
                _change(self.fused.auroc_by_set[group][name], "{:+.2f}", 100),
            ]
            for group, sets in self.num_ood_rows.items()
            for name, count in sets.items()
        ]
        path = [
            [COLUMNS[metric].heading(), *(COLUMNS[metric].text(getattr(step, metric)) for step in self.path)]
            for metric in ("accuracy", "nll")
        ]
        diversity = [
            [DIVERSITY[kind], *(COLUMNS[metric].text(value) for metric, value in values.items())]
            for kind, values in self.diversity.items()
        ]
        cosines = {"Weights": self.weight_cosines}
        if self.difference_cosines is not None:
            cosines["Learned since pre-training"] = self.difference_cosines
        ranges = [[part, *(_range(each.get(part, {})) for each in cosines.values())] for part in self.weight_cosines]
        rises = f"The NLL rises by {self.rise:.3f} on the way, by {self.barrier:.3f} above the straight line between its ends."
        found = [Title("Detection, not fused → fused"), Table(["Data", "Rows", "AUROC ↑", "Change (95 %)"], detection)]
        return [
            Title(f"Fusing {self.num_members} members: {self.verdict}", 1),
            self.sentence,
            *([self.trunk_sentence] if self.trunk_sentence else []),
            Title("Each member, alone → inside the fused model"),
            Table(["Member", *titles], inside),
            Title("The ensemble"),
            Table(["", *titles, "NLL change (95 %)"], ensembles),
            *(found if groups else []),
            Title("The way to the mean"),
            Table(["Members, on average", *(f"{step.t:.0%}" for step in self.path)], path),
            rises,
            Title("How much members disagree"),
            Table(["Members differ in", "MI", "DI"], diversity),
            Title("How alike members are"),
            "Cosines, the least and the greatest over the pairs.",
            Table(["Part", *cosines], ranges),
        ]


def _cells(found: ClassifierMetrics) -> list[str]:
    values = [COLUMNS[metric].text(getattr(found, metric)) for metric in METRICS]
    return values + [COLUMNS["auroc"].text(found.mean_auroc(group)) for group in found.auroc]


def _change(change: Change, form: str = "{:+.3f}", factor: float = 1) -> str:
    values = (form.format(factor * value) for value in (change.difference, change.low, change.high))
    return "{} ({} to {})".format(*values)


def _range(cosines: Mapping[str, float | None]) -> str:
    known = [cosine for cosine in cosines.values() if cosine is not None]
    return f"{min(known):.3f} to {max(known):.3f}" if known else NO_VALUE


def fusion_report(
    members: Sequence[PreTrainedModel | str | os.PathLike],
    data: Any,
    ood_data: Any = None,
    *,
    pretrained: PreTrainedModel | None = None,
    batch_size: int = 32,
) -> FusionReport | TaskReport:
    """Measures, before members are fused, what sharing the mean of their weights does to them.

    This is written for models that choose one class. For other tasks it is a `TaskReport` that compares each member alone, the
    members not fused, and fused with all parts shared and with each part left out; its verdict is yours.

    Args:
        members: two or more classifiers of one architecture, as `from_pruned_members` takes them: supported models of
            Transformers or Hydras, pruned or not (left unchanged); or folders or Hub names to load them from. No
            processor is needed there.
        data: labelled data that no member was trained on: a DataLoader, a list of dict batches, or a Dataset or list of
            dict rows. It is read up to 16 times (`ood_data` 12 times), and must give the same rows in the same order each time.
        ood_data: `{"near": {name: data}, "far": {name: data}}`, `{name: data}`, or one data set; labels are not read.
        pretrained: the model that members were fine-tuned from, with or without a head: adds the cosines between the
            members' changes since then.
        batch_size: rows per batch, where data comes in rows.

    Memory: beside the members, a Hydra with all of them, on the device of the first, and a copy of the weights that are
    shared at the moment, or a second Hydra that shares them.

    The verdict. Fused and not fused, the members answer the same rows, so every change is a mean over rows with a 95 %
    interval. A change is sure where all of its interval lies beyond what is tolerated:

    - the ensemble's NLL may rise by 5 % (at least by 0.01 nats), its accuracy may fall by 2 points, a member's by 5;
    - the ensemble's AUROC may fall by 2 points on average over the sets of a group, near or far, of 100 rows or more each.

    1. With fewer than 100 rows: "cannot tell".
    2. One of these losses is sure: "fuse without PART" if leaving out one part makes a Hydra that passes steps 3 and 4
       (of several, the one of the lowest NLL), otherwise "do not fuse".
    3. A member alone is not surely better than guessing, neither in accuracy nor in NLL: "cannot tell".
    4. None of these losses is sure, and the NLL has surely not risen by more than is tolerated: "fuse".
    5. Anything else: "cannot tell", and about how many rows would tell.

    Where the verdict is "fuse", a quarter, a half and three quarters of the layers are merged whole as well, and
    `trunk_layers` is the most of these that pass step 4, too.

    The sentence also mentions a higher ECE, which a temperature repairs, and single OOD sets that are detected worse; they
    do not change the verdict. The intervals are for other rows like these; other training seeds, and data of another kind,
    may behave differently.
    """
    hydra = _checked_members(members)
    if task_of_model(hydra) != ONE_CLASS:
        if pretrained is not None:
            raise ValueError("pretrained is for models that choose one class: leave it out")
        return _compare_choices(hydra, data, ood_data, batch_size)
    known = _DataSet("data", data, True, batch_size)
    foreign = {
        group: {name: _DataSet(place_of(group, name), each, False, batch_size) for name, each in sets.items()}
        for group, sets in ood_groups(ood_data).items()
    }
    cosines = weight_cosines(hydra)
    learned = None if pretrained is None else difference_cosines(hydra, pretrained)
    apart = _run(hydra, known, foreign)
    _warn_of_known_rows(known, foreign)
    weights = {part: weights_of(hydra, part) for part in PARTS}

    def at_mean(*parts: str, t: float = 1.0) -> AbstractContextManager[None]:
        return moved([weights[part] for part in parts], t)

    def share(*parts: str) -> Fused:
        with at_mean(*parts):
            return _compared(parts, apart, _run(hydra, known, foreign))

    def step(t: float) -> Step:
        with at_mean(*SHARED_PARTS, t=t):
            return _step(t, _run(hydra, known, {}).members())

    fused = share(*SHARED_PARTS)
    between = [step(t) for t in STEPS]
    parts = [share(part) for part in SHARED_PARTS]
    parts += [share(*(part for part in SHARED_PARTS if part != left_out)) for left_out in SHARED_PARTS]
    trunks = []
    for depth in _trunk_depths(hydra):
        merged = build(type(hydra), read_members(type(hydra), hydra, "members"), SHARED_PARTS, {"": depth})
        found = _compared(SHARED_PARTS, apart, _run(merged, known, foreign))
        trunks.append(replace(found, trunk_layers=depth))
    not_fused, alone = apart.metrics(), apart.members()
    diversity = {"not fused": not_fused.diversity(), "attention": fused.ensemble.diversity()}
    soup = None
    if has_equal_heads(hydra):
        with at_mean(*(part for part in (*SHARED_PARTS, "attention") if part != "mlp")):
            diversity["mlp"] = _run(hydra, known, {}).metrics().diversity()
        with at_mean(*PARTS):
            soup = _run(hydra.member(0), known, foreign).metrics()
    path = [_step(0.0, alone), *between, _step(1.0, fused.members)]
    guess = _guess(known.labels)
    return FusionReport(
        num_rows=len(known),
        num_ood_rows={group: {name: len(each) for name, each in sets.items()} for group, sets in foreign.items()},
        guessing={name: exact_mean(values) for name, values in guess.items()},
        beats_guessing=[_beats(member, guess) for member in apart.known[1:]],
        alone=alone,
        not_fused=not_fused,
        fused=fused,
        soup=soup,
        parts=parts,
        trunks=trunks,
        num_layers=len(hydra.config.kept_heads),
        path=path,
        rise=max(each.nll for each in path) - path[0].nll,
        barrier=max(each.nll - ((1 - each.t) * path[0].nll + each.t * path[-1].nll) for each in path),
        diversity=diversity,
        weight_cosines=cosines,
        difference_cosines=learned,
    )


def _compare_choices(hydra: PreTrainedModel, data: Any, ood_data: Any, batch_size: int) -> TaskReport:
    """Each choice of what to share, one after the other: one Hydra is in memory at a time."""
    members = [hydra.member(index) for index in range(hydra.num_members)]
    choices = {"all": SHARED_PARTS}
    choices |= {f"all but {part}": tuple(each for each in SHARED_PARTS if each != part) for part in SHARED_PARTS}
    report = evaluate_uncertainty(
        {f"member {index}": member for index, member in enumerate(members)} | {"not fused": hydra},
        data,
        ood_data,
        batch_size=batch_size,
    )
    results = dict(report.models)
    for name, shared in choices.items():
        fused = type(hydra).from_pruned_members(members, shared, allow_equal=True).eval()
        fused.config.aggregate = hydra.config.aggregate
        found = evaluate_uncertainty({f"fused, shared: {name}": fused}, data, ood_data, batch_size=batch_size)
        results |= found.models
    return replace(report, models=results)


def _checked_members(members: Sequence[PreTrainedModel | str | os.PathLike]) -> PreTrainedModel:
    """The members as a Hydra that shares nothing."""
    if isinstance(members, (PreTrainedModel, str, os.PathLike)):
        raise TypeError(f"members is a {type(members).__name__}: pass a list of members")
    members = [load_trained(each) if isinstance(each, (str, os.PathLike)) else each for each in members]
    for position, member in enumerate(members):
        name = f"members[{position}]"
        if not hasattr(hydra_class(member, name), "classify"):
            raise TypeError(
                f"{name} is a {type(member).__name__}, which has no classifier: pass models with a classification head; "
                "compare models of two towers with evaluate_uncertainty, fused and not"
            )
    hydra = AutoHydra.from_pruned_members(members, shared=(), allow_equal=True)
    if hydra.num_members < 2:
        raise ValueError("members has one member: pass two or more, there is nothing to fuse")
    check_task(hydra, "members", (ONE_CLASS, *EVALUATIONS))
    hydra.config.aggregate = getattr(members[0].config, "aggregate", None)
    return hydra


def _trunk_depths(hydra: PreTrainedModel) -> list[int]:
    """How many first layers to merge whole: shares of all, as far as members keep the same heads."""
    kept = hydra.config.kept_heads
    layers = len(kept)
    same = next((at for at, heads in enumerate(kept) if any(each != heads[0] for each in heads)), layers)
    return sorted({depth for share in TRUNKS if 0 < (depth := trunk_depth(share, layers)) <= same})


class _DataSet:
    """Data that is read again for each model, and refused where it changes."""

    def __init__(self, name: str, data: Any, labelled: bool, batch_size: int):
        if hasattr(data, "__next__"):
            raise TypeError(f"{name} is an iterator, which can be read once: pass a list, a Dataset or a DataLoader")
        self.name, self.data, self.labelled, self.batch_size = name, data, labelled, batch_size
        self.digests: list[bytes] = []  # of the inputs, row by row
        self.labels = torch.empty(0, dtype=torch.long, device="cpu")

    def __len__(self) -> int:
        return len(self.digests)

    def run(self, model: PreTrainedModel) -> list[Mapping[str, Tensor]]:
        """The `sample_values` of the ensemble, then of each member."""
        digests, all_labels, device = [], [self.labels[:0]], device_of(model)
        accumulators: list[UncertaintyAccumulator] = []
        for batch in batches(self.data, self.batch_size, classes=classes_of(model) if self.labelled else None):
            inputs, labels = split_labels(batch)
            digests += fingerprints_of_rows(inputs)
            labels = labels if self.labelled else None
            if labels is not None:
                all_labels.append(labels.cpu())
            elif self.labelled:
                raise ValueError(f"{self.name} has no labels: add a column labels (or label) with class indices")
            member_logits = predict(model, {name: tensor.to(device) for name, tensor in inputs.items()}).cpu()
            answers = [member_logits, *member_logits.split(1, dim=1)]
            accumulators = accumulators or [UncertaintyAccumulator() for _ in answers]
            for accumulator, answer in zip(accumulators, answers, strict=True):
                accumulator.update(answer, labels)
        if not digests:
            raise ValueError(f"{self.name} is empty: pass at least one sample")
        labels = torch.cat(all_labels)
        if not self.digests:
            self.digests, self.labels = digests, labels
        if digests != self.digests or not torch.equal(labels, self.labels):
            raise ValueError(
                f"{self.name} gives other rows, or another order of them, when it is read again, and models are compared row "
                "by row: pass it without shuffling and without random crops or flips"
            )
        return [accumulator.values() for accumulator in accumulators]


def _warn_of_known_rows(known: _DataSet, foreign: Mapping[str, Mapping[str, _DataSet]]) -> None:
    digests = set(known.digests)
    for data_set in (each for sets in foreign.values() for each in sets.values()):
        common = sum(digest in digests for digest in data_set.digests)
        if common:
            warnings.warn(f"{common} of the {len(data_set)} rows of {data_set.name} are in data too", stacklevel=3)


@dataclass(frozen=True)
class _Rows:
    """The `sample_values` of an ensemble and of each of its members; out of distribution by group and data set."""

    known: list[Mapping[str, Tensor]]
    ood: dict[str, dict[str, list[Mapping[str, Tensor]]]]

    def metrics(self, place: int = 0) -> ClassifierMetrics:
        """Of the ensemble (0) or a member (from 1 on)."""
        values = self.known[place]
        return ClassifierMetrics(
            accuracy=exact_mean(values["correct"]),
            nll=exact_mean(values["nll"]),
            ece=expected_calibration_error(values["confidence"], values["correct"]),
            mutual_information=exact_mean(values["epistemic"]),
            disagreement=exact_mean(values["disagreement"]),
            auroc={
                group: {
                    name: ood_metrics(values["score"], rows[place]["score"])["auroc"] for name, rows in sets.items()
                }
                for group, sets in self.ood.items()
            },
        )

    def members(self) -> list[ClassifierMetrics]:
        return [self.metrics(place) for place in range(1, len(self.known))]


def _run(model: PreTrainedModel, known: _DataSet, foreign: Mapping[str, Mapping[str, _DataSet]]) -> _Rows:
    return _Rows(
        known.run(model),
        {group: {name: each.run(model) for name, each in sets.items()} for group, sets in foreign.items()},
    )


def _compared(shared: tuple[str, ...], before: _Rows, after: _Rows) -> Fused:
    def change(of: Callable[[Tensor, Tensor], Change], name: str, place: int = 0) -> Change:
        return of(before.known[place][name], after.known[place][name])

    def auroc(group: str, *names: str) -> Change:
        scores = [tuple(rows.ood[group][name][0]["score"] for rows in (before, after)) for name in names]
        return auroc_change(before.known[0]["score"], after.known[0]["score"], scores)

    return Fused(
        shared=shared,
        ensemble=after.metrics(),
        members=after.members(),
        nll=change(mean_change, "nll"),
        accuracy=change(accuracy_change, "correct"),
        member_accuracies=[change(accuracy_change, "correct", place) for place in range(1, len(before.known))],
        auroc={group: auroc(group, *sets) for group, sets in before.ood.items()},
        auroc_by_set={group: {name: auroc(group, name) for name in sets} for group, sets in before.ood.items()},
    )


def _step(t: float, members: Sequence[ClassifierMetrics]) -> Step:
    accuracy, nll = (sum(getattr(member, name) for member in members) / len(members) for name in ("accuracy", "nll"))
    return Step(t, accuracy, nll)


def _guess(labels: Tensor) -> dict[str, Tensor]:
    """Per row, whether the most frequent class is right, and the NLL of the class frequencies."""
    frequencies = labels.bincount().double() / len(labels)
    return {"accuracy": (labels == frequencies.argmax()).double(), "nll": -frequencies[labels].log()}


def _beats(member: Mapping[str, Tensor], guess: Mapping[str, Tensor]) -> bool:
    by_accuracy = accuracy_change(guess["accuracy"], member["correct"]).low > 0
    return by_accuracy or mean_change(guess["nll"], member["nll"]).high < 0
