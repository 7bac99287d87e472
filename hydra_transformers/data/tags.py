"""Tokens of words for classifiers of tokens: the first token of a word carries its tag, and the prediction about it."""

from collections.abc import Sequence
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
    """The tokens of a list of words, with `labels`: the tag of a word on its first token, -100 on all others. Without tags,
    `word_starts` is 1 on the first token of a word and 0 on all others."""
    if isinstance(words, str) or not all(isinstance(word, str) for word in words):
        raise TypeError("it is not a list of words")
    encoded = tokenizer(list(words), is_split_into_words=True, truncation=True, **options)
    before = [None, *encoded.word_ids()]
    firsts = [None if word == other else word for other, word in pairwise(before)]
    if tags is None:
        return {**encoded, "word_starts": [int(word is not None) for word in firsts]}
    return {**encoded, "labels": [NO_TAG if word is None else tags[word] for word in firsts]}


def collect_words(model: nn.Module, data: Any, batch_size: int) -> tuple[Tensor, Tensor | None]:
    """The members' logits for the words of all texts, (texts, members, words, classes), and their tags (texts, words) or None.

    A word is a token with a label other than -100; in data without labels one that `word_starts` marks, as `load_data` does, or
    else any that is not padding. Texts with fewer words are filled up with NaN and -100.
    """
    logits, tags = [], []  # (words, members, classes) and (words,) of each text
    for batch in batches(data, batch_size, device_of(model)):
        member_logits = at_least_float32(predict(model, batch)).cpu().transpose(1, 2)
        labels = labels_of(batch, len(member_logits))
        if labels is None:
            mask = batch.get("word_starts", batch.get("attention_mask", torch.ones(member_logits.shape[:2])))
            are_words = mask.cpu().bool()
        else:
            check_tags(labels, *member_logits.shape[:2], member_logits.shape[-1])
            are_words = labels.cpu() != NO_TAG
            tags += [text[words] for text, words in zip(labels.cpu(), are_words, strict=True)]
        logits += [text[words] for text, words in zip(member_logits, are_words, strict=True)]
    if not logits:
        raise ValueError("data has no batches: pass at least one sample")
    if tags and len(tags) != len(logits):
        raise ValueError(f"{len(tags)} of {len(logits)} texts have tags: give them to every batch, or to none of them")
    padded = pad_sequence(tags, batch_first=True, padding_value=NO_TAG) if tags else None
    return pad_sequence(logits, batch_first=True, padding_value=torch.nan).transpose(1, 2), padded


def check_tags(labels: Tensor, texts: int, tokens: int, classes: int) -> None:
    """Raises for labels of a batch that are not a class index for each token."""
    if labels.shape != (texts, tokens) or labels.is_floating_point():
        raise ValueError(
            f"labels of a batch are {labels.dtype} of shape {tuple(labels.shape)}, and this model classifies tokens: give every "
            f"token a class index, ({texts}, {tokens}), -100 to those without one"
        )
    outside = labels[(labels != NO_TAG) & ((labels < 0) | (labels >= classes))]
    if len(outside):
        raise ValueError(f"data has tag {int(outside[0])}: the model's tags are 0 to {classes - 1}, or -100 for none")


def rows_of_words(answers: Tensor, labels: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """The words of all texts one after the other: (words, members, classes), and their tags (words,)"""
    are_words = ~answers.isnan().all(dim=-1).all(dim=1) if labels is None else labels != NO_TAG
    return answers.transpose(1, 2)[are_words], None if labels is None else labels[are_words]
