"""A tiny BERT and a tiny ViT in folders, and the tokenizer."""

import pytest
from transformers import AutoTokenizer

from tests.tiny_data import save_bert, save_vit


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    return save_bert(tmp_path_factory.mktemp("bert"))


@pytest.fixture(scope="module")
def tokenizer(bert):
    return AutoTokenizer.from_pretrained(bert)


@pytest.fixture(scope="module")
def vit(tmp_path_factory):
    return save_vit(tmp_path_factory.mktemp("vit"))
