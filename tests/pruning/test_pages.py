"""The page and the docstrings about pruning are true."""

import re
import warnings

import pytest

from hydra_transformers import pruning
from hydra_transformers.pruning import head_scores
from hydra_transformers.pruning.scores import HEAD_SCORES
from tests.families import VIT
from tests.pages import ROOT, run_python_blocks


@pytest.mark.slow
def test_the_python_blocks_of_the_page_run_in_order(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # random models score at chance
        run_python_blocks("docs/pruning.md", at_least=10)


def test_the_table_of_scores_names_every_method_there_is():
    named = re.findall(r'^\| `"(\w+)"` \|', (ROOT / "docs/pruning.md").read_text(), flags=re.MULTILINE)
    assert named == list(HEAD_SCORES)


def test_what_the_page_imports_is_public():
    for names in re.findall(r"from hydra_transformers\.pruning import (.+)", (ROOT / "docs/pruning.md").read_text()):
        assert set(names.split(", ")) <= set(pruning.__all__)


def test_a_score_of_ones_own_is_a_method_like_the_others(monkeypatch):
    monkeypatch.setitem(HEAD_SCORES, "mine", lambda model, data: {(0, head): len(data) for head in range(4)})
    assert head_scores(VIT.backbone(), [{}, {}], "mine") == {(0, head): 2 for head in range(4)}
