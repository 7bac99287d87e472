"""What a Hydra costs beside one and several unpruned backbones, as the card shows it: counted, not measured."""

from transformers import PreTrainedModel

from ..baselines import Baseline
from ..cost import count_parameters, inputs_for, multiply_adds_of, readable_count, unpruned_backbone
from ..data.prediction import only_what_is_read
from ..fusion import without_weights
from ..reports.table import Table


def card_cost_table(model: PreTrainedModel) -> str:
    """A markdown table with the Hydra, one unpruned backbone, and as many of these as the Hydra has members."""
    members = model.config.num_members
    hydra = _cost(without_weights(type(model), model.config))
    single = _cost(unpruned_backbone(model))
    return _table({"This model": hydra, "One unpruned model": single}, members, "unpruned models")


def baseline_cost_table(model: Baseline) -> str:
    """A markdown table with the baseline, one model like that inside, and as many of these as the baseline has members."""
    single = _cost(without_weights(type(model.model), model.config))
    return _table(
        {"This model": _cost(model.without_weights()), "One plain model": single}, model.num_members, "plain models"
    )


def _table(costs: dict[str, dict[str, int]], members: int, of_what: str) -> str:
    """The costs, the last of which is one model's, and those of as many of it as there are members."""
    single = list(costs.values())[-1]
    if members > 1:
        several = {column: members * value for column, value in single.items()}
        costs[f"{members} {of_what} (Deep Ensemble)"] = several
    rows = [[name, *(_readable(column, value) for column, value in cost.items())] for name, cost in costs.items()]
    return Table(["", *single], rows).markdown()


def _cost(model: PreTrainedModel | Baseline) -> dict[str, int]:
    """Column title -> number. CLIP's images and prompts count apart: prompts are computed once for many images."""
    cost = {"Parameters": count_parameters(model)}
    inputs = inputs_for(model, 1, "meta")
    image = {"pixel_values": inputs["pixel_values"]} if "pixel_values" in inputs else None
    text = {"input_ids": inputs["input_ids"]} if "input_ids" in inputs else None
    if image and text:
        model = model.model if isinstance(model, Baseline) else model  # what it adds is little beside its towers
        cost["Multiply-adds per image"] = multiply_adds_of(
            model.get_image_features, **image, **only_what_is_read(model)
        )
        tokens = inputs["input_ids"].shape[1]
        cost[f"Multiply-adds per prompt of {tokens} tokens"] = multiply_adds_of(model.get_text_features, **text)
    elif "input_values" in inputs:
        frames = inputs["input_values"].shape[1]
        cost[f"Multiply-adds per sound of {frames} frames"] = multiply_adds_of(model, **inputs)
    elif image:
        cost["Multiply-adds per image"] = multiply_adds_of(model, **image)
    else:
        tokens = inputs["input_ids"].shape[1]
        cost[f"Multiply-adds per text of {tokens} tokens"] = multiply_adds_of(model, **text)
    return cost


def _readable(column: str, value: int) -> str:
    return f"{value:,}" if column == "Parameters" else readable_count(value)
