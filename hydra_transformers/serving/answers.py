"""Predictions as text, and as tables of Arrow."""

from collections.abc import Mapping, Sequence
from typing import Any

from ..models.pipeline_hydra import PARTS_OF_UNCERTAINTY


# The fields of columns that hold lists of dicts.
NUMBERS = dict.fromkeys(("score", *PARTS_OF_UNCERTAINTY), "double")
FIELDS = {
    "scores": {"label": "string", "score": "double"},
    "label scores": {"label": "string", **NUMBERS},
    "entities": {
        "entity_group": "string",
        "word": "string",
        "start": "int64",
        "end": "int64",
        **NUMBERS,
        "mean_uncertainty": "double",
        "detector_score": "double",
        "abstain": "bool",
    },
}


def prediction_text(prediction: Mapping[str, Any], number: str = "{!r}") -> str:
    """Write what a model predicts, whether it abstains or not.

    Args:
        prediction (`Mapping`): of `predict`: a label, labels, numbers or entities.
        number (`str`, *optional*): the format of numbers; by default all digits.
    """
    if "entities" in prediction:
        return _entity_names(prediction["entities"]) or "no entity"
    if "labels" in prediction:
        return ", ".join(prediction["labels"]) or "no label"
    if "interval" in prediction:
        scores = prediction["scores"]
        if len(scores) == 1:
            return number.format(scores[0]["score"])
        return ", ".join(f"{score['label']} {number.format(score['score'])}" for score in scores)
    return prediction["label"]


def answer_text(prediction: Mapping[str, Any]) -> str | None:
    """Write what a model predicts; None where it abstains.

    Of entities those that it does not abstain on.
    """
    if not prediction["abstain"]:
        return prediction_text(prediction)
    sure_entities = [entity for entity in prediction.get("entities", ()) if not entity["abstain"]]
    return _entity_names(sure_entities) or None


def _entity_names(entities: Sequence[Mapping[str, Any]]) -> str:
    """Write entities with their groups, separated by commas."""
    return ", ".join(f"{entity['word']} ({entity['entity_group']})" for entity in entities)


def check_fields(answers: Sequence[Mapping[str, Any]], columns: Mapping[str, str]) -> None:
    """Raise for a field without a column: it would be lost."""
    fields = {name for answer in answers for name in answer}
    extra = fields - columns.keys() - {"error"}
    if extra:
        raise ValueError(f"predictions have the field {min(extra)!r}, which is not among the columns of their task")


def to_table(answers: Sequence[Mapping[str, Any]], columns: Mapping[str, str]) -> Any:
    """Return a table of Arrow, with `answer`, `prediction` and `why` and the other columns.

    They stand in place of `label` and `reason`.

    Args:
        answers (`Sequence[Mapping]`): predictions, or {"error": why} for rows that cannot be read.
        columns (`Mapping[str, str]`): of the task, see `Task.columns`.
    """
    import pyarrow

    check_fields(answers, columns)
    rows: list[dict[str, Any]] = []
    for answer in answers:
        row = dict(answer)
        if "error" in answer:
            row["why"] = f"It cannot be read: {answer['error']}."
        else:
            row["answer"] = answer_text(answer)
            row["prediction"] = prediction_text(answer)
            row["why"] = answer["reason"]
        if isinstance(row.get("threshold"), str):  # "inf" or "-inf", as JSON has them
            row["threshold"] = float(row["threshold"])
        rows.append(row)

    types = dict.fromkeys(("answer", "prediction", "why"), "string")
    types |= {name: kind for name, kind in columns.items() if name not in ("label", "reason")}
    return pyarrow.Table.from_pylist(rows, schema=arrow_schema(types))


def arrow_schema(columns: Mapping[str, str]) -> Any:
    """Return Arrow's schema for columns with the types of `Task.columns`."""
    import pyarrow

    # The types that Arrow has no name for.
    types = {
        "strings": pyarrow.list_(pyarrow.string()),
        "intervals": pyarrow.list_(pyarrow.list_(pyarrow.float64())),
    }
    for kind, fields in FIELDS.items():
        struct = [(name, pyarrow.type_for_alias(field)) for name, field in fields.items()]
        types[kind] = pyarrow.list_(pyarrow.struct(struct))

    schema = []
    for name, kind in columns.items():
        schema.append((name, types.get(kind) or pyarrow.type_for_alias(kind)))
    return pyarrow.schema(schema)
