"""`info`: the heads that each member keeps, sizes and cost."""

from typing import TYPE_CHECKING

from .folders import check_is_hydra
from .options import argument, model_name


if TYPE_CHECKING:
    from ..model_info import ModelInfo
    from ..models.pretrained import HydraModelMixin

MOST_NAMES = 10  # of classes


def info(model: argument(str, "MODEL", "a Hydra; its weights are not read", parser=model_name)) -> None:
    """Show which heads each member keeps, sizes and cost."""
    from ..baselines import DeepEnsemble
    from ..cost import compare_costs, count_parameters, unpruned_backbone
    from ..fusion.structure import without_weights
    from ..hub import kept_heads_map
    from ..model_info import ModelInfo
    from ..reports import cost_table
    from ..serving.saved_models import load_config

    about = ModelInfo.of(load_config(model))
    config = about.config
    check_is_hydra(config, model)
    hydra = without_weights(about.model_class, config)

    # What it is.
    members = "1 member"
    if config.num_members > 1:
        members = f"{config.num_members} members"
    shared = ", ".join(config.shared) or "nothing"
    print(f"{type(hydra).__name__}, {members}, sharing {shared}")
    if about.class_names:
        print(_describe_task(about))
    print(_state_of_calibration(hydra, model))
    print(f"{count_parameters(hydra):,} parameters\n")
    print(kept_heads_map(config), end="\n\n")

    # What it costs, beside what it was made from.
    models = {"This model": hydra, "Its backbone": unpruned_backbone(hydra)}
    if config.num_members > 1:
        backbones = [unpruned_backbone(hydra) for _ in range(config.num_members)]
        models[f"Deep Ensemble of {config.num_members}"] = DeepEnsemble(backbones)
    print(cost_table(compare_costs(models)))


def _describe_task(about: "ModelInfo") -> str:
    """Say what a model predicts, with its first classes or outputs."""
    names = list(about.class_names)
    task = f"{len(names)} classes"
    if about.task.predicts_numbers:
        task = f"regression with {len(names)} output(s)"
    if len(names) > MOST_NAMES:
        names = [*names[:MOST_NAMES], "..."]
    description = f"{task}: {', '.join(names)}"
    aggregate = getattr(about.config, "aggregate", None)
    if aggregate:
        description += f", aggregated by {aggregate!r}"
    return description


def _state_of_calibration(hydra: "HydraModelMixin", folder: str) -> str:
    """Say whether a model was calibrated, and whether it ever abstains."""
    from ..uncertainty import CalibratedClassifier

    if hydra.decision is not None:
        threshold = hydra.decision.settings.threshold
    elif CalibratedClassifier.is_saved_in(folder):
        threshold = CalibratedClassifier.settings_saved_in(folder)["threshold"]
    else:
        return "not calibrated: it never abstains and has no sets"
    if threshold is None:
        return "calibrated without a target: it never abstains"
    return "calibrated"
