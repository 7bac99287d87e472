"""The rows of the tables: what each method needs, and how its model is put together."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from torch import nn

from hydra_transformers import AutoHydra
from hydra_transformers.baselines import DeepEnsemble, LoRAEnsemble, MCDropout

from .parts import CIRC, MEMBERS, SAMPLED, TAYLOR, Part, Parts, members, pruning_of
from .settings import Setting


SAMPLES = 10  # of MC Dropout


@dataclass(frozen=True)
class Method:
    """One row.

    title: as the paper has it
    needs: (setting, seed) -> what must have been trained and extracted
    build: (parts, seed) -> the model that is measured
    """

    title: str
    needs: Callable[[Setting, int], list[Part]]
    build: Callable[[Parts, int], nn.Module]


def backbone_needs(setting: Setting, seed: int) -> list[Part]:
    return [Part("backbone", seed)]


def single(parts: Parts, seed: int) -> nn.Module:
    return parts.backbone(seed)


def deep_ensemble(parts: Parts, seed: int) -> nn.Module:
    return DeepEnsemble([parts.backbone(index) for index in range(seed, seed + MEMBERS)])


def mc_dropout(parts: Parts, seed: int) -> nn.Module:
    return MCDropout(parts.backbone(seed), num_samples=SAMPLES, p=parts.setting.sampled_dropout, seed=0)


def lora_single(parts: Parts, seed: int) -> nn.Module:
    """The first adapter of the ensemble."""
    model = parts.lora(seed).model
    for adapter in list(model.peft_config)[1:]:
        model.delete_adapter(adapter)
    return LoRAEnsemble(model)


def baseline(title: str, name: str) -> Method:
    return Method(
        title,
        lambda setting, seed: [Part("baseline", seed, name)],
        lambda parts, seed: parts.baseline(seed, name),
    )


def pruned(title: str, name: str, removed: int = 0, tuned: bool = True) -> Method:
    """One pruned model; as it was cut out, or fine-tuned."""

    def needs(setting: Setting, seed: int) -> list[Part]:
        member = Part("member", seed, name, removed)
        return [member if tuned else pruning_of(member)]

    def build(parts: Parts, seed: int) -> nn.Module:
        member = Part("member", seed, name, removed)
        return parts.member(member) if tuned else parts.pruned(member)

    return Method(title, needs, build)


def hydra(title: str, parts_of: Callable[[int], Sequence[Part]], fused: bool = True) -> Method:
    """Members fine-tuned one by one, then fused (4.2); not fused, they share nothing (B.7)."""

    def build(parts: Parts, seed: int) -> nn.Module:
        tuned = [parts.member(part) for part in parts_of(seed)]
        options = {} if fused else {"shared": ()}
        return AutoHydra.from_pruned_members(tuned, allow_equal=True, **options)

    return Method(title, lambda setting, seed: list(parts_of(seed)), build)


# What members of one circuit differ in (B.5, tables 8 and 9), in the paper's order.
SOURCES = (("heads",), ("order",), ("noise",), ("order", "noise"), ("heads", "order", "noise"), ())


def varied_members(seed: int, sources: Sequence[str]) -> list[Part]:
    """Three members from the average's circuit that differ in `sources` alone."""
    names = SAMPLED if "heads" in sources else SAMPLED[:1] * MEMBERS
    found = []
    for place, name in enumerate(names):
        order = 10 * place if "order" in sources else 0
        noise = 10 * place if "noise" in sources else 0
        found.append(Part("member", seed, name, order=order, noise=noise))
    return found


def five_members(seed: int) -> list[Part]:
    """The circuits' three, and two that are sampled from the average's (B.6)."""
    return [*members(seed, CIRC), *varied_members(seed, ("heads", "order", "noise"))[1:]]


def varied_name(sources: Sequence[str]) -> str:
    return f"varied-{'-'.join(sources) or 'nothing'}"


METHODS = {
    "single": Method("Single", backbone_needs, single),
    "deep-ensembles": Method(
        "Deep Ensembles",
        lambda setting, seed: [Part("backbone", index) for index in range(seed, seed + MEMBERS)],
        deep_ensemble,
    ),
    "deep-ensembles-d": baseline("Deep Ensembles (D)", "deep-ensembles-d"),
    "packed": baseline("Packed Ensembles", "packed"),
    "mimo": baseline("MIMO", "mimo"),
    "batch-ensemble": baseline("Batch Ensembles", "batch-ensemble"),
    "mc-dropout": Method("MC Dropout", backbone_needs, mc_dropout),
    "lora-single": Method("LoRA-Single", lambda setting, seed: [Part("lora", seed)], lora_single),
    "lora": Method("LoRA Ensembles", lambda setting, seed: [Part("lora", seed)], lambda parts, seed: parts.lora(seed)),
    "oba": pruned("OBA", "oba"),
    "taylor": pruned("Taylor", TAYLOR[0]),
    "circ-avg": pruned("CircAvg", "circ-avg"),
    "hydra-taylor": hydra("Hydra Ensembles (Taylor)", partial(members, names=TAYLOR)),
    "hydra-circ": hydra("Hydra Ensembles (Circ)", partial(members, names=CIRC)),
    "hydra-circ-not-fused": hydra("Hydra Ensembles (Circ), not fused", partial(members, names=CIRC), fused=False),
    "hydra-circ-5": hydra("Hydra Ensembles (Circ), five members", five_members),
    "taylor-untuned": pruned("Taylor, not fine-tuned", TAYLOR[0], tuned=False),
    "circ-avg-untuned": pruned("CircAvg, not fine-tuned", "circ-avg", tuned=False),
    "circ-ood-untuned": pruned("CircOOD, not fine-tuned", "circ-ood", tuned=False),
    "circ-acc-untuned": pruned("CircAcc, not fine-tuned", "circ-acc", tuned=False),
}
for sources in SOURCES:
    differ = ", ".join(sources) or "nothing"
    METHODS[varied_name(sources)] = hydra(
        f"Hydra Ensembles (Circ), members differ in: {differ}", partial(varied_members, sources=sources)
    )


def swept_name(name: str, removed: int, tuned: bool) -> str:
    """Return the name of a pruned model in figures 5 and 6."""
    return f"{name}-{removed}-removed" + ("" if tuned else "-untuned")


def sweep(setting: Setting, tuned: bool) -> dict[str, Method]:
    """Return the pruned models of figures 5 (not fine-tuned) and 6, with more and more heads of each layer removed."""
    found = {}
    for name, pruning in (("taylor", TAYLOR[0]), ("circ-avg", "circ-avg")):
        for removed in setting.removed_per_layer:
            title = f"{METHODS[name].title}, {removed} heads per layer removed"
            found[swept_name(name, removed, tuned)] = pruned(title, pruning, removed, tuned)
    return found


def methods_of(setting: Setting) -> dict[str, Method]:
    return METHODS | sweep(setting, tuned=False) | sweep(setting, tuned=True)
