"""The columns that a model's answers make: one for each field of an answer."""

from collections.abc import Mapping, Sequence
from typing import Any

from ..models.pipeline_hydra import PARTS_OF_UNCERTAINTY


# The types are Arrow's, or lists: see `arrow_schema`.
COLUMNS = {
    "label": "string",
    "score": "double",
    "uncertainty": "double",
    "aleatoric": "double",
    "epistemic": "double",
    "abstain": "bool",
    "detector": "string",
    "detector_score": "double",
    "threshold": "double",
    "reason": "string",
    "prediction_set": "strings",
    "scores": "scores",
}
# Of models that classify tokens, whose answers are entities.
TOKEN_COLUMNS = {
    "entities": "entities",
    "uncertainty": "double",
    "aleatoric": "double",
    "epistemic": "double",
    "abstain": "bool",
    "detector": "string",
    "threshold": "double",
    "reason": "string",
    "truncated": "bool",
}
# Of models of texts only, and of problem types.
TEXT_COLUMNS = {"truncated": "bool"}
PROBLEM_COLUMNS = {
    "regression": {"interval": "intervals"},
    "multi_label_classification": {"labels": "strings", "scores": "label scores"},
}


def columns_of(kind: str, problem_type: str | None = None) -> dict[str, str]:
    """The names of a model's columns, in order, and their types.

    kind: "text", "tokens", "image", "zero-shot" or "audio"; problem_type: of the model's config
    """
    if kind == "tokens":
        return dict(TOKEN_COLUMNS)
    return COLUMNS | PROBLEM_COLUMNS.get(problem_type, {}) | (TEXT_COLUMNS if kind == "text" else {})


def to_columns(answers: Sequence[Mapping[str, Any] | None], columns: Mapping[str, str]) -> dict[str, list[Any]]:
    """A list per column, with None in each where an answer is None.

    A field without a column is refused: it would be lost.
    """
    for answer in answers:
        extra = [name for name in answer or () if name not in columns]
        if extra:
            raise ValueError(f"an answer has the field {extra[0]!r}, which has no column: add it to answer_columns.py")
    return {name: [None if answer is None else answer[name] for answer in answers] for name in columns}


def arrow_schema(columns: Mapping[str, str]) -> Any:
    """The columns as a schema of Arrow, so that all files of a job have the same types."""
    import pyarrow

    fields = [("label", pyarrow.string()), ("score", pyarrow.float64())]
    parts = [(name, pyarrow.float64()) for name in PARTS_OF_UNCERTAINTY]
    label_score = pyarrow.struct([*fields, *parts, ("abstain", pyarrow.bool_())])
    words = [(name, pyarrow.string()) for name in ("entity_group", "word")]
    places = [(name, pyarrow.int64()) for name in ("start", "end")]
    numbers = ("score", *PARTS_OF_UNCERTAINTY, "mean_uncertainty", "detector_score")
    numbers = [(name, pyarrow.float64()) for name in numbers]
    entity = pyarrow.struct([*words, *places, *numbers, ("abstain", pyarrow.bool_())])
    intervals = pyarrow.list_(pyarrow.list_(pyarrow.float64()))
    types = {"strings": pyarrow.list_(pyarrow.string()), "intervals": intervals, "entities": pyarrow.list_(entity)}
    types |= {"scores": pyarrow.list_(pyarrow.struct(fields)), "label scores": pyarrow.list_(label_score)}
    found = {name: types[kind] if kind in types else pyarrow.type_for_alias(kind) for name, kind in columns.items()}
    return pyarrow.schema(list(found.items()))
