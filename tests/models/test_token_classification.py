"""Token classifiers keep the promises of every Hydra, for each token: against plain Transformers models, in float64."""

from dataclasses import replace

import pytest
import torch
import transformers
from torch.nn import functional as F

from hydra_transformers import AutoHydra
from hydra_transformers.cost import count_multiply_adds
from hydra_transformers.fusion import to_transformers
from hydra_transformers.fusion.structure import slots
from tests.families import (
    ALBERT,
    BERT,
    DEBERTA,
    DISTILBERT,
    ELECTRA,
    GEMMA,
    LLAMA,
    MODERNBERT,
    MPNET,
    ROBERTA,
    Family,
    backbone,
    each_of,
    padded_texts,
)


def with_token_head(family: Family) -> Family:
    """The row of a family, with Transformers' token classifier in place of its text classifier."""
    plain = family.backbone()
    name = type(plain).__name__.replace("ForSequence", "ForToken")
    fields = {key: value for key, value in plain.config.to_dict().items() if key != "architectures"}
    build = backbone(getattr(transformers, name), fields)
    return replace(family, name=f"{family.name}-tokens", backbone=build)


BERT_TOKENS = with_token_head(BERT)
every_family = each_of([BERT, ROBERTA, DEBERTA, DISTILBERT, ELECTRA, MPNET, MODERNBERT, LLAMA, GEMMA, ALBERT])


def tags(batch: int = 4, tokens: int = 7) -> torch.Tensor:
    """Labels of padded texts, with -100 on the padding and on some of the words."""
    labels = torch.randint(0, 3, (batch, tokens), generator=torch.Generator().manual_seed(1))
    labels[padded_texts(batch, tokens)["attention_mask"] == 0] = -100
    labels[:, 1] = -100
    return labels


def at_words(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """(batch, tokens, ...) -> (tokens that are not padding, ...)"""
    return values[mask.bool()]


@every_family
def test_every_promise_holds_for_each_token(family):
    family = with_token_head(family)
    inputs = family.inputs()
    labels = tags()
    mask = inputs["attention_mask"]
    backbones = [family.backbone(seed) for seed in range(3)]
    references = [family.ablate(model, heads) for model, heads in zip(backbones, family.heads_to_prune, strict=True)]
    with torch.no_grad():
        expected = [model(**inputs).logits for model in references]
        dense = family.hydra.from_backbone(backbones[0])
        torch.testing.assert_close(
            at_words(dense(**inputs).member_logits[:, 0], mask),
            at_words(backbones[0](**inputs).logits, mask),
            atol=1e-12,
            rtol=1e-10,
        )
        # pruned = ablated, and back to Transformers
        member = family.members()[0]
        torch.testing.assert_close(
            at_words(member(**inputs).member_logits[:, 0], mask), at_words(expected[0], mask), atol=1e-12, rtol=1e-10
        )
        plain = to_transformers(member, fill_up=True)
        assert type(plain) is family.hydra.backbone_classes[0]
        torch.testing.assert_close(
            at_words(plain(**inputs).logits, mask), at_words(expected[0], mask), atol=1e-12, rtol=1e-10
        )

    # fused with nothing shared = the mean of the members' probabilities, token by token
    hydra = family.fused(shared=())
    outputs = hydra(**inputs, labels=labels)
    assert outputs.logits.shape == (4, 7, 3) and outputs.member_logits.shape == (4, 3, 7, 3)
    mean = torch.stack([logits.softmax(-1) for logits in expected]).mean(0)
    torch.testing.assert_close(at_words(outputs.logits.softmax(-1), mask), at_words(mean, mask), atol=1e-10, rtol=0)
    # the loss is the mean of the members' losses, as Transformers computes each of them
    losses = [F.cross_entropy(logits.flatten(0, 1), labels.flatten()) for logits in expected]
    torch.testing.assert_close(outputs.loss, torch.stack(losses).mean(), atol=1e-10, rtol=0)
    with torch.no_grad():
        of_member = hydra.member(1)(**inputs).member_logits[:, 0]
        torch.testing.assert_close(at_words(of_member, mask), at_words(expected[1], mask), atol=1e-12, rtol=1e-10)

    check_members_never_mix(hydra, outputs.member_logits, mask)


def check_members_never_mix(hydra, member_logits, mask) -> None:
    slot_of = dict(slots(hydra))
    for i in range(3):
        hydra.zero_grad()
        at_words(member_logits[:, i], mask).square().sum().backward(retain_graph=True)
        for name, parameter in hydra.named_parameters():
            slot = slot_of[name]
            if slot.member is not None:
                assert slot.member == i or parameter.grad is None or parameter.grad.count_nonzero() == 0, name
            elif slot.rows is not None and len(slot.rows) == 3 and parameter.numel():
                for j, rows in enumerate(parameter.grad.split(slot.rows)):
                    assert j == i or rows.count_nonzero() == 0, f"{name}: member {i} depends on member {j}"


@every_family
@torch.no_grad()
def test_padding_on_either_side_changes_no_token(family):
    family = with_token_head(family)
    hydra = family.fused()
    text = padded_texts(batch=1, tokens=5)["input_ids"]
    alone = hydra(input_ids=text, attention_mask=torch.ones_like(text)).logits
    padding = torch.full((1, 2), hydra.config.pad_token_id)
    no = torch.zeros(1, 2).long()
    ones = torch.ones_like(text)
    finds_positions = family.name.startswith(("roberta", "xlm-roberta", "camembert", "mpnet"))  # by the padding
    tolerance = 1e-10 if family.gradient_tolerance == 1e-10 else 1e-5  # where backbones compute in float32
    for order in (1, -1):
        mask = torch.cat([ones, no][::order], dim=1)
        inputs = {"input_ids": torch.cat([text, padding][::order], dim=1), "attention_mask": mask}
        if not finds_positions:
            inputs["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)
        found = hydra(**inputs).logits[mask.bool()]
        torch.testing.assert_close(found, alone[0], atol=tolerance, rtol=0)


def test_the_loss_counts_the_labels_of_all_accumulated_batches():
    hydra = BERT_TOKENS.fused()
    inputs = padded_texts()
    labels = tags()
    count = (labels != -100).sum()
    mean = hydra(**inputs, labels=labels).loss
    torch.testing.assert_close(hydra(**inputs, labels=labels, num_items_in_batch=2 * count).loss, mean / 2)
    hydra.config.ensemble_loss = "ensemble"
    outputs = hydra(**inputs, labels=labels)
    expected = F.nll_loss(outputs.logits.log_softmax(-1).flatten(0, 1), labels.flatten())
    torch.testing.assert_close(outputs.loss, expected)


def test_labels_of_whole_texts_are_refused():
    hydra = BERT_TOKENS.fused()
    with pytest.raises(ValueError, match=r"takes a class index per token, \(4, 7\)"):
        hydra(**padded_texts(), labels=torch.tensor([0, 1, 2, 0]))
    with pytest.raises(ValueError, match="a token has one class of several"):
        AutoHydra.from_backbone(BERT_TOKENS.backbone(num_labels=1))


def test_the_last_layer_is_counted_for_every_token():
    whole = AutoHydra.from_backbone(BERT_TOKENS.backbone())
    tokens = 16
    hidden = 32
    inner = 40
    classes = 3
    layer = 4 * tokens * hidden**2 + 2 * tokens**2 * hidden + 2 * tokens * hidden * inner
    assert count_multiply_adds(whole) == 3 * layer + tokens * hidden * classes
    assert count_multiply_adds(whole) == count_multiply_adds(BERT_TOKENS.backbone())


@every_family
def test_a_saved_token_classifier_is_found_by_auto_hydra(family, tmp_path):
    family = with_token_head(family)
    hydra = family.fused()
    inputs = family.inputs()
    hydra.save_pretrained(tmp_path)
    loaded = AutoHydra.from_pretrained(tmp_path, dtype=torch.float64)
    assert type(loaded) is family.hydra is type(hydra)
    auto = transformers.AutoModelForTokenClassification.from_pretrained(tmp_path, dtype=torch.float64)
    with torch.no_grad():
        expected = hydra(**inputs).member_logits
        assert torch.equal(loaded(**inputs).member_logits, expected)
        assert torch.equal(auto(**inputs).member_logits, expected)
