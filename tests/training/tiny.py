"""Tiny models and data for the tests of training."""

import copy
from functools import cache

import torch
from transformers import PreTrainedModel, Trainer, TrainingArguments

from tests.families import FAMILIES as ALL
from tests.families import Family


FAMILIES = {family.name: family for family in ALL}
FORMS = ("backbone", "member", "fused", "unshared")

# Trainer in a test: on the CPU, without reports and bars.
QUIET = {"use_cpu": True, "report_to": "none", "disable_tqdm": True}


def tiny_members(family: Family, **fields) -> list[PreTrainedModel]:
    """Three members of one backbone, in float32; one layer has lost all its heads."""
    return copy.deepcopy(_members(family, **fields))


@cache
def _members(family: Family, **fields) -> list[PreTrainedModel]:
    backbone = family.backbone(**fields).float()
    return [family.hydra.from_backbone(backbone, heads) for heads in family.heads_to_prune]


def tiny_model(name: str, form: str = "fused", **fields) -> PreTrainedModel:
    """A model of family `name` in one of the `FORMS` it comes in."""
    return copy.deepcopy(_build(name, form, **fields))


@cache
def _build(name: str, form: str, **fields) -> PreTrainedModel:
    family = FAMILIES[name]
    if form == "backbone":
        return family.backbone(**fields).float()
    members = _members(family, **fields)
    if form == "member":
        return members[0]
    return family.hydra.from_pruned_members(members, **({"shared": ()} if form == "unshared" else {}))


def tiny_dataset(name: str, rows: int = 12, seed: int = 1) -> list[dict]:
    """Rows that show their class, so that there is something to learn; images with texts for
    CLIP."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(rows) % 3
    images = torch.randn(rows, 3, 8, 8, generator=generator)
    images[torch.arange(rows), labels] += 1
    tokens = torch.randint(1, 30, (rows, 10), generator=generator)
    tokens[:, 1] = 30 + labels
    tokens[:, -1] = 39
    if name == "clip":
        return [{"pixel_values": image, "input_ids": text} for image, text in zip(images, tokens, strict=True)]
    family = FAMILIES[name]
    key = "input_ids"
    inputs = tokens
    if family.audio_name is not None:
        shape = family.inputs()[family.audio_name].shape[1:]
        key = family.audio_name
        inputs = torch.randn(rows, *shape, generator=generator)
        inputs[torch.arange(rows), labels] += 1
    elif family.reads_images:
        key = "pixel_values"
        inputs = images
    return [{key: row, "labels": int(label)} for row, label in zip(inputs, labels, strict=True)]


class Interrupting(list):
    """A dataset that interrupts the training when it has been read often enough for that."""

    def __init__(self, rows: list[dict], reads: int):
        super().__init__(rows)
        self.reads_left = reads

    def __getitem__(self, index: int) -> dict:
        self.reads_left -= 1
        if self.reads_left < 0:
            raise KeyboardInterrupt
        return super().__getitem__(index)


def assert_same_weights(first: torch.nn.Module, second: torch.nn.Module) -> None:
    for (name, expected), (_, found) in zip(first.named_parameters(), second.named_parameters(), strict=True):
        assert torch.equal(expected, found), name


def clip_pairs(rows: list[dict]) -> dict[str, torch.Tensor]:
    """Data collator that asks CLIP for its loss."""
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    return batch | {"return_loss": True}


def tiny_trainer(name: str, model: PreTrainedModel, arguments: TrainingArguments, **kwargs) -> Trainer:
    kwargs = {"train_dataset": tiny_dataset(name), "eval_dataset": tiny_dataset(name, 6, seed=2), **kwargs}
    if name == "clip":
        kwargs["data_collator"] = clip_pairs
    return Trainer(model=model, args=arguments, **kwargs)


def weights_of(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def changed(before: dict[str, torch.Tensor], model: PreTrainedModel) -> set[str]:
    """The names of the parameters that are not bit for bit what they were."""
    return {name for name, parameter in model.named_parameters() if not torch.equal(before[name], parameter)}
