"""Predictions as text, and as tables of Arrow."""

from collections.abc import Mapping, Sequence
from typing import Any

from ..models.pipeline_hydra import PARTS_OF_UNCERTAINTY


# The fields of columns that hold lists of dicts.
NUMBERS = dict.fromkeys(("score", *PARTS_OF_UNCERTAINTY), "double")
PLACE = {"entity_group": "string", "word": "string", "start": "int64", "end": "int64"}
FIELDS = {
    "scores": {"label": "string", "score": "double"},
    "label scores": {"label": "string", **NUMBERS},
    "entities": {**PLACE, **NUMBERS, "mean_uncertainty": "double", "detector_score": "double", "abstain": "bool"},
}


def text_of(prediction: Mapping[str, Any], number: str = "{!r}") -> str:
    """What a model predicts, whether it abstains or not: a label, labels, numbers (in this format) or entities."""
    if "entities" in prediction:
        return _names(prediction["entities"]) or "no entity"
    if "labels" in prediction:
        return ", ".join(prediction["labels"]) or "no label"
    if "interval" in prediction:
        scores = prediction["scores"]
        if len(scores) == 1:
            return number.format(scores[0]["score"])
        return ", ".join(f"{score['label']} {number.format(score['score'])}" for score in scores)
    return prediction["label"]


def answer_of(prediction: Mapping[str, Any]) -> str | None:
    """What a model predicts; None where it abstains. Of entities those that it does not abstain on."""
    if prediction["abstain"]:
        return _names([entity for entity in prediction.get("entities", ()) if not entity["abstain"]]) or None
    return text_of(prediction)


def _names(entities: Sequence[Mapping[str, Any]]) -> str:
    return ", ".join(f"{entity['word']} ({entity['entity_group']})" for entity in entities)


def check_fields(answers: Sequence[Mapping[str, Any]], columns: Mapping[str, str]) -> None:
    """Raises an error for a field without a column: it would be lost."""
    extra = {name for answer in answers for name in answer} - columns.keys() - {"error"}
    if extra:
        raise ValueError(f"predictions have the field {min(extra)!r}, which is not among the columns of their task")


def to_table(answers: Sequence[Mapping[str, Any]], columns: Mapping[str, str]) -> Any:
    """A table with `answer`, `prediction` and `why` in place of `label` and `reason`, and with the other columns."""
    import pyarrow

    check_fields(answers, columns)
    rows: list[dict[str, Any]] = []
    for answer in answers:
        texts = {"why": f"It cannot be read: {answer.get('error')}."}
        if "error" not in answer:
            texts = {"answer": answer_of(answer), "prediction": text_of(answer), "why": answer["reason"]}
        rows.append({**answer, **texts})
    types = dict.fromkeys(("answer", "prediction", "why"), "string")
    types |= {name: kind for name, kind in columns.items() if name not in ("label", "reason")}
    return pyarrow.Table.from_pylist(rows, schema=arrow_schema(types))


def arrow_schema(columns: Mapping[str, str]) -> Any:
    """The schema of columns with the types of `Task.columns`."""
    import pyarrow

    alias = pyarrow.type_for_alias
    types = {"strings": pyarrow.list_(pyarrow.string()), "intervals": pyarrow.list_(pyarrow.list_(pyarrow.float64()))}
    for kind, fields in FIELDS.items():
        types[kind] = pyarrow.list_(pyarrow.struct([(name, alias(field)) for name, field in fields.items()]))
    return pyarrow.schema([(name, types.get(kind) or alias(kind)) for name, kind in columns.items()])
