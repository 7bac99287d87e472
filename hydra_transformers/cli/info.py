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
    from ..models.auto import head_of, is_zero_shot
    from ..reports import cost_table
    from ..serving.saved_models import load_config

    config = load_config(model)
    check_is_hydra(config, model)
    hydra = without_weights(head_of(config), config)
    members = f"{config.num_members} member{'s' if config.num_members > 1 else ''}"
    print(f"{type(hydra).__name__}, {members}, sharing {', '.join(config.shared) or 'nothing'}")
    if getattr(config, "id2label", None) and not is_zero_shot(config):
        is_regression, names = config.problem_type == "regression", list(map(str, config.id2label.values()))
        task = f"regression with {config.num_labels} output(s)" if is_regression else f"{config.num_labels} classes"
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
