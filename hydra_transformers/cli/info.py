"""`info`: the heads that each member keeps, sizes and cost."""

from pathlib import Path

from .folders import check_is_hydra
from .options import argument, model_name


def info(
    model: argument(str, "MODEL", "a Hydra, whose weights are not read, or a folder of members", parser=model_name),
) -> None:
    """Show which heads each member keeps, sizes and cost."""
    from ..serving.saved_models import member_folders

    folder = Path(model)
    if folder.is_dir() and not (folder / "config.json").exists() and member_folders(folder):
        for member in member_folders(folder):
            print(f"{member.name}\n")
            _describe(str(member))
            print()
    else:
        _describe(model)


def _describe(name: str) -> None:
    from ..baselines import DeepEnsemble
    from ..cost import compare_costs, count_parameters, unpruned_backbone
    from ..fusion.structure import without_weights
    from ..hub import kept_heads_map
    from ..models.auto import head_of, is_zero_shot
    from ..reports import cost_table
    from ..serving.saved_models import load_config
    from ..uncertainty import CalibratedClassifier

    config = load_config(name)
    check_is_hydra(config, name)
    model = without_weights(head_of(config), config)
    members = f"{config.num_members} member{'s' if config.num_members > 1 else ''}"
    print(f"{type(model).__name__}, {members}, sharing {', '.join(config.shared) or 'nothing'}")
    if getattr(config, "id2label", None) and not is_zero_shot(config):
        is_regression, names = config.problem_type == "regression", list(map(str, config.id2label.values()))
        what = f"regression with {config.num_labels} output(s)" if is_regression else f"{config.num_labels} classes"
        aggregate = getattr(config, "aggregate", None)
        first_names = ", ".join([*names[:10], "..."] if len(names) > 10 else names)
        print(f"{what}: {first_names}{f', aggregated by {aggregate!r}' if aggregate else ''}")
    is_calibrated = model.decision is not None or CalibratedClassifier.is_saved_in(name)
    print("calibrated" if is_calibrated else "not calibrated: it never abstains and has no sets")
    print(f"{count_parameters(model):,} parameters\n")
    print(kept_heads_map(config), end="\n\n")
    models = {"This model": model, "Unpruned backbone": unpruned_backbone(model)}
    if config.num_members > 1:
        backbones = [unpruned_backbone(model, "meta") for _ in range(config.num_members)]
        models[f"Deep Ensemble of {config.num_members}"] = DeepEnsemble(backbones)
    print(cost_table(compare_costs(models)))
