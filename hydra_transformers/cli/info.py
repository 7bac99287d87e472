"""`info`: the heads that each member keeps, sizes and cost."""

from pathlib import Path

from torch import nn
from transformers import PreTrainedConfig

from ..cost import compare_costs, count_parameters, inputs_for, unpruned_backbone
from ..fusion import without_weights
from ..models.auto import head_of, is_zero_shot
from ..reports import cost_table
from .folders import check_is_hydra, load_config, member_folders
from .options import argument


def info(
    model: argument(str, "FOLDER_OR_REPO", "a Hydra, whose weights are not read, or a folder of members"),
) -> None:
    """Show which heads each member keeps, sizes and cost."""
    folder = Path(model)
    if folder.is_dir() and not (folder / "config.json").exists() and member_folders(folder):
        for member in member_folders(folder):
            print(f"{member.name}\n")
            _describe_hydra(load_config(str(member)), str(member))
            print()
        return
    config = load_config(model)
    _describe_hydra(config, model)


def _describe_hydra(config: PreTrainedConfig, name: str) -> None:
    from ..hub import kept_heads_map

    check_is_hydra(config, name)
    model = without_weights(head_of(config), config)
    members = f"{config.num_members} member{'s' if config.num_members > 1 else ''}"
    print(f"{type(model).__name__}, {members}, sharing {', '.join(config.shared) or 'nothing'}")
    if getattr(config, "id2label", None) and not is_zero_shot(config):
        is_number, names = config.problem_type == "regression", list(map(str, config.id2label.values()))
        what = f"regression with {config.num_labels} output(s)" if is_number else f"{config.num_labels} classes"
        aggregate = getattr(config, "aggregate", None)
        print(f"{what}: {', '.join(names[:10])}{f', put together as {aggregate!r}' if aggregate else ''}")
    print(f"{count_parameters(model):,} parameters\n")
    print(kept_heads_map(config), end="\n\n")
    _print_costs(model, {"Unpruned backbone": unpruned_backbone(model), **deep_ensemble_of(model)})


def _print_costs(model: nn.Module, others: dict[str, nn.Module]) -> None:
    costs = compare_costs({"This model": model, **others})
    print(f"{cost_table(costs)}\n({sample_size(model)} per sample)")


def deep_ensemble_of(hydra: nn.Module, device: str = "meta") -> dict[str, nn.Module]:
    """As many unpruned backbones as a Hydra has members, with their name; nothing for a single member."""
    from ..baselines import DeepEnsemble

    members = hydra.config.num_members
    backbones = [unpruned_backbone(hydra, device) for _ in range(members)]
    return {f"Deep Ensemble of {members}": DeepEnsemble(backbones)} if members > 1 else {}


def sample_size(model: nn.Module) -> str:
    """The size of one input, in words."""
    inputs = inputs_for(model, 1, "meta")
    parts = ["{} x {} pixels".format(*inputs["pixel_values"].shape[2:])] if "pixel_values" in inputs else []
    if "input_values" in inputs:
        is_raw = inputs["input_values"].dim() == 2
        words = "{:,} samples" if is_raw else "{} frames of {} mel bins"
        parts.append(words.format(*inputs["input_values"].shape[1:]))
    if "input_features" in inputs:
        parts.append("{1} frames of {0} mel bins".format(*inputs["input_features"].shape[1:]))
    if "input_ids" in inputs:
        parts.append(f"{inputs['input_ids'].shape[1]} tokens")
    return " and ".join(parts)
