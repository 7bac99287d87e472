"""What Transformers 4 pruned and saved loads again and is what it was."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageClassification, BertForMaskedLM, BertModel

from hydra_transformers.pruning import load_pruned, prune_heads
from tests.families import (
    BEIT,
    BERT,
    CLIP,
    DEBERTA,
    DEBERTA_V2,
    DECODERS,
    FAMILIES,
    HEAD_DIM,
    LLAMA,
    MODERNBERT,
    VIT,
    WAVLM,
    WHISPER,
    Family,
)


PRUNED = {0: [1], 1: [0, 1, 2, 3], 2: [0, 3]}
PRUNED_BY_TRANSFORMERS_4 = [
    family for family in FAMILIES if family not in (BEIT, DEBERTA, DEBERTA_V2, MODERNBERT, WAVLM, WHISPER, *DECODERS)
]
# As the files name a layer's four projections; output projections lose columns, the others rows.
OUTPUTS = r"(attention\.output\.dense|attention\.dense|out_proj|out_lin|attn\.o)\.weight"
INPUTS = r"(attention|self|self_attn|attn)\.(query|key|value|[qkv]_proj|[qkv]_lin|[qkv])\.(weight|bias)"


def save_as_transformers_4(model, folder: Path, pruned: dict) -> None:
    """Slices the files of a plain model by hand, head by head."""
    model.save_pretrained(folder)
    tensors, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    by_tower = pruned if "vision" in pruned else {"": pruned}
    sliced = 0
    for name, tensor in tensors.items():
        tower = next((each for each in by_tower if name.startswith(each)), None)
        layer = re.search(r"layer(?:s|_groups)?\.(\d+)\.", name)
        gone = [] if tower is None or layer is None else by_tower[tower].get(int(layer[1]), [])
        left = [row for row in range(4 * HEAD_DIM) if row // HEAD_DIM not in gone]
        if gone and re.search(f"{OUTPUTS}$", name):
            tensors[name], sliced = tensor[:, left].contiguous(), sliced + 1
        elif gone and re.search(f"{INPUTS}$", name):
            tensors[name], sliced = tensor[left].contiguous(), sliced + 1
    assert sliced == 7 * sum(map(len, by_tower.values()))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    for tower, layers in by_tower.items():
        # an image classifier may be one of two towers
        own = config.get(f"{tower or 'vision'}_config", config)
        own["pruned_heads"] = {str(key): layers[key] for key in layers}
    (folder / "config.json").write_text(json.dumps(config))


def pruned_for(family: Family) -> dict:
    return {"vision": PRUNED, "text": {2: [2]}} if family.has_towers else PRUNED


@pytest.mark.parametrize("family", PRUNED_BY_TRANSFORMERS_4, ids=lambda family: family.name)
def test_an_old_checkpoint_answers_as_the_model_with_these_heads_zeroed(family, tmp_path):
    model, pruned = family.backbone(), pruned_for(family)
    save_as_transformers_4(model, tmp_path, pruned)
    loaded = load_pruned(tmp_path)
    assert type(loaded) is family.hydra
    assert loaded.config.kept_heads == prune_heads(model, pruned).config.kept_heads
    with torch.no_grad():
        expected = family.logits(family.ablate(model, pruned), **family.inputs())
        outputs = loaded(**family.inputs())
        answers = outputs.similarity if family.has_towers else outputs.member_logits[:, 0]
    torch.testing.assert_close(answers, expected, rtol=0, atol=1e-10)
    tensors = prune_heads(model, pruned).state_dict()
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in loaded.state_dict().items())
    assert "pruned_heads" not in json.dumps(loaded.config.to_dict())


def test_transformers_itself_does_not_load_one(tmp_path):
    save_as_transformers_4(VIT.backbone(), tmp_path, PRUNED)
    with pytest.raises(RuntimeError, match="mismatch"):
        AutoModelForImageClassification.from_pretrained(tmp_path)


def test_an_encoder_without_a_head_loads_too(tmp_path):
    model = BERT.backbone().bert
    save_as_transformers_4(model, tmp_path, {0: [2]})
    loaded = load_pruned(tmp_path)
    texts = BERT.inputs()
    with torch.no_grad():
        expected = prune_heads(model, {0: [2]})(**texts).pooler_output
        assert torch.equal(loaded(**texts).pooler_output, expected)
    assert isinstance(model, BertModel)


def test_other_checkpoints_are_refused(tmp_path):
    VIT.backbone().save_pretrained(tmp_path / "whole")
    with pytest.raises(ValueError, match="names no pruned heads"):
        load_pruned(tmp_path / "whole")
    prune_heads(VIT.backbone(), {0: [1]}).save_pretrained(tmp_path / "hydra")
    with pytest.raises(ValueError, match="is a Hydra, which from_pretrained loads"):
        load_pruned(tmp_path / "hydra")
    MODERNBERT.backbone().save_pretrained(tmp_path / "joint")
    change(tmp_path / "joint", {"0": [1]})
    with pytest.raises(ValueError, match=r"is a ModernBertFor.* are one map, which Transformers 4 pruned no heads of"):
        load_pruned(tmp_path / "joint")
    LLAMA.backbone().save_pretrained(tmp_path / "causal")
    change(tmp_path / "causal", {"0": [1]})
    with pytest.raises(ValueError, match=r"is a LlamaFor.*, which Transformers 4 pruned no heads of"):
        load_pruned(tmp_path / "causal")
    DEBERTA.backbone().save_pretrained(tmp_path / "positions")
    change(tmp_path / "positions", {"0": [1]})
    with pytest.raises(
        ValueError, match="heads weigh the positions of tokens, which Transformers 4 pruned no heads of"
    ):
        load_pruned(tmp_path / "positions")
    BertForMaskedLM(BERT.backbone().config).save_pretrained(tmp_path / "masked")
    change(tmp_path / "masked", {"0": [1]})
    with pytest.raises(ValueError, match="is a BertForMaskedLM: pass one of"):
        load_pruned(tmp_path / "masked")


def change(folder: Path, pruned_heads: dict) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"pruned_heads": pruned_heads}))


def test_a_config_of_other_weights_and_pickled_weights_are_refused(tmp_path):
    save_as_transformers_4(VIT.backbone(), tmp_path, {0: [1]})
    for pruned_heads, problem in (
        ({"0": [1, 2]}, "the shapes of the weights are not those that config.pruned_heads asks for"),
        ({"7": [1]}, "is broken .heads_to_prune names layer 7"),
        ({"0": [9]}, "is broken .*names head 9"),
    ):
        change(tmp_path, pruned_heads)
        with pytest.raises(ValueError, match=problem):
            load_pruned(tmp_path)
    change(tmp_path, {"0": [1]})
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match="has no weights in safetensors, and pickled ones are not read here: convert"):
        load_pruned(tmp_path)


def test_two_towers_are_pruned_by_tower(tmp_path):
    save_as_transformers_4(CLIP.backbone(), tmp_path, {"text": {1: [0]}, "vision": {}})
    assert load_pruned(tmp_path).config.kept_heads["text"][1] == [[1, 2, 3]]
