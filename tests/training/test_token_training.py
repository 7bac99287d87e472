"""Classifiers of tokens are fine-tuned, and pruned by their own loss."""

import copy

import pytest
import torch
from torch.nn import functional as F

import hydra_transformers
from hydra_transformers import AutoHydra
from hydra_transformers.data import load_data
from hydra_transformers.data.batches import collate
from hydra_transformers.data.tags import check_tags
from hydra_transformers.pruning import extract_circuit, prune_heads, taylor_scores
from hydra_transformers.training import EnsembleLoss, lora_config
from tests import tiny_tags


def data(count: int = 24, seed: int = 0, model=None):
    return load_data(tiny_tags.rows(count, seed), model or tiny_tags.backbone(), processor=tiny_tags.tokenizer())


def word_loss(model, rows) -> float:
    """The mean cross-entropy over all tagged words, text by text."""
    total = 0.0
    words = 0
    for row in (rows[index] for index in range(len(rows))):
        inputs = {name: torch.tensor([values]) for name, values in row.items() if name != "labels"}
        with torch.no_grad():
            logits = model(**inputs).logits[0]
        total += F.cross_entropy(logits, torch.tensor(row["labels"]), reduction="sum").item()
        words += sum(label != -100 for label in row["labels"])
    return total / words


@pytest.mark.slow
def test_circuits_remove_the_head_whose_loss_hurts_tags_least():
    model = tiny_tags.backbone()
    rows = data()
    circuit = extract_circuit(model, rows, budget=1, objective="acc")
    without = {
        (layer, head): word_loss(AutoHydra.from_backbone(model, {layer: [head]}), rows)
        for layer in range(2)
        for head in range(4)
    }
    assert tuple(circuit.ranking[0]) == min(without, key=without.get)
    assert circuit.scores[0] == pytest.approx(-min(without.values()), abs=1e-5)
    with pytest.raises(ValueError, match="this model classifies tokens: give every token a class index"):
        check_tags(torch.tensor([0, 1]), 2, 5, 3)


def test_taylor_scores_are_of_the_mean_loss_over_all_words():
    """Also if batches have different numbers of words: one word for the first text, many for the
    others."""
    model = tiny_tags.backbone().double()
    rows = data(40)
    found = taylor_scores(model, rows)
    plain = copy.deepcopy(model)
    batch = collate([rows[index] for index in range(len(rows))])
    plain(**batch).loss.backward()
    attention = plain.bert.encoder.layer[1].attention.self
    expected = (
        sum(
            (each.weight * each.weight.grad).abs().view(4, 8, -1).mean(dim=(1, 2))
            for each in (attention.query, attention.key, attention.value)
        )
        / 3
    )
    scores = torch.tensor([found[1, head] for head in range(4)], dtype=torch.float64)
    torch.testing.assert_close(scores, expected, rtol=1e-5, atol=1e-9)


def test_the_ensemble_loss_smooths_labels_of_tokens():
    hydra = tiny_tags.fused()
    batch = hydra_transformers.data.batches.collate([data(6)[index] for index in range(6)])
    outputs = hydra(**batch)
    torch.testing.assert_close(EnsembleLoss()(outputs, batch["labels"]), outputs.loss)
    expected = torch.stack(
        [
            F.cross_entropy(each.flatten(0, 1), batch["labels"].flatten(), label_smoothing=0.1)
            for each in outputs.member_logits.unbind(1)
        ]
    ).mean()
    torch.testing.assert_close(EnsembleLoss(label_smoothing=0.1)(outputs, batch["labels"]), expected)


def test_adapters_and_pruned_heads_work_on_classifiers_of_tokens():
    peft = pytest.importorskip("peft")
    hydra = tiny_tags.fused()
    batch = hydra_transformers.data.batches.collate([data(4)[index] for index in range(4)])
    adapted = peft.get_peft_model(hydra, lora_config(hydra, r=2))
    adapted(**batch).loss.backward()
    trained = [name for name, each in adapted.named_parameters() if each.grad is not None and each.grad.any()]
    assert any("lora_B" in name for name in trained) and any("classifier" in name for name in trained)
    pruned = prune_heads(tiny_tags.backbone(), {0: [1, 2]})
    assert type(pruned).__name__ == "HydraBertForTokenClassification" and pruned.config.kept_heads[0] == [[0, 3]]
