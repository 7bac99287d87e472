"""`info`: the heads that each member keeps, sizes and cost."""

from typing import TYPE_CHECKING

from .folders import check_is_hydra
from .options import argument, model_name


if TYPE_CHECKING:
    from ..models.pretrained import HydraModelMixin


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
    members = f"{config.num_members} member{'s' if config.num_members > 1 else ''}"
    print(f"{type(hydra).__name__}, {members}, sharing {', '.join(config.shared) or 'nothing'}")
    names = about.class_names
    if names:
        is_regression = about.task.predicts_numbers
        task = f"regression with {len(names)} output(s)" if is_regression else f"{len(names)} classes"
        aggregate = getattr(config, "aggregate", None)
        first_names = ", ".join([*names[:10], "..."] if len(names) > 10 else names)
        print(f"{task}: {first_names}{f', aggregated by {aggregate!r}' if aggregate else ''}")
    print(_state_of_calibration(hydra, model))
    print(f"{count_parameters(hydra):,} parameters\n")
    print(kept_heads_map(config), end="\n\n")
    models = {"This model": hydra, "Its backbone": unpruned_backbone(hydra)}
    if config.num_members > 1:
        backbones = [unpruned_backbone(hydra) for _ in range(config.num_members)]
        models[f"Deep Ensemble of {config.num_members}"] = DeepEnsemble(backbones)
    print(cost_table(compare_costs(models)))


def _state_of_calibration(hydra: "HydraModelMixin", folder: str) -> str:
    """Say whether a model was calibrated, and whether it ever abstains."""
    from ..uncertainty import CalibratedClassifier

    threshold = None
    if hydra.decision is not None:
        threshold = hydra.decision.settings.threshold
    elif CalibratedClassifier.is_saved_in(folder):
        threshold = CalibratedClassifier.settings_saved_in(folder)["threshold"]
    else:
        return "not calibrated: it never abstains and has no sets"
    return "calibrated" if threshold is not None else "calibrated without a target: it never abstains"
