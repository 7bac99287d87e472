"""One setting's work: which parts a method needs, and its numbers in a JSON file for each seed."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from hydra_transformers._io.files import write_atomically
from hydra_transformers.pruning import prune_heads

from ..heads.separation import DENSE, head_separation, head_vectors
from .data import as_batches
from .judging import judged, judged_under_shift
from .methods import Method, methods_of
from .parts import Part, Parts, expanded, needs_of


RESULTS = "results"
SHIFT = "shift"
DISTANCES = "distances"  # table 5
COMPONENTS = "components"  # figure 4
TOWER_SCORES = "tower-scores"  # figure 7
STUDIES = (DISTANCES, COMPONENTS, TOWER_SCORES)
CIRCUITS = ("circuit", "vision-circuit")
SHOWN_HEADS = 6  # of each kind in figure 4
SHOWN_ROWS = 250


class Study(Parts):
    """Trains, extracts and measures what tables ask for."""

    @cached_property
    def methods(self) -> dict[str, Method]:
        return methods_of(self.setting)

    def goals(self, names: Sequence[str], seeds: int, with_shift: bool = False) -> list[Part]:
        """Return what is to be measured, seed by seed and Hydras first, without what is there.

        A run that is cut off has whole seeds.
        """
        hydras_first = sorted(names, key=lambda name: not name.startswith("hydra"))
        found = []
        for seed in range(seeds):
            for name in hydras_first:
                kind = "study" if name in STUDIES else "result"
                found.append(Part(kind, seed, name))
                if with_shift:
                    found.append(Part(SHIFT, seed, name))
        return [part for part in found if not self.result_file(part).exists()]

    def result_file(self, part: Part) -> Path:
        name = f"{part.name}-{SHIFT}" if part.kind == SHIFT else part.name
        return self.folder / RESULTS / str(part.seed) / f"{name}.json"

    def needs(self, part: Part) -> list[Part]:
        if part.kind == "study":
            return [self.circuit_for_study(part)]
        if part.kind in ("result", SHIFT):
            return self.methods[part.name].needs(self.setting, part.seed)
        return needs_of(self.setting, part)

    def plan(self, goals: Sequence[Part]) -> dict[Part, list[Part]]:
        """Return the goals and all that they need, each behind its needs, and with them."""
        plan = {part: list(self.needs(part)) for part in expanded(goals, self.needs)}

        # A longer circuit goes on in the file of a shorter one: they come one after the other.
        of_file: dict[Part, list[Part]] = {}
        for part in plan:
            if part.kind in CIRCUITS:
                of_file.setdefault(part._replace(removed=0), []).append(part)
        for circuits in of_file.values():
            for shorter, longer in pairwise(sorted(circuits, key=lambda part: part.removed)):
                plan[longer].append(shorter)
        return {part: plan[part] for part in expanded(goals, plan.__getitem__)}

    def make(self, part: Part) -> None:
        if part.kind not in ("result", SHIFT, "study"):
            super().make(part)
            return
        if part.kind == "study":
            found = self.distances(part) if part.name == DISTANCES else self.components(part)
        elif part.kind == SHIFT:
            found = self.under_shift(part)
        else:
            model = self.methods[part.name].build(self, part.seed).to(self.device).eval()
            found = judged(model, self.splits.test, self.splits.ood)
        self.write(part, found)

    def write(self, part: Part, found: dict[str, Any]) -> None:
        write_atomically(self.result_file(part), json.dumps(found, indent=1) + "\n")

    def under_shift(self, part: Part) -> dict[str, Any]:
        if self.setting.shift is None:
            raise ValueError(f"{self.setting.name} has no corrupted data: tables 13 and 14 are of imagenet1k")
        model = self.methods[part.name].build(self, part.seed).to(self.device).eval()
        return judged_under_shift(model, self.splits.test, self.setting.shift(self.data, self.start))

    # Heads that tell known from unknown (B.2.1)

    def circuit_for_study(self, part: Part) -> Part:
        setting = self.setting
        heads = setting.heads_to_prune
        if part.name == COMPONENTS:
            heads = setting.layers * setting.heads - 1
        return Part("circuit", part.seed, "ood", heads)

    def ood_sets(self) -> dict[str, Any]:
        return {name: rows for of_group in self.splits.ood.values() for name, rows in of_group.items()}

    def distances(self, part: Part) -> dict[str, Any]:
        """Return the mean distances of the last layer's heads, {network: {OOD set: distances}} (table 5)."""
        circuit = self.circuit(self.circuit_for_study(part))
        ood = {name: list(as_batches_on(rows, self.device)) for name, rows in self.ood_sets().items()}
        known = list(as_batches_on(self.splits.test, self.device))
        found = head_separation(self.backbone(part.seed), known, ood, {"circ-ood": circuit.ranking})
        networks: dict[str, dict[str, Any]] = {}
        for name, title in (("dense", DENSE), ("circ-ood", "circ-ood")):
            for ood_set in ood:
                heads = found.networks[title][ood_set]
                last = max(layer for layer, _ in found.networks[DENSE][ood_set])
                mean = found.mean(title, ood_set, [head for head in heads if head[0] == last])
                networks.setdefault(name, {})[ood_set] = None if mean is None else asdict(mean)
        return {"distances": networks}

    def components(self, part: Part) -> dict[str, Any]:
        """Return two principal components of single heads' outputs on known and OOD rows (figure 4)."""
        circuit = self.circuit(self.circuit_for_study(part))
        heads = circuit.ranking
        shown = {"least important": heads[:SHOWN_HEADS], "most important": heads[-SHOWN_HEADS:]}
        ood_sets = self.ood_sets()
        name = "mnist" if "mnist" in ood_sets else next(iter(ood_sets))
        model = prune_heads(self.backbone(part.seed)).float().eval()
        known = head_vectors(model, list(as_batches_on(self.splits.test, self.device))[:1])
        unknown = head_vectors(model, list(as_batches_on(ood_sets[name], self.device))[:1])
        found = {}
        for title, chosen in shown.items():
            found[title] = [
                {"head": list(head), **principal_components(known[head], unknown[head])} for head in chosen
            ]
        return {"ood_set": name, "heads": found}


def principal_components(known: torch.Tensor, unknown: torch.Tensor) -> dict[str, Any]:
    """Return both on the two directions in which they vary most, at most `SHOWN_ROWS` points each."""
    known = known[:SHOWN_ROWS]
    unknown = unknown[:SHOWN_ROWS]
    both = torch.cat([known, unknown])
    centred = both - both.mean(dim=0)
    _, _, directions = torch.linalg.svd(centred, full_matrices=False)
    points = (centred @ directions[:2].t()).round(decimals=4)
    return {"known": points[: len(known)].tolist(), "ood": points[len(known) :].tolist()}


def as_batches_on(rows: Any, device: str) -> Any:
    for batch in as_batches(rows):
        yield {name: value.to(device) for name, value in batch.items()}
