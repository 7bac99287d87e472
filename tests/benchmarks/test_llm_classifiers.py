"""What classifiers on large language models cost."""

import json
import sys

import llm_classifiers
import pytest
import torch


@pytest.mark.slow
def test_every_method_is_counted_and_timed(tmp_path, monkeypatch):
    monkeypatch.setattr(
        sys, "argv", ["llm_classifiers.py", "--smallest", "--device", "cpu", "--output", str(tmp_path)]
    )
    llm_classifiers.main()
    report = json.loads((tmp_path / "llm_classifiers_tiny.json").read_text())
    for rows in (report["sizes"], report["speeds"]):
        assert [row["method"] for row in rows] == list(llm_classifiers.METHODS)
    page = (tmp_path / "llm_classifiers_tiny.md").read_text()
    assert all(f"{key}: {report['machine'][key]}" in page for key in ("machine", "versions", "date", "commit"))


def test_what_is_counted_is_what_is_timed():
    sizes = llm_classifiers.PRESETS["tiny"]
    counted = {row.method: row.parameters for row in llm_classifiers.sizes_of(sizes, tokens=8)}
    for method in llm_classifiers.METHODS:
        model = llm_classifiers.built(method, sizes, "cpu")
        assert sum(parameter.numel() for parameter in model.parameters()) == counted[method]
        assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("method", [llm_classifiers.HALF, llm_classifiers.HALF_OF_KEYS])
def test_members_keep_half_of_the_heads_and_not_the_same(method):
    for layer in llm_classifiers.hydra_config(method, llm_classifiers.QWEN2_7B).kept_heads:
        assert [len(heads) for heads in layer] == [14, 14, 14]
        assert len({tuple(heads) for heads in layer}) == 3
        assert {len({head // 7 for head in heads}) for heads in layer} == {4 if method == llm_classifiers.HALF else 2}
