"""The model card: filled from the model, its report and its circuits, with metadata the Hub understands."""

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from transformers import PreTrainedModel

from ..baselines import Baseline
from ..fusion import slots, tower_configs
from ..models.auto import AUTO_CLASSES
from ..pruning import Circuit
from ..reports.report import UncertaintyReport
from ..reports.table import escape_markdown
from ..uncertainty import CalibratedClassifier, TemperatureScaling
from .card_sections import sealed, to_fill_in
from .cost_table import card_cost_table
from .kept_heads_map import kept_heads_map, trunk_sentence
from .licenses import warn_of_unknown_license
from .member_circuits import has_led_to, heads_of_backbone, kept_by, lost_by
from .tasks import BASELINE_LIMITS, BASELINE_SNIPPETS, PAIRS, TASKS, Task


TEMPLATE, BASELINE_TEMPLATE = (Path(__file__).with_name(name) for name in ("model_card.md", "baseline_card.md"))
BASELINE_TAGS = ["uncertainty", "hydra-ensembles", "out-of-distribution-detection"]
TAGS = ["hydra-ensembles", "uncertainty", "ensemble", "out-of-distribution-detection", "head-pruning"]
SHARED_NAMES = {"embeddings": "embeddings", "layernorm": "LayerNorms", "mlp": "MLPs"}
OBJECTIVE_NAMES = {"acc": "accuracy", "ood": "out-of-distribution AUROC", "avg": "mean of accuracy and OOD AUROC"}


def create_model_card(
    model: PreTrainedModel | Baseline | CalibratedClassifier,
    report: UncertaintyReport | None = None,
    *,
    repo_id: str | None = None,
    base_model: str | None = None,
    dataset: str | None = None,
    license: str | None = None,
    circuits: Sequence[Circuit] | None = None,
    fine_tunings: bool | None = None,
    fine_tuning: str | None = None,
    report_model: str | None = None,
    temperature: TemperatureScaling | None = None,
    plots: Mapping[str, str] | None = None,
) -> ModelCard:
    """The card of a Hydra classifier or a baseline; `.save("README.md")` writes it.

    Args:
        model: a Hydra with a classifier, or one for zero-shot classification; or a baseline around one model, calibrated
            or not.
        report: from `evaluate_uncertainty`; fills the evaluation table and the Hub's evaluation metadata.
        repo_id: where the model will lie, "me/my-hydra"; the code in the card loads it from there.
        base_model: the id on the Hub of the backbone, or of the pre-trained model that the members are fine-tunings of.
        dataset: the in-distribution data's id on the Hub ("cifar100"); needed with a report.
        license: a license id of the Hub ("apache-2.0"); a warning tells of one that is not known.
        circuits: one per member, in their order, or a single one that all members were sampled from; of Hydras alone.
        fine_tunings: whether each member is a fine-tuning of its own, and not a copy of one backbone; by default told by the
            circuits, by the weights they were extracted from, and by members that have all heads.
        fine_tuning: a sentence on how the members were fine-tuned.
        report_model: which of the report's models this one is; needed where it has several.
        temperature: the temperature that is published with the model.
        plots: title -> path in the repository, for pictures below the evaluation table.

    What is not known is marked "To be filled in". Parts between `<!-- generated: ... -->` and `<!-- end -->` are renewed by
    later pushes; the text around them is yours.
    """
    model, decision = split_decision(model)
    check_names(repo_id=repo_id, base_model=base_model, dataset=dataset)
    warn_of_unknown_license(license)
    if isinstance(model, Baseline):
        if circuits or fine_tunings:
            raise ValueError(
                f"circuits and fine_tunings are about Hydras, this is a {type(model).__name__}: leave them out"
            )
        fields = _baseline_fields(model, repo_id, base_model)
        fields["decision"] = _listed(() if decision is None else decision.decision.settings["sentences"])
    else:
        fields = card_fields(model, repo_id, base_model, circuits, fine_tunings)
    fields |= {"fine_tuning": fine_tuning, "temperature": temperature, "plots": plots or {}, "dataset": dataset}
    data = card_data(model, base_model, dataset, license)
    if report is not None:
        if dataset is None:
            raise ValueError("dataset is missing: name the report's in-distribution data, such as dataset='cifar100'")
        fields["evaluation"] = re.sub(r"^##", "###", report.to_markdown(), flags=re.MULTILINE).strip()
        data.eval_results = _eval_results(report, dataset, report_model, task_of(model).pipeline_tag)
        data.model_name, data.metrics = fields["model_name"], ["accuracy"]
    return render(data, fields, BASELINE_TEMPLATE if isinstance(model, Baseline) else TEMPLATE)


def _baseline_fields(model: Baseline, repo_id: str | None, base_model: str | None) -> dict[str, Any]:
    """The fields of the template for baselines."""
    name, task = type(model).__name__, task_of(model)
    repo_id = repo_id or f"me/{name.lower()}"
    arguments = {key: value for key, value in model.arguments.items() if key != "num_members"}
    return {
        "repo_id": repo_id,
        "model_name": repo_id.split("/")[-1],
        "summary": model.summary.format(members=model.num_members),
        "model_class": type(model.model).__name__,
        "of_base_model": f" of [{base_model}](https://huggingface.co/{base_model})" if base_model else "",
        "intended_use": task.intended_use,
        "snippet": (model.usage or BASELINE_SNIPPETS[task.pipeline_tag]).replace("REPO", repo_id).strip(),
        "baseline": name,
        "members": model.num_members,
        "arguments": {key: escape_markdown(str(value)) for key, value in arguments.items()},
        "cost": card_cost_table(model),
        "limits": BASELINE_LIMITS,
    }


def card_fields(
    model: PreTrainedModel,
    repo_id: str | None = None,
    base_model: str | None = None,
    circuits: Sequence[Circuit] | None = None,
    fine_tunings: bool | None = None,
) -> dict[str, Any]:
    """The fields of the template for Hydras; a model on the meta device will do."""
    task, config = task_of(model), model.config
    repo_id = repo_id or f"me/{type(model).__name__.lower()}"
    members = config.num_members
    if fine_tunings is None:
        fine_tunings = _are_fine_tunings(model, circuits)
    nameless = "one pre-trained model" if fine_tunings else "one backbone"
    link = f"[{base_model}](https://huggingface.co/{base_model})" if base_model else nameless
    shared = ", ".join(SHARED_NAMES[part] for part in SHARED_NAMES if part in config.shared)
    return {
        "repo_id": repo_id,
        "model_name": repo_id.split("/")[-1],
        "members": members,
        "origin": _origin(model, link, circuits, fine_tunings),
        "architecture": model.architecture,
        "intended_use": task.intended_use,
        "snippet": task.snippet.replace("REPO", repo_id).strip(),
        "logits_name": task.logits_name,
        "logits_are": task.logits_are,
        "decomposed": task.decomposed,
        "decision": _listed(_promises(model)),
        "heads_sentence": _heads_sentence(model),
        "shared_sentence": f"{shared} (the mean over the members)"
        if shared
        else "nothing, they are independent models",
        "own_sentence": _own_parts(model),
        "trunk_sentence": trunk_sentence(config),
        "pruning": _pruning_sentences(model, circuits, fine_tunings),
        "kept_heads_map": kept_heads_map(config),
        "cost": card_cost_table(model),
        "limits": task.limits,
    }


def _promises(model: PreTrainedModel) -> Sequence[str]:
    """The promises of a calibrated Hydra; none where its weights are not those that were calibrated."""
    decision = model.decision
    if decision is None or not (model.device.type == "meta" or decision.compare(model)):
        return ()
    return decision.settings["sentences"]


def split_decision(model: Any) -> tuple[Any, CalibratedClassifier | None]:
    """A model, and where it is a calibrated baseline, that with its decision."""
    if isinstance(model, CalibratedClassifier) and isinstance(model.model, Baseline):
        return model.model, model
    return model, None


def _listed(sentences: Sequence[str]) -> str:
    """Names of classes and data sets stand in them, as whoever made the model chose to call these."""
    return "\n".join(f"- {escape_markdown(each)}" for each in sentences)


def card_data(
    model: PreTrainedModel | Baseline, base_model: str | None, dataset: str | None, license: str | None
) -> ModelCardData:
    """The metadata of a model's card, without results."""
    return ModelCardData(
        base_model=base_model,
        datasets=[dataset] if dataset else None,
        license=license,
        library_name="hydra-transformers" if isinstance(model, Baseline) else "transformers",
        pipeline_tag=task_of(model).pipeline_tag,
        tags=BASELINE_TAGS if isinstance(model, Baseline) else TAGS,
    )


def render(data: ModelCardData, fields: Mapping[str, Any], template: Path = TEMPLATE) -> ModelCard:
    """The filled template, with its generated parts sealed."""
    content = str(ModelCard.from_template(data, template_path=str(template), to_fill_in=to_fill_in, **fields))
    content = re.sub(r"\n{3,}", "\n\n", content)  # where the template's conditions stood
    content = content.replace(" -->\n\n", " -->\n").replace("<!-- end -->\n", "<!-- end -->\n\n")
    content = re.sub(r"\n+<!-- end -->\n+", "\n<!-- end -->\n\n", content)
    return ModelCard(sealed(content.rstrip() + "\n"))


def task_of(model: PreTrainedModel | Baseline) -> Task:
    """By names: a class that came with a repository's own code is another object than the installed one."""
    if isinstance(model, Baseline):
        return _task_of_baseline(model)
    auto_classes = getattr(model.config, "auto_classes", {})
    for auto_class, task in TASKS.items():
        if auto_classes.get(auto_class, "").endswith(f".{type(model).__name__}"):
            return PAIRS if hasattr(model, "logit_bias") else task
    classifiers = sorted(each.__name__ for each in AUTO_CLASSES if hasattr(each, "from_pruned_members"))
    raise TypeError(f"model is a {type(model).__name__}: a card describes one of {', '.join(classifiers)}")


def _task_of_baseline(model: Baseline) -> Task:
    if hasattr(model.model, "get_image_features"):
        return TASKS["AutoModelForZeroShotImageClassification"]
    name = type(model.model).__name__
    found = next((task for auto_class, task in TASKS.items() if auto_class.removeprefix("AutoModel") in name), None)
    if found is None:
        raise TypeError(f"model has a {name} inside: a card describes classifiers, CLIP and SigLIP")
    return found


def _own_parts(model: PreTrainedModel) -> str:
    """Names the parts that each member has for itself, beside attention and the parts that members may share."""
    found = [slot for _, slot in slots(model) if slot.rows is not None or ".head." in slot.name]
    own = sorted({slot.name for slot in found if ".attention." not in slot.name})
    paths = [name.removeprefix(f"{model.base_model_prefix}.").split(".") for name in own]
    names = list(dict.fromkeys(" ".join(path[: 2 if "head" in path[1:] else 1]) for path in paths))
    words = [name.replace("_", " ") for name in names]
    return " and ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


def check_names(**names: str | None) -> None:
    """Refuses what cannot be the name of a repository on the Hub."""
    for argument, value in names.items():
        if value is None:
            continue
        try:
            validate_repo_id(value)
        except HFValidationError as error:
            example = {"dataset": "uoft-cs/cifar100", "repo_id": "me/my-hydra"}.get(
                argument, "google/vit-base-patch16-224"
            )
            raise ValueError(f"{argument} is {value!r}: pass an id of the Hub such as {example!r}") from error


def _heads_sentence(model: PreTrainedModel) -> str:
    sentences = []
    for tower, config in tower_configs(model.config).items():
        every = config.num_attention_heads * config.num_hidden_layers
        kept = [str(_num_kept(config, member)) for member in range(config.num_members)]
        counts = kept[0] if len(set(kept)) == 1 else f"{', '.join(kept[:-1])} and {kept[-1]}"
        each = (
            "each keeps" if len(set(kept)) == 1 and len(kept) > 1 else "the members keep" if len(kept) > 1 else "keeps"
        )
        where = f"in the {tower} tower " if tower else ""
        only = " (a single member, used with all of the other tower)" if len(kept) < model.config.num_members else ""
        sentences.append(f"{where}{each} {counts} of the backbone's {every}{only}")
    return "; ".join(sentences)


def _num_kept(config: Any, member: int) -> int:
    return sum(len(layer[min(member, len(layer) - 1)]) for layer in config.kept_heads)


def _are_fine_tunings(model: PreTrainedModel, circuits: Sequence[Circuit] | None) -> bool:
    """Circuits of different weights, or several members that are whole, tell that members are no copies of one model."""
    if model.config.num_members == 1:
        return False
    return _is_whole(model) or len({circuit.made_from.get("weights") for circuit in circuits or ()}) > 1


def _is_whole(model: PreTrainedModel) -> bool:
    """Whether no member lost a head."""
    every = heads_of_backbone(model.config)
    return all(kept_by(model.config, member) == every for member in range(model.config.num_members))


def _origin(model: PreTrainedModel, link: str, circuits: Sequence[Circuit] | None, fine_tunings: bool) -> str:
    """Says what the members are, as a part of a sentence."""
    members = model.config.num_members
    if not fine_tunings:
        return f"{members} copies of {link}, each with other attention heads cut out"
    if _is_whole(model):
        is_known = bool(model.config.shared) or link.startswith(
            "["
        )  # models that share nothing may come from anywhere
        whose = f"fine-tunings of {link}" if is_known else "models that share nothing,"
        return f"{members} {whose} with all their attention heads"
    by = "pruned by its own circuit" if circuits else "with attention heads of its own cut out"
    return f"{members} fine-tunings of {link}, each {by}"


def _pruning_sentences(model: PreTrainedModel, circuits: Sequence[Circuit] | None, fine_tunings: bool) -> str | None:
    if not circuits:
        return (
            "None was cut out: the members are fine-tunings of their own."
            if fine_tunings and _is_whole(model)
            else None
        )
    members = model.config.num_members
    if len(circuits) not in (1, members):
        raise ValueError(
            f"there are {len(circuits)} circuits, the model has {members} members: pass one per member, or one"
        )
    every = heads_of_backbone(model.config)
    kept = [kept_by(model.config, member) for member in range(members)]
    if len(circuits) < members or (members == 1 and not has_led_to(circuits[0], kept[0], every)):
        return (
            f"Heads are ranked by one circuit ({_describe(circuits[0])}); each member lost heads sampled from the "
            f"first part of the ranking of {len(circuits[0].ranking)}."
        )
    lines = []
    for member, circuit in enumerate(circuits):
        if not has_led_to(circuit, kept[member], every):
            raise ValueError(
                f"circuits[{member}] (objective {circuit.objective!r}) is not the one by which member {member} lost its "
                "heads: pass the circuits in the order of the members"
            )
        removed = len(lost_by(circuit, kept[member], every))
        score = (
            f", score {circuit.dense_score:.4f} before and {circuit.scores[removed - 1]:.4f} after" if removed else ""
        )
        lines.append(f"- Member {member}: {removed} heads removed along a circuit ({_describe(circuit)}){score}")
    of = ", each of the member's own fine-tuning" if fine_tunings else ""
    return "\n".join([f"Circuits{of}: the head without which the score is best goes, again and again.", "", *lines])


def _describe(circuit: Circuit) -> str:
    rows = (circuit.made_from.get("data") or {}).get("samples")
    score = circuit.made_from.get("score") or "msp"
    of_score = "" if score == "msp" else f" of {score}"
    objective = OBJECTIVE_NAMES.get(circuit.objective) or circuit.made_from.get("metric", circuit.objective)
    return escape_markdown(f"objective: {objective}{of_score}" + (f", {rows} samples" if rows else ""))


def _eval_results(report: UncertaintyReport, dataset: str, report_model: str | None, task: str) -> list:
    if report_model is None and len(report.models) > 1:
        raise ValueError(
            f"the report has {len(report.models)} models: say with report_model= which of "
            f"{', '.join(report.models)} is published"
        )
    results = report.to_eval_results(dataset, dataset_type=dataset, model=report_model, task_type=task)
    # The Hub's metadata knows no infinity (a negative log-likelihood may be one).
    return [result for result in results if math.isfinite(result.metric_value)]
