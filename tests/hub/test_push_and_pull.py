"""The three models of the paper go to a Hub and come back from it, also where the package is not installed."""

import json

import huggingface_hub.constants
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModel

from hydra_transformers.hub import push_hydra_to_hub
from tests.families import BERT, CLIP, VIT
from tests.fresh_process import run_without_package
from tests.hub.local_hub import LocalHub


# Repository, Auto class that gives predictions, the class it is, and the field of predictions.
MODELS = {
    "vit": (VIT, "AutoModelForImageClassification", "HydraViTForImageClassification", "logits"),
    "bert": (BERT, "AutoModelForSequenceClassification", "HydraBertForSequenceClassification", "logits"),
    "clip": (CLIP, "AutoModel", "HydraCLIPModel", "logits_per_image"),
}
PULL = """
import json, sys
import torch, transformers
from huggingface_hub import constants
from safetensors.torch import load_file, save_file

url, cache, models = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
constants.ENDPOINT, constants.HF_HUB_OFFLINE = url, False
constants.HUGGINGFACE_CO_URL_TEMPLATE = url + "/{repo_id}/resolve/{revision}/{filename}"
for name, (auto_class, expected, field) in models.items():
    load = getattr(transformers, auto_class).from_pretrained
    model, info = load(f"org/hydra-{name}", trust_remote_code=True, cache_dir=cache, output_loading_info=True)
    assert type(model).__name__ == expected and not type(model).__module__.startswith("hydra_transformers.")
    assert not info["missing_keys"] and not info["unexpected_keys"], info
    encoder, info = transformers.AutoModel.from_pretrained(
        f"org/hydra-{name}", trust_remote_code=True, cache_dir=cache, output_loading_info=True
    )
    assert not info["missing_keys"], info
    with torch.no_grad():
        outputs = model(**load_file(f"inputs-{name}.safetensors"))
        encoder(**load_file(f"inputs-{name}.safetensors"))
    save_file({field: outputs[field].contiguous()}, f"outputs-{name}.safetensors")
"""


@pytest.fixture
def local_hub(monkeypatch):
    with LocalHub().serving() as hub:
        template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        for name, value in {
            "ENDPOINT": hub.url,
            "HUGGINGFACE_CO_URL_TEMPLATE": template,
            "HF_HUB_OFFLINE": False,
        }.items():
            monkeypatch.setattr(huggingface_hub.constants, name, value)
        monkeypatch.setenv("HF_TOKEN", "hf_of_this_machine")
        # Another test may have made Transformers' client already, for the Hub.
        monkeypatch.setattr(transformers.utils.hub, "_hf_api", None, raising=False)
        yield hub


@pytest.mark.slow
def test_each_of_the_three_models_is_pushed_and_pulled_and_runs_without_the_package(local_hub, tmp_path):
    hydras = {name: family.fused().float() for name, (family, *_) in MODELS.items()}
    for name, (family, *_) in MODELS.items():
        push_hydra_to_hub(hydras[name], f"org/hydra-{name}", license="apache-2.0")
        save_file(family.inputs_in(torch.float32), tmp_path / f"inputs-{name}.safetensors")
        pushed = local_hub.files[f"org/hydra-{name}"]
        assert {"README.md", "config.json", "model.safetensors", "modeling_hydra.py"} <= set(pushed)
    told = json.dumps({name: classes for name, (_, *classes) in MODELS.items()})
    result = run_without_package(PULL, local_hub.url, tmp_path / "cache", told, folder=tmp_path)
    assert result.returncode == 0, result.stderr
    for name, (family, _, _, field) in MODELS.items():
        found = load_file(tmp_path / f"outputs-{name}.safetensors")[field]
        with torch.no_grad():
            expected = hydras[name](**family.inputs_in(torch.float32))[field]
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)
        served = [request for request in local_hub.requests if f"org/hydra-{name}/resolve" in request]
        assert any(request.endswith("model.safetensors") for request in served)


@pytest.mark.slow
def test_the_models_own_push_goes_the_same_way(local_hub, tmp_path):
    """As with every model of Transformers, and back by `from_pretrained` with a repository's name."""
    hydra = VIT.fused().float()
    hydra.push_to_hub("org/hydra-own")
    again = AutoModel.from_pretrained("org/hydra-own", trust_remote_code=True, cache_dir=tmp_path)
    assert type(again).__name__ == "HydraViTModel"
    for name, weight in again.state_dict().items():
        assert torch.equal(weight, hydra.vit.state_dict()[name]), name
