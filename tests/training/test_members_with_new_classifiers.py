"""AutoHydra.from_backbone(num_members=...): members of one pre-trained model that differ by their
classifiers."""

import re

import pytest
import torch
from transformers import BertForMaskedLM

from hydra_transformers import AutoHydra, HydraBertForSequenceClassification, HydraBertModel
from tests.families import GEMMA, Family
from tests.training.tiny import FAMILIES, assert_same_weights, tiny_model, weights_of


NAMES = ["a", "b", "c", "d"]


def inputs_of(family: Family) -> dict[str, torch.Tensor]:
    inputs = family.inputs()
    return {"pixel_values": inputs["pixel_values"]} if family.has_towers else inputs


def test_members_start_equal_but_for_their_classifiers_and_the_trunk_runs_once(family):
    pretrained = family.backbone()
    before = weights_of(pretrained)
    hydra = AutoHydra.from_backbone(pretrained, num_members=3, class_names=NAMES, seed=3)
    assert hydra.num_members == 3 and list(hydra.config.id2label.values()) == NAMES
    assert (hydra.config.trunk_layers, hydra.config.shared) == (2, ["embeddings"])
    members = [hydra.member(index) for index in range(3)]
    different = {
        name
        for name, weight in members[0].named_parameters()
        if not torch.equal(weight, members[1].get_parameter(name))
    }
    assert different and not any(name.startswith(f"{hydra.base_model_prefix}.") for name in different)
    assert all(torch.equal(before[name], weight) for name, weight in pretrained.named_parameters())
    inputs = inputs_of(family)
    with torch.no_grad():
        together = hydra(**inputs).member_logits
        for index, member in enumerate(members):
            torch.testing.assert_close(member(**inputs).member_logits[:, 0], together[:, index], rtol=0, atol=1e-12)
    alone = AutoHydra.from_backbone(pretrained, class_names=NAMES, seed=4)
    assert alone.num_members == 1
    assert_same_weights(alone, members[1])


@pytest.mark.parametrize("name", ["vit", "bert", "wav2vec2"])
def test_a_folder_and_an_encoder_without_a_head_give_the_same_members(name, tmp_path):
    pretrained = tiny_model(name, "backbone")
    pretrained.save_pretrained(tmp_path)
    expected = AutoHydra.from_backbone(pretrained, num_members=2, num_labels=4)
    assert_same_weights(AutoHydra.from_backbone(tmp_path, num_members=2, num_labels=4), expected)
    assert_same_weights(AutoHydra.from_backbone(pretrained.base_model, num_members=2, num_labels=4), expected)
    whole = AutoHydra.from_backbone(tmp_path)
    assert_same_weights(whole, AutoHydra.from_backbone(pretrained))


def test_a_new_pooler_starts_equal_for_all_members():
    model = BertForMaskedLM(tiny_model("bert", "backbone").config)
    hydra = AutoHydra.from_backbone(model, num_members=2)
    first = hydra.member(0)
    second = hydra.member(1)
    assert torch.equal(first.bert.pooler.dense.weight, second.bert.pooler.dense.weight)
    assert not torch.equal(first.classifier.weight, second.classifier.weight)
    assert torch.equal(first.bert.embeddings.word_embeddings.weight, model.bert.embeddings.word_embeddings.weight)


@pytest.mark.parametrize(
    ("problem_type", "names"),
    [("regression", None), ("multi_label_classification", NAMES), ("token_classification", NAMES)],
)
def test_every_task_has_members_with_classifiers_of_their_own(problem_type, names):
    hydra = AutoHydra.from_backbone(
        tiny_model("bert", "backbone"), num_members=2, class_names=names, problem_type=problem_type
    )
    is_of_tokens = problem_type == "token_classification"
    assert hydra.config.problem_type == ("single_label_classification" if is_of_tokens else problem_type)
    assert ("Token" in type(hydra).__name__) == is_of_tokens and hydra.config.num_labels == len(names or "1")
    assert not torch.equal(hydra.member(0).classifier.weight, hydra.member(1).classifier.weight)


def test_trunk_shared_parts_and_heads_are_a_choice():
    pretrained = tiny_model("vit", "backbone")
    parts = ("embeddings", "layernorm", "mlp")
    state = torch.get_rng_state()
    hydra = AutoHydra.from_backbone(pretrained, {2: [0, 3]}, num_members=2, trunk_layers=1, shared=parts)
    assert hydra.config.trunk_layers == 1 and hydra.config.kept_heads[2] == [[1, 2], [1, 2]]
    own = AutoHydra.from_backbone(pretrained, {2: [0, 3]}, num_members=2, trunk_layers=1)
    assert own.num_parameters() > hydra.num_parameters()
    pixels = FAMILIES["vit"].inputs()["pixel_values"].float()
    torch.testing.assert_close(hydra(pixels).logits, own(pixels).logits)
    assert torch.equal(torch.get_rng_state(), state), "drawing classifiers leaves no trace in the random numbers"


def test_half_precision_on_disk_becomes_float32_and_what_a_config_says_is_not_rounded(tmp_path):
    """The scale of Gemma's words is not a whole number here."""
    GEMMA.backbone(hidden_size=24).bfloat16().save_pretrained(tmp_path)
    hydra = AutoHydra.from_backbone(tmp_path, num_members=2)
    assert hydra.dtype == torch.float32
    exact = AutoHydra.from_backbone(GEMMA.backbone(hidden_size=24).bfloat16().float(), num_members=2)
    ids = GEMMA.inputs()["input_ids"]
    torch.testing.assert_close(hydra(ids).logits, exact(ids).logits)


def test_what_cannot_be_built_gets_one_sentence():
    vit = tiny_model("vit", "backbone")
    bert = tiny_model("bert", "backbone")
    for options, words in (
        ({"num_members": 0}, "num_members is 0"),
        ({"class_names": ["a", "a"]}, "at least two different names"),
        ({"class_names": NAMES, "num_labels": 3}, "num_labels is 3 and class_names has 4"),
        ({"problem_type": "labels"}, "problem_type is 'labels'"),
        ({"num_members": 2, "shared": ("attention",)}, "shared names 'attention'"),
        ({"num_members": 2, "shared": ("mlp",)}, "shared has to name 'embeddings'"),
        ({"num_members": 2, "trunk_layers": 4}, "trunk_layers is 4"),
        ({"num_members": 2, "problem_type": "token_classification"}, "gets no classifier of tokens"),
    ):
        with pytest.raises(ValueError, match=re.escape(words)):
            AutoHydra.from_backbone(vit, **options)
    with pytest.raises(ValueError, match="has no classifier"):
        HydraBertModel.from_backbone(bert, num_members=2)
    with pytest.raises(ValueError, match="a vit: HydraBertForSequenceClassification gets"):
        HydraBertForSequenceClassification.from_backbone(vit, num_members=2)
    with pytest.raises(ValueError, match="hydra_bert, which gets no classifier"):
        AutoHydra.from_backbone(AutoHydra.from_backbone(bert), num_members=2)
    bert.config.intermediate_size = 44
    with pytest.raises(ValueError, match=r"has no bert\.encoder\.layer\.0\.\S+ of the right shape"):
        AutoHydra.from_backbone(bert, num_members=2)
