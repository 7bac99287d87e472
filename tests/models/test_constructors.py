"""from_backbone, from_pruned_members and member: what carries over, what comes back, what is refused."""

import copy
import logging

import pytest
import torch
from transformers import BeitForMaskedImageModeling, BertModel, ViTModel

from hydra_transformers import AutoHydra, HydraBertModel, HydraViTModel
from tests.families import (
    BEIT,
    BERT,
    CLIP,
    DEBERTA,
    FEW,
    GEMMA3,
    LLAMA,
    OWN_LAYERS,
    QWEN3,
    VIT,
    bert_backbone,
    clip_backbone,
    each_of,
    images,
    padded_texts,
    randomise,
    vit_backbone,
)


def state(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_same_state(left, right):
    assert left.keys() == right.keys()
    for name in left:
        assert torch.equal(left[name], right[name]), name


def slice_attention(projections, output, kept, head_dim=8):
    """Head pruning as users do it on live modules: fewer rows in q, k, v, fewer columns in the output projection."""
    index = torch.cat([torch.arange(head * head_dim, (head + 1) * head_dim) for head in kept])
    for linear in projections:
        linear.weight = torch.nn.Parameter(linear.weight[index])
        linear.bias = torch.nn.Parameter(linear.bias[index])
        linear.out_features = len(index)
    output.weight = torch.nn.Parameter(output.weight[:, index])
    output.in_features = len(index)


# What carries over


@each_of(FEW)
def test_members_are_left_as_they_were_and_share_no_storage_with_the_hydra(family):
    members = [family.backbone(), *family.members()[1:]]
    before = [state(member) for member in members]
    random_state = torch.get_rng_state()
    hydra = family.hydra.from_pruned_members(members)
    assert torch.equal(torch.get_rng_state(), random_state)
    with torch.no_grad():
        for parameter in hydra.parameters():
            parameter.zero_()
    for member, expected in zip(members, before, strict=True):
        assert_same_state(state(member), expected)


def test_kept_heads_are_the_heads_that_were_not_pruned():
    hydra = VIT.hydra.from_pruned_members(
        [vit_backbone(0), VIT.hydra.from_backbone(vit_backbone(1), {0: [2], 2: [0, 1, 2, 3]})]
    )
    everything = [0, 1, 2, 3]
    assert hydra.config.kept_heads == [[everything, [0, 1, 3]], [everything, everything], [everything, []]]


def test_pruning_a_pruned_member_further_counts_in_backbone_heads():
    once = VIT.hydra.from_backbone(vit_backbone(), {0: [1]})
    twice = VIT.hydra.from_backbone(once, {0: [3], 1: [0]})
    at_once = VIT.hydra.from_backbone(vit_backbone(), {0: [1, 3], 1: [0]})
    assert twice.config.kept_heads == at_once.config.kept_heads
    assert_same_state(state(twice), state(at_once))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_labels_dtype_and_attention_backend_carry_over(dtype):
    labels = {0: "cat", 1: "dog", 2: "bird", 3: "fish", 4: "frog"}
    backbones = [
        vit_backbone(seed, id2label=labels, label2id={v: k for k, v in labels.items()}).to(dtype) for seed in (0, 1)
    ]
    backbones[0].set_attn_implementation("eager")
    hydra = VIT.hydra.from_pruned_members(backbones)
    assert hydra.config.id2label == labels and hydra.config.label2id["fish"] == 3
    assert {parameter.dtype for parameter in hydra.parameters()} == {hydra.dtype} == {dtype}
    assert hydra.config._attn_implementation == "eager"


@each_of([VIT, CLIP])
def test_the_mean_of_equal_members_is_bit_for_bit_the_member(family):
    member = family.hydra.from_backbone(family.backbone()).float()
    for count in (2, 3, 5, 7) if family is VIT else (3,):  # the mean is taken by the same lines for all
        found = dict(family.hydra.from_pruned_members([member] * count, allow_equal=True).named_parameters())
        for name, tensor in member.named_parameters():
            if name in found and found[name].shape == tensor.shape:
                assert torch.equal(found[name], tensor), name


# Kinds of members


@each_of([VIT, CLIP])
@torch.no_grad()
def test_members_may_be_plain_models_hydras_and_one_member_hydras(family):
    inputs = family.inputs()
    backbones = [family.backbone(seed) for seed in range(4)]
    pair = family.hydra.from_pruned_members(backbones[1:3], shared=())
    hydra = family.hydra.from_pruned_members([backbones[0], pair, family.hydra.from_backbone(backbones[3])], shared=())
    assert hydra.num_members == 4
    expected = torch.stack([family.logits(backbone, **inputs) for backbone in backbones], dim=1)
    torch.testing.assert_close(hydra(**inputs).member_logits, expected, atol=1e-12, rtol=1e-10)


@torch.no_grad()
@pytest.mark.parametrize("with_pooler", [True, False])
def test_base_models_become_base_hydras(with_pooler):
    vit = randomise(ViTModel(vit_backbone().config, add_pooling_layer=with_pooler).double(), 0)
    hydra = HydraViTModel.from_pruned_members([HydraViTModel.from_backbone(vit, {0: [1]}), vit], shared=())
    outputs = hydra(images())
    expected = vit(images())
    states = outputs.member_last_hidden_state
    torch.testing.assert_close(states[:, 1], expected.last_hidden_state, atol=1e-12, rtol=1e-10)
    assert (outputs.pooler_output is not None) == with_pooler
    if with_pooler:
        torch.testing.assert_close(outputs.member_pooler_output[:, 1], expected.pooler_output, atol=1e-12, rtol=1e-10)

    bert = randomise(BertModel(bert_backbone().config, add_pooling_layer=with_pooler).double(), 0)
    hydra = HydraBertModel.from_backbone(bert)
    texts = padded_texts()
    torch.testing.assert_close(
        hydra(**texts).last_hidden_state, bert(**texts).last_hidden_state, atol=1e-12, rtol=1e-10
    )


# Back again


@each_of(OWN_LAYERS)
@torch.no_grad()
def test_taking_an_ensemble_apart_and_fusing_it_again_is_the_identity(family):
    hydra = family.fused(shared=())
    members = [hydra.member(i) for i in range(hydra.num_members)]
    for member, original in zip(members, family.members(), strict=True):
        assert member.num_members == 1
        assert_same_state(state(member), state(original))
    again = family.hydra.from_pruned_members(members, shared=())
    assert again.config.kept_heads == hydra.config.kept_heads
    assert_same_state(state(again), state(hydra))


def test_a_member_that_never_met_a_loss_fuses_with_one_that_did():
    """Transformers writes the problem type into a model's config when the model first computes a loss."""
    trained = vit_backbone(1)
    trained(images(), labels=torch.tensor([0, 1, 2, 3]))
    assert trained.config.problem_type == "single_label_classification"
    hydra = VIT.hydra.from_pruned_members([vit_backbone(0), trained])
    assert hydra.config.problem_type == "single_label_classification"


# Refused


def fuse(*members, family=VIT, **options):
    return family.hydra.from_pruned_members(list(members), **options)


def fuse_with(family=VIT, **fields):
    """A backbone and another one, of these fields."""
    return fuse(family.backbone(), family.backbone(1, **fields), family=family)


def prune(heads, family=VIT):
    return family.hydra.from_backbone(family.backbone(), heads)


def in_two_dtypes():
    mixed = vit_backbone()
    mixed.classifier.bfloat16()
    return mixed


def broken(family, value):
    model = family.backbone(1)
    next(p for name, p in model.named_parameters() if "layers.1" in name or "layer.1" in name).data.view(-1)[3] = value
    return model


def with_patches_of_two():
    other = clip_backbone(1)
    other.config.vision_config.patch_size = 2
    return other


BOTH = {"problem_type": "multi_label_classification"}
NOT_FINITE = r"members\[1\]: .*1\..* has NaN or infinite values"
REFUSALS = [
    (lambda: fuse(vit_backbone(), bert_backbone()), ValueError, r"members\[1\] is a BertForSequenceClass.* \(bert\)"),
    (
        lambda: fuse_with(num_labels=6),
        ValueError,
        r"members\[1\] has num_labels = 6, members\[0\] has 5: pass models fine-tuned",
    ),
    (lambda: fuse_with(num_hidden_layers=2), ValueError, "num_hidden_layers = 2"),
    (lambda: fuse_with(hidden_size=64), ValueError, "hidden_size = 64"),
    (lambda: fuse_with(num_attention_heads=2), ValueError, "num_attention_heads = 2"),
    (lambda: fuse_with(image_size=16), ValueError, "image_size = 16"),
    (
        lambda: fuse_with(id2label=dict(enumerate("abcde"))),
        ValueError,
        "id2label = {0: 'a'.*fine-tuned on the same labels",
    ),
    (
        lambda: fuse_with(**BOTH),
        ValueError,
        r"problem_type = 'multi_label_classification'.*set it alike in their configs",
    ),
    (lambda: fuse_with(BERT, vocab_size=41), ValueError, r"members\[1\] has vocab_size = 41, members\[0\] has 40"),
    (
        lambda: fuse_with(LLAMA, is_causal=False),
        ValueError,
        r"members\[1\] has is_causal = False, members\[0\] has None",
    ),
    (lambda: fuse_with(DEBERTA, position_buckets=6), ValueError, "position_buckets = 6"),
    (lambda: fuse(clip_backbone(), with_patches_of_two(), family=CLIP), ValueError, r"members\[1\]"),
    (
        lambda: fuse(vit_backbone(), vit_backbone(1).float()),
        ValueError,
        r"members\[1\] is torch.float32 .* torch.float64",
    ),
    (
        lambda: fuse(in_two_dtypes(), vit_backbone()),
        ValueError,
        "several dtypes .*classifier.weight is torch.bfloat16",
    ),
    (lambda: fuse(vit_backbone(), broken(VIT, float("nan"))), ValueError, NOT_FINITE),
    (lambda: fuse(clip_backbone(), broken(CLIP, float("inf")), family=CLIP), ValueError, NOT_FINITE),
    (lambda: fuse(vit_backbone().to("meta")), ValueError, r"members\[0\] has weights that are not in memory"),
    (lambda: fuse(*VIT.members(), shared=("attention",)), ValueError, "shared names 'attention'"),
    (lambda: fuse(*VIT.members(), shared="mlp"), ValueError, "shared names 'm': members can share 'embeddings'"),
    (lambda: VIT.hydra.from_backbone(ViTModel(vit_backbone().config)), ValueError, "has no parameter 'vit"),
    (lambda: VIT.fused().member(3), IndexError, "member 3 does not exist: this Hydra has members 0 to 2"),
    (lambda: prune({3: [0]}), ValueError, "heads_to_prune names layer 3: the model has layers 0 to 2"),
    (lambda: prune({1: [4]}), ValueError, r"heads_to_prune\[1\] names 4: the heads are \[0, 1, 2, 3\]"),
    (lambda: prune({0: ["1"]}), ValueError, r"heads_to_prune\[0\] names '1'"),
    (
        lambda: prune({"vision": {0: [1]}}),
        ValueError,
        "heads_to_prune names layer vision: the model has layers 0 to 2",
    ),
    (lambda: prune({0: [1]}, CLIP), ValueError, r"heads_to_prune is {0: \[1\]}: pass {'vision'"),
    (lambda: prune([{0: [1]}], CLIP), ValueError, r"heads_to_prune is \[{0: \[1\]}\]: pass {'vision'"),
]


@pytest.mark.parametrize(("call", "error", "words"), REFUSALS, ids=[words for _, _, words in REFUSALS])
def test_what_cannot_be_built_is_refused(call, error, words):
    with pytest.raises(error, match=words):
        call()


# Members that were not made from one backbone


@each_of([VIT, CLIP])
@pytest.mark.parametrize("shared", [("mlp",), ("embeddings", "layernorm", "mlp")])
def test_members_of_networks_trained_apart_are_told_of(family, shared, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    apart = family.members()[:2]
    related = [apart[0], copy.deepcopy(apart[0])]
    with torch.no_grad():
        for parameter in related[1].parameters():
            parameter.add_(0.2 * parameter.abs().mean() * torch.randn_like(parameter))
    family.hydra.from_pruned_members(related, shared=shared)
    family.hydra.from_pruned_members(apart, shared=())
    assert "little in common" not in caplog.text
    family.hydra.from_pruned_members(apart, shared=shared)
    assert "members[1] has little in common with members[0]" in caplog.text
    assert "shared=() to keep each whole" in caplog.text


# New classifiers


def self_supervised_beit():
    config = BEIT.backbone(use_mean_pooling=True, use_mask_token=True, vocab_size=6).config
    return randomise(BeitForMaskedImageModeling(config).double(), 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "make", [self_supervised_beit, QWEN3.backbone, GEMMA3.backbone], ids=["beit-mean", "qwen3", "gemma3"]
)
def test_members_get_classifiers_of_their_own_on_one_pre_trained_encoder(make, tmp_path):
    """Also where the pre-trained model has no norm of the mean, and where its classifier is called `score`."""
    backbone = make()
    backbone.save_pretrained(tmp_path)
    for model in (backbone, tmp_path):
        hydra = AutoHydra.from_backbone(model, num_members=2, num_labels=7, trunk_layers=2)
        weights = hydra.classifier.weight.unflatten(0, (2, 7))
        assert weights.shape[:2] == (2, 7) and not torch.equal(weights[0], weights[1])
        expected = AutoHydra.from_backbone(backbone.base_model).layers[2].mlp.fc1.weight
        assert torch.equal(hydra.base_model.layers[2].mlp[1].fc1.weight, expected.to(weights.dtype))
