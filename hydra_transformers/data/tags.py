"""Tokens of words for classifiers of tokens: the first token of a word carries its tag, and the
prediction about it."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from ..models.ensembling import at_least_float32
from .batches import batches, labels_of
from .labels import NO_TAG
from .prediction import device_of, predict


TOKEN_CLASSIFICATION = "token_classification"  # the problem type of data with tags


def tokens_of_words(tokenizer: Any, words: Any, tags: Sequence[int] | None, **options: Any) -> dict[str, list[int]]:
    """Return the tokens of a list of words, and which of them are the first ones of a word.

    With tags as `labels`: the tag of a word on its first token, -100 on all others. Without tags as
    `word_starts`: 1 on the first token of a word and 0 on all others.
    """
    if isinstance(words, str) or not all(isinstance(word, str) for word in words):
        raise TypeError("it is not a list of words")
    encoded = tokenizer(list(words), is_split_into_words=True, truncation=True, **options)

    # The word that begins with each token; None on the other tokens
    firsts = []
    for previous, word in pairwise([None, *encoded.word_ids()]):
        firsts.append(None if word == previous else word)
    if tags is None:
        return {**encoded, "word_starts": [int(word is not None) for word in firsts]}
    return {**encoded, "labels": [NO_TAG if word is None else tags[word] for word in firsts]}


def collect_words(model: nn.Module, data: Any, batch_size: int) -> tuple[Tensor, Tensor | None]:
    """Return the members' logits for the words of all texts, and their tags.

    A word is a token with a label other than -100; in data without labels one that `word_starts`
    marks, as `load_data` does, or else any that is not padding.

    Returns:
        The logits (texts, members, words, classes), and the tags (texts, words) or None. Texts with
        fewer words are filled up with NaN and -100.
    """
    logits = []  # (words, members, classes) of each text
    tags = []  # (words,)
    for batch in batches(data, batch_size, device_of(model)):
        member_logits = at_least_float32(predict(model, batch)).cpu().transpose(1, 2)
        labels = labels_of(batch, len(member_logits))
        if labels is None:
            are_words = _words_without_labels(batch, member_logits.shape[:2])
        else:
            check_tags(labels, *member_logits.shape[:2], member_logits.shape[-1])
            labels = labels.cpu()
            are_words = labels != NO_TAG
            tags += [text[words] for text, words in zip(labels, are_words, strict=True)]
        logits += [text[words] for text, words in zip(member_logits, are_words, strict=True)]

    # One tensor of all texts, filled up at the end of each
    if not logits:
        raise ValueError("data has no batches: pass at least one sample")
    if tags and len(tags) != len(logits):
        raise ValueError(f"{len(tags)} of {len(logits)} texts have tags: give them to every batch, or to none of them")
    padded_tags = None
    if tags:
        padded_tags = pad_sequence(tags, batch_first=True, padding_value=NO_TAG)
    padded_logits = pad_sequence(logits, batch_first=True, padding_value=torch.nan)
    return padded_logits.transpose(1, 2), padded_tags


def _words_without_labels(batch: Mapping[str, Tensor], shape: torch.Size) -> Tensor:
    """Return which tokens (texts, tokens) of a batch without labels are words."""
    for name in ("word_starts", "attention_mask"):
        if name in batch:
            return batch[name].cpu().bool()
    return torch.ones(shape, dtype=torch.bool)


def check_tags(labels: Tensor, texts: int, tokens: int, classes: int) -> None:
    """Raise for labels of a batch that are not a class index for each token."""
    if labels.shape != (texts, tokens) or labels.is_floating_point():
        raise ValueError(
            f"labels of a batch are {labels.dtype} of shape {tuple(labels.shape)}, and this model classifies tokens: "
            f"give every token a class index, ({texts}, {tokens}), -100 to those without one"
        )
    outside = labels[(labels != NO_TAG) & ((labels < 0) | (labels >= classes))]
    if len(outside):
        raise ValueError(f"data has tag {int(outside[0])}: the model's tags are 0 to {classes - 1}, or -100 for none")


def rows_of_words(answers: Tensor, labels: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """Return the words of all texts one after the other: (words, members, classes), and their tags
    (words,)."""
    words = answers.transpose(1, 2)  # (texts, words, members, classes)
    if labels is None:
        is_padding = answers.isnan().all(dim=-1).all(dim=1)
        return words[~is_padding], None
    are_words = labels != NO_TAG
    return words[are_words], labels[are_words]
