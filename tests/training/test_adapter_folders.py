"""Folders of PEFT adapters, CrossEncoders and SetFit models where members are expected."""

import json

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    BertForMaskedLM,
    BertForSequenceClassification,
    BertForTokenClassification,
    ViTForImageClassification,
)

from hydra_transformers import AutoHydra
from hydra_transformers.training import lora_config
from tests.command_line import run
from tests.tiny_data import save_bert, save_vit


IDS = torch.tensor([[2, 5, 6, 7, 3], [2, 6, 8, 5, 3]])


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return save_bert(tmp_path_factory.mktemp("base"))


def save_adapters(model, folder, seed: int = 0, **options) -> torch.nn.Module:
    """Adapters of `model` in a folder, as after a training; the model with them."""
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["query", "value"], **options))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    adapted.save_pretrained(folder)
    return adapted.eval()


@pytest.fixture(scope="module")
def members(base, tmp_path_factory):
    """Two folders of adapters with five classes, where the base model has two; and the models."""
    folders = [tmp_path_factory.mktemp("lora") for _ in range(2)]
    new_classes = {"num_labels": 5, "ignore_mismatched_sizes": True}
    models = [
        save_adapters(
            BertForSequenceClassification.from_pretrained(base, **new_classes), folder, seed, task_type="SEQ_CLS"
        )
        for seed, folder in enumerate(folders)
    ]
    return [str(folder) for folder in folders], models


def test_adapters_are_merged_into_their_base_model_and_fused(members):
    folders, models = members
    hydra = AutoHydra.from_pruned_members(folders, shared=())
    assert (hydra.num_members, hydra.config.num_labels) == (2, 5)
    with torch.no_grad():
        expected = torch.stack([model(IDS).logits for model in models], dim=1)
        torch.testing.assert_close(hydra(IDS).member_logits, expected, rtol=1e-4, atol=1e-5)
    fresh = AutoHydra.from_backbone(folders[0], num_members=2, num_labels=3)
    merged = models[0].get_base_model().bert.encoder.layer[0].attention.self.query.get_delta_weight("default")
    whole = AutoHydra.from_backbone(models[0].get_base_model().config.name_or_path, num_members=2, num_labels=3)
    difference = fresh.bert.layers[0].attention.qkv_proj.weight - whole.bert.layers[0].attention.qkv_proj.weight
    torch.testing.assert_close(difference[:32], merged, rtol=1e-4, atol=1e-5)


def test_the_command_fuses_them_with_the_processor_of_the_base_model(members, tmp_path):
    folders, _ = members
    run("fuse", *folders, "--output", tmp_path / "fused")
    assert AutoHydra.from_pretrained(tmp_path / "fused").num_members == 2
    assert (tmp_path / "fused" / "tokenizer.json").exists()


@pytest.mark.parametrize("kind", ["tokens", "images", "named"])
def test_the_task_and_the_names_of_classes_are_those_of_the_adapters(kind, base, tmp_path):
    if kind == "images":  # PEFT has no task_type for them
        model = ViTForImageClassification.from_pretrained(save_vit(tmp_path / "vit"))
        peft.get_peft_model(model, lora_config(model)).save_pretrained(tmp_path / "lora")
    else:
        head, task = (
            (BertForTokenClassification, "TOKEN_CLS")
            if kind == "tokens"
            else (BertForSequenceClassification, "SEQ_CLS")
        )
        model = head.from_pretrained(base, num_labels=3, ignore_mismatched_sizes=True)
        save_adapters(model, tmp_path / "lora", task_type=task)
        if kind == "named":
            model.config.id2label = {0: "a", 1: "b", 2: "c"}
            model.config.save_pretrained(tmp_path / "lora")
    hydra = AutoHydra.from_pruned_members([tmp_path / "lora"], allow_equal=True)
    expected = {"tokens": "Token", "images": "Image", "named": "Sequence"}[kind]
    assert f"For{expected}Classification" in type(hydra).__name__
    assert kind != "named" or hydra.config.id2label == {0: "a", 1: "b", 2: "c"}


def test_what_is_missing_or_cannot_be_merged_gets_one_sentence(base, members, tmp_path):
    def words_of(folder) -> str:
        with pytest.raises((ValueError, FileNotFoundError)) as error:
            AutoHydra.from_pruned_members([folder, folder])
        return str(error.value)

    BertForMaskedLM.from_pretrained(base).save_pretrained(tmp_path / "pretrained")
    model = BertForSequenceClassification.from_pretrained(tmp_path / "pretrained")
    save_adapters(model, tmp_path / "headless")
    assert "headless has no bert.pooler.dense.bias: pass a model that is trained" in words_of(tmp_path / "headless")
    file = tmp_path / "headless" / "adapter_model.safetensors"
    save_adapters(BertForSequenceClassification.from_pretrained(base), file.parent, task_type="SEQ_CLS")
    weights = load_file(file)
    removed = next(key for key in weights if "layer.1" in key and "lora_B" in key)
    save_file({key: weight for key, weight in weights.items() if key != removed}, file)
    assert f"has no {removed.removeprefix('base_model.model.')}" in words_of(file.parent)
    settings = json.loads((file.parent / "adapter_config.json").read_text())
    for name, words in (("/gone/base", "there is no folder /gone/base"), (None, "names no base_model_name_or_path")):
        settings["base_model_name_or_path"] = name
        (file.parent / "adapter_config.json").write_text(json.dumps(settings))
        assert words in words_of(file.parent)
    settings["base_model_name_or_path"] = str(base)
    (file.parent / "adapter_config.json").write_text(json.dumps(settings))
    file.rename(file.with_suffix(".bin"))  # which is never loaded
    assert "no adapter_model.safetensors: save the adapters again" in words_of(file.parent)
    prompts = peft.PromptTuningConfig(task_type="SEQ_CLS", num_virtual_tokens=2)
    peft.get_peft_model(BertForSequenceClassification.from_pretrained(base), prompts).save_pretrained(
        tmp_path / "tuned"
    )
    assert "PROMPT_TUNING, which cannot be merged into weights" in words_of(tmp_path / "tuned")


def test_a_cross_encoder_is_a_member_and_setfit_gets_its_own_sentence(base, tmp_path):
    package = pytest.importorskip("sentence_transformers")
    new_classes = {"model_kwargs": {"ignore_mismatched_sizes": True}}
    encoder = package.CrossEncoder(str(base), num_labels=1, device="cpu", **new_classes)
    encoder.save_pretrained(str(tmp_path / "reranker"))
    hydra = AutoHydra.from_pruned_members([tmp_path / "reranker"], allow_equal=True)
    with torch.no_grad():
        torch.testing.assert_close(hydra(IDS).logits, encoder.model(IDS).logits)
    BertForMaskedLM.from_pretrained(base).bert.save_pretrained(tmp_path / "setfit")
    (tmp_path / "setfit" / "config_setfit.json").write_text("{}")
    with pytest.raises(ValueError, match="setfit is a SetFit model, whose classifier is outside the network"):
        AutoHydra.from_pruned_members([tmp_path / "setfit"] * 2)
    assert AutoHydra.from_backbone(tmp_path / "setfit", num_members=2, num_labels=2).num_members == 2
