"""The rows that a cascade is calibrated on: inputs as its stages get them, labels by name."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..data.columns import DataSource, find_columns, find_label_column
from ..data.labels import Labels
from ..data.loading import load_data
from ..data.rows import load_rows
from .predictor import HydraPredictor


@dataclass(frozen=True)
class LabelledRows:
    """Rows with the names of their classes."""

    rows: Any
    columns: tuple[str, ...]
    labels: list[str]

    def batches(self, size: int) -> Iterator[tuple[int, list[Any]]]:
        """Yield the number of the first row of each batch, and its inputs."""
        for start in range(0, len(self.labels), size):
            places = range(start, min(start + size, len(self.labels)))
            yield start, [input_in(self.rows[place], self.columns) for place in places]


def _rows_without_model(source: DataSource) -> LabelledRows:
    """Read labelled rows where no model says what it reads, or which classes there are."""
    rows = load_rows(source).rows
    columns = find_columns(rows, "text", source)
    labels = Labels(rows, find_label_column(rows, source), source)
    names = labels.values
    if labels.names is not None and not labels.are_texts:
        names = [labels.names[value] for value in labels.indices()]
    return LabelledRows(rows, columns, [str(name) for name in names])


def input_in(row: Mapping[str, Any], columns: Sequence[str]) -> Any:
    """Return the input in a row: a value, or a pair of texts."""
    value, *pair = [row[column] for column in columns]
    return {"text": value, "text_pair": pair[0]} if pair else value


def labelled_rows(rows: Any, reader: HydraPredictor | None, column: Any, label: str | None) -> LabelledRows:
    """Read labelled rows.

    Args:
        rows: what `load_data` accepts, or returns.
        reader (`HydraPredictor`, *optional*): of the first model, by whose classes labels are
            named; None without any.
        column (`str` or pair of `str`, *optional*), label (`str`, *optional*): their columns.
    """
    if reader is None:
        return _rows_without_model(DataSource(rows, column=column, label=label))
    data = load_data(rows, reader.info, labelled=True, column=column, label=label, processor=reader.processor)
    if data.labels is None:
        raise ValueError("rows has no labels: calibrate on labelled rows, and name their column as label=")
    names = data.class_names if reader.info.is_zero_shot else reader.class_names
    return LabelledRows(data.rows, data.columns, [str(names[place]) for place in data.labels])
