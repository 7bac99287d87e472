"""What is trained and extracted: backbones, circuits, members, baselines. Everything is kept in a folder and made once."""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from hydra_transformers import AutoHydra, evaluate_uncertainty
from hydra_transformers._io.files import write_atomically
from hydra_transformers.baselines import (
    MIMO,
    BatchEnsemble,
    LoRAEnsemble,
    MIMOCollator,
    PackedEnsemble,
    finetune_lora_ensemble,
)
from hydra_transformers.pruning import Circuit, draw_members, extract_circuit, oba_prune, prune_heads
from hydra_transformers.pruning.members import sample_heads
from hydra_transformers.pruning.oba import ranked_weights
from hydra_transformers.training import Recipe, finetune_members

from ..rows import TensorRows, as_it_is
from ..splits import Splits
from .data import EVALUATION_BATCH, as_batches
from .settings import Setting


MEMBERS = 3
OBJECTIVES = ("acc", "ood", "avg")
CIRC = ("circ-acc", "circ-ood", "circ-avg")
TAYLOR = ("taylor-0", "taylor-1", "taylor-2")
SAMPLED = ("sampled-0", "sampled-1", "sampled-2")
# The place in its ensemble decides a member's seed; those sampled from one circuit share the average's.
PLACES = {name: place for names in (CIRC, TAYLOR) for place, name in enumerate(names)}
OBA_BATCH = 64  # a backward through a backward takes several times the memory


class Part(NamedTuple):
    """What one process does at a time.

    kind: "rate", "backbone", "circuit", "pruning", "member", "lora", "baseline" or, for what is measured, "result",
        "shift", "study"
    seed: of the backbone, for all that is made of it
    name: of the objective, the pruning, the baseline or the method
    removed: of a circuit how many heads it ranks; of a pruning or a member how many go per layer; 0 for the setting's
    order, noise: of a member, shifts of the seeds of the data's order and of all else that is random in training
    rate: a learning rate to try
    """

    kind: str
    seed: int
    name: str = ""
    removed: int = 0
    order: int = 0
    noise: int = 0
    rate: float = 0.0

    def __str__(self) -> str:
        words = [self.kind, str(self.seed), self.name]
        for name in ("removed", "order", "noise", "rate"):
            value = getattr(self, name)
            words += [f"{name}{value:g}"] if value else []
        return "-".join(word for word in words if word)


# Learning rates of members are tried with it.
TRIED_MEMBER = Part("member", 0, TAYLOR[0])


def rates(setting: Setting, of: str) -> list[Part]:
    """Return the learning rates that are tried for "backbone" or "member"; none where the recipe has one."""
    recipe = getattr(setting, f"{of}_recipe")
    return [Part("rate", 0, of, rate=rate) for rate in recipe.learning_rates]


def ranked_heads(setting: Setting, member: Part) -> int:
    """Return how many heads of its circuit a member needs."""
    if member.name in SAMPLED:
        return setting.heads_to_rank
    return setting.layers * member.removed or setting.heads_to_prune


def circuit_of(setting: Setting, member: Part) -> Part | None:
    """Return the circuit that a member is cut out by; None without one."""
    if member.name in CIRC:
        return Part("circuit", member.seed, OBJECTIVES[CIRC.index(member.name)], ranked_heads(setting, member))
    if member.name in SAMPLED:
        return Part("circuit", member.seed, "avg", ranked_heads(setting, member))
    return None


def pruning_of(member: Part) -> Part:
    """Return the choice of heads that a member is cut out by, which members of other training seeds share."""
    return Part("pruning", member.seed, member.name, member.removed)


def needs_of(setting: Setting, part: Part) -> list[Part]:
    """Return what must be done before a part is trained or extracted: several processes never make the same thing."""
    if part.kind in ("backbone", "baseline"):
        return rates(setting, "backbone")
    if part.kind == "rate":
        return [pruning_of(TRIED_MEMBER)] if part.name == "member" else []
    if part.kind == "member":
        return [pruning_of(part), *rates(setting, "member")]
    if part.kind == "pruning":
        circuit = circuit_of(setting, part)
        return [Part("backbone", part.seed)] if circuit is None else [circuit]
    return [Part("backbone", part.seed)]


class Parts:
    """A setting's data on a device, and all that is trained and extracted on them, kept in `folder`."""

    def __init__(self, setting: Setting, data: Path | None, start: str, folder: Path, device: str):
        self.setting = setting
        self.data = data
        self.start = start
        self.folder = folder
        self.device = device

    @cached_property
    def splits(self) -> Splits:
        return self.setting.read(self.data, self.start).to(self.device)

    @cached_property
    def circuit_data(self) -> tuple[Any, Any]:
        return as_batches(self.splits.circuit_id), as_batches(self.splits.circuit_ood)

    def make(self, part: Part) -> None:
        if part.kind == "rate":
            self.try_rate(part)
        elif part.kind == "backbone":
            self.backbone(part.seed)
        elif part.kind == "circuit":
            self.circuit(part)
        elif part.kind == "pruning":
            self.pruned(part)
        elif part.kind == "member":
            self.member(part)
        elif part.kind == "lora":
            self.lora(part.seed)
        else:
            self.baseline(part.seed, part.name)

    # Training

    def trained(
        self, model: nn.Module, recipe: Recipe, name: str, seed: int, data_seed: int | None = None, **options: Any
    ) -> nn.Module:
        """Fine-tune one model as `finetune_members` does, or load it from its folder."""
        [tuned] = finetune_members(
            [model],
            recipe,
            self.splits.train,
            self.splits.validation,
            self.folder / name,
            seed=seed,
            data_seed=data_seed,
            **self.training_options() | options,
        )
        return tuned

    def training_options(self) -> dict[str, Any]:
        # Rows in memory come in whole batches.
        in_memory = isinstance(self.splits.train, TensorRows)
        return {
            "data_collator": as_it_is if in_memory else None,
            "remove_unused_columns": False,
            "dataloader_pin_memory": False,
            "per_device_train_batch_size": self.setting.batch_size,
            "per_device_eval_batch_size": EVALUATION_BATCH,
            "logging_strategy": "no",
            "report_to": "none",
            "progress": False,
            "use_cpu": self.device == "cpu",
            "bf16": self.device == "cuda",
            **self.setting.training_arguments,
        }

    def backbone(self, seed: int, rate: float | None = None) -> PreTrainedModel:
        """Return the fine-tuned model, with all its heads."""
        recipe, name = self.with_rate("backbone", f"backbone-{seed}", rate)
        batch = self.setting.backbone_batch or self.setting.batch_size
        model = self.new_model(seed)
        return self.trained(model, recipe, name, seed, per_device_train_batch_size=batch).eval()

    def new_model(self, seed: int) -> PreTrainedModel:
        return self.setting.new_backbone(self.start, seed).to(self.device)

    def member(self, part: Part, rate: float | None = None) -> PreTrainedModel:
        """Return a pruned and fine-tuned member (D.2)."""
        recipe, name = self.with_rate("member", str(part), rate)
        if part.name == "oba":
            recipe = replace(recipe, keep_zeros=True, reset_classifier=False)
        seed = 100 * part.seed + PLACES.get(part.name, 2)
        return self.trained(self.pruned(part), recipe, name, seed + part.noise, seed + part.order)

    # Learning rates

    def with_rate(self, of: str, name: str, rate: float | None) -> tuple[Recipe, str]:
        """Return the recipe with a learning rate, the best by default, and a folder's name that says which."""
        recipe = getattr(self.setting, f"{of}_recipe")
        if not recipe.learning_rates:
            return recipe, name
        rate = rate or self.best_rate(of)
        return recipe.with_arguments(learning_rate=rate), f"{name}-at-{rate:g}"

    def rate_file(self, part: Part) -> Path:
        return self.folder / "rates" / f"{part}.json"

    def try_rate(self, part: Part) -> None:
        """Train the first seed's backbone, or its first Taylor member, and measure it on the validation data."""
        if self.rate_file(part).exists():
            return
        if part.name == "backbone":
            model = self.backbone(0, part.rate)
        else:
            model = self.member(TRIED_MEMBER, part.rate)
        report = evaluate_uncertainty({"tried": model}, as_batches(self.splits.validation))
        found = {name: report.models["tried"]["data"][name] for name in ("accuracy", "nll")}
        write_atomically(self.rate_file(part), json.dumps(found) + "\n")

    def best_rate(self, of: str) -> float:
        """Return the rate with the best accuracy on the validation data, of equal ones that with the lower loss."""

        def score(part: Part) -> tuple[float, float]:
            found = json.loads(self.rate_file(part).read_text())
            return found["accuracy"], -found["nll"]

        return max(rates(self.setting, of), key=score).rate

    # Pruning

    def circuit(self, part: Part) -> Circuit:
        """Return the ranking of `part.removed` heads; a longer one goes on where a shorter one ended."""
        backbone = prune_heads(self.backbone(part.seed))
        if self.device == "cuda":
            backbone = backbone.to(torch.bfloat16)
        return extract_circuit(
            backbone,
            *self.circuit_data,
            part.name,
            budget=part.removed,
            mode=self.setting.circuit_mode,
            checkpoint=self.folder / f"circuit-{part.seed}-{part.name}.json",
        )

    def pruned(self, part: Part) -> PreTrainedModel:
        """Return a member as it is cut out of its backbone, before fine-tuning."""
        backbone = self.backbone(part.seed)
        if part.name == "oba":
            return self.sparse(part.seed, backbone)
        return prune_heads(backbone, self.heads_to_prune(part, backbone))

    def heads_to_prune(self, part: Part, backbone: PreTrainedModel) -> dict[int, list[int]]:
        """Return the heads that a member loses, which are kept in a file."""
        names = f"heads-{part.seed}-{part.name}-{part.removed}"
        path = self.folder / f"{names}.json"
        if not path.exists():
            heads = self.chosen_heads(part, backbone)
            write_atomically(path, json.dumps(sorted(heads.items())) + "\n")
        return {int(layer): heads for layer, heads in json.loads(path.read_text())}

    def chosen_heads(self, part: Part, backbone: PreTrainedModel) -> dict[int, list[int]]:
        setting = self.setting
        circuit = circuit_of(setting, part)
        if part.name in SAMPLED:
            seed = 10 * part.seed + SAMPLED.index(part.name)
            return sample_heads(self.circuit(circuit), setting.heads_to_prune, setting.heads_to_rank, seed)
        if circuit is not None:
            return self.circuit(circuit).heads_to_prune(circuit.removed)

        # Taylor: each member has its own half of the calibration data.
        heads_per_layer = setting.heads - part.removed if part.removed else setting.heads_per_layer
        seed = 10 * part.seed + TAYLOR.index(part.name)
        data = self.circuit_data[0]
        [member] = draw_members(backbone, data=data, heads_per_layer=heads_per_layer, num_members=1, seed=seed)
        all_heads = set(range(setting.heads))
        return {layer: sorted(all_heads - set(kept[0])) for layer, kept in enumerate(member.config.kept_heads)}

    def sparse(self, seed: int, backbone: PreTrainedModel) -> PreTrainedModel:
        """Return the model without as many single weights, by OBA, as the heads have that circuits remove (5.1, note 3)."""
        folder = self.folder / f"sparse-{seed}"
        if not folder.exists():
            config = backbone.config
            weights_of_a_head = 4 * config.hidden_size * (config.hidden_size // config.num_attention_heads)
            weights = sum(weight.numel() for weight in ranked_weights(backbone))
            share = self.setting.heads_to_prune * weights_of_a_head / weights
            rows = self.splits.circuit_id
            data = rows.batches(OBA_BATCH) if isinstance(rows, TensorRows) else rows
            # Renamed when it is whole: an interrupted one is made anew.
            unfinished = folder.with_name(f".{folder.name}")
            oba_prune(backbone, data, sparsity=share).save_pretrained(unfinished)
            os.replace(unfinished, folder)
        return type(backbone).from_pretrained(folder).to(self.device).eval()

    # Baselines

    def lora(self, seed: int) -> LoRAEnsemble:
        return finetune_lora_ensemble(
            self.backbone(seed),
            self.setting.lora_recipe,
            self.splits.train,
            self.splits.validation,
            self.folder / f"lora-{seed}",
            seed=100 * seed,
            **self.training_options(),
        )

    def baseline(self, seed: int, name: str) -> nn.Module:
        """Return a baseline of three members, trained from what backbones start from."""
        start = self.setting.new_backbone(self.start, seed)
        recipe, folder = self.with_rate("backbone", f"{name}-{seed}", None)
        options: dict[str, Any] = {}
        if name == "mimo":
            model = MIMO(start, num_members=MEMBERS, seed=seed)
            # Its own loss knows which label lies in which place.
            recipe = recipe.with_arguments(label_smoothing_factor=0.0)
            drawing = dict(self.setting.mimo)
            if isinstance(self.splits.train, TensorRows):
                drawing["collator"] = as_it_is
            options["data_collator"] = MIMOCollator(MEMBERS, **drawing)
        elif name == "batch-ensemble":
            model = BatchEnsemble(start, num_members=MEMBERS, seed=seed)
        elif name == "packed":
            model = PackedEnsemble.from_backbone(start, num_members=MEMBERS, seed=seed)
        else:  # one encoder, three classifiers
            model = AutoHydra.from_backbone(
                start,
                num_members=MEMBERS,
                trunk_layers=self.setting.layers,
                num_labels=start.config.num_labels,
                seed=seed,
            )
        return self.trained(model.to(self.device), recipe, folder, 100 * seed, **options)


def expanded(goals: Sequence[Part], needs: Callable[[Part], list[Part]]) -> list[Part]:
    """Return the goals and all that they need, each behind its needs."""
    found: dict[Part, None] = {}

    def add(part: Part) -> None:
        if part not in found:
            for need in needs(part):
                add(need)
            found[part] = None

    for goal in goals:
        add(goal)
    return list(found)


def members(seed: int, names: Sequence[str]) -> Iterator[Part]:
    for name in names:
        yield Part("member", seed, name)
