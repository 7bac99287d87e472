"""LayerScale of DINOv2, DINOv3 and BEiT: weights of their own, and folders of earlier versions that have them folded in."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.testing import assert_close
from transformers import PreTrainedModel

from hydra_transformers import AutoHydra
from hydra_transformers.fusion import to_transformers
from tests.families import BEIT, DINOV2, DINOV2_WITH_REGISTERS, DINOV3, Family, each_of


WITH_LAYER_SCALE = [DINOV2, DINOV2_WITH_REGISTERS, DINOV3, BEIT]


def output_of(family: Family, model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        outputs = model(**family.inputs())
    return outputs.last_hidden_state if family is DINOV3 else outputs.logits


def save_as_before_0_4(hydra: PreTrainedModel, folder) -> None:
    """Saves a model of one or several members with its factors folded into the maps, as versions before 0.4 did."""
    hydra.save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    for name in [name for name in weights if name.endswith("attention_scale.weight")]:
        layer = name.removesuffix("attention_scale.weight")
        of_attention, of_mlp = (weights.pop(f"{layer}{part}_scale.weight") for part in ("attention", "mlp"))
        output = f"{layer}attention.o_proj"
        second = f"{layer}mlp.fc2"
        heads = weights[f"{output}.weight"].shape[0] // len(of_attention)
        weights[f"{output}.weight"] *= of_attention.repeat_interleave(heads, dim=0)
        weights[f"{output}.bias"] *= of_attention
        weights[f"{second}.weight"] *= of_mlp[0].unsqueeze(1)
        weights[f"{second}.bias"] *= of_mlp[0]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    del config["layer_scale"]
    (folder / "config.json").write_text(json.dumps(config))


@each_of(WITH_LAYER_SCALE)
def test_folders_of_earlier_versions_give_the_same_outputs(family, tmp_path):
    hydra = family.fused("uniform")
    save_as_before_0_4(hydra, tmp_path)

    loaded = type(hydra).from_pretrained(tmp_path, dtype=torch.float64)

    assert not any("scale.weight" in name for name, _ in loaded.named_parameters())
    assert_close(output_of(family, loaded), output_of(family, hydra))
    loaded.save_pretrained(tmp_path / "again")
    again = type(hydra).from_pretrained(tmp_path / "again", dtype=torch.float64)
    assert torch.equal(output_of(family, again), output_of(family, loaded))


@each_of(WITH_LAYER_SCALE)
def test_members_of_earlier_versions_go_back_to_transformers_and_are_fused_with_each_other_alone(family, tmp_path):
    first, second = (AutoHydra.from_backbone(family.backbone(seed)) for seed in range(2))
    save_as_before_0_4(first, tmp_path)
    folded = type(first).from_pretrained(tmp_path, dtype=torch.float64)

    assert_close(output_of(family, to_transformers(folded)), output_of(family, family.backbone(0)))
    with pytest.raises(ValueError, match=r"layer_scale = True.*build all members anew"):
        type(first).from_pruned_members([folded, second])


@each_of(WITH_LAYER_SCALE)
def test_the_factors_are_weights_that_go_back_to_transformers(family):
    hydra = AutoHydra.from_backbone(family.backbone())
    plain = to_transformers(hydra)
    for name, expected in family.backbone().named_parameters():
        if "mask_token" not in name:
            assert torch.equal(plain.get_parameter(name), expected), name


def test_new_models_begin_with_the_value_of_the_config():
    config = AutoHydra.from_backbone(DINOV2.backbone(layerscale_value=0.3)).config
    layer = DINOV2.hydra(config).dinov2.layers[0]
    assert (layer.attention_scale.weight == 0.3).all()
    assert (layer.mlp_scale.weight == 0.3).all()


@pytest.mark.parametrize("shared", [(), ("embeddings", "layernorm", "mlp")])
def test_members_share_the_factor_of_the_mlp_where_they_share_the_mlp(shared):
    hydra = DINOV2.fused("uniform", shared=shared)
    layer = hydra.dinov2.layers[0]
    assert len(layer.attention_scale.weight) == 3
    assert len(layer.mlp_scale.weight) == (1 if shared else 3)
