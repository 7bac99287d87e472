"""Tiny token classifiers of random weights, their tokenizer, and tagged texts."""

import copy
from functools import cache

import torch
from transformers import BertConfig, BertForTokenClassification, BertTokenizer, PreTrainedModel

from hydra_transformers import AutoHydra
from tests.tiny_data import SIZES, names_of


TAGS = ["O", "B-PER", "I-PER", "B-LOC", "I-LOC"]
PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "anna", "##bel", "##le", "smith", "went", "to", "paris", "."]


def tokenizer() -> BertTokenizer:
    return BertTokenizer(vocab={piece: index for index, piece in enumerate(PIECES)}, model_max_length=16)


def backbone(seed: int = 0, **fields) -> BertForTokenClassification:
    torch.manual_seed(seed)
    fields = {**names_of(TAGS), **fields}
    fields = {"initializer_range": 0.5, **SIZES, **fields}
    config = BertConfig(vocab_size=len(PIECES), max_position_embeddings=16, **fields)
    return BertForTokenClassification(config).eval()


@cache
def _fused() -> PreTrainedModel:
    return AutoHydra.from_pruned_members([backbone(seed) for seed in range(3)], shared=())


def fused() -> PreTrainedModel:
    """Three members with nothing in common, for the test to change as it likes."""
    return copy.deepcopy(_fused())


def rows(count: int = 40, seed: int = 0) -> list[dict]:
    """Words and the names of their tags: names are persons, "paris" is a place, one row of five is tagged at random."""
    generator = torch.Generator().manual_seed(seed)
    words = ["annabelle", "smith", "went", "to", "paris", "."]
    right = {"annabelle": "B-PER", "smith": "I-PER", "paris": "B-LOC"}
    found = []
    for row in range(count):
        length = int(torch.randint(2, 7, (1,), generator=generator))
        chosen = [words[place] for place in torch.randint(0, 6, (length,), generator=generator).tolist()]
        tags = [right.get(word, "O") for word in chosen]
        if row % 5 == 0:
            tags = [TAGS[place] for place in torch.randint(0, 5, (length,), generator=generator).tolist()]
        found.append({"tokens": chosen, "ner_tags": tags})
    return found
