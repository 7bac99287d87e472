"""MIMO: one network that reads several inputs at once and answers each of them."""

import pytest
import torch
from torch import nn

from hydra_transformers.baselines import MIMO, MIMOCollator
from hydra_transformers.data.prediction import predict
from tests.families import BEIT, BERT, MPNET, ROBERTA, VIT, bert_backbone, each_of, vit_backbone


LABELS = torch.tensor([0, 1, 2, 0])


@each_of([VIT, BERT, MPNET, BEIT])
def test_with_the_same_input_in_all_places_it_starts_as_the_model(family):
    expected = predict(family.backbone(), family.inputs())
    for members in (1, 3):
        mimo = MIMO(family.backbone(), num_members=members)
        member_logits = predict(mimo, family.inputs())
        torch.testing.assert_close(member_logits, expected.expand(-1, members, -1), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("family", [VIT, BERT], ids=lambda family: family.name)
def test_each_head_reads_all_places_by_projections_of_their_own(family):
    """Different inputs in the places: what is read is the sum over them."""
    model = family.backbone(**dict.fromkeys(family.dropout, 0.0))
    mimo = MIMO(model, num_members=2).train()
    places = torch.tensor([[0, 1], [1, 0]])
    output = mimo(**family.inputs(), places=places, labels=LABELS)
    assert output.member_logits.shape[:2] == (2, 2)
    assert not torch.allclose(output.member_logits[0], output.member_logits[1])  # the order of the places counts
    alike = MIMO(model, num_members=2, spread=0.0).train()
    same = alike(**family.inputs(), places=places).member_logits
    torch.testing.assert_close(same[0], same[1])  # and does not where they are read alike
    losses = [nn.functional.cross_entropy(output.member_logits[:, m], LABELS[places[:, m]]) for m in range(2)]
    torch.testing.assert_close(output.loss, sum(losses))


def test_a_token_counts_that_is_read_in_any_place():
    inputs = BERT.inputs()
    mimo = MIMO(bert_backbone(), num_members=2).eval()
    places = torch.tensor([[0, 3], [3, 0]])
    mixed = {name: value[places] for name, value in inputs.items()}
    expected = mimo.member_logits(**mixed | {"attention_mask": torch.ones_like(mixed["attention_mask"])})
    assert inputs["attention_mask"][0].all()  # the first text is the longest
    torch.testing.assert_close(mimo.member_logits(**mixed), expected)


def test_in_use_places_change_nothing():
    mimo = MIMO(vit_backbone(), num_members=2).eval()
    places = torch.tensor([[0, 1], [1, 0]])
    with torch.no_grad():
        plain = mimo(**VIT.inputs(), labels=LABELS)
        given = mimo(**VIT.inputs(), labels=LABELS, places=places)
    assert torch.equal(plain.member_logits, given.member_logits) and torch.equal(plain.loss, given.loss)


def test_with_rho_one_the_loss_is_that_of_the_model_times_the_members():
    model = vit_backbone()
    mimo = MIMO(model, num_members=3).train()
    collator = MIMOCollator(3, rho=1.0, repetitions=2)
    places = collator.places(4)
    assert torch.equal(places, places[:, :1].expand(-1, 3))
    loss = mimo(**VIT.inputs(), labels=LABELS, places=places).loss
    expected = 3 * model(**VIT.inputs(), labels=LABELS).loss
    torch.testing.assert_close(loss, expected)
    accumulated = mimo(**VIT.inputs(), labels=LABELS, places=places, num_items_in_batch=torch.tensor(8)).loss
    torch.testing.assert_close(accumulated, expected / 2)


def test_every_example_is_in_each_place_as_often_as_it_is_repeated_and_the_share_of_mixed_rows_is_rounded():
    torch.manual_seed(0)
    for rho in (0.0, 0.3, 0.9, 1.0):  # 10 * (1 - 0.9) is a little less than one
        places = MIMOCollator(50, rho=rho, repetitions=4).places(5)
        assert places.shape == (20, 50)
        assert all(torch.equal(places[:, member].bincount(), torch.full((5,), 4)) for member in range(50))
        assert (places != places[:, :1]).any(dim=1).sum() == round(20 * (1 - rho))
    equal = torch.cat([draw[:, 0] == draw[:, 1] for draw in (MIMOCollator(2, 0.0, 1).places(8) for _ in range(500))])
    assert equal.float().mean() == pytest.approx(1 / 8, abs=0.02)  # the places are independent


@pytest.mark.parametrize("family", [ROBERTA, MPNET], ids=lambda family: family.name)
def test_texts_that_are_filled_up_in_front_are_read_as_the_model_does(family):
    """Such a model numbers only what is not padding, and where it reads embeddings does not see that."""
    model = family.backbone()
    padding = model.config.pad_token_id
    tokens = torch.tensor([[padding, padding, 5, 6], [padding, 7, 8, 9]])
    inputs = {"input_ids": tokens, "attention_mask": (tokens != padding).long()}
    expected = model(**inputs).logits.unsqueeze(1).expand(-1, 2, -1)
    torch.testing.assert_close(predict(MIMO(model, num_members=2), inputs), expected)


@pytest.mark.parametrize("problem", ["multi_label_classification", "regression"])
def test_a_mimo_learns_several_numbers_per_row(problem):
    """As many as it has members: the labels' columns are not the members'."""
    model = vit_backbone(num_labels=3, problem_type=problem)
    mimo = MIMO(model, num_members=3)
    labels = torch.rand(4, 3, dtype=torch.float64).round()
    expected = 3 * model(**VIT.inputs(), labels=labels).loss
    torch.testing.assert_close(mimo.eval()(**VIT.inputs(), labels=labels).loss, expected)
    places = torch.tensor([[0, 0, 0], [1, 2, 3]])
    output = mimo.train()(**VIT.inputs(), labels=labels, places=places)
    loss = nn.functional.mse_loss if problem == "regression" else nn.functional.binary_cross_entropy_with_logits
    torch.testing.assert_close(output.loss, 3 * loss(output.member_logits, labels[places]))


def test_a_mimo_of_a_single_output_takes_one_number_per_row():
    model = bert_backbone(num_labels=1, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    labels = torch.rand(4, dtype=torch.float64)
    places = torch.tensor([[0, 1], [2, 3]])
    output = MIMO(model, num_members=2).train()(**BERT.inputs(), labels=labels, places=places)
    torch.testing.assert_close(output.loss, 2 * (output.member_logits.squeeze(-1) - labels[places]).square().mean())
