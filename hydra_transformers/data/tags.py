"""Words and their tags, for classifiers of tokens: the first token of a word carries its tag, and the answer about it."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from ..models.modeling_hydra import at_least_float32
from .batches import batches, labels_of
from .columns import column_kinds
from .labels import are_generic, match_names
from .multi_hot import LabelLists
from .prediction import classes_of, device_of, predict
from .rows import DataSource


TOKEN_CLASSIFICATION = "token_classification"  # the problem type of data with tags
NO_TAG = -100  # of tokens that no loss and no metric counts
# The usual names, first choice first.
WORD_NAMES = ("tokens", "words")
TAG_NAMES = ("ner_tags", "tags", "labels", "pos_tags", "upos", "label")


def find_word_column(rows: Any, source: DataSource) -> str:
    """The column of lists of words."""
    columns = _lists(rows)
    if len(source.text_columns) > 1:
        raise ValueError(f"text is {source.text!r}: a text of words is one column, name it")
    if source.text_columns:
        [named] = source.text_columns
        if named not in column_kinds(rows):
            raise ValueError(f"{source.name} has no column {named!r}: it has {', '.join(column_kinds(rows))}")
        if columns.get(named) != "text":
            raise ValueError(
                f"the column {named!r} of {source.name} does not hold lists of words, which a model of tokens is read from: "
                "split its texts into words, or name another as text= (--text-column)"
            )
        return named
    usual = [name for name in WORD_NAMES if columns.get(name) == "text"]
    found = usual[:1] or [name for name, kind in columns.items() if kind == "text" and name not in TAG_NAMES]
    if len(found) != 1:
        raise ValueError(
            f"{source.name} has {'more than one' if found else 'no'} column of words among {', '.join(column_kinds(rows))}, and this "
            "model reads lists of words: name it as text= (--text-column)"
        )
    return found[0]


def has_words(rows: Any, source: DataSource) -> bool:
    """Whether the rows are lists of words with tags, and no texts."""
    kinds, columns = column_kinds(rows), _lists(rows)
    if source.text_columns:
        return len(source.text_columns) == 1 and columns.get(source.text_columns[0]) == "text"
    has_text = any(
        kind == "text" and name not in TAG_NAMES and name not in ("id", "lang") for name, kind in kinds.items()
    )
    return not has_text and any(columns.get(name) == "text" for name in WORD_NAMES)


def find_tag_column(rows: Any, source: DataSource, words: str, num_labels: int | None) -> str:
    """The column of lists of tags; of several (POS and NER) the one with as many tags as the model has classes."""
    columns, kinds = _lists(rows), column_kinds(rows)
    if source.label is not None and source.label not in kinds:
        raise ValueError(f"{source.name} has no column {source.label!r}: it has {', '.join(kinds)}")
    lists = [name for name in columns if name != words]
    if source.label is not None:
        found = [source.label] if source.label in lists else []
    else:
        fitting = [name for name in lists if num_labels is not None and _num_tags(rows, name) == num_labels]
        usual = [name for name in TAG_NAMES if name in lists]
        found = fitting if len(fitting) == 1 else usual[:1] or lists
    if len(found) == 1:
        return found[0]
    single = source.label or next((name for name in kinds if name in TAG_NAMES and name not in lists), None)
    if single is not None and not found:
        raise ValueError(
            f"the column {single!r} of {source.name} has one label for each row, and this model classifies tokens: give each row "
            "a list of tags, one for each of its words"
        )
    raise ValueError(
        f"{source.name} has {'more than one' if found else 'no'} column of tags among {', '.join(kinds)}: name it as label= "
        "(--label-column)"
    )


def _lists(rows: Any) -> dict[str, str]:
    """Columns of lists -> "text" where they hold texts, otherwise "number"."""
    features = getattr(rows, "features", None)
    if features:
        inside = {name: getattr(feature, "feature", None) for name, feature in features.items()}
        kinds = {name: str(getattr(each, "dtype", "")) for name, each in inside.items() if each is not None}
        kinds = {name: kind for name, kind in kinds.items() if type(inside[name]).__name__ in ("Value", "ClassLabel")}
        return {name: "text" if "string" in kind else "number" for name, kind in kinds.items()}
    found: dict[str, str] = {}
    for name, value in rows[0].items() if isinstance(rows[0], Mapping) else ():
        if isinstance(value, (list, tuple)) or (hasattr(value, "tolist") and getattr(value, "ndim", 0) == 1):
            found[name] = "text" if len(value) and isinstance(value[0], str) else "number"
    return found


def _num_tags(rows: Any, column: str) -> int | None:
    feature = rows.features[column] if getattr(rows, "features", None) else None
    return getattr(getattr(feature, "feature", None), "num_classes", None)


class Tags(LabelLists):
    """The column of tags of a data set: a name or number for each word, -100 where a word has none."""

    def classes(self) -> list[str]:
        """The data's own tags in the order of their numbers; LABEL_0, LABEL_1, ... where they have no names."""
        if self.names is not None:
            return list(self.names)
        most = max((tag for row, tags in enumerate(self.values) for tag in self._numbers(tags, row)), default=-1)
        if most < 1:
            raise ValueError(
                f"column {self.column!r} of {self.source.name} has {most + 1} different tags, so there is nothing to learn"
            )
        return [f"LABEL_{tag}" for tag in range(most + 1)]

    def of_words(self, words: Sequence[Sequence[str]], classes: Sequence[str]) -> tuple[list[list[int]], str]:
        """The class of each word as the model counts them, and a note on how tags were matched."""
        count, name = len(classes), self.source.name
        for row, (texts, tags) in enumerate(zip(words, self.values, strict=True)):
            if len(texts) != len(tags):
                raise ValueError(
                    f"row {row} of {name} has {len(texts)} words and {len(tags)} tags: give every word one"
                )
        numbers = [self._numbers(tags, row) for row, tags in enumerate(self.values)]
        note, matched = "tag numbers taken as they are", None
        if self.names is not None and not (self.source.labels_in_order and not self.are_texts):
            if are_generic(classes) and not self.are_texts:
                if len(self.names) != count:
                    raise ValueError(f"{name} has {len(self.names)} tags, the model {count} classes: they do not fit")
                note = f"{count} tags taken in order (the model has no names for them)"
            else:
                present = {tag for tags in numbers for tag in tags if tag >= 0}
                matched = match_names(self.names, list(classes), present, name)
                note = f"{len(matched)} of the model's {count} tags, matched by name"
        if matched is not None:
            numbers = [[tag if tag < 0 else matched[tag] for tag in tags] for tags in numbers]
        for row, tags in enumerate(numbers):
            outside = next((tag for tag in tags if not 0 <= tag < count and tag != NO_TAG), None)
            if outside is not None:
                raise ValueError(f"row {row} of {name} has the tag {outside}, the model has the tags 0 to {count - 1}")
        return numbers, note


def check_knows_words(tokenizer: Any) -> None:
    """Refuses a tokenizer that cannot say which word a token belongs to."""
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError(
            f"{type(tokenizer).__name__} does not say which word a token belongs to: pass the fast tokenizer of the model"
        )


def tokens_of_words(tokenizer: Any, words: Any, tags: Sequence[int] | None, **options: Any) -> dict[str, list[int]]:
    """The tokens of a list of words, with `labels`: the tag of a word on its first token, -100 on all others. Without tags,
    `word_starts` is 1 on the first token of a word and 0 on all others."""
    if isinstance(words, str) or not all(isinstance(word, str) for word in words):
        raise TypeError("it is no list of words")
    encoded = tokenizer(list(words), is_split_into_words=True, truncation=True, **options)
    before = [None, *encoded.word_ids()]
    firsts = [None if word == other else word for other, word in pairwise(before)]
    if tags is None:
        return {**encoded, "word_starts": [int(word is not None) for word in firsts]}
    return {**encoded, "labels": [NO_TAG if word is None else tags[word] for word in firsts]}


# Answers about words


def collect_words(model: nn.Module, data: Any, batch_size: int) -> tuple[Tensor, Tensor | None]:
    """The members' logits for the words of all texts, (texts, members, words, classes), and their tags (texts, words) or None.

    A word is a token with a label other than -100; in data without labels one that `word_starts` marks, as `load_data` does, or
    else any that is no padding. Texts with fewer words are filled up with NaN and -100.
    """
    answers, tags, device, classes = [], [], device_of(model), classes_of(model)
    for batch in batches(data, batch_size, device, classes=classes):
        member_logits = at_least_float32(predict(model, batch)).cpu()
        labels = labels_of(batch, len(member_logits))
        for row, own in enumerate(which_are_words(member_logits, labels, batch)):
            answers.append(member_logits[row][:, own])
            tags.append(None if labels is None else labels[row].cpu()[own])
    if not answers:
        raise ValueError("data has no batches: pass at least one sample")
    known = [each for each in tags if each is not None]
    if known and len(known) != len(tags):
        raise ValueError(f"{len(known)} of {len(tags)} texts have tags: give them to every batch, or to none of them")
    most = max(each.shape[1] for each in answers)
    filled = [nn.functional.pad(each, (0, 0, 0, most - each.shape[1]), value=torch.nan) for each in answers]
    padded = [nn.functional.pad(each, (0, most - len(each)), value=NO_TAG) for each in known]
    return torch.stack(filled), torch.stack(padded) if known else None


def which_are_words(member_logits: Tensor, labels: Tensor | None, batch: Mapping[str, Tensor]) -> Tensor:
    """Whether each token stands for a word, see `collect_words`: (batch, tokens)"""
    texts, _, tokens, classes = member_logits.shape
    if labels is not None:
        check_tags(labels, texts, tokens, classes)
        return labels.cpu() != NO_TAG
    mask = batch.get("word_starts", batch.get("attention_mask"))
    return torch.ones(texts, tokens).bool() if mask is None else mask.cpu().bool()


def check_tags(labels: Tensor, texts: int, tokens: int, classes: int) -> None:
    """Refuses labels of a batch that are not a class index for each token."""
    if labels.shape != (texts, tokens) or labels.is_floating_point():
        raise ValueError(
            f"labels of a batch are {labels.dtype} of shape {tuple(labels.shape)}, and this model classifies tokens: give every "
            f"token a class index, ({texts}, {tokens}), -100 to those without one"
        )
    outside = labels[(labels != NO_TAG) & ((labels < 0) | (labels >= classes))]
    if len(outside):
        raise ValueError(
            f"data has the tag {int(outside[0])}: the model's tags are 0 to {classes - 1}, or -100 for none"
        )


def rows_of_words(answers: Tensor, labels: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """The words of all texts one after the other: (words, members, classes), and their tags (words,)"""
    are_words = ~answers.isnan().all(dim=-1).all(dim=1) if labels is None else labels != NO_TAG
    return answers.transpose(1, 2)[are_words], None if labels is None else labels[are_words]
