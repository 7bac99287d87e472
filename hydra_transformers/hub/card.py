"""The model card: filled from the model, its report and its circuits, with metadata the Hub understands."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import ModelCard, ModelCardData
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from transformers import PreTrainedConfig, PreTrainedModel

from ..cost import count_parameters, inputs_for, multiply_adds_of, readable_count, unpruned_backbone
from ..data.zero_shot import first_token_kwargs
from ..fusion.structure import slots, without_weights
from ..models.decision_settings import typed_settings
from ..pruning import Circuit
from ..pruning.heads import heads_in
from ..reports.table import escape_markdown, markdown_table
from .card_texts import TASKS, texts_for
from .member_heads import heads_of_backbone, kept_heads_map, matches_circuit, pruned_heads, trunk_sentence


if TYPE_CHECKING:
    from ..reports import Report

TEMPLATE = Path(__file__).with_name("model_card.md")
TO_FILL_IN = "**To be filled in after training:**"
TAGS = ["hydra-ensembles", "uncertainty", "ensemble", "out-of-distribution-detection"]
SHARED_NAMES = {"embeddings": "embeddings", "layernorm": "LayerNorms", "mlp": "MLPs"}
OBJECTIVE_NAMES = {"acc": "accuracy", "ood": "out-of-distribution AUROC", "avg": "mean of accuracy and OOD AUROC"}
EXAMPLES = {"dataset": "uoft-cs/cifar100", "repo_id": "me/my-hydra"}


def create_model_card(
    model: PreTrainedModel,
    report: "Report | None" = None,
    *,
    repo_id: str | None = None,
    base_model: str | None = None,
    dataset: str | None = None,
    license: str | None = None,
    circuits: Sequence[Circuit] | None = None,
    fine_tuning: str | None = None,
    pruning: str | None = None,
    report_model: str | None = None,
    plots: Mapping[str, str] | None = None,
) -> ModelCard:
    """Creates the card of a Hydra. What is not known is marked "To be filled in".

    Args:
        model (`PreTrainedModel`): a Hydra with a classifier, or one for zero-shot classification.
        report (`Report`, *optional*): from `evaluate_uncertainty`; fills the evaluation table and the Hub's metadata.
        repo_id (`str`, *optional*): the model's repository, "me/my-hydra"; the code in the card loads it from there.
        base_model (`str`, *optional*): the id on the Hub of the pre-trained model or backbone.
        dataset (`str`, *optional*): the in-distribution data's id on the Hub ("cifar100"); needed with a report.
        license (`str`, *optional*): of the weights: a license id of the Hub ("apache-2.0").
        circuits (`Sequence[Circuit]`, *optional*): one per member, in their order, or one that all were sampled from.
        fine_tuning (`str`, *optional*): a sentence on how the members were fine-tuned.
        pruning (`str`, *optional*): a sentence on how the heads were chosen, where no circuits did, such as by Taylor scores.
        report_model (`str`, *optional*): which of the report's models this one is; needed where it has several.
        plots (`Mapping[str, str]`, *optional*): title -> path in the repository, for pictures below the evaluation table.

    Returns:
        `ModelCard`: the card.

    Example:
        >>> create_model_card(hydra, report, dataset="cifar100").save("README.md")  # doctest: +SKIP
    """
    task, config = card_task(model), model.config
    check_names(repo_id=repo_id, base_model=base_model, dataset=dataset)
    if pruning is not None and circuits:
        raise ValueError("pruning and circuits are given: leave one of them out")
    repo_id = repo_id or f"me/{type(model).__name__.lower()}"
    name = repo_id.split("/")[-1]
    has_own_weights = len({circuit.made_from.get("weights") for circuit in circuits or ()}) > 1
    fine_tunings = config.num_members > 1 and (_has_all_heads(config) or has_own_weights)
    shared = ", ".join(name for part, name in SHARED_NAMES.items() if part in config.shared)
    is_current = model.decision is not None and (model.device.type == "meta" or model.decision.compare(model))
    sentences = typed_settings(model.decision.settings).sentences if is_current else ()
    named = {"base_model": base_model, "datasets": [dataset] if dataset else None, "license": license}
    tags = TAGS if _has_all_heads(config) else [*TAGS, "head-pruning"]
    data = ModelCardData(**named, library_name="transformers", pipeline_tag=task["pipeline_tag"], tags=tags)
    evaluation = None
    if report is not None:
        if dataset is None:
            raise ValueError("dataset is missing: name the report's in-distribution data, such as dataset='cifar100'")
        if report_model is None and len(report.models) > 1:
            raise ValueError(
                f"report_model is missing: the report has the models {', '.join(report.models)}: name one of them"
            )
        evaluation = re.sub(r"^##", "###", report.to_markdown(), flags=re.MULTILINE).strip()
        data.eval_results = report.to_eval_results(
            dataset, dataset_type=dataset, model=report_model, task_type=task["pipeline_tag"]
        )
        data.model_name, data.metrics = name, [data.eval_results[0].metric_type]
    card = ModelCard.from_template(
        data,
        template_path=str(TEMPLATE),
        to_fill_in=lambda what: f"{TO_FILL_IN} {what}",
        task=task,
        repo_id=repo_id,
        model_name=name,
        members=config.num_members,
        origin=_origin(config, base_model, fine_tunings),
        architecture=model.architecture,
        decision="\n".join(f"- {escape_markdown(sentence)}" for sentence in sentences),
        shared_sentence=shared or "nothing, they are independent models",
        own_sentence=_own_parts(model),
        trunk_sentence=trunk_sentence(config),
        pruning=pruning or _pruning_sentences(model, circuits, fine_tunings),
        kept_heads_map=kept_heads_map(config),
        cost=card_cost_table(model),
        evaluation=evaluation,
        dataset=dataset,
        fine_tuning=fine_tuning,
        plots=plots or {},
    )
    return ModelCard(re.sub(r"\n{3,}", "\n\n", str(card)).rstrip() + "\n")  # where the template's conditions stood


def check_names(**names: str | None) -> None:
    """Raises on names that no repository on the Hub can have."""
    for argument, value in names.items():
        try:
            validate_repo_id(value or EXAMPLES["repo_id"])
        except HFValidationError as error:
            example = EXAMPLES.get(argument, "google/vit-base-patch16-224")
            raise ValueError(f"{argument} is {value!r}: pass an id of the Hub such as {example!r}") from error


def card_task(model: PreTrainedModel) -> dict[str, Any]:
    """The texts for a classifier, by the name of its class: code from a repository has classes of its own."""
    auto_classes = getattr(model.config, "auto_classes", {})
    for model_class in TASKS:
        if auto_classes.get(model_class, "").endswith(f".{type(model).__name__}"):
            return texts_for(model_class, model.config, hasattr(model, "logit_bias"))
    raise TypeError(f"model is a {type(model).__name__}: a card describes a Hydra with a head")


def _has_all_heads(config: PreTrainedConfig) -> bool:
    heads = heads_of_backbone(config)
    return all(set(heads_in(config.kept_heads, member)) == heads for member in range(config.num_members))


def _origin(config: PreTrainedConfig, base_model: str | None, fine_tunings: bool) -> str:
    """What the members are, as a part of a sentence."""
    members, link = config.num_members, f"[{base_model}](https://huggingface.co/{base_model})"
    if not fine_tunings:
        source = link if base_model else "one backbone"
        return f"{members} members of {source}, each with other attention heads cut out"
    origin = f"{members} fine-tuned versions of {link if base_model else 'one pre-trained model'}"
    if not _has_all_heads(config):
        return f"{origin}, each pruned by its own circuit"
    if not config.shared and not base_model:  # they may come from anywhere
        origin = f"{members} models that share nothing,"
    return f"{origin} with all their attention heads"


def _own_parts(model: PreTrainedModel) -> str:
    """Names the parts that each member has for itself, beside attention."""
    names = {slot.name for _, slot in slots(model) if slot.rows is not None or ".head." in slot.name}
    names = sorted(name for name in names if ".attention." not in name)
    paths = [name.removeprefix(f"{model.base_model_prefix}.").split(".") for name in names]
    parts = dict.fromkeys(" ".join(path[: 2 if "head" in path[1:] else 1]).replace("_", " ") for path in paths)
    *first, last = [*(name for part, name in SHARED_NAMES.items() if part not in model.config.shared), *parts]
    return " and ".join(filter(None, [", ".join(first), last]))


def _pruning_sentences(model: PreTrainedModel, circuits: Sequence[Circuit] | None, fine_tunings: bool) -> str | None:
    config, members = model.config, model.config.num_members
    if not circuits:
        return "None was cut out: the members differ by their fine-tuning." if fine_tunings else None
    if len(circuits) not in (1, members):
        raise ValueError(f"there are {len(circuits)} circuits and {members} members: pass one per member, or one")
    if len(circuits) < members or (members == 1 and not matches_circuit(circuits[0], config, 0)):
        return (
            f"Heads are ranked by one circuit ({describe_circuit(circuits[0])}); each member lost heads sampled from the "
            f"first part of the ranking of {len(circuits[0].ranking)}."
        )
    lines = []
    for member, circuit in enumerate(circuits):
        if not matches_circuit(circuit, config, member):
            raise ValueError(
                f"circuits[{member}] (objective {circuit.objective!r}) is not the one by which member {member} lost its "
                "heads: pass the circuits in the order of the members"
            )
        removed = len(pruned_heads(circuit, config, member))
        line = f"- Member {member}: {removed} heads removed along a circuit ({describe_circuit(circuit)})"
        if removed:
            line += f", score {circuit.dense_score:.4f} before and {circuit.scores[removed - 1]:.4f} after"
        lines.append(line)
    note = ", each of the member's own weights" if fine_tunings else ""
    return "\n".join([f"Circuits{note}: the head without which the score is best goes, again and again.", "", *lines])


def describe_circuit(circuit: Circuit) -> str:
    """The objective of a circuit and the number of its samples."""
    rows = (circuit.made_from.get("data") or {}).get("samples")
    objective = OBJECTIVE_NAMES.get(circuit.objective) or circuit.made_from.get("metric", circuit.objective)
    return escape_markdown(f"objective: {objective}" + (f", {rows} samples" if rows else ""))


def card_cost_table(model: PreTrainedModel) -> str:
    """A markdown table of a model, one unpruned model, and as many of these as there are members: counted, not measured."""
    single, members = _cost(unpruned_backbone(model)), model.config.num_members
    costs = {"This model": _cost(without_weights(type(model), model.config)), "One unpruned model": single}
    if members > 1:
        costs[f"{members} unpruned models (Deep Ensemble)"] = {title: members * n for title, n in single.items()}
    rows = [
        [name, f"{parameters:,}", *map(readable_count, work)]
        for name, (parameters, *work) in ((name, cost.values()) for name, cost in costs.items())
    ]
    return markdown_table(["", *single], rows)


def _cost(model: PreTrainedModel) -> dict[str, int]:
    """Column title -> number. CLIP's images and prompts count apart: prompts are computed once for many images."""
    inputs, parameters = inputs_for(model, 1, "meta"), {"Parameters": count_parameters(model)}
    if "pixel_values" in inputs and "input_ids" in inputs:
        images = {"pixel_values": inputs["pixel_values"], **first_token_kwargs(model)}
        per_prompt = multiply_adds_of(model.get_text_features, input_ids=inputs["input_ids"])
        return parameters | {
            "Multiply-adds per image": multiply_adds_of(model.get_image_features, **images),
            f"Multiply-adds per prompt of {inputs['input_ids'].shape[1]} tokens": per_prompt,
        }
    name = next(name for name in ("pixel_values", "input_ids", "input_features", "input_values") if name in inputs)
    shape = inputs[name].shape
    units = {
        "pixel_values": "image",
        "input_ids": f"text of {shape[1]} tokens",
        "input_features": f"audio of {shape[-1]:,} frames",
        "input_values": f"audio of {shape[1]:,} {'samples' if len(shape) == 2 else 'frames'}",
    }
    return parameters | {f"Multiply-adds per {units[name]}": multiply_adds_of(model, **{name: inputs[name]})}
