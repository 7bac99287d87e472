"""What a report's page says of single classes and rows: confusions, classes, bins, examples."""

import base64
import io
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import torch
from torch import Tensor

from ..data.loading import PreparedData
from ..models.inputs import read_image
from .table import NO_VALUE, Table


MOST_PAIRS = 10  # of classes that are confused
MOST_EXAMPLES = 12  # of each kind
MOST_CLASSES = 50  # in the table by class
MOST_CHARACTERS = 300  # of a text that is quoted
LONGEST_SIDE = 128  # pixels of an image that is shown
THIN_BIN = 10  # rows: fewer say nothing about a bin's accuracy


def details_of(values: Mapping[str, Tensor], classes: Sequence[str] | None, data: Any) -> dict[str, Any]:
    """Return a single-label model's worst pairs, its classes, and examples of its rows.

    Args:
        values (`Mapping[str, Tensor]`): label, prediction, confidence and, of a model that
            abstains, answered of each row, (rows,).
        classes (`Sequence[str]`, *optional*): names of the classes.
        data: what was read; rows of `load_data` are shown, others are numbered.
    """
    num_classes = int(torch.cat([values["label"], values["prediction"]]).max()) + 1
    names = [str(index) for index in range(num_classes)]
    if classes is not None and len(classes) >= num_classes:
        names = [str(name) for name in classes]

    # Rows in the order of their confidence; equal ones stay in theirs.
    by_confidence = values["confidence"].argsort(stable=True)
    is_wrong = values["label"] != values["prediction"]
    least_sure = by_confidence[:MOST_EXAMPLES]
    surest_wrong = by_confidence.flip(0)
    surest_wrong = surest_wrong[is_wrong[surest_wrong]][:MOST_EXAMPLES]
    return {
        "confusions": _confusions(values, names),
        "classes": _classes(values, names),
        "surest_wrong": [_example(int(row), values, names, data) for row in surest_wrong],
        "least_sure": [_example(int(row), values, names, data) for row in least_sure],
    }


def _confusions(values: Mapping[str, Tensor], names: Sequence[str]) -> list[dict[str, Any]]:
    """Return the pairs of classes that are confused most often."""
    labels = values["label"]
    is_wrong = labels != values["prediction"]
    pairs = torch.stack([labels[is_wrong], values["prediction"][is_wrong]], dim=1)  # (wrong rows, 2)
    if not len(pairs):
        return []
    pairs, counts = pairs.unique(dim=0, return_counts=True)
    confusions = []
    for place in counts.argsort(descending=True, stable=True)[:MOST_PAIRS].tolist():
        label, prediction = pairs[place].tolist()
        rows = int(counts[place])
        rows_of_class = int((labels == label).sum())
        confusions.append(
            {
                "label": names[label],
                "prediction": names[prediction],
                "rows": rows,
                "share": rows / rows_of_class,
            }
        )
    return confusions


def _classes(values: Mapping[str, Tensor], names: Sequence[str]) -> list[dict[str, Any]]:
    """Return how each class does that has rows or is predicted, the least accurate first."""
    is_right = values["label"] == values["prediction"]
    classes = []
    for index, name in enumerate(names):
        of_class = values["label"] == index
        rows = int(of_class.sum())
        predicted = int((values["prediction"] == index).sum())
        right = int((of_class & is_right).sum())
        if rows == 0 and predicted == 0:
            continue
        answered = values.get("answered")
        classes.append(
            {
                "class": name,
                "rows": rows,
                "recall": right / rows if rows else None,
                "precision": right / predicted if predicted else None,
                "answered": None if answered is None or rows == 0 else float(answered[of_class].double().mean()),
            }
        )
    # Classes without rows come last.
    return sorted(classes, key=lambda row: (row["recall"] is None, row["recall"] or 0.0))


def _example(row: int, values: Mapping[str, Tensor], names: Sequence[str], data: Any) -> dict[str, Any]:
    """Return a row with what was predicted, and with its text or image where `data` has it."""
    example = {
        "row": row,
        "label": names[int(values["label"][row])],
        "prediction": names[int(values["prediction"][row])],
        "confidence": float(values["confidence"][row]),
    }
    if not isinstance(data, PreparedData):
        return example
    raw = data.rows[row]
    contents = [raw[column] for column in data.columns]
    if data.kind == "text":
        text = " | ".join(map(str, contents))
        if len(text) > MOST_CHARACTERS:
            text = f"{text[:MOST_CHARACTERS]}..."
        example["text"] = text
    elif data.kind == "image" and hasattr(contents[0], "mode"):
        example["jpeg"] = _thumbnail(contents[0])
    return example


def _thumbnail(image: Any) -> str:
    """Return a small copy of an image of PIL, as a JPEG in base64."""
    small = read_image(image, "it", "RGB").copy()
    small.thumbnail((LONGEST_SIDE, LONGEST_SIDE))
    file = io.BytesIO()
    small.save(file, "JPEG", quality=85)
    return base64.b64encode(file.getvalue()).decode()


# Tables and galleries


def confusion_table(details: Mapping[str, Any]) -> Table:
    """Return the table of the pairs that are confused most often."""
    header = ["Is", "Taken for", "Rows", "Of its class (%)"]
    rows = []
    for pair in details["confusions"]:
        rows.append([pair["label"], pair["prediction"], str(pair["rows"]), _percent(pair["share"])])
    return header, rows


def class_table(details: Mapping[str, Any]) -> Table:
    """Return the table by class, the least accurate first; at most fifty."""
    shown = details["classes"][:MOST_CLASSES]
    abstains = any(row["answered"] is not None for row in shown)
    header = ["Class", "Rows", "Recognised (%)", "Right when predicted (%)"]
    if abstains:
        header.append("Answered (%)")
    rows = []
    for row in shown:
        cells = [row["class"], str(row["rows"]), _percent(row["recall"]), _percent(row["precision"])]
        if abstains:
            cells.append(_percent(row["answered"]))
        rows.append(cells)
    return header, rows


def bin_table(curve: Mapping[str, Sequence[Any]], num_rows: int) -> Table:
    """Return the table of reliability bins that have rows.

    Args:
        curve (`Mapping`): of `reliability_curve`.
        num_rows (`int`): of the data.
    """
    width = 1 / len(curve["share"])
    rows = []
    for number, share in enumerate(curve["share"]):
        count = round(share * num_rows)
        if count == 0:
            continue
        note = "too few rows to tell" if count < THIN_BIN else ""
        between = f"{100 * number * width:.0f} to {100 * (number + 1) * width:.0f}"
        confidence = _percent(curve["confidence"][number])
        rows.append([between, str(count), confidence, _percent(curve["accuracy"][number]), note])
    return ["Confidence (%)", "Rows", "Mean confidence (%)", "Accuracy (%)", ""], rows


def gallery_html(title: str, examples: Sequence[Mapping[str, Any]]) -> str:
    """Return rows as elements of a page: images shown, texts quoted, others by their numbers."""
    figures = []
    for example in examples:
        content = ""
        if "jpeg" in example:
            content = f'<img alt="row {int(example["row"])}" src="data:image/jpeg;base64,{escape(example["jpeg"])}">'
        elif "text" in example:
            content = f"<blockquote>{escape(example['text'])}</blockquote>"
        verdict = f"row {int(example['row'])}: predicted {example['prediction']}, {_percent(example['confidence'])} %"
        if example["prediction"] != example["label"]:
            verdict += f"; it is {example['label']}"
        figures.append(f'<figure class="row">{content}<figcaption>{escape(verdict)}</figcaption></figure>')
    return f"<h2>{escape(title)}</h2>\n<div class=rows>{''.join(figures)}</div>"


def _percent(share: float | None) -> str:
    """Write a share as a number of percents."""
    if share is None:
        return NO_VALUE
    return f"{100 * share:.1f}"
