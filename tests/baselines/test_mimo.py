"""MIMO: one network that reads several inputs at once and answers each of them."""

import copy

import pytest
import torch
from torch import nn
from transformers import Trainer, TrainingArguments

from hydra_transformers.baselines import MIMO, MIMOCollator
from hydra_transformers.cost import count_multiply_adds, count_parameters
from hydra_transformers.data.batches import collate
from hydra_transformers.data.prediction import predict
from hydra_transformers.training import compute_accuracy
from tests.families import BERT, CLIP, DECODERS, FAMILIES, MPNET, ROBERTA, VIT, bert_backbone, vit_backbone
from tests.training.tiny import QUIET, tiny_dataset, tiny_model


CLASSIFIERS = [
    family for family in FAMILIES if not family.has_towers and not family.reads_audio and family not in DECODERS
]
LABELS = torch.tensor([0, 1, 2, 0])


@pytest.mark.parametrize("family", CLASSIFIERS, ids=lambda family: family.name)
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
        plain, given = mimo(**VIT.inputs(), labels=LABELS), mimo(**VIT.inputs(), labels=LABELS, places=places)
    assert torch.equal(plain.member_logits, given.member_logits) and torch.equal(plain.loss, given.loss)


def test_a_part_of_a_batch_is_not_trained_on_as_if_it_were_the_whole():
    """`nn.DataParallel` splits the examples as well as the places, which are numbers of examples in the whole batch."""
    mimo, places = MIMO(vit_backbone(), num_members=2).train(), torch.tensor([[3, 1], [1, 0]])
    half = mimo._replicate_for_data_parallel()  # what it makes of a model for each GPU
    with pytest.raises(
        RuntimeError, match=r"nn\.DataParallel splits a batch, .*: train on one GPU .* or with a process"
    ):
        half(pixel_values=VIT.inputs()["pixel_values"][:2], labels=LABELS[:2], places=places)


def test_with_rho_one_the_loss_is_that_of_the_model_times_the_members():
    model = vit_backbone()
    mimo, collator = MIMO(model, num_members=3).train(), MIMOCollator(3, rho=1.0, repetitions=2)
    places = collator.places(4)
    assert torch.equal(places, places[:, :1].expand(-1, 3))
    loss = mimo(**VIT.inputs(), labels=LABELS, places=places).loss
    expected = 3 * model(**VIT.inputs(), labels=LABELS).loss
    torch.testing.assert_close(loss, expected)
    accumulated = mimo(**VIT.inputs(), labels=LABELS, places=places, num_items_in_batch=torch.tensor(8)).loss
    torch.testing.assert_close(accumulated, expected / 2)


def test_every_example_is_in_each_place_as_often_as_it_is_repeated():
    torch.manual_seed(0)
    for rho in (0.0, 0.3, 1.0):
        places = MIMOCollator(3, rho=rho, repetitions=4).places(5)
        assert places.shape == (20, 3)
        assert all(torch.equal(places[:, member].bincount(), torch.full((5,), 4)) for member in range(3))
        assert (places == places[:, :1]).all(dim=1).sum() >= 20 * rho


def test_with_rho_zero_the_places_are_independent():
    torch.manual_seed(0)
    collator = MIMOCollator(2, rho=0.0, repetitions=1)
    equal = torch.cat([(draw[:, 0] == draw[:, 1]).float() for draw in (collator.places(8) for _ in range(500))])
    assert equal.mean() == pytest.approx(1 / 8, abs=0.02)


@pytest.mark.parametrize("family", [VIT, BERT], ids=lambda family: family.name)
def test_saved_and_loaded_it_answers_the_same(family, tmp_path):
    mimo = MIMO(family.backbone(), num_members=2)
    with torch.no_grad():
        for parameter in mimo.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
    mimo.save_pretrained(tmp_path)
    loaded = MIMO.from_pretrained(tmp_path)
    torch.testing.assert_close(loaded.state_dict(), mimo.state_dict(), rtol=0, atol=0)
    places = torch.tensor([[0, 1], [2, 0]])
    mixed = {name: value[places] for name, value in family.inputs().items()}
    assert torch.equal(loaded.member_logits(**mixed), mimo.eval().member_logits(**mixed))
    plain = type(mimo.model).from_pretrained(tmp_path / "model")
    if family is VIT:  # one model, whose logits are the mean of the members'
        torch.testing.assert_close(predict(plain, VIT.inputs())[:, 0], predict(mimo, VIT.inputs()).mean(1))


@pytest.mark.parametrize("name", ["vit", "bert"])
def test_it_trains_with_trainer(name, tmp_path):
    """Evaluation answers to each row, although the collator draws places for it, too; the user's model stays as it was."""
    model, rows = tiny_model(name, "backbone"), tiny_dataset(name)
    before = copy.deepcopy(model.state_dict())
    mimo = MIMO(model, num_members=2)
    before_training = {each: parameter.detach().clone() for each, parameter in mimo.named_parameters()}
    trainer = Trainer(
        model=mimo,
        args=TrainingArguments(tmp_path, max_steps=2, learning_rate=0.01, save_strategy="no", **QUIET),
        data_collator=MIMOCollator(2, repetitions=2),
        train_dataset=rows,
        eval_dataset=rows,
        compute_metrics=compute_accuracy,
    )
    trainer.train()
    own = {"vit": f"model.{mimo.projection}.weight", "bert": "embeddings.mixing"}[name]
    for each in (own, "model.classifier.weight"):
        assert not torch.equal(before_training[each], mimo.get_parameter(each))
    expected = predict(mimo, collate(rows)).softmax(-1).mean(1).argmax(-1) == torch.arange(12) % 3
    assert trainer.evaluate()["eval_accuracy"] == pytest.approx(expected.float().mean().item())
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


@pytest.mark.slow
def test_in_training_members_become_independent():
    torch.manual_seed(0)
    rows = tiny_dataset("vit", 96)
    data, collator = collate(rows), MIMOCollator(2, rho=0.2, repetitions=2)
    mimo = MIMO(tiny_model("vit", "backbone", num_hidden_layers=1), num_members=2)
    start = mimo.independence(rows)
    optimizer = torch.optim.AdamW(mimo.train().parameters(), lr=3e-3)
    for _ in range(120):
        chosen = torch.randperm(96)[:24]
        optimizer.zero_grad()
        mimo(**{name: value[chosen] for name, value in data.items()}, places=collator.places(24)).loss.backward()
        optimizer.step()
    end = mimo.independence(rows)
    assert min(end.together) > 0.9 and min(end.own) > 0.75 > max(start.own)
    assert max(end.others) < 1 / 3 and mimo.training


@pytest.mark.slow
def test_it_costs_about_one_forward():
    """Of all places the projection, and a head each."""
    model = vit_backbone()
    mimo = MIMO(model, num_members=3)
    patches, head = 4 * 3 * 4 * 4 * 32, 32 * 5
    assert count_multiply_adds(mimo) == count_multiply_adds(model) + 2 * (patches + head)
    assert count_parameters(mimo) == count_parameters(model) + 2 * (3 * 4 * 4 * 32 + 33 * 5)
    texts, tokens = bert_backbone(), 16
    mixing, head = tokens * 32 * 32, 32 * texts.config.num_labels
    assert count_multiply_adds(MIMO(texts, num_members=3)) == count_multiply_adds(texts) + 3 * mixing + 2 * head


def test_bad_arguments_are_refused():
    for arguments, message in [
        ({"num_members": 0}, "num_members is 0"),
        ({"num_members": True}, "num_members is True"),
        ({"spread": -1.0}, "spread is -1.0"),
    ]:
        with pytest.raises(ValueError, match=message):
            MIMO(vit_backbone(), **arguments)
    with pytest.raises(TypeError, match="model is a CLIPModel, no classifier"):
        MIMO(CLIP.backbone())
    for arguments, message in [
        ((0,), "num_members is 0"),
        ((2, 1.5), "rho is 1.5"),
        ((2, 0.5, 0), "repetitions is 0"),
        ((2, 0.5, 1.5), "repetitions is 1.5"),
    ]:
        with pytest.raises(ValueError, match=message):
            MIMOCollator(*arguments)
    with pytest.raises(ValueError, match="data has no labels"):
        MIMO(vit_backbone()).independence([VIT.inputs()])
    with pytest.raises(ValueError, match="data has no batch with examples of several classes"):
        MIMO(vit_backbone().float()).independence(tiny_dataset("vit", 9)[::3])


@pytest.mark.parametrize("family", [ROBERTA, MPNET], ids=lambda family: family.name)
def test_texts_that_are_filled_up_in_front_are_read_as_the_model_does(family):
    """Such a model numbers only what is no padding, and where it reads embeddings does not see that."""
    model = family.backbone()
    padding = model.config.pad_token_id
    tokens = torch.tensor([[padding, padding, 5, 6], [padding, 7, 8, 9]])
    inputs = {"input_ids": tokens, "attention_mask": (tokens != padding).long()}
    expected = model(**inputs).logits.unsqueeze(1).expand(-1, 2, -1)
    torch.testing.assert_close(predict(MIMO(model, num_members=2), inputs), expected)


def test_labels_that_do_not_go_into_the_places_are_no_labels_of_these():
    """Trainer keeps them back where it computes the loss itself, as for label smoothing."""
    mimo, places = MIMO(vit_backbone(), num_members=2), torch.tensor([[0, 1], [1, 0], [2, 3], [3, 2]])
    with pytest.raises(ValueError, match="leave compute_loss_func and label smoothing out"):
        mimo.train()(**VIT.inputs(), places=places, num_items_in_batch=4)


@pytest.mark.parametrize("rho", [0.8, 0.9])
def test_the_share_of_rows_that_are_mixed_is_rounded(rho):
    """10 * (1 - 0.9) is a little less than one."""
    torch.manual_seed(0)
    places = MIMOCollator(50, rho=rho, repetitions=1).places(20)
    assert (places != places[:, :1]).any(dim=1).sum() == round(20 * (1 - rho))


def test_many_places_are_joined_to_the_channels_of_one_image():
    """3 * 49 * (1 / 49) is a little less than three."""
    torch.testing.assert_close(
        predict(MIMO(vit_backbone(), num_members=49).plain_model(), VIT.inputs()),
        predict(vit_backbone(), VIT.inputs()),
    )
