"""Data sets by Hub name, folder or file, as rows that a model takes: columns found, labels matched, inputs prepared."""

import glob
import logging
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from numbers import Real
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import MODEL_MAPPING, PreTrainedConfig

from ..fusion.probe import TEXT_TOKENS
from ..fusion.structure import without_weights
from ..models.auto import is_zero_shot
from ..models.pipeline_hydra import image_mode, most_tokens, read_image
from .raw_data import TEXT_NAMES
from .sounds import is_audio, prepared_sound, undecoded


LABEL_NAMES = ("label", "labels", "fine_label", "target", "class")
FILE_FORMATS = {".csv": "csv", ".tsv": "csv", ".json": "json", ".jsonl": "json", ".parquet": "parquet"}
MOST_HELD_OUT_ROWS = 3_000
GENERIC_NAME = re.compile(r"LABEL_\d+")


@dataclass(frozen=True)
class DataSource:
    """Which rows to read.

    name: a data set on the Hub ("cifar100", with a config "glue:sst2"), a folder that `save_to_disk` wrote, a folder of
        images or sounds, csv, json or parquet files, or one such file
    split: by default the first that exists of those a command prefers; "train[:1000]" and "train[:10%]" are parts of one
    part: "training", "validation" or "test": a random part of the split, the same in every command, before any limit
    limit: at most this many rows, drawn at random with the seed 0, because many sets are sorted by class
    image_column, audio_column, text_column, label_column: guessed where not given; "translation.en" is a field of a text column, and
        "premise,hypothesis" are two columns of pairs
    max_length: the tokens that texts, or both texts of a pair together, are cut to
    labels_in_order: take the data's class indices as they are, whatever the classes are called
    """

    name: str
    split: str | None = None
    part: str | None = None
    limit: int | None = None
    image_column: str | None = None
    audio_column: str | None = None
    text_column: str | None = None
    label_column: str | None = None
    labels_in_order: bool = False
    max_length: int | None = None

    @property
    def text_columns(self) -> tuple[str, ...]:
        """The one or two columns that `text_column` names; none where it names none."""
        return tuple(name.strip() for name in self.text_column.split(",")) if self.text_column else ()


@dataclass
class PreparedData(torch.utils.data.Dataset):
    """Rows `{"pixel_values": ...}`, `{"input_ids": ..., ...}` or `{"input_values": ...}`, with `labels` where they were asked
    for.

    Images and sounds are opened and processed when a row is read; texts are tokenized once, and kept.
    notes: what was found and decided, for the user to read
    class_names: of the data's own classes, in order; None where labels were not asked for or have no names
    split: the one that was read; None where the data has none
    change: what an image goes through before it is processed, something random for example
    text_columns, max_tokens: of texts, or of pairs, where they are and at how many tokens they end
    """

    rows: Any
    labels: list[int] | None = None
    class_names: list[str] | None = None
    notes: list[str] = field(default_factory=list)
    tokens: dict[str, Tensor] | None = None
    image_column: str | None = None
    image_mode: str = "RGB"
    audio_column: str | None = None
    processor: Any = None
    split: str | None = None
    change: Callable[[Any], Any] | None = None
    text_columns: tuple[str, ...] = ()
    max_tokens: int | None = None

    @property
    def holds_texts(self) -> bool:
        return self.tokens is not None

    def with_changed_texts(self, change: Callable[[str], str]) -> "PreparedData":
        """The same rows, their texts changed before they are tokenized."""
        columns = [[change(text) for text in self.rows[column]] for column in self.text_columns]
        return replace(self, tokens=_tokenized(columns, self.max_tokens, self.processor))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if self.tokens is not None:
            row = {name: values[index] for name, values in self.tokens.items()}
        elif self.audio_column is not None:
            row = prepared_sound(self.rows[index][self.audio_column], self.processor)
        else:
            image = read_image(self.rows[index][self.image_column], f"the image of row {index}", self.image_mode)
            image = image if self.change is None else self.change(image)
            row = {"pixel_values": self.processor(image, return_tensors="pt")["pixel_values"][0]}
        return row if self.labels is None else {**row, "labels": self.labels[index]}


def prepare_data(
    source: DataSource,
    config: PreTrainedConfig,
    processor: Any,
    labelled: bool = True,
    prefer: Sequence[str] = ("validation", "test", "train"),
) -> PreparedData:
    """Reads a data set for a model.

    Args:
        source: which rows.
        config: the model's: whether it reads images, sounds or texts, and its class names. CLIP and SigLIP have none, so
            they take the data's.
        processor: the model's image processor, feature extractor, tokenizer, or for two towers images' and texts' in one.
        labelled: whether labels are needed; out-of-distribution data has none that the model knows.
        prefer: the splits to choose from where the source names none.
    """
    rows, split = load_rows(source, prefer)
    notes = [f"{source.name}: {len(rows):,} rows" + (f" of the split {split}" if split else "")]
    if not labelled:
        source = _without_missing_columns(source, rows.features)
    prepared = PreparedData(rows, notes=notes, split=split)
    if labelled:
        column = find_label_column(rows.features, source, getattr(config, "num_labels", None))
        names = class_names_of(rows, column)
        if is_zero_shot(config):
            if names is None:
                raise ValueError(
                    f"column {column!r} of {source.name} has no class names, of which the model's prompts are made"
                )
            prepared.labels, note = _indices(rows, column, names, source), f"{len(names)} classes named by the data"
        else:
            prepared.labels, note = match_labels(rows, column, names, config, source)
        _check_labels(prepared.labels, len(names) if is_zero_shot(config) else config.num_labels, source)
        prepared.class_names = names
        notes.append(f"labels: column {column!r}, {note}")
    if hasattr(config, "vision_config") or hasattr(config, "image_size"):
        prepared.image_column = find_image_column(rows.features, source)
        _check_none_is_missing(rows, prepared.image_column, "image", source)
        if not rows.features[prepared.image_column].decode:
            prepared.rows = rows.cast_column(prepared.image_column, type(rows.features[prepared.image_column])())
        prepared.image_mode = image_mode(config)
        prepared.processor = processor
        notes.append(f"images: column {prepared.image_column!r}")
    elif hasattr(config, "num_mel_bins"):
        prepared.audio_column = find_audio_column(rows.features, source)
        prepared.rows, prepared.processor = undecoded(rows), processor
        _check_none_is_missing(prepared.rows, prepared.audio_column, "sound", source)
        notes.append(f"sounds: column {prepared.audio_column!r}")
    else:
        columns = find_text_columns(rows.features, source)
        for column in columns:
            _check_none_is_missing(rows, column, "text", source)
        prepared.text_columns, prepared.processor = columns, processor
        prepared.max_tokens = _max_tokens(config, processor, source.max_length)
        prepared.tokens = _tokenized([rows[column] for column in columns], prepared.max_tokens, processor)
        named = (
            f"column {columns[0]!r}"
            if len(columns) == 1
            else f"pairs of the columns {columns[0]!r} and {columns[1]!r}"
        )
        notes.append(f"texts: {named}, {prepared.tokens['input_ids'].shape[1]} tokens")
    return prepared


def _max_tokens(config: PreTrainedConfig, tokenizer: Any, max_length: int | None) -> int:
    encoder = MODEL_MAPPING.get(type(config), None)
    positions = config.max_position_embeddings
    if isinstance(encoder, type):
        positions = most_tokens(without_weights(encoder, config))
    most = min(positions, tokenizer.model_max_length)
    if max_length is not None and max_length > most:
        raise ValueError(f"--max-length is {max_length}: the model reads at most {most} tokens")
    return min(TEXT_TOKENS, most) if max_length is None else max_length


def _tokenized(columns: Sequence[Sequence[str]], max_tokens: int, tokenizer: Any) -> dict[str, Tensor]:
    """
    columns: the texts, or the first and the second ones of pairs
    """
    texts = [list(column) for column in columns]
    return dict(tokenizer(*texts, truncation=True, max_length=max_tokens, padding=True, return_tensors="pt"))


def classes_in(source: DataSource, prefer: Sequence[str]) -> list[str]:
    """The names of the data's own classes in the order of their indices; LABEL_0, LABEL_1, ... where they have none."""
    rows, _ = load_rows(source, prefer)
    column = find_label_column(rows.features, source, None)
    names = class_names_of(rows, column)
    if names is None:
        highest = max(_indices(rows, column, None, source))
        names = [f"LABEL_{index}" for index in range(highest + 1)]
    if len(names) < 2:
        raise ValueError(f"column {column!r} of {source.name} has {len(names)} class, so there is nothing to learn")
    return names


# Changing images


@dataclass(frozen=True)
class RandomCropAndFlip:
    """A rectangle of an image, mirrored or not, each time another.

    scale: the least and the largest share of the area, or None for the whole image
    flip: how often it is mirrored
    """

    scale: tuple[float, float] | None = None
    flip: float = 0.0

    def __call__(self, image: Any) -> Any:
        from PIL import ImageOps

        if self.scale is not None:
            image = image.crop(self._box(*image.size))
        return ImageOps.mirror(image) if torch.rand(()).item() < self.flip else image

    def _box(self, width: int, height: int) -> tuple[int, int, int, int]:
        for _ in range(10):  # until one fits, as torchvision's RandomResizedCrop
            share, shape, right, down = torch.rand(4).tolist()
            area = width * height * (self.scale[0] + share * (self.scale[1] - self.scale[0]))
            ratio = (3 / 4) ** (1 - 2 * shape)
            wide, high = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if 0 < wide <= width and 0 < high <= height:
                left, top = int(right * (width - wide + 1)), int(down * (height - high + 1))
                return left, top, left + wide, top + high
        return 0, 0, width, height


def random_changes(transforms: Sequence[tuple[str, dict]]) -> tuple[RandomCropAndFlip | None, list[str]]:
    """What a recipe's transforms do to an image before the model's processor, and the names of those that are not known."""
    named = dict(transforms)
    crop, flip = named.pop("RandomResizedCrop", None), named.pop("RandomHorizontalFlip", None)
    unknown = [name for name in named if name not in ("Normalize", "tokenize")]  # the processor does these
    if crop is None and flip is None:
        return None, unknown
    scale = None if crop is None else tuple(crop.get("scale", (0.08, 1.0)))
    return RandomCropAndFlip(scale, 0.0 if flip is None else flip.get("p", 0.5)), unknown


# Finding rows


def load_rows(source: DataSource, prefer: Sequence[str]) -> tuple[Any, str | None]:
    """The rows of a source, a `datasets.Dataset`, and the split they are from."""
    try:
        import datasets
    except ImportError as error:
        raise ImportError("reading data sets needs datasets: pip install datasets") from error
    path = Path(source.name)
    if path.exists():
        found = _load_local(datasets, path)
    elif source.name.startswith((".", "/", "~")) or path.suffix in FILE_FORMATS:
        raise ValueError(f"there is no folder or file {source.name}")
    else:
        found = _load_from_hub(datasets, source, prefer)
    rows, split = _split_of(datasets, found, source, prefer)
    if any(column.startswith("__index_level_") for column in rows.features):
        # where pandas puts what it takes for the names of the rows
        raise ValueError(f"rows of {source.name} have more cells than its first line: check separators and quotes")
    if any("." in column and column not in rows.features for column in source.text_columns):
        rows = rows.flatten()  # "translation.en" is a field of the column "translation"
    if source.part is not None:
        rows = rows.select(places_of_part(len(rows), source))
    if source.limit is not None and source.limit < len(rows):
        rows = rows.shuffle(seed=0).select(range(source.limit))
    if len(rows) == 0:
        raise ValueError(f"{source.name} has no rows" + (f" in the split {split}" if split else ""))
    return rows, split


def places_of_part(count: int, source: DataSource) -> list[int]:
    """The rows of a part: of `count` rows a tenth, at most 3,000, is for tests, as many for validation, the rest to train."""
    if count < 3:
        raise ValueError(f"{source.name} has {count} rows, too few for a part each to train, to validate and to test")
    held_out = min(MOST_HELD_OUT_ROWS, max(1, count // 10))
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0)).tolist()
    parts = {"test": order[:held_out], "validation": order[held_out : 2 * held_out], "training": order[2 * held_out :]}
    return sorted(parts[source.part])


def is_same_source(name: str, other: str) -> bool:
    """Whether two names are those of one data set, however its folder is written."""
    if Path(name).exists() and Path(other).exists():
        return Path(name).samefile(other)
    return name == other


@contextmanager
def _one_sentence(path: Path) -> Iterator[None]:
    """What goes wrong while local files are read, by its cause; `datasets` itself says that something went wrong."""
    logger = logging.getLogger("datasets")
    level = logger.level
    logger.setLevel(logging.CRITICAL)  # its errors come as exceptions, too
    try:
        yield
    except Exception as error:
        if "corresponds to no data" in str(error):
            raise ValueError(f"{path} has no rows") from error
        files = [path] if path.is_file() else path.rglob("*")
        empty = next((file for file in files if _is_empty_file(file)), None)
        reason = _cause(error) if empty is None else f"{empty.name} is an empty file"
        raise ValueError(f"{path} cannot be read: {reason}") from error
    finally:
        logger.setLevel(level)


def _cause(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    words = str(error).split()
    return " ".join(words[:40]) + (" ..." if len(words) > 40 else "") or type(error).__name__


def _is_empty_file(path: Path) -> bool:
    return path.suffix in FILE_FORMATS and path.is_file() and path.stat().st_size == 0


def _load_local(datasets: Any, path: Path) -> Any:
    """By their whole paths: a bare name may be that of a builder, which would read what lies around it."""
    if path.is_file():
        if path.suffix not in FILE_FORMATS:
            raise ValueError(f"{path} is no {', '.join(FILE_FORMATS)} file: pass one, or a folder")
        settings = {"sep": "\t"} if path.suffix == ".tsv" else {}
        file = glob.escape(str(path.absolute()))
        with _one_sentence(path):
            return datasets.load_dataset(FILE_FORMATS[path.suffix], data_files=file, **settings)
    if (path / "dataset_dict.json").exists() or (path / "state.json").exists():
        with _one_sentence(path):
            return datasets.load_from_disk(path.absolute())
    if not any(path.iterdir()):
        raise ValueError(
            f"the folder {path} is empty: it should hold a saved data set, images, csv, json or parquet files"
        )
    with _one_sentence(path):
        return datasets.load_dataset(str(path.absolute()))


def _load_from_hub(datasets: Any, source: DataSource, prefer: Sequence[str]) -> Any:
    name, _, config = source.name.partition(":")
    config = config or None
    if name in _builders(datasets):
        raise ValueError(f"there is no folder {name} here, and on the Hub no data set can have that name: check it")
    names = datasets.get_dataset_split_names(name, config)
    split = _chosen_split(names, source, prefer)
    return {split: datasets.load_dataset(name, config, split=split)}


def _builders(datasets: Any) -> set[str]:
    """Names that `load_dataset` takes for file formats, whose files it then looks for in the working directory."""
    known = getattr(datasets.packaged_modules, "_PACKAGED_DATASETS_MODULES", ())
    return {*known, *FILE_FORMATS.values(), "text", "arrow", "imagefolder", "audiofolder"}


def _split_of(datasets: Any, found: Any, source: DataSource, prefer: Sequence[str]) -> tuple[Any, str | None]:
    """Of what was loaded, the rows of one split or of a part of one, and its name."""
    if not isinstance(found, dict):
        if found.split is None:
            if source.split is not None:
                raise ValueError(f"{source.name} has no splits: leave out the split {source.split!r}")
            return found, None
        found = {str(found.split): found}
    split = _chosen_split(list(found), source, prefer)
    if split in found:
        return found[split], split
    try:
        parts = datasets.ReadInstruction.from_spec(split).to_absolute({name: len(found[name]) for name in found})
    except (ValueError, AssertionError) as error:
        raise ValueError(
            f"the split {split!r} of {source.name} cannot be read ({_cause(error)}): it has {', '.join(found)}, of which "
            'a part is written as "train[:1000]" or "train[:10%]"'
        ) from error
    rows = [found[part.splitname].select(range(part.from_, part.to)) for part in parts]
    return datasets.concatenate_datasets(rows), split


def _chosen_split(names: Sequence[str], source: DataSource, prefer: Sequence[str]) -> str:
    if source.split is not None:
        if source.split not in names and not re.search(r"[\[+]", source.split):
            raise ValueError(f"{source.name} has no split {source.split!r}: it has {', '.join(names)}")
        return source.split
    chosen = next((name for name in prefer if name in names), names[0] if len(names) == 1 else None)
    if chosen is None:
        raise ValueError(f"{source.name} has the splits {', '.join(names)}: choose one")
    return chosen


# Finding columns


def find_image_column(features: Any, source: DataSource) -> str:
    found = [name for name, feature in features.items() if _is_image(feature)]
    return _one_column(features, source, "image", source.image_column, found, _is_image)


def find_audio_column(features: Any, source: DataSource) -> str:
    found = [name for name, feature in features.items() if is_audio(feature)]
    return _one_column(features, source, "audio", source.audio_column, found, is_audio)


def find_text_columns(features: Any, source: DataSource) -> tuple[str, ...]:
    """One column of texts, or where the source names two those of pairs."""
    found = _columns_of_texts(features)
    preferred = [name for name in TEXT_NAMES if name in found]
    if len(source.text_columns) > 2:
        raise ValueError(f"--text-column is {source.text_column!r}: name one column, or two of pairs")
    named: Sequence[str | None] = source.text_columns or (None,)
    columns = [_one_column(features, source, "text", name, preferred[:1] or found, _is_text) for name in named]
    return tuple(columns)


def _columns_of_texts(features: Any) -> list[str]:
    return [name for name in features if _is_text(features[name]) and name not in LABEL_NAMES]


def find_label_column(features: Any, source: DataSource, num_labels: int | None) -> str:
    """The column of classes; of several (coarse and fine labels) the one with as many as the model has."""
    classes = {name: feature for name, feature in features.items() if type(feature).__name__ == "ClassLabel"}
    fitting = [name for name, feature in classes.items() if feature.num_classes == num_labels]
    named = [name for name in LABEL_NAMES if name in features]
    found = fitting if len(fitting) == 1 else list(classes) if len(classes) == 1 else named[:1] or list(classes)
    return _one_column(features, source, "label", source.label_column, found)


def _one_column(
    features: Any,
    source: DataSource,
    kind: str,
    chosen: str | None,
    found: Sequence[str],
    is_fit: Callable[[Any], bool] | None = None,
) -> str:
    columns = ", ".join(features)
    if chosen is not None:
        if chosen not in features:
            raise ValueError(f"{source.name} has no column {chosen!r}: it has {columns}")
        if is_fit is not None and not is_fit(features[chosen]):
            held = getattr(features[chosen], "dtype", None) or type(features[chosen]).__name__
            raise ValueError(
                f"the column {chosen!r} of {source.name} holds {held}, no {kind}{'s' * (kind != 'audio')}: name another"
            )
        return chosen
    if len(found) != 1:
        problem = "no" if not found else "more than one"
        pairs = ", or two of pairs as --text-column FIRST,SECOND" if kind == "text" and len(found) > 1 else ""
        raise ValueError(
            f"{source.name} has {problem} {kind} column among {columns}: name it with --{kind}-column{pairs}"
        )
    return found[0]


def _without_missing_columns(source: DataSource, features: Any) -> DataSource:
    """Columns are named for the labelled data: another set that has no such column is searched for its own."""
    image = source.image_column if source.image_column in features else None
    audio = source.audio_column if source.audio_column in features else None
    has_texts = all(column in features for column in source.text_columns)
    text = source.text_column if has_texts else _pair_instead(source, features)
    return replace(source, image_column=image, audio_column=audio, text_column=text)


def _pair_instead(source: DataSource, features: Any) -> str | None:
    """The two columns of texts of another set, where pairs are asked for: texts that are no pairs would be told from pairs
    by their form alone."""
    if len(source.text_columns) < 2:
        return None
    found = _columns_of_texts(features)
    if len(found) != 2:
        raise ValueError(
            f"{source.name} has no columns {' and '.join(map(repr, source.text_columns))}, nor just two of texts, and is "
            f"to be compared with pairs: rename two of its columns ({', '.join(features)})"
        )
    return ",".join(found)


def _is_image(feature: Any) -> bool:
    return type(feature).__name__ == "Image"


def _is_text(feature: Any) -> bool:
    return getattr(feature, "dtype", None) in ("string", "large_string") and type(feature).__name__ == "Value"


def _check_none_is_missing(rows: Any, column: str, kind: str, source: DataSource) -> None:
    if rows.data.column(column).null_count == 0:
        return
    if kind == "image":
        rows = rows.cast_column(column, type(rows.features[column])(decode=False))
    missing = sum(value is None for value in rows[column])
    if missing:
        raise ValueError(
            f"{missing} of {len(rows):,} rows of {source.name} have no {kind} in the column {column!r}: fill or remove them"
        )


# Matching labels


def class_names_of(rows: Any, column: str) -> list[str] | None:
    """The names of a column's classes in the order of their indices; None for a column of bare numbers."""
    feature = rows.features[column]
    if type(feature).__name__ == "ClassLabel":
        return list(feature.names)
    return sorted({value for value in rows[column] if value is not None}) if _is_text(feature) else None


def _indices(rows: Any, column: str, names: list[str] | None, source: DataSource) -> list[int]:
    """The column as numbers: class indices as they are, texts by their place in `names`, -1 for what is missing."""
    if _is_text(rows.features[column]):
        places = {name: place for place, name in enumerate(names)}
        return [-1 if value is None else places[value] for value in rows[column]]
    return [_index(value, column, source) for value in rows[column]]


def _index(value: Any, column: str, source: DataSource) -> int:
    if value is None or value != value:
        return -1
    # 1.0 is the class 1: pandas and csv files make floats of a column of whole numbers in which one was missing.
    if not isinstance(value, Real) or math.isinf(value) or value != int(value):
        shown = repr(value)[:40]
        raise ValueError(
            f"the column {column!r} of {source.name} holds {shown}, which is no class: labels are whole numbers or names, "
            "name their column with --label-column"
        )
    return int(value)


def match_labels(
    rows: Any, column: str, names: list[str] | None, config: PreTrainedConfig, source: DataSource
) -> tuple[list[int], str]:
    """The labels as the model's class indices, and a sentence on how they were matched."""
    labels = _indices(rows, column, names, source)
    model_names = [str(config.id2label[index]) for index in range(config.num_labels)]
    if names is None:
        return labels, "class indices taken as they are"
    are_texts = _is_text(rows.features[column])
    if source.labels_in_order:
        if are_texts and len(names) != len(model_names):
            raise ValueError(
                f"column {column!r} of {source.name} holds {len(names)} names, the model has {len(model_names)} classes: "
                "without all of them their order says nothing, make the column class indices"
            )
        return labels, "class indices taken as they are" if not are_texts else "class names taken in order"
    if all(map(GENERIC_NAME.fullmatch, model_names)):
        if are_texts:
            raise ValueError(
                f"column {column!r} of {source.name} holds names, and the model has no names for its {config.num_labels} "
                "classes: set id2label in its config.json, or make the column class indices"
            )
        if len(names) != len(model_names):
            raise ValueError(f"{source.name} has {len(names)} classes, the model {len(model_names)}: they do not fit")
        return labels, f"{len(names)} classes taken in order (the model has no names for them)"
    matched = _matched(names, model_names, {label for label in labels if label >= 0}, source)
    moved = [place for place, target in matched.items() if target != place]
    note = f"{len(matched)} of the model's {len(model_names)} classes, matched by name"
    if moved:
        note += f" ({names[moved[0]]!r} is {moved[0]} in the data, {matched[moved[0]]} in the model)"
    return [label if label < 0 else matched[label] for label in labels], note


def _matched(names: list[str], model_names: list[str], present: set[int], source: DataSource) -> dict[int, int]:
    """For each class that is present in the data its place in the model; refuses what is not certain."""
    candidates = _candidates(names, model_names)
    for label in sorted(present):
        places = candidates[label]
        if not places:
            raise ValueError(
                f"{source.name} has the class {names[label]!r}, which the model does not know (it knows "
                f"{_shortened(model_names)}): filter the data, or pass --labels-in-order if only the names differ"
            )
        if len(places) > 1:
            raise ValueError(
                f"{source.name} has the class {names[label]!r}, which may be the model's {places[0]} "
                f"({model_names[places[0]]!r}) or {places[1]} ({model_names[places[1]]!r}): rename it in the data, or pass "
                "--labels-in-order if data and model count their classes alike"
            )
        others = [names[other] for other, found in enumerate(candidates) if other != label and found == places]
        if others:
            raise ValueError(
                f"{source.name} has the classes {names[label]!r} and {others[0]!r}, and both may be the model's "
                f"{places[0]} ({model_names[places[0]]!r}): rename or filter them, or pass --labels-in-order if data and "
                "model count their classes alike"
            )
    return {label: candidates[label][0] for label in sorted(present)}


def _candidates(names: list[str], model_names: list[str]) -> list[list[int]]:
    """For each name the model's classes that it may mean: those of exactly this name; if there are none, those that are
    it in another spelling; and if there are none of these either, those that have a synonym in common with it."""
    found: list[list[int]] = [[] for _ in names]
    for keys in (lambda name: [name], lambda name: _keys(name)[:1], _keys):
        places: dict[str, list[int]] = {}
        for place, name in enumerate(model_names):
            for key in keys(name):
                places.setdefault(key, []).append(place)
        for index, name in enumerate(names):
            if not found[index]:
                found[index] = sorted({place for key in keys(name) for place in places.get(key, ())})
    return found


def _keys(name: str) -> list[str]:
    """Ways in which a class name may be written: the whole of it, and each of its synonyms ("tench, Tinca tinca")."""
    plain = " ".join(re.sub(r"[_\-\s]+", " ", name.casefold()).split())
    return list(dict.fromkeys([plain, *(part.strip() for part in plain.split(","))]))


def _check_labels(labels: list[int], num_classes: int, source: DataSource) -> None:
    missing = labels.count(-1)
    if missing:
        raise ValueError(
            f"{source.name} has {missing} rows without a label (-1, or an empty cell, as which csv files also count NA and "
            "None): remove them, or choose another split"
        )
    for label in labels:
        if not 0 <= label < num_classes:
            raise ValueError(f"{source.name} has the label {label}, the model has the classes 0 to {num_classes - 1}")


def _shortened(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
