"""`info`: the heads that each member keeps, sizes and cost."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from transformers import PreTrainedConfig

from ..cost import compare_costs, count_parameters, unpruned_backbone
from ..fusion import without_weights
from ..models.auto import head_of, is_zero_shot
from ..reports import cost_table
from .benchmark import sample_size
from .folders import check_is_hydra, is_baseline, load_config, load_model, member_folders


if TYPE_CHECKING:
    from ..baselines import Baseline


def info(
    model: Annotated[
        str,
        typer.Argument(
            metavar="FOLDER_OR_REPO",
            help="a Hydra, of which no weights are read, a baseline, or a folder of members",
        ),
    ],
) -> None:
    """Show which heads each member keeps, sizes and cost."""
    folder = Path(model)
    if folder.is_dir() and not (folder / "config.json").exists() and member_folders(folder):
        for member in member_folders(folder):
            print(f"{member.name}\n")
            _describe(load_config(str(member)), str(member))
            print()
        return
    config = load_config(model)
    if is_baseline(model):
        return _describe_baseline(load_model(model))
    _describe(config, model)


def _describe_baseline(model: "Baseline") -> None:
    arguments = ", ".join(f"{name}={value!r}" for name, value in model.arguments.items())
    print(f"{type(model).__name__}({arguments}) around a {type(model.model).__name__}\n")
    rows = {"This model": model, "One plain model": without_weights(type(model.model), model.config)}
    print(f"{cost_table(compare_costs(rows)).markdown()}\n({sample_size(model)} per sample)")


def _describe(config: PreTrainedConfig, name: str) -> None:
    from ..baselines import DeepEnsemble
    from ..hub import kept_heads_map

    check_is_hydra(config, name)
    model = without_weights(head_of(config), config)
    shared = ", ".join(config.shared) or "nothing"
    print(
        f"{type(model).__name__}, {config.num_members} member{'s' if config.num_members > 1 else ''}, sharing {shared}"
    )
    if getattr(config, "id2label", None) and not is_zero_shot(config):
        print(f"{config.num_labels} classes: {', '.join(list(map(str, config.id2label.values()))[:10])}")
    print(f"{count_parameters(model):,} parameters\n")
    print(kept_heads_map(config))
    rows = {"This model": model, "Unpruned backbone": unpruned_backbone(model)}
    if config.num_members > 1:
        several = [unpruned_backbone(model) for _ in range(config.num_members)]
        rows[f"Deep Ensemble of {config.num_members}"] = DeepEnsemble(several)
    print(f"\n{cost_table(compare_costs(rows)).markdown()}\n({sample_size(model)} per sample)")
