"""The model card: filled from the model, its report and its circuits, with metadata the Hub understands."""

import difflib
import math
import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from transformers import PreTrainedModel

from ..baselines import Baseline
from ..cost import count_parameters, inputs_for, multiply_adds_of, readable_count, unpruned_backbone
from ..data.zero_shot import first_token_kwargs
from ..fusion import slots, tower_configs, without_weights
from ..models.auto import AUTO_CLASSES
from ..pruning import Circuit
from ..reports.report import UncertaintyReport
from ..reports.table import Table, escape_markdown
from ..reports.task_report import TaskReport
from ..uncertainty import CalibratedClassifier, TemperatureScaling
from .card_sections import sealed, to_fill_in
from .card_texts import BASELINE_LIMITS, PAIRS, TASKS, ZERO_SHOT, Task, of_problem
from .member_heads import has_led_to, heads_of_backbone, kept_by, kept_heads_map, lost_by, trunk_sentence


TEMPLATE, BASELINE_TEMPLATE = (Path(__file__).with_name(name) for name in ("model_card.md", "baseline_card.md"))
BASELINE_TAGS = ["uncertainty", "hydra-ensembles", "out-of-distribution-detection"]
TAGS = ["hydra-ensembles", "uncertainty", "ensemble", "out-of-distribution-detection", "head-pruning"]
SHARED_NAMES = {"embeddings": "embeddings", "layernorm": "LayerNorms", "mlp": "MLPs"}
OBJECTIVE_NAMES = {"acc": "accuracy", "ood": "out-of-distribution AUROC", "avg": "mean of accuracy and OOD AUROC"}
EXAMPLES = {"dataset": "uoft-cs/cifar100", "repo_id": "me/my-hydra"}
LICENSES = """
    apache-2.0 mit openrail bigscience-openrail-m creativeml-openrail-m bigscience-bloom-rail-1.0 bigcode-openrail-m
    afl-3.0 artistic-2.0 bsl-1.0 bsd bsd-2-clause bsd-3-clause bsd-3-clause-clear c-uda cc cc0-1.0 cc-by-2.0 cc-by-2.5
    cc-by-3.0 cc-by-4.0 cc-by-sa-3.0 cc-by-sa-4.0 cc-by-nc-2.0 cc-by-nc-3.0 cc-by-nc-4.0 cc-by-nd-4.0 cc-by-nc-nd-3.0
    cc-by-nc-nd-4.0 cc-by-nc-sa-2.0 cc-by-nc-sa-3.0 cc-by-nc-sa-4.0 cdla-sharing-1.0 cdla-permissive-1.0
    cdla-permissive-2.0 wtfpl ecl-2.0 epl-1.0 epl-2.0 etalab-2.0 eupl-1.1 eupl-1.2 agpl-3.0 gfdl gpl gpl-2.0 gpl-3.0 lgpl
    lgpl-2.1 lgpl-3.0 isc lppl-1.3c ms-pl mpl-2.0 odc-by odbl openrail++ osl-3.0 postgresql ofl-1.1 ncsa unlicense zlib
    pddl lgpl-lr deepfloyd-if-license llama2 llama3 llama3.1 llama3.2 llama3.3 llama4 gemma apple-ascl apple-amlr
    h-research intel-research fair-noncommercial-research-license unknown other
"""


def create_model_card(
    model: PreTrainedModel | Baseline | CalibratedClassifier,
    report: UncertaintyReport | TaskReport | None = None,
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
        repo_id: the model's repository, "me/my-hydra"; the code in the card loads it from there.
        base_model: the id on the Hub of the backbone, or of the pre-trained model that the members are fine-tunings of.
        dataset: the in-distribution data's id on the Hub ("cifar100"); needed with a report.
        license: of the weights, usually that of `base_model`: a license id of the Hub ("apache-2.0"). An unknown one gives
            a warning; without one the card names none.
        circuits: for Hydras: one per member, in their order, or a single one that all members were sampled from.
        fine_tunings: whether each member is a fine-tuning of its own, not a copy of one backbone; by default True where
            circuits come from different weights or members have all heads.
        fine_tuning: a sentence on how the members were fine-tuned.
        report_model: which of the report's models this one is; needed where it has several.
        temperature: the temperature that is published with the model.
        plots: title -> path in the repository, for pictures below the evaluation table.

    What is not known is marked "To be filled in". Later pushes renew the parts between `<!-- generated: ... -->` and
    `<!-- end -->`; the text around them is yours.
    """
    model, decision = split_decision(model)
    check_names(repo_id=repo_id, base_model=base_model, dataset=dataset)
    _check_license(license)
    is_baseline = isinstance(model, Baseline)
    if is_baseline:
        if circuits or fine_tunings:
            raise ValueError(
                f"circuits and fine_tunings are about Hydras, this is a {type(model).__name__}: leave them out"
            )
        fields = _baseline_fields(model, repo_id, base_model)
        fields["decision"] = _listed(() if decision is None else decision.decision.settings["sentences"])
    else:
        fields = _hydra_fields(model, repo_id, base_model, circuits, fine_tunings)
    fields |= {"cost": card_cost_table(model), "intended_use": task_of(model).intended_use}
    fields |= {"fine_tuning": fine_tuning, "temperature": temperature, "plots": plots or {}, "dataset": dataset}
    data = ModelCardData(
        base_model=base_model,
        datasets=[dataset] if dataset else None,
        license=license,
        library_name="hydra-transformers" if is_baseline else "transformers",
        pipeline_tag=task_of(model).pipeline_tag,
        tags=BASELINE_TAGS if is_baseline else TAGS,
    )
    if report is not None:
        if dataset is None:
            raise ValueError("dataset is missing: name the report's in-distribution data, such as dataset='cifar100'")
        fields["evaluation"] = re.sub(r"^##", "###", report.to_markdown(), flags=re.MULTILINE).strip()
        data.eval_results = _eval_results(report, dataset, report_model, task_of(model).pipeline_tag)
        first = "accuracy" if isinstance(report, UncertaintyReport) else next(iter(report.columns))
        data.model_name, data.metrics = fields["model_name"], [first]
    template = str(BASELINE_TEMPLATE if is_baseline else TEMPLATE)
    content = str(ModelCard.from_template(data, template_path=template, to_fill_in=to_fill_in, **fields))
    content = re.sub(r"\n{3,}", "\n\n", content)  # where the template's conditions stood
    content = content.replace(" -->\n\n", " -->\n").replace("<!-- end -->\n", "<!-- end -->\n\n")
    content = re.sub(r"\n+<!-- end -->\n+", "\n<!-- end -->\n\n", content)
    return ModelCard(sealed(content.rstrip() + "\n"))


def split_decision(model: Any) -> tuple[Any, CalibratedClassifier | None]:
    """The model; for a calibrated baseline the baseline, and the calibrated one."""
    if isinstance(model, CalibratedClassifier) and isinstance(model.model, Baseline):
        return model.model, model
    return model, None


def check_names(**names: str | None) -> None:
    """Refuses names that no repository on the Hub can have."""
    for argument, value in names.items():
        if value is None:
            continue
        try:
            validate_repo_id(value)
        except HFValidationError as error:
            example = EXAMPLES.get(argument, "google/vit-base-patch16-224")
            raise ValueError(f"{argument} is {value!r}: pass an id of the Hub such as {example!r}") from error


def _check_license(license: str | None) -> None:
    """Warns of an unknown license: the Hub's list grows, so it is not refused."""
    known = LICENSES.split()
    if license is None or license in known:
        return
    if not license.isprintable():
        raise ValueError(f"license is {license!r}: pass a license id of the Hub such as 'apache-2.0'")
    similar = difflib.get_close_matches(license.lower().replace(" ", "-"), known, n=1)
    instead = f"do you mean {similar[0]!r}?" if similar else "for one of your own it is 'other'"
    warnings.warn(f"the Hub may not know the license {license!r}: {instead}", stacklevel=3)


def task_of(model: PreTrainedModel | Baseline) -> Task:
    """The task of a classifier, by the name of its class: code from a repository has classes of its own."""
    if isinstance(model, Baseline):
        name = type(model.model).__name__
        found = [task for auto_class, task in TASKS.items() if auto_class.removeprefix("AutoModel") in name]
        found += [ZERO_SHOT] if hasattr(model.model, "get_image_features") else []
        if not found:
            raise TypeError(f"model has a {name} inside: a card describes classifiers, CLIP and SigLIP")
        return found[-1]
    auto_classes = getattr(model.config, "auto_classes", {})
    for auto_class, task in TASKS.items():
        if auto_classes.get(auto_class, "").endswith(f".{type(model).__name__}"):
            return PAIRS if hasattr(model, "logit_bias") else of_problem(task, model.config)
    classifiers = sorted(each.__name__ for each in AUTO_CLASSES if hasattr(each, "from_pruned_members"))
    raise TypeError(f"model is a {type(model).__name__}: a card describes one of {', '.join(classifiers)}")


def _eval_results(report: UncertaintyReport | TaskReport, dataset: str, report_model: str | None, task: str) -> list:
    if report_model is None and len(report.models) > 1:
        raise ValueError(
            f"the report has {len(report.models)} models: say with report_model= which of "
            f"{', '.join(report.models)} is published"
        )
    results = report.to_eval_results(dataset, dataset_type=dataset, model=report_model, task_type=task)
    return [result for result in results if math.isfinite(result.metric_value)]  # the metadata has no infinity


def _listed(sentences: Sequence[str]) -> str:
    """A list; the names of classes and data sets in it are escaped."""
    return "\n".join(f"- {escape_markdown(each)}" for each in sentences)


def _link(base_model: str) -> str:
    return f"[{base_model}](https://huggingface.co/{base_model})"


# The fields of the templates


def _baseline_fields(model: Baseline, repo_id: str | None, base_model: str | None) -> dict[str, Any]:
    name = type(model).__name__
    repo_id = repo_id or f"me/{name.lower()}"
    arguments = {key: value for key, value in model.arguments.items() if key != "num_members"}
    own_snippet = (model.usage or "").replace("REPO", repo_id).strip()
    return {
        "repo_id": repo_id,
        "model_name": repo_id.split("/")[-1],
        "summary": model.summary.format(members=model.num_members),
        "model_class": type(model.model).__name__,
        "of_base_model": f" of {_link(base_model)}" if base_model else "",
        "snippet": own_snippet or task_of(model).baseline_snippet(repo_id),
        "baseline": name,
        "members": model.num_members,
        "arguments": {key: escape_markdown(str(value)) for key, value in arguments.items()},
        "limits": BASELINE_LIMITS,
    }


def _hydra_fields(
    model: PreTrainedModel,
    repo_id: str | None,
    base_model: str | None,
    circuits: Sequence[Circuit] | None,
    fine_tunings: bool | None,
) -> dict[str, Any]:
    """A model on the meta device will do."""
    task, config = task_of(model), model.config
    repo_id = repo_id or f"me/{type(model).__name__.lower()}"
    if fine_tunings is None:
        has_own_weights = len({circuit.made_from.get("weights") for circuit in circuits or ()}) > 1
        fine_tunings = config.num_members > 1 and (_is_whole(model) or has_own_weights)
    shared = ", ".join(SHARED_NAMES[part] for part in SHARED_NAMES if part in config.shared)
    nothing = "nothing, they are independent models"
    is_current = model.decision is not None and (model.device.type == "meta" or model.decision.compare(model))
    return {
        "repo_id": repo_id,
        "model_name": repo_id.split("/")[-1],
        "members": config.num_members,
        "origin": _origin(model, base_model, circuits, fine_tunings),
        "architecture": model.architecture,
        "snippet": task.snippet(repo_id),
        "logits_name": task.logits_name,
        "logits_are": task.logits_are,
        "decomposed": task.decomposed,
        "answer_fields": task.answer_fields,
        "decision": _listed(model.decision.settings["sentences"] if is_current else ()),
        "heads_sentence": _heads_sentence(model),
        "shared_sentence": f"{shared} (the mean over the members)" if shared else nothing,
        "own_sentence": _own_parts(model),
        "trunk_sentence": trunk_sentence(config),
        "pruning": _pruning_sentences(model, circuits, fine_tunings),
        "kept_heads_map": kept_heads_map(config),
        "limits": task.limits,
    }


def _is_whole(model: PreTrainedModel) -> bool:
    """Whether no member lost a head."""
    every = heads_of_backbone(model.config)
    return all(kept_by(model.config, member) == every for member in range(model.config.num_members))


def _origin(
    model: PreTrainedModel, base_model: str | None, circuits: Sequence[Circuit] | None, fine_tunings: bool
) -> str:
    """Says what the members are, as a part of a sentence."""
    members = model.config.num_members
    if not fine_tunings:
        backbone = _link(base_model) if base_model else "one backbone"
        return f"{members} copies of {backbone}, each with other attention heads cut out"
    those = f"{members} fine-tunings of {_link(base_model) if base_model else 'one pre-trained model'}"
    if _is_whole(model):
        if not model.config.shared and not base_model:  # they may come from anywhere
            those = f"{members} models that share nothing,"
        return f"{those} with all their attention heads"
    return f"{those}, each {'pruned by its own circuit' if circuits else 'with attention heads of its own cut out'}"


def _own_parts(model: PreTrainedModel) -> str:
    """Names the parts that each member has for itself, beside attention and the parts that members may share."""
    found = [slot for _, slot in slots(model) if slot.rows is not None or ".head." in slot.name]
    own = sorted({slot.name for slot in found if ".attention." not in slot.name})
    paths = [name.removeprefix(f"{model.base_model_prefix}.").split(".") for name in own]
    names = list(dict.fromkeys(" ".join(path[: 2 if "head" in path[1:] else 1]) for path in paths))
    words = [name.replace("_", " ") for name in names]
    return " and ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


def _heads_sentence(model: PreTrainedModel) -> str:
    sentences = []
    for tower, config in tower_configs(model.config).items():
        every = config.num_attention_heads * len(config.kept_heads)
        kept = [str(sum(len(layer[member]) for layer in config.kept_heads)) for member in range(config.num_members)]
        counts = kept[0] if len(set(kept)) == 1 else f"{', '.join(kept[:-1])} and {kept[-1]}"
        each = "keeps" if len(kept) == 1 else "each keeps" if len(set(kept)) == 1 else "the members keep"
        where = f"in the {tower} tower " if tower else ""
        only = " (a single member, used with all of the other tower)" if len(kept) < model.config.num_members else ""
        runs = max(config.layer_runs)
        again = f", in {'a layer that runs' if len(config.layer_runs) == 1 else 'layers that run'} {runs} times" * (
            runs > 1
        )
        sentences.append(f"{where}{each} {counts} of the backbone's {every}{again}{only}")
    return "; ".join(sentences)


def _pruning_sentences(model: PreTrainedModel, circuits: Sequence[Circuit] | None, fine_tunings: bool) -> str | None:
    if not circuits:
        is_none = fine_tunings and _is_whole(model)
        return "None was cut out: the members are fine-tunings of their own." if is_none else None
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
        line = f"- Member {member}: {removed} heads removed along a circuit ({_describe(circuit)})"
        if removed:
            line += f", score {circuit.dense_score:.4f} before and {circuit.scores[removed - 1]:.4f} after"
        lines.append(line)
    of = ", each of the member's own fine-tuning" if fine_tunings else ""
    return "\n".join([f"Circuits{of}: the head without which the score is best goes, again and again.", "", *lines])


def _describe(circuit: Circuit) -> str:
    rows = (circuit.made_from.get("data") or {}).get("samples")
    score = circuit.made_from.get("score") or "msp"
    of_score = "" if score == "msp" else f" of {score}"
    objective = OBJECTIVE_NAMES.get(circuit.objective) or circuit.made_from.get("metric", circuit.objective)
    return escape_markdown(f"objective: {objective}{of_score}" + (f", {rows} samples" if rows else ""))


# Costs, counted and not measured


def card_cost_table(model: PreTrainedModel | Baseline) -> str:
    """A markdown table of a model, one plain (for a Hydra unpruned) model, and as many of these as there are members."""
    if isinstance(model, Baseline):
        own, single, kind = model.without_weights(), without_weights(type(model.model), model.config), "plain model"
        members = model.num_members
    else:
        own, single, kind = without_weights(type(model), model.config), unpruned_backbone(model), "unpruned model"
        members = model.config.num_members
    costs = {"This model": _cost(own), f"One {kind}": _cost(single)}
    if members > 1:
        several = {column: members * value for column, value in costs[f"One {kind}"].items()}
        costs[f"{members} {kind}s (Deep Ensemble)"] = several
    rows = [
        [name, f"{parameters:,}", *map(readable_count, counts)]
        for name, (parameters, *counts) in ((name, cost.values()) for name, cost in costs.items())
    ]
    return Table(["", *costs["This model"]], rows).markdown()


def _cost(model: PreTrainedModel | Baseline) -> dict[str, int]:
    """Column title -> number. CLIP's images and prompts count apart: prompts are computed once for many images."""
    inputs = inputs_for(model, 1, "meta")
    parameters = {"Parameters": count_parameters(model)}
    if "pixel_values" in inputs and "input_ids" in inputs:
        towers = model.model if isinstance(model, Baseline) else model  # what it adds is little beside its towers
        images = {"pixel_values": inputs["pixel_values"], **first_token_kwargs(towers)}
        per_prompt = multiply_adds_of(towers.get_text_features, input_ids=inputs["input_ids"])
        return parameters | {
            "Multiply-adds per image": multiply_adds_of(towers.get_image_features, **images),
            f"Multiply-adds per prompt of {inputs['input_ids'].shape[1]} tokens": per_prompt,
        }
    if "pixel_values" in inputs:
        unit, inputs = "image", {"pixel_values": inputs["pixel_values"]}
    elif "input_values" in inputs:
        sound = inputs["input_values"]
        unit = f"sound of {sound.shape[1]:,} {'samples' if sound.dim() == 2 else 'frames'}"
    elif "input_features" in inputs:
        unit = f"sound of {inputs['input_features'].shape[2]:,} frames"
    else:
        unit, inputs = f"text of {inputs['input_ids'].shape[1]} tokens", {"input_ids": inputs["input_ids"]}
    return parameters | {f"Multiply-adds per {unit}": multiply_adds_of(model, **inputs)}
