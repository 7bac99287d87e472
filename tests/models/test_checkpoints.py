"""A checkpoint is loaded as what it was saved as, or not at all."""

import json
import os

import pytest
import torch
import transformers
from huggingface_hub import CommitOperationAdd, ModelCard
from safetensors.torch import load_file, save_file

from hydra_transformers import AutoHydra
from hydra_transformers.models import pretrained
from hydra_transformers.models.auto import load_trained
from tests.families import BERT, CLIP, VIT, bert_backbone, each_of, randomise
from tests.models.test_hub import auto_class_of, run_second_process


def swap_first_members(folder, family) -> None:
    """Other heads for the same packed rows: as many in all, dealt out to the members in another way."""
    config = json.loads((folder / "config.json").read_text())
    heads = config["vision_config"]["kept_heads"] if family.has_towers else config["kept_heads"]
    assert len(heads[0][0]) != len(heads[0][1])
    heads[0][0], heads[0][1] = heads[0][1], heads[0][0]
    (folder / "config.json").write_text(json.dumps(config))


@each_of([VIT, BERT])
@pytest.mark.parametrize(
    ("saved", "named"),
    [((), ("mlp",)), (("mlp",), ()), (("mlp",), ("embeddings",)), (("embeddings", "layernorm"), ())],
)
def test_weights_that_were_saved_with_other_shared_parts_are_refused(family, saved, named, tmp_path):
    hydra = family.hydra.from_pruned_members([family.backbone(seed) for seed in range(2)], shared=saved)
    hydra.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"saved with other parts shared than config\.shared names"):
        type(hydra).from_pretrained(tmp_path, shared=list(named))
    with pytest.raises(ValueError, match=r"saved with other parts shared than config\.shared names"):
        hydra.base_model.__class__.from_pretrained(tmp_path, shared=list(named))
    model, info = type(hydra).from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and model.config.shared == hydra.config.shared


@each_of([VIT, CLIP])
def test_heads_that_were_swapped_between_members_are_refused(family, tmp_path):
    hydra = family.fused()
    hydra.save_pretrained(tmp_path)
    swap_first_members(tmp_path, family)
    sentence = (
        r"other heads than config.kept_heads names \(layer 0: \[\[0, 2, 3\], .* saved, \[\[0, 1, 2, 3\], .* named\)"
    )
    with pytest.raises(ValueError, match=sentence):
        family.hydra.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match=sentence):
        getattr(transformers, auto_class_of(hydra)).from_pretrained(tmp_path, output_loading_info=True)
    with pytest.raises(ValueError, match=sentence):
        family.hydra(family.hydra.config_class.from_pretrained(tmp_path)).load_state_dict(hydra.state_dict())


def test_pickled_weights_are_refused(tmp_path):
    VIT.fused().save_pretrained(tmp_path)
    torch.save(load_file(tmp_path / "model.safetensors"), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    for load in (VIT.hydra.from_pretrained, AutoHydra.from_pretrained, load_trained):
        with pytest.raises(OSError, match=r"no file named model\.safetensors"):
            load(tmp_path)


@pytest.mark.slow
def test_they_are_refused_where_the_package_is_not_importable_too(tmp_path):
    """As they are, they load there: test_hub.py."""
    hydra = VIT.fused().float()
    hydra.save_pretrained(tmp_path / "hydra")
    save_file({"pixel_values": VIT.inputs()["pixel_values"].float()}, tmp_path / "hydra" / "inputs.safetensors")
    swap_first_members(tmp_path / "hydra", VIT)
    with pytest.raises(AssertionError, match=r"other heads than config.kept_heads names"):
        run_second_process(tmp_path / "hydra", "AutoModelForImageClassification", tmp_path / "second")


@each_of([VIT, CLIP])
def test_checkpoints_without_the_mask_load_as_before(family, tmp_path):
    hydra = family.fused()
    hydra.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    masks = [name for name in tensors if name.endswith("kept_heads_mask")]
    assert len(masks) == (6 if family.has_towers else 3)  # one in each layer
    without = {name: tensor for name, tensor in tensors.items() if name not in masks}
    save_file(without, tmp_path / "model.safetensors", metadata={"format": "pt"})
    loaded, info = family.hydra.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values()), info
    for name, tensor in hydra.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    family.hydra(hydra.config).load_state_dict(without)


@pytest.mark.parametrize("first, second", [("1GB", "20KB"), ("20KB", "1GB")], ids=["shards last", "shards first"])
def test_saving_again_leaves_one_checkpoint(first, second, tmp_path):
    VIT.fused().save_pretrained(tmp_path, max_shard_size=first)
    hydra = randomise(VIT.fused(), seed=3)
    hydra.save_pretrained(tmp_path, max_shard_size=second)
    loaded = VIT.hydra.from_pretrained(tmp_path)
    assert all(torch.equal(loaded.state_dict()[name], tensor) for name, tensor in hydra.state_dict().items())
    assert (tmp_path / "model.safetensors").exists() != (tmp_path / "model.safetensors.index.json").exists()


class Repository:
    """A Hub that only takes notes."""

    files = None

    def __init__(self, token=None):
        pass

    def create_repo(self, repo_id, **arguments):
        return type("Url", (), {"repo_id": repo_id})

    def create_commit(self, repo_id, operations, **arguments):
        for operation in operations:
            assert isinstance(operation, CommitOperationAdd)
            Repository.files.add(operation.path_in_repo)

    def list_repo_files(self, repo_id, revision=None):
        return sorted(Repository.files)

    def delete_files(self, repo_id, delete_patterns, **arguments):
        Repository.files -= set(delete_patterns)


@pytest.mark.parametrize("first, second", [("1GB", "20KB"), ("20KB", "1GB")], ids=["shards last", "shards first"])
def test_pushing_again_leaves_one_checkpoint(first, second, monkeypatch, tmp_path):
    monkeypatch.setattr(pretrained, "HfApi", Repository)
    for module in ("modeling_utils", "utils.hub"):
        monkeypatch.setattr(f"transformers.{module}.hf_api", Repository)
        monkeypatch.setattr(f"transformers.{module}.create_and_tag_model_card", lambda *_, **__: ModelCard("card"))
    Repository.files = {"notes.md", "adapter/model.safetensors", "adapter/model-00001-of-00002.safetensors"}
    others = set(Repository.files)
    hydra = BERT.hydra.from_backbone(bert_backbone(problem_type="multi_label_classification"))
    hydra.push_to_hub("me/hydra", max_shard_size=first)
    hydra.push_to_hub("me/hydra", max_shard_size=second)
    hydra.save_pretrained(tmp_path, max_shard_size=second)
    assert {name for name in Repository.files if "safetensors" in name} - others == {
        name for name in os.listdir(tmp_path) if "safetensors" in name
    }
    assert others < Repository.files
    Repository.files = set()
    hydra.save_pretrained(tmp_path / "pushed", push_to_hub=True, repo_id="me/hydra")
    assert {path.name for path in tmp_path.glob("*.py")} < Repository.files
