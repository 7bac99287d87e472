"""What a model is, is the same whether its folder, its config or the model itself is asked."""

import os

import peft
import pytest
from torch import nn

from hydra_transformers.baselines import DeepEnsemble
from hydra_transformers.data.zero_shot import ZeroShotClassifier
from hydra_transformers.model_info import ModelInfo
from tests.families import CLIP, FAMILIES, VIT, bert_backbone, each_of, padded_texts


INPUTS = {
    "AutoModelForAudioClassification": "audio",
    "AutoModelForImageClassification": "image",
    "AutoModelForSequenceClassification": "text",
    "AutoModelForTokenClassification": "tokens",
    "AutoModelForZeroShotImageClassification": "zero-shot",
}


@each_of(FAMILIES)
def test_model_config_and_folder_say_the_same(family, tmp_path):
    for model in (family.hydra.from_backbone(family.backbone()), family.backbone()):
        model.save_pretrained(tmp_path)
        of_model = ModelInfo.of(model)
        of_folder = ModelInfo.of(tmp_path)
        of_config = ModelInfo.of(of_folder.config)
        for found in (of_folder, of_config):
            for name in ("model_class", "task", "auto_class", "inputs", "is_hydra", "class_names"):
                if name == "class_names" and of_model.is_zero_shot:
                    continue
                assert getattr(found, name) == getattr(of_model, name), name
        assert of_model.is_hydra is isinstance(model, family.hydra) and of_model.model_class is type(model)
        assert of_model.inputs == INPUTS[of_model.auto_class] and of_model.wrapper is None


@pytest.mark.parametrize(
    "fields, name",
    [
        ({}, "single_label_classification"),
        ({"problem_type": "multi_label_classification"}, "multi_label_classification"),
        ({"num_labels": 1}, "regression"),
        ({"num_labels": 1, "aggregate": "min"}, "reward"),
    ],
)
def test_the_task_follows_from_the_config(fields, name):
    model = bert_backbone(0, **{"num_labels": 3} | fields)
    found = ModelInfo.of(model)
    assert found.task.name == name and found.task is ModelInfo.of(model.config).task
    assert found.says_task is ("problem_type" in fields or "num_labels" not in fields)


def test_what_is_around_a_model_is_named():
    backbones = [VIT.backbone(), VIT.backbone()]
    towers = CLIP.hydra.from_backbone(CLIP.backbone())
    zero_shot = ZeroShotClassifier(towers, dict(padded_texts(2)), ["cat", "dog"])
    adapted = peft.get_peft_model(VIT.backbone(), peft.LoraConfig(target_modules=["q_proj"], r=2))
    found = {
        "other": ModelInfo.of(DeepEnsemble(backbones)),
        "zero-shot classifier": ModelInfo.of(zero_shot),
        "adapters": ModelInfo.of(adapted),
    }
    assert {info.wrapper: info for info in found.values()} == found
    assert not any(info.is_hydra for info in found.values())
    assert found["other"].model_class is found["adapters"].model_class is type(backbones[0])
    assert found["zero-shot classifier"].inputs == "image" and found["zero-shot classifier"].is_zero_shot
    assert found["zero-shot classifier"].class_names == ["cat", "dog"]


def test_a_module_without_a_config_has_no_inputs():
    info = ModelInfo.of(nn.Linear(2, 2))
    assert (info.config, info.model_class, info.inputs, info.class_names) == (None, None, None, None)


def test_what_is_no_model_gets_a_sentence():
    with pytest.raises(TypeError, match="model is a int: pass a model, its folder or Hub name, or its config"):
        ModelInfo.of(3)
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        ModelInfo.of(os.path.join(".", "nowhere"))


def test_identity_is_probed_in_one_place():
    import ast
    from pathlib import Path

    import hydra_transformers

    root = Path(hydra_transformers.__file__).parent
    found = {}
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and node.value in ("from_pruned_members", "Token", "ZeroShot"):
                found.setdefault(node.value, set()).add(path.relative_to(root).as_posix())
    assert found.get("from_pruned_members") == {"models/auto.py"}
    assert "ZeroShot" not in found
