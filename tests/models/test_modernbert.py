"""ModernBERT: windows, rotary positions of two kinds, both ways of pooling."""

import pytest
import torch
from transformers.models.modernbert import modeling_modernbert

from hydra_transformers.models import modeling_hydra
from hydra_transformers.pruning.ablation import ablation_of
from hydra_transformers.training import lora_config
from tests.families import MODERNBERT, padded_texts


pytestmark = pytest.mark.slow  # families other than ViT, BERT, CLIP and Llama


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=1e-10, rtol=0)


@torch.no_grad()
def test_attentions_are_those_of_the_backbone_and_see_no_further_than_the_window():
    backbone = MODERNBERT.backbone()
    inputs = MODERNBERT.inputs()
    backbone.set_attn_implementation("eager")
    found = MODERNBERT.hydra.from_backbone(backbone)(**inputs, output_attentions=True).attentions
    expected = backbone(**inputs, output_attentions=True).attentions
    for mine, theirs in zip(found, expected, strict=True):
        close(mine, theirs)
    assert expected[0][0, 0, 0, 5] > 0 and expected[1][0, 0, 0, 5] == 0


def test_backends_that_know_windows_get_that_of_the_backbone(monkeypatch):
    def watched(module, given: list):
        original = module.eager_attention_forward

        def forward(*args, **kwargs):
            given.append((kwargs.get("sliding_window"), kwargs.get("deterministic")))
            return original(*args, **kwargs)

        monkeypatch.setattr(module, "eager_attention_forward", forward)
        return given

    backbone = MODERNBERT.backbone(deterministic_flash_attn=True)
    backbone.set_attn_implementation("eager")
    hydra = MODERNBERT.hydra.from_backbone(backbone)  # first: building one compares answers
    mine = watched(modeling_hydra, [])
    theirs = watched(modeling_modernbert, [])
    backbone(**MODERNBERT.inputs())
    hydra(**MODERNBERT.inputs())
    assert mine == theirs == [(None, True), (4, True), (4, True)]


@torch.no_grad()
def test_pooled_is_the_mean_of_the_tokens_that_are_no_padding():
    hydra = MODERNBERT.hydra.from_backbone(MODERNBERT.backbone(classifier_pooling="mean"))
    inputs = padded_texts(2)
    outputs = hydra.model(**inputs)
    lengths = inputs["attention_mask"].sum(dim=1)
    for row, length in enumerate(lengths):
        close(outputs.pooler_output[row], outputs.last_hidden_state[row, :length].mean(dim=0))
    mask = torch.ones(2, 1, 7, 7, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"classifier_pooling is 'mean'.*pass a mask of shape \(batch, tokens\)"):
        hydra(input_ids=inputs["input_ids"], attention_mask=mask)


@torch.no_grad()
@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_heads_turned_off_together_answer_as_one_by_one(pooling):
    backbone = MODERNBERT.backbone(classifier_pooling=pooling)
    inputs = MODERNBERT.inputs()
    inputs["position_ids"] = torch.stack([torch.arange(7) * step for step in (1, 2, 3, 1)])
    engine = ablation_of(MODERNBERT.hydra.from_backbone(backbone))
    found = torch.cat(list(engine.over(engine.heads)(inputs)))
    expected = [MODERNBERT.ablate(backbone, {layer: [head]})(**inputs).logits for layer, head in engine.heads]
    close(found, torch.stack([*expected, backbone(**inputs).logits]))


def test_adapters_of_the_backbone_sit_on_the_joint_map():
    backbone = MODERNBERT.backbone()
    assert lora_config(backbone).target_modules == {"attn.Wqkv"}
    assert lora_config(backbone, targets=("q", "k", "v", "o")).target_modules == {"attn.Wqkv", "attn.Wo"}
    with pytest.raises(ValueError, match=r"targets has .'q', 'v'., but q, k and v of ModernBertFor.* are one weight"):
        lora_config(backbone, targets=("q", "v"))


def test_new_weights_spread_as_those_of_the_backbone():
    config = MODERNBERT.fused().config
    torch.manual_seed(0)
    hydra = MODERNBERT.hydra(config)
    assert hydra.head.norm.weight.unique().tolist() == [1.0]
    for kind in ("full_attention", "sliding_attention"):
        theirs = getattr(modeling_modernbert.ModernBertRotaryEmbedding(config), f"{kind}_inv_freq")
        assert torch.equal(getattr(hydra.model.rotary_emb, f"{kind}_inv_freq"), theirs)
    stds = [hydra.model.layers[0].attention.o_proj.weight.std(), hydra.classifier.weight.std()]
    torch.testing.assert_close(torch.stack(stds), torch.tensor([0.02 / 6**0.5, 32**-0.5]), rtol=0.15, atol=0)
