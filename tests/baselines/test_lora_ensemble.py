"""LoRAEnsemble: one backbone, one adapter and one classifier per member."""

import copy
import inspect
import shutil

import pytest
import torch
from peft import PeftModel, get_peft_model

from hydra_transformers.baselines import LoRAEnsemble, finetune_lora_ensemble
from hydra_transformers.data.prediction import predict
from hydra_transformers.training import lora_config, recipe
from tests import tiny_tags
from tests.baselines.test_mc_dropout import in_threads
from tests.families import BERT, VIT, bert_backbone, each_of, images, vit_backbone
from tests.training.tiny import QUIET, tiny_dataset, tiny_model


SHORT = recipe("imagenet1k").with_arguments(max_steps=6, warmup_steps=1, learning_rate=0.1)
ARGUMENTS = {"per_device_train_batch_size": 4, **QUIET}
SAME = {"num_members": 2, "r": 2, "seed": 5, **ARGUMENTS}


def save_adapter(backbone, folder, seed: int, **options) -> None:
    """Plain PEFT: an adapter of random weights, with a classifier of its own, saved in a folder."""
    model = get_peft_model(copy.deepcopy(backbone), lora_config(backbone, r=2, **options))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
    model.save_pretrained(folder)


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    """Three adapters of a ViT, to be read."""
    folder = tmp_path_factory.mktemp("adapters")
    for index in range(3):
        save_adapter(vit_backbone(), folder / f"member-{index}", seed=index)
    return folder


def assert_same(before: dict, after: dict) -> None:
    assert list(before) == list(after)
    assert all(torch.equal(before[name], after[name]) for name in before)


TASKS = {
    "regression": (lambda: bert_backbone(0, num_labels=2, problem_type="regression"), lambda members: members.mean(1)),
    "multi-label": (
        lambda: bert_backbone(0, num_labels=3, problem_type="multi_label_classification"),
        lambda members: members.sigmoid().mean(1).logit(),
    ),
    "tokens": (lambda: tiny_tags.backbone().double(), lambda members: members.softmax(-1).mean(1).log()),
}


@pytest.mark.parametrize("task", TASKS)
@torch.no_grad()
def test_adapters_answer_every_task(task, tmp_path):
    make, answer = TASKS[task]
    backbone = make().eval()
    inputs = {"input_ids": torch.arange(1, 13).view(2, 6) % 9 + 1}
    for index in range(2):
        save_adapter(backbone, tmp_path / f"member-{index}", seed=index)
    folders = [tmp_path / f"member-{index}" for index in range(2)]
    apart = [PeftModel.from_pretrained(copy.deepcopy(backbone), each).eval()(**inputs).logits for each in folders]
    output = LoRAEnsemble.from_pretrained(backbone, tmp_path)(**inputs)
    torch.testing.assert_close(output.member_logits, torch.stack(apart, dim=1), rtol=0, atol=1e-10)
    torch.testing.assert_close(output.logits.double(), answer(output.member_logits), rtol=0, atol=1e-6)


@pytest.mark.slow
@each_of([VIT, BERT])
def test_each_member_answers_like_its_adapter_alone_and_like_the_merged_model(family, tmp_path):
    backbone = family.backbone()
    for index in range(3):
        save_adapter(backbone, tmp_path / f"member-{index}", seed=index, targets=("q", "k", "v", "o"))
    member_logits = predict(LoRAEnsemble.from_pretrained(backbone, tmp_path), family.inputs())
    for index in range(3):
        alone = PeftModel.from_pretrained(family.backbone(), tmp_path / f"member-{index}").eval()
        with torch.no_grad():
            assert torch.equal(member_logits[:, index], alone(**family.inputs()).logits)
            merged = alone.merge_and_unload()
            torch.testing.assert_close(member_logits[:, index], merged(**family.inputs()).logits)


def test_any_adapters_of_a_peft_model_are_an_ensemble(adapters):
    model = PeftModel.from_pretrained(vit_backbone(), adapters / "member-1", adapter_name="late")
    model.load_adapter(adapters / "member-0", adapter_name="early")
    expected = predict(LoRAEnsemble.from_pretrained(vit_backbone(), adapters), VIT.inputs())
    assert torch.equal(predict(LoRAEnsemble(model), VIT.inputs()), expected[:, [1, 0]])


def test_the_backbone_stays_as_it_was(adapters):
    backbone = vit_backbone().train()
    before = copy.deepcopy(backbone.state_dict())
    predict(LoRAEnsemble.from_pretrained(backbone, adapters), VIT.inputs())
    assert_same(before, backbone.state_dict())
    assert backbone.training and all(parameter.requires_grad for parameter in backbone.parameters())


# Fine-tuning


@pytest.mark.slow
def test_only_adapters_and_classifiers_train_each_by_its_own_seed_and_a_second_call_trains_nothing(
    tmp_path, monkeypatch
):
    """Every claim about one fine-tuning, in one test: the training is shared."""
    rows = tiny_dataset("vit"), tiny_dataset("vit", 6, seed=2)
    backbone = tiny_model("vit", "backbone")
    output_dir = tmp_path / "lora"
    before = copy.deepcopy(backbone.state_dict())
    ensemble = finetune_lora_ensemble(backbone, SHORT, *rows, output_dir, **SAME)
    weights = ensemble.state_dict()
    assert_same(before, backbone.state_dict())
    assert all(parameter.requires_grad for parameter in backbone.parameters())
    inside = {
        name.removeprefix("model.base_model.model.").replace("base_layer.", "").replace("original_module.", ""): tensor
        for name, tensor in weights.items()
        if "lora_" not in name and "modules_to_save" not in name
    }
    assert inside.keys() == before.keys()
    assert all(torch.equal(before[name], tensor) for name, tensor in inside.items())
    for name, tensor in weights.items():
        assert "lora_B" not in name or tensor.any(), f"{name} has not trained"
        if "member-0" in name:
            assert not torch.equal(tensor, weights[name.replace("member-0", "member-1")]), name
    # Member 1 of seed 5 is member 0 of seed 6.
    one = finetune_lora_ensemble(backbone, SHORT, *rows, tmp_path / "one", **SAME | {"num_members": 1, "seed": 6})
    for name, tensor in one.state_dict().items():
        assert torch.equal(tensor, weights[name.replace("member-0", "member-1")])
    monkeypatch.delattr("transformers.Trainer.train")  # finished members are not trained again
    again = finetune_lora_ensemble(backbone, SHORT, *rows, output_dir, **SAME)
    for each in (again, LoRAEnsemble.from_pretrained(backbone, output_dir)):
        assert_same(weights, each.state_dict())


def test_the_papers_rank_and_scale_are_the_default():
    defaults = {name: each.default for name, each in inspect.signature(finetune_lora_ensemble).parameters.items()}
    assert [defaults[name] for name in ("r", "lora_alpha", "targets", "num_members")] == [4, 8, ("q", "v"), 3]


# What is refused


def test_what_is_not_a_whole_ensemble_of_this_backbone_is_refused(adapters, tmp_path):
    """PEFT loads the layers that both have, and says nothing of the others."""
    for fields, reason in (
        ({"num_labels": 7}, "size mismatch"),
        ({"num_hidden_layers": 2}, r"no place for .*layers\.2\..* of member-0"),
        ({"num_hidden_layers": 4}, r"no .*layers\.3\..* in member-0"),
    ):
        with pytest.raises(ValueError, match=rf"do not fit this .* \({reason}.*\): pass the backbone"):
            LoRAEnsemble.from_pretrained(vit_backbone(**fields), adapters)
    folder = shutil.copytree(adapters, tmp_path / "adapters")
    (folder / "member-2" / "adapter_model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"member-2 has no adapter_model\.safetensors, so the ensemble is not"):
        LoRAEnsemble.from_pretrained(vit_backbone(), folder)
    shutil.rmtree(folder / "member-1")
    for missing in (folder, tmp_path / "nothing"):
        with pytest.raises(FileNotFoundError, match=r"member-\d has no adapter_config\.json"):
            LoRAEnsemble.from_pretrained(vit_backbone(), missing)


# Threads


def hydra_ensemble() -> LoRAEnsemble:
    """Adapters on grouped weights, for which PEFT changes the layers during a forward."""
    hydra = tiny_model("vit", "fused").double()
    config = lora_config(hydra, r=2)
    model = get_peft_model(hydra, config, adapter_name="first")
    model.add_adapter("second", copy.deepcopy(config))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return LoRAEnsemble(model)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["backbone", "hydra"])
def test_threads_get_the_answers_that_one_alone_gets(kind, adapters):
    ensembles = [
        LoRAEnsemble.from_pretrained(vit_backbone(), adapters) if kind == "backbone" else hydra_ensemble()
        for _ in range(2)
    ]
    batches = [{"pixel_values": images(seed=seed)} for seed in range(4)]
    expected = [predict(ensembles[0], batch) for batch in batches]
    assert len(torch.cat(expected).flatten(0, 1).unique(dim=0)) == 4 * expected[0].shape[:2].numel()
    answers = in_threads(4, 8, lambda number: predict(ensembles[number % 2], batches[number % 4]))
    assert all(torch.equal(answer, expected[number % 4]) for number, answer in answers)
