"""The cost of a model beside one and several plain ones, as its card shows it: counted, not measured."""

from transformers import PreTrainedModel

from ..baselines import Baseline
from ..cost import count_parameters, inputs_for, multiply_adds_of, readable_count, unpruned_backbone
from ..data.prediction import only_what_is_read
from ..fusion import without_weights
from ..reports.table import Table


def card_cost_table(model: PreTrainedModel | Baseline) -> str:
    """A markdown table with a Hydra, one unpruned backbone, and as many of these as the Hydra has members; of a baseline with
    models like the one inside."""
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
    rows = [[name, *(_readable(column, value) for column, value in cost.items())] for name, cost in costs.items()]
    return Table(["", *costs["This model"]], rows).markdown()


def _cost(model: PreTrainedModel | Baseline) -> dict[str, int]:
    """Column title -> number. CLIP's images and prompts count apart: prompts are computed once for many images."""
    inputs = inputs_for(model, 1, "meta")
    parameters = {"Parameters": count_parameters(model)}
    if "pixel_values" in inputs and "input_ids" in inputs:
        towers = model.model if isinstance(model, Baseline) else model  # what it adds is little beside its towers
        images = {"pixel_values": inputs["pixel_values"], **only_what_is_read(towers)}
        per_prompt = multiply_adds_of(towers.get_text_features, input_ids=inputs["input_ids"])
        return parameters | {
            "Multiply-adds per image": multiply_adds_of(towers.get_image_features, **images),
            f"Multiply-adds per prompt of {inputs['input_ids'].shape[1]} tokens": per_prompt,
        }
    if "pixel_values" in inputs:
        unit, inputs = "image", {"pixel_values": inputs["pixel_values"]}
    elif "input_values" in inputs:
        unit = f"sound of {inputs['input_values'].shape[1]} frames"
    else:
        unit, inputs = f"text of {inputs['input_ids'].shape[1]} tokens", {"input_ids": inputs["input_ids"]}
    return parameters | {f"Multiply-adds per {unit}": multiply_adds_of(model, **inputs)}


def _readable(column: str, value: int) -> str:
    return f"{value:,}" if column == "Parameters" else readable_count(value)
