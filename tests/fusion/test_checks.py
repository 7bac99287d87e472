"""A model that computes something else than its class and config say is refused; what computes the same is accepted."""

import copy
import functools
import logging

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import ViTConfig, ViTForImageClassification, ViTModel, WhisperConfig, WhisperForConditionalGeneration

from hydra_transformers import HydraBertModel, HydraViTModel, HydraWhisperModel
from hydra_transformers.fusion import probe
from hydra_transformers.pruning import ablated, extract_circuit, head_scores, prune_heads
from tests.families import (
    BERT,
    CLIP,
    DEBERTA,
    GEMMA3,
    LLAMA,
    MODERNBERT,
    ROBERTA,
    VIT,
    WHISPER,
    bert_backbone,
    images,
    padded_texts,
    randomise,
    vit_backbone,
)
from tests.models.test_constructors import slice_attention


class LoRALinear(nn.Linear):
    """As people write it: the weights of the linear layer, and two small matrices beside it."""

    def __init__(self, linear):
        super().__init__(linear.in_features, linear.out_features, dtype=linear.weight.dtype)
        self.load_state_dict(linear.state_dict())
        self.lora_A = nn.Parameter(torch.randn(2, linear.in_features, dtype=linear.weight.dtype))
        self.lora_B = nn.Parameter(torch.randn(linear.out_features, 2, dtype=linear.weight.dtype))

    def forward(self, states):
        return super().forward(states) + states @ self.lora_A.t() @ self.lora_B.t()


class HandMadeViT(ViTForImageClassification):
    def forward(self, *args, **kwargs):
        outputs = super().forward(*args, **kwargs)
        outputs.logits = outputs.logits.flip(-1)
        return outputs


class Named(ViTForImageClassification):
    """Another class that computes the same."""


def with_lora_by_hand(vit):
    vit.vit.layers[0].attention.q_proj = LoRALinear(vit.vit.layers[0].attention.q_proj)


def with_a_forward_of_its_own(vit):
    plain = vit.classifier.forward
    vit.classifier.forward = lambda states: plain(states) + 1


def double(module, args, outputs=None):
    return (2 * args[0],) if outputs is None else 2 * outputs


def slice_heads(vit):
    attention = vit.vit.layers[1].attention
    slice_attention([attention.q_proj, attention.k_proj, attention.v_proj], attention.o_proj, [0, 2, 3])
    attention.num_attention_heads = 3


TANH = functools.partial(nn.functional.gelu, approximate="tanh")
DIFFERENT = r"gives different outputs than its Hydra: for random inputs their logits differ by"
CHANGES = {
    "lora by hand": (with_lora_by_hand, r"has the parameter 'vit.layers.0.attention.q_proj.lora_A'"),
    "heads sliced by hand": (slice_heads, r"its config has \(96, 32\)|not 4 heads of 8"),
    "new parameter": (
        lambda vit: vit.vit.layers[0].register_parameter("scale", nn.Parameter(torch.ones(1))),
        r"has the parameter 'vit.layers.0.scale'",
    ),
    "hook": (lambda vit: vit.vit.layers[1].register_forward_hook(double), r"a forward hook on vit.layers.1 "),
    "pre-hook": (
        lambda vit: vit.vit.layers[1].attention.o_proj.register_forward_pre_hook(double),
        r"a forward hook on vit.layers.1.attention.o_proj ",
    ),
    "forward of an instance": (with_a_forward_of_its_own, DIFFERENT),
    "forward of a subclass": (lambda vit: setattr(vit, "__class__", HandMadeViT), DIFFERENT),
    "activation": (lambda vit: setattr(vit.vit.layers[0].mlp, "activation_fn", nn.ReLU()), DIFFERENT),
    "its function": (lambda vit: setattr(vit.vit.layers[0].mlp.activation_fn, "act", TANH), DIFFERENT),
    "norm": (lambda vit: setattr(vit.vit.layers[0].layernorm_before, "eps", 0.1), DIFFERENT),
    "activation in the config": (lambda vit: setattr(vit.config, "hidden_act", "relu"), DIFFERENT),
    "norm in the config": (lambda vit: setattr(vit.config, "layer_norm_eps", 0.1), DIFFERENT),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_computes_something_else_is_refused(name):
    backbone, (change, words) = vit_backbone(), CHANGES[name]
    change(backbone)
    batches = [{"pixel_values": images(), "labels": torch.tensor([0, 1, 2, 3])}]
    for use in (
        lambda: VIT.hydra.from_backbone(backbone, {0: [1]}),
        lambda: VIT.hydra.from_pruned_members([vit_backbone(1), backbone]),
        lambda: head_scores(backbone, batches),
        lambda: extract_circuit(backbone, batches, budget=1),
    ):
        with pytest.raises(ValueError, match=words):
            use()


def test_no_member_is_made_while_heads_are_turned_off():
    for model in (vit_backbone(), prune_heads(vit_backbone())):
        with ablated(model, {0: [1]}), pytest.raises(ValueError, match=r"a forward hook on .*leave the block"):
            prune_heads(model)
        prune_heads(model)


@pytest.mark.parametrize("fused", [True, False])
def test_a_changed_hydra_is_refused(fused):
    hydra = VIT.fused(shared=()) if fused else VIT.members()[0]
    mlp = hydra.vit.layers[0].mlp
    (mlp[2] if fused else mlp).activation_fn = nn.ReLU()
    with pytest.raises(ValueError, match=r"member_logits differ"):
        hydra.member(-1)
    with pytest.raises(ValueError, match=r"members\[0\].*member_logits differ"):
        VIT.hydra.from_pruned_members([hydra, vit_backbone(7)])
    VIT.hydra.from_pruned_members([hydra, vit_backbone(7)], check=False)


def test_a_replaced_pooler_of_a_classifier_is_refused():
    backbone = bert_backbone()
    backbone.bert.pooler.activation = nn.Identity()
    with pytest.raises(ValueError, match=DIFFERENT):
        BERT.hydra.from_backbone(backbone)


def test_a_method_that_forward_calls_is_noticed(monkeypatch):
    backbone = vit_backbone()
    backbone.vit.embeddings.position_embeddings.requires_grad_(False)
    monkeypatch.setattr(
        type(backbone.vit.embeddings), "interpolate_pos_encoding", lambda self, *sizes: self.position_embeddings
    )
    prune_heads(backbone)  # which no answer depends on
    rotary = LLAMA.backbone()
    rotary.model.rotary_emb.inv_freq *= 3  # a buffer that no checkpoint has
    rotary.model.rotary_emb.original_inv_freq *= 3
    with pytest.raises(ValueError, match=DIFFERENT):
        prune_heads(rotary)
    with pytest.raises(ValueError, match=rf"members\[1\] .*{DIFFERENT}"):
        LLAMA.hydra.from_pruned_members([LLAMA.backbone(1), rotary])
    assert LLAMA.hydra.from_backbone(rotary, check=False).num_members == 1
    assert LLAMA.hydra.from_pruned_members([LLAMA.backbone(1), rotary], check=False).num_members == 2


@pytest.mark.parametrize(
    ("family", "dtype"),
    [(LLAMA, torch.float64), (VIT, torch.float32), (BERT, torch.bfloat16), (CLIP, torch.float16)],
    ids=["llama-float64", "vit-float32", "bert-bfloat16", "clip-float16"],
)
def test_the_probe_takes_every_dtype_and_notices_changes_in_it(family, dtype):
    backbone = family.backbone().to(dtype)
    hydra = family.hydra.from_backbone(backbone)
    assert hydra.dtype == dtype
    with torch.no_grad():
        for parameter in hydra.parameters():
            parameter.copy_(parameter.flip(-1))
    with pytest.raises(ValueError, match="gives different outputs"):
        probe.check_same_outputs(hydra, backbone, "model")


def test_the_probe_leaves_no_trace():
    backbone = vit_backbone()
    backbone.train()
    backbone.vit.layers[0].eval()
    random_state = torch.get_rng_state()
    modes = [module.training for module in backbone.modules()]
    with torch.autocast("cpu", torch.bfloat16):
        prune_heads(backbone)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert [module.training for module in backbone.modules()] == modes
    assert all(parameter.grad is None for parameter in backbone.parameters())


def test_a_backbone_that_cannot_run_is_taken_with_a_warning(monkeypatch, caplog):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)

    def stop(*_):
        raise RuntimeError("no such kernel on this device")

    monkeypatch.setattr(probe, "outputs_of", stop)
    assert VIT.hydra.from_backbone(vit_backbone()).num_members == 1
    assert "could not be compared with its Hydra" in caplog.text
    assert "no such kernel" in caplog.text


# Accepted


def train_with_checkpoints(vit):
    vit.train().gradient_checkpointing_enable()
    vit.enable_input_require_grads()


def record_outputs(vit):
    vit(images(), output_hidden_states=True, output_attentions=True)  # which leaves hooks of Transformers


def set_dropout(vit):
    for module in vit.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.3


def set_head(vit):
    vit.classifier, vit.config.num_labels = nn.Linear(32, 7, dtype=torch.float64), 7


HARMLESS = {
    "adapters that are merged": lambda vit: get_peft_model(
        vit, LoraConfig(target_modules=["q_proj"])
    ).merge_and_unload(),
    "training": train_with_checkpoints,
    "recorded outputs": record_outputs,
    "dropout": set_dropout,
    "a new head": set_head,
    "a loss beside it": lambda vit: vit.add_module("loss_function_of_mine", nn.CrossEntropyLoss()),
    "eager": lambda vit: vit.set_attn_implementation("eager"),
    "a subclass": lambda vit: setattr(vit, "__class__", Named),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_what_computes_the_same_is_accepted(name):
    vit = vit_backbone()
    HARMLESS[name](vit)
    assert VIT.hydra.from_backbone(vit, {0: [1]}).num_members == 1


def test_parts_that_a_hydra_has_no_use_for_are_accepted():
    config = ViTConfig(**{**vit_backbone().config.to_dict(), "num_labels": 5})
    assert HydraViTModel.from_backbone(ViTModel(config, use_mask_token=True)).pooler is not None
    assert HydraViTModel.from_backbone(ViTModel(config, add_pooling_layer=False)).pooler is None
    classifier = bert_backbone()
    classifier.classifier = nn.Sequential(nn.Linear(32, 8), nn.ReLU())  # which the base model does not read
    assert HydraBertModel.from_backbone(classifier).num_members == 1


# Members that are one model


@pytest.mark.slow
@pytest.mark.parametrize("family", [VIT, CLIP], ids=["vit", "clip"])
def test_equal_members_are_refused_unless_asked_for(family):
    backbone = family.backbone()
    equal = copy.deepcopy(family.backbone())
    with pytest.raises(ValueError, match=r"members.0. and members.2. have the same heads and weights.*allow_equal"):
        family.hydra.from_pruned_members([backbone, family.backbone(1), equal])
    with pytest.raises(ValueError, match=r"there is one member, members.0., .*pass several, or allow_equal"):
        family.hydra.from_pruned_members([backbone])
    assert family.hydra.from_pruned_members([backbone, equal], allow_equal=True).num_members == 2
    assert family.hydra.from_pruned_members([backbone], allow_equal=True).num_members == 1
    heads = [family.in_every_tower({0: [head]}) for head in (1, 2)]
    pruned = [family.hydra.from_backbone(backbone, each) for each in heads]
    assert family.hydra.from_pruned_members(pruned).num_members == 2


def test_members_that_hardly_differ_are_told_of(monkeypatch, caplog):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    backbone = vit_backbone()
    close = vit_backbone()
    with torch.no_grad():
        for parameter in close.parameters():
            parameter.mul_(1 + 1e-5)
    VIT.hydra.from_pruned_members([backbone, vit_backbone(1)], shared=())
    assert "hardly differ" not in caplog.text
    VIT.hydra.from_pruned_members([backbone, vit_backbone(1), close], shared=())
    assert "members[0] and members[2] hardly differ: for random inputs their outputs are" in caplog.text


def test_roberta_counts_positions_behind_its_padding_token_in_the_probe_too():
    backbone = ROBERTA.backbone(0, max_position_embeddings=6, pad_token_id=1)
    assert ROBERTA.hydra.from_backbone(backbone).num_members == 1


# Wrongly refused once


@torch.no_grad()
@pytest.mark.parametrize("family", [LLAMA, MODERNBERT], ids=lambda family: family.name)
def test_positions_scaled_by_the_length_of_a_text_leave_a_model_as_it_is(family):
    rope = {"rope_type": "dynamic", "rope_theta": 20.0, "factor": 4.0}
    kinds = {kind: dict(rope) for kind in ("full_attention", "sliding_attention")}
    backbone = family.backbone(rope_parameters=rope if family is LLAMA else kinds)
    hydra = family.hydra.from_backbone(backbone)
    texts = padded_texts()
    for model in (backbone, hydra):
        model(**padded_texts(tokens=24))  # longer than what it was trained on
    expected = backbone(**texts).logits
    for found in (family.hydra.from_backbone(backbone), hydra.member(0)):
        torch.testing.assert_close(found(**texts).member_logits[:, 0], expected)


def test_a_float64_model_with_constants_in_float32_is_accepted():
    """Gemma's factor on embeddings, the root of their width, which moves its logits by 1.7e-6."""
    backbone = GEMMA3.backbone(hidden_size=24, num_hidden_layers=6, layer_types=["sliding_attention"] * 6)
    assert GEMMA3.hydra.from_backbone(backbone).num_members == 1


@torch.no_grad()
def test_a_deberta_with_a_norm_of_distances_that_it_does_not_compute_is_itself():
    backbone = DEBERTA.backbone(relative_attention=False, norm_rel_ebd="layer_norm", position_biased_input=True)
    found = DEBERTA.hydra.from_backbone(backbone)(**padded_texts()).member_logits[:, 0]
    torch.testing.assert_close(found, backbone(**padded_texts()).logits, atol=1e-10, rtol=0)


@torch.no_grad()
def test_the_encoder_of_a_whisper_with_a_decoder_is_taken():
    sizes = {"decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 8, "vocab_size": 40}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    config = WhisperConfig(**{**WHISPER.backbone().config.to_dict(), **sizes, **tokens})
    whole = randomise(WhisperForConditionalGeneration(config).double(), 0)
    expected = whole.model.encoder(**WHISPER.inputs()).last_hidden_state
    encoder = HydraWhisperModel.from_backbone(whole)
    torch.testing.assert_close(encoder(**WHISPER.inputs()).last_hidden_state, expected, atol=1e-10, rtol=0)
    classifier = WHISPER.hydra.from_backbone(whole, num_labels=3)
    torch.testing.assert_close(classifier.encoder(**WHISPER.inputs()).last_hidden_state, expected, atol=1e-10, rtol=0)
