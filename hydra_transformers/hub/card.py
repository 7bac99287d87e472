"""The model card: filled from model, report and circuits, with metadata the Hub understands."""

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
MAIN_INPUTS = ("pixel_values", "input_ids", "input_features", "input_values")
# What errors suggest in place of a wrong name.
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
    """Create the card of a Hydra. What is not known is marked "To be filled in".

    Args:
        model (`PreTrainedModel`):
            A Hydra with a classifier, or one for zero-shot classification.
        report (`Report`, *optional*):
            From `evaluate_uncertainty`; fills the evaluation table and the Hub's metadata.
        repo_id (`str`, *optional*):
            The model's repository, "me/my-hydra"; the code in the card loads it from there.
        base_model (`str`, *optional*):
            The id on the Hub of the pre-trained model or backbone.
        dataset (`str`, *optional*):
            The in-distribution data's id on the Hub ("cifar100"); needed with a report.
        license (`str`, *optional*):
            Of the weights: a license id of the Hub ("apache-2.0").
        circuits (`Sequence[Circuit]`, *optional*):
            One per member, in their order, or one that all were sampled from.
        fine_tuning (`str`, *optional*):
            A sentence on how the members were fine-tuned.
        pruning (`str`, *optional*):
            A sentence on how the heads were chosen, where no circuits did, such as by Taylor
            scores.
        report_model (`str`, *optional*):
            Which of the report's models this one is; needed where it has several.
        plots (`Mapping[str, str]`, *optional*):
            Title -> path in the repository, for pictures below the evaluation table.

    Returns:
        `ModelCard`: the card.

    Example:
        >>> create_model_card(hydra, report, dataset="cifar100").save("README.md")  # doctest: +SKIP
    """
    # Check what was given, before anything is counted.
    task = card_task(model)
    config = model.config
    check_names(repo_id=repo_id, base_model=base_model, dataset=dataset)
    if pruning is not None and circuits:
        raise ValueError("pruning and circuits are given: leave one of them out")
    repo_id = repo_id or f"me/{type(model).__name__.lower()}"
    name = repo_id.split("/")[-1]

    # The metadata, by which the Hub finds the model.
    tags = list(TAGS)
    if not _has_all_heads(config):
        tags.append("head-pruning")
    data = ModelCardData(
        base_model=base_model,
        datasets=[dataset] if dataset else None,
        license=license,
        library_name="transformers",
        pipeline_tag=task["pipeline_tag"],
        tags=tags,
    )

    # What was measured.
    evaluation = None
    if report is not None:
        _check_report(report, dataset, report_model)
        evaluation = re.sub(r"^##", "###", report.to_markdown(), flags=re.MULTILINE).strip()
        data.eval_results = report.to_eval_results(
            dataset, dataset_type=dataset, model=report_model, task_type=task["pipeline_tag"]
        )
        data.model_name = name
        data.metrics = [data.eval_results[0].metric_type]

    # The text.
    fine_tunings = _are_fine_tunings(config, circuits)
    shared = ", ".join(title for part, title in SHARED_NAMES.items() if part in config.shared)
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
        decision="\n".join(f"- {escape_markdown(sentence)}" for sentence in _promises(model)),
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
    # Empty lines are left where the template's conditions stood.
    text = re.sub(r"\n{3,}", "\n\n", str(card))
    return ModelCard(text.rstrip() + "\n")


def _check_report(report: "Report", dataset: str | None, report_model: str | None) -> None:
    """Raise for a report of unknown data, or of several models of which none is named."""
    if dataset is None:
        raise ValueError("dataset is missing: name the report's in-distribution data, such as dataset='cifar100'")
    if report_model is None and len(report.models) > 1:
        names = ", ".join(report.models)
        raise ValueError(f"report_model is missing: the report has the models {names}: name one of them")


def _are_fine_tunings(config: PreTrainedConfig, circuits: Sequence[Circuit] | None) -> bool:
    """Whether the members differ by their weights, and not by their heads alone."""
    weights = {circuit.made_from.get("weights") for circuit in circuits or ()}
    return config.num_members > 1 and (_has_all_heads(config) or len(weights) > 1)


def _promises(model: PreTrainedModel) -> Sequence[str]:
    """Return the sentences of a model's decision; none where it is about other weights."""
    if model.decision is None:
        return ()
    # A model without weights cannot be compared with what was calibrated.
    is_current = model.device.type == "meta" or model.decision.compare(model)
    return typed_settings(model.decision.settings).sentences if is_current else ()


def check_names(**names: str | None) -> None:
    """Raise for names that no repository on the Hub can have."""
    for argument, value in names.items():
        try:
            validate_repo_id(value or EXAMPLES["repo_id"])
        except HFValidationError as error:
            example = EXAMPLES.get(argument, "google/vit-base-patch16-224")
            raise ValueError(f"{argument} is {value!r}: pass an id of the Hub such as {example!r}") from error


def card_task(model: PreTrainedModel) -> dict[str, Any]:
    """Return the texts for a classifier, by the name of its class.

    Code from a repository has classes of its own.
    """
    auto_classes = getattr(model.config, "auto_classes", {})
    for model_class in TASKS:
        if auto_classes.get(model_class, "").endswith(f".{type(model).__name__}"):
            return texts_for(model_class, model.config, hasattr(model, "logit_bias"))
    raise TypeError(f"model is a {type(model).__name__}: a card describes a Hydra with a head")


def _has_all_heads(config: PreTrainedConfig) -> bool:
    """Whether no member lost a head."""
    heads = heads_of_backbone(config)
    return all(set(heads_in(config.kept_heads, member)) == heads for member in range(config.num_members))


def _origin(config: PreTrainedConfig, base_model: str | None, fine_tunings: bool) -> str:
    """Say what the members are, as a part of a sentence."""
    members = config.num_members
    link = None
    if base_model:
        link = f"[{base_model}](https://huggingface.co/{base_model})"
    if not fine_tunings:
        return f"{members} members of {link or 'one backbone'}, each with other attention heads cut out"
    origin = f"{members} fine-tuned versions of {link or 'one pre-trained model'}"
    if not _has_all_heads(config):
        return f"{origin}, each pruned by its own circuit"
    if not config.shared and not base_model:  # they may come from anywhere
        origin = f"{members} models that share nothing,"
    return f"{origin} with all their attention heads"


def _own_parts(model: PreTrainedModel) -> str:
    """Name the parts that each member has for itself, beside attention."""
    # Parameters with a row, or a name, for each member.
    own_names = set()
    for _, slot in slots(model):
        is_own = slot.rows is not None or ".head." in slot.name
        if is_own and ".attention." not in slot.name:
            own_names.add(slot.name)

    # The first word of each name, of heads the first two; each part once, in the order of names.
    parts = [title for part, title in SHARED_NAMES.items() if part not in model.config.shared]
    own_parts = {}
    for name in sorted(own_names):
        path = name.removeprefix(f"{model.base_model_prefix}.").split(".")
        depth = 2 if "head" in path[1:] else 1
        own_parts[" ".join(path[:depth]).replace("_", " ")] = None
    *first, last = [*parts, *own_parts]
    if not first:
        return last
    return f"{', '.join(first)} and {last}"


def _pruning_sentences(model: PreTrainedModel, circuits: Sequence[Circuit] | None, fine_tunings: bool) -> str | None:
    """Say by which circuits the members lost their heads; None where nothing is known of that."""
    config = model.config
    members = config.num_members
    if not circuits:
        if fine_tunings:
            return "None was cut out: the members differ by their fine-tuning."
        return None
    if len(circuits) not in (1, members):
        raise ValueError(f"there are {len(circuits)} circuits and {members} members: pass one per member, or one")

    # One ranking that all members' heads were drawn from.
    first = circuits[0]
    is_common = len(circuits) < members or (members == 1 and not matches_circuit(first, config, 0))
    if is_common:
        return (
            f"Heads are ranked by one circuit ({describe_circuit(first)}); each member lost heads sampled from the "
            f"first part of the ranking of {len(first.ranking)}."
        )

    # A circuit for each member.
    lines = []
    for member, circuit in enumerate(circuits):
        if not matches_circuit(circuit, config, member):
            raise ValueError(
                f"circuits[{member}] (objective {circuit.objective!r}) is not the one by which member {member} lost "
                "its heads: pass the circuits in the order of the members"
            )
        removed = len(pruned_heads(circuit, config, member))
        line = f"- Member {member}: {removed} heads removed along a circuit ({describe_circuit(circuit)})"
        if removed:
            line += f", score {circuit.dense_score:.4f} before and {circuit.scores[removed - 1]:.4f} after"
        lines.append(line)
    title = "Circuits"
    if fine_tunings:
        title = "Circuits, each of the member's own weights"
    return "\n".join([f"{title}: the head without which the score is best goes, again and again.", "", *lines])


def describe_circuit(circuit: Circuit) -> str:
    """Return the objective of a circuit and the number of its samples."""
    objective = OBJECTIVE_NAMES.get(circuit.objective) or circuit.made_from.get("metric", circuit.objective)
    description = f"objective: {objective}"
    data = circuit.made_from.get("data") or {}
    if data.get("samples"):
        description += f", {data['samples']} samples"
    return escape_markdown(description)


def card_cost_table(model: PreTrainedModel) -> str:
    """Return a markdown table of what a model costs, counted, not measured.

    Beside it stand one unpruned model, and as many of these as there are members.
    """
    single = _cost(unpruned_backbone(model))
    members = model.config.num_members
    costs = {"This model": _cost(without_weights(type(model), model.config)), "One unpruned model": single}
    if members > 1:
        costs[f"{members} unpruned models (Deep Ensemble)"] = {title: members * n for title, n in single.items()}

    rows = []
    for name, cost in costs.items():
        parameters, *work = cost.values()
        rows.append([name, f"{parameters:,}", *map(readable_count, work)])
    return markdown_table(["", *single], rows)


def _cost(model: PreTrainedModel) -> dict[str, int]:
    """Return column title -> number.

    CLIP's images and prompts count apart: prompts are computed once for many images.
    """
    inputs = inputs_for(model, 1, "meta")
    cost = {"Parameters": count_parameters(model)}
    if "pixel_values" in inputs and "input_ids" in inputs:
        images = {"pixel_values": inputs["pixel_values"], **first_token_kwargs(model)}
        prompts = inputs["input_ids"]
        cost["Multiply-adds per image"] = multiply_adds_of(model.get_image_features, **images)
        title = f"Multiply-adds per prompt of {prompts.shape[1]} tokens"
        cost[title] = multiply_adds_of(model.get_text_features, input_ids=prompts)
        return cost

    # The input that others, such as masks, belong to.
    name = next(name for name in MAIN_INPUTS if name in inputs)
    shape = inputs[name].shape
    kind = "samples" if len(shape) == 2 else "frames"
    units = {
        "pixel_values": "image",
        "input_ids": f"text of {shape[1]} tokens",
        "input_features": f"audio of {shape[-1]:,} frames",
        "input_values": f"audio of {shape[1]:,} {kind}",
    }
    cost[f"Multiply-adds per {units[name]}"] = multiply_adds_of(model, **{name: inputs[name]})
    return cost
