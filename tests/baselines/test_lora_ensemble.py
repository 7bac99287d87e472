"""LoRAEnsemble: one backbone, one adapter and one classifier per member."""

import copy
import dataclasses
import json
import shutil
import sys
import threading

import pytest
import torch
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file

from hydra_transformers import evaluate_uncertainty
from hydra_transformers._io.files import write_atomically
from hydra_transformers.baselines import LoRAEnsemble, finetune_lora_ensemble
from hydra_transformers.baselines.lora_ensemble import _checked_member_folders
from hydra_transformers.cost import count_multiply_adds, count_parameters
from hydra_transformers.data.prediction import predict
from hydra_transformers.training import finetune_members, lora_config, recipe
from tests import tiny_tags
from tests.families import BERT, VIT, bert_backbone, images, vit_backbone
from tests.training.tiny import QUIET, copy_of_weights, reads_to_know, tiny_dataset, tiny_model


SHORT = dataclasses.replace(recipe("imagenet1k"), max_steps=6, warmup_steps=1, learning_rate=0.1)
ARGUMENTS = {"per_device_train_batch_size": 4, **QUIET}
SAME = {"num_members": 2, "r": 2, "seed": 5, **ARGUMENTS}
FAMILIES = pytest.mark.parametrize("family", [VIT, BERT], ids=lambda family: family.name)


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


@pytest.fixture
def folder(adapters, tmp_path):
    """The same, to be changed."""
    return shutil.copytree(adapters, tmp_path / "adapters")


def state(model) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_same(before: dict, after: dict) -> None:
    assert list(before) == list(after)
    assert all(torch.equal(before[name], after[name]) for name in before)


TASKS = {
    "regression": (lambda: bert_backbone(0, num_labels=2, problem_type="regression"), lambda members: members.mean(1)),
    "several labels": (
        lambda: bert_backbone(0, num_labels=3, problem_type="multi_label_classification"),
        lambda members: members.sigmoid().mean(1).logit(),
    ),
    "tokens": (lambda: tiny_tags.backbone().double(), lambda members: members.softmax(-1).mean(1).log()),
}


@pytest.mark.filterwarnings("ignore:12 samples")
@pytest.mark.parametrize("task", TASKS)
@torch.no_grad()
def test_adapters_answer_every_task_and_are_judged_by_it(task, tmp_path):
    make, answer = TASKS[task]
    backbone, inputs = make().eval(), {"input_ids": torch.arange(1, 13).view(2, 6) % 9 + 1}
    for index in range(2):
        save_adapter(backbone, tmp_path / f"member-{index}", seed=index)
    ensemble = LoRAEnsemble.from_pretrained(backbone, tmp_path)
    folders = [tmp_path / f"member-{index}" for index in range(2)]
    apart = [PeftModel.from_pretrained(copy.deepcopy(backbone), each).eval()(**inputs).logits for each in folders]
    found = ensemble(**inputs)
    torch.testing.assert_close(found.member_logits, torch.stack(apart, dim=1), rtol=0, atol=1e-10)
    torch.testing.assert_close(found.logits.double(), answer(found.member_logits), rtol=0, atol=1e-6)
    labels = found.logits.argmax(-1) if task == "tokens" else found.logits
    labels = (labels > labels.mean(0)).float() if task == "several labels" else labels
    report = evaluate_uncertainty({"LoRA": ensemble}, [{**inputs, "labels": labels}])
    assert report.task == task and report.models["LoRA"].num_members == 2


@pytest.mark.slow
@FAMILIES
def test_each_member_answers_like_its_adapter_alone_and_like_the_merged_model(family, tmp_path):
    backbone = family.backbone()
    for index in range(3):
        save_adapter(backbone, tmp_path / f"member-{index}", seed=index, targets=("q", "k", "v", "o"))
    ensemble = LoRAEnsemble.from_pretrained(backbone, tmp_path)
    output = ensemble(**family.inputs())
    torch.testing.assert_close(output.logits.softmax(-1), output.member_logits.softmax(-1).mean(1))
    member_logits = predict(ensemble, family.inputs())
    assert member_logits.shape[1] == ensemble.num_members == 3
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


def test_saved_and_loaded_it_answers_the_same(adapters, tmp_path):
    ensemble = LoRAEnsemble.from_pretrained(vit_backbone(), adapters)
    ensemble.save_pretrained(tmp_path / "saved")
    files = {path.name for path in (tmp_path / "saved").rglob("*") if path.is_file()}
    assert files == {"adapter_config.json", "adapter_model.safetensors", "members.json"}
    expected = predict(ensemble, VIT.inputs())
    assert torch.equal(
        predict(LoRAEnsemble.from_pretrained(vit_backbone(), tmp_path / "saved"), VIT.inputs()), expected
    )
    first = PeftModel.from_pretrained(vit_backbone(), tmp_path / "saved" / "member-0").eval()
    assert torch.equal(first(**VIT.inputs()).logits.detach(), expected[:, 0])


def test_the_backbone_is_left_as_it_was(adapters):
    backbone = vit_backbone().train()
    before, names = state(backbone), [name for name, _ in backbone.named_modules()]
    predict(LoRAEnsemble.from_pretrained(backbone, adapters), VIT.inputs())
    assert_same(before, state(backbone))
    assert [name for name, _ in backbone.named_modules()] == names
    assert backbone.training and all(parameter.requires_grad for parameter in backbone.parameters())


def test_it_costs_one_forward_with_adapters_per_member(adapters):
    """An adapter of rank 2 on q and v adds 2 * 2 * (hidden + hidden) multiply-adds per token and layer."""
    backbone, tokens, layers, hidden, rank = vit_backbone(), 5, 3, 32, 2
    ensemble = LoRAEnsemble.from_pretrained(backbone, adapters)
    of_adapter = tokens * layers * 2 * rank * (hidden + hidden)
    assert count_multiply_adds(ensemble) == 3 * (count_multiply_adds(backbone) + of_adapter)
    extra = layers * 2 * rank * (hidden + hidden) + sum(p.numel() for p in backbone.classifier.parameters())
    assert count_parameters(ensemble) == count_parameters(backbone) + 3 * extra


# Fine-tuning


@pytest.fixture(scope="module")
def rows():
    return tiny_dataset("vit"), tiny_dataset("vit", 6, seed=2)


@pytest.mark.slow
def test_fine_tuning(rows, tmp_path, capsys, monkeypatch):
    """Every claim about one fine-tuning, in one test: the training is shared."""
    backbone, output_dir = tiny_model("vit", "backbone"), tmp_path / "lora"
    before = state(backbone)
    ensemble = finetune_lora_ensemble(backbone, SHORT, *rows, output_dir, **SAME)

    only_adapters_and_classifiers_change(backbone, before, ensemble)
    each_member_has_its_own_adapter_and_order_of_the_data(ensemble, rows, tmp_path / "alone")
    an_interrupted_member_goes_on_to_the_same_weights(backbone, ensemble, rows, tmp_path / "interrupted")
    assert "going on from checkpoint-3" in capsys.readouterr().out
    for change in ({"lora_alpha": 4}, {"r": 3}, {"targets": ("q",)}, {"seed": 0}):
        with pytest.raises(
            ValueError, match=r"member-0 holds another fine-tuning \(other (member|arguments|member, arguments)\)"
        ):
            finetune_lora_ensemble(backbone, SHORT, *rows, output_dir, **SAME | change)
    unfinished_members_are_no_ensemble(backbone, ensemble, output_dir, tmp_path / "begun")
    capsys.readouterr()
    monkeypatch.delattr("transformers.Trainer.train")  # finished members are not trained again
    again = finetune_lora_ensemble(backbone, SHORT, *rows, output_dir, **SAME)
    assert "member-1: already finished" in capsys.readouterr().out
    for each in (again, LoRAEnsemble.from_pretrained(backbone, output_dir)):
        assert_same(ensemble.state_dict(), each.state_dict())


def only_adapters_and_classifiers_change(backbone, before, ensemble):
    assert_same(before, state(backbone))
    assert all(parameter.requires_grad for parameter in backbone.parameters())
    inside = {
        name.removeprefix("model.base_model.model.").replace("base_layer.", "").replace("original_module.", ""): tensor
        for name, tensor in ensemble.state_dict().items()
        if "lora_" not in name and "modules_to_save" not in name
    }
    assert inside.keys() == before.keys()
    assert all(torch.equal(before[name], tensor) for name, tensor in inside.items())
    for name, tensor in ensemble.state_dict().items():
        if "lora_B" in name:
            assert tensor.any(), f"{name} has not trained"
        if "modules_to_save" in name and name.endswith("weight"):
            assert not torch.equal(tensor, backbone.classifier.weight)


def each_member_has_its_own_adapter_and_order_of_the_data(ensemble, rows, folder):
    weights = ensemble.state_dict()
    for name in weights:
        if "member-0" in name:
            assert not torch.equal(weights[name], weights[name.replace("member-0", "member-1")]), name
    # Member 1 of seed 5 is member 0 of seed 6.
    model = tiny_model("vit", "backbone")
    alone = finetune_lora_ensemble(model, SHORT, *rows, folder, **SAME | {"num_members": 1, "seed": 6})
    for name, tensor in alone.state_dict().items():
        assert torch.equal(tensor, weights[name.replace("member-0", "member-1")])


def an_interrupted_member_goes_on_to_the_same_weights(backbone, ensemble, rows, folder):
    class Interrupting(list):
        reads_left = reads_to_know(rows[0]) + 12 + 6  # two epochs of twelve rows

        def __getitem__(self, index):
            Interrupting.reads_left -= 1
            if Interrupting.reads_left < 0:
                raise KeyboardInterrupt
            return super().__getitem__(index)

    with pytest.raises(KeyboardInterrupt):
        finetune_lora_ensemble(backbone, SHORT, Interrupting(rows[0]), rows[1], folder, **SAME)
    resumed = finetune_lora_ensemble(backbone, SHORT, *rows, folder, **SAME)
    assert_same(ensemble.state_dict(), resumed.state_dict())


def unfinished_members_are_no_ensemble(backbone, ensemble, output_dir, begun):
    shutil.copytree(output_dir, begun)
    (begun / "member-1" / "finished.json").unlink()
    with pytest.raises(ValueError, match="member-1 is not finished, of 2 members: call finetune_lora_ensemble again"):
        LoRAEnsemble.from_pretrained(backbone, begun)
    shutil.rmtree(begun / "member-1")
    with pytest.raises(FileNotFoundError, match=r"member-1 has no adapter_config\.json, of 2 members"):
        LoRAEnsemble.from_pretrained(backbone, begun)
    with pytest.raises(ValueError, match="holds a fine-tuning, which could not be resumed then: pass another folder"):
        ensemble.save_pretrained(output_dir)


@pytest.mark.slow
def test_the_best_epoch_is_kept_and_the_classifier_may_start_from_zero(tmp_path):
    """What a recipe asks for beside the parts that train: here sst2's early stopping, and a reset classifier."""
    rows = tiny_dataset("bert")
    settings = dataclasses.replace(recipe("sst2"), reset_classifier=True, epochs=2, learning_rate=0.0)
    backbone = tiny_model("bert", "backbone")
    ensemble = finetune_lora_ensemble(backbone, settings, rows, rows, tmp_path, num_members=1, **ARGUMENTS)
    weights = load_file(tmp_path / "member-0" / "adapter_model.safetensors")
    assert not weights["base_model.model.classifier.weight"].any()
    assert backbone.classifier.weight.any()
    assert json.loads((tmp_path / "member-0" / "finished.json").read_text())["learning_rate"] == 0.0
    assert predict(ensemble, {"input_ids": torch.stack([row["input_ids"] for row in rows])}).shape == (12, 1, 3)


@pytest.mark.slow
def test_the_papers_rank_and_scale_are_the_default(tmp_path):
    rows = tiny_dataset("bert", 4)
    settings = dataclasses.replace(SHORT, max_steps=2)
    ensemble = finetune_lora_ensemble(bert_backbone().float(), settings, rows, rows, tmp_path, **ARGUMENTS)
    configs = list(ensemble.model.peft_config.values())
    assert [(config.r, config.lora_alpha) for config in configs] == [(4, 8)] * 3
    assert configs[0].target_modules == {"attention.self.query", "attention.self.value"}


def test_finetune_members_returns_peft_models_as_they_were_saved(rows, tmp_path):
    backbone = tiny_model("vit", "backbone")
    member = get_peft_model(backbone, lora_config(backbone, r=2))
    before = copy_of_weights(member)
    [tuned] = finetune_members([member], SHORT, *rows, output_dir=tmp_path, **ARGUMENTS)
    assert all(torch.equal(before[name], parameter) for name, parameter in member.named_parameters())
    loaded = PeftModel.from_pretrained(tiny_model("vit", "backbone"), tmp_path / "member-0")
    assert_same(loaded.state_dict(), tuned.state_dict())
    assert isinstance(tuned, PeftModel) and not tuned.training


# What is refused


def test_adapters_that_do_not_fit_or_are_not_whole_are_refused(folder):
    with pytest.raises(
        ValueError, match=r"do not fit this ViTForImageClassification \(size mismatch .*\): pass the backbone"
    ):
        LoRAEnsemble.from_pretrained(vit_backbone(num_labels=7), folder)
    (folder / "member-1" / "adapter_model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"member-1 has no adapter_model\.safetensors"):
        LoRAEnsemble.from_pretrained(vit_backbone(), folder)


def test_bad_input_is_refused(folder, rows, tmp_path, monkeypatch):
    with pytest.raises(TypeError, match="model is a ViTForImageClassification: pass a PeftModel"):
        LoRAEnsemble(vit_backbone())
    with pytest.raises(FileNotFoundError, match=r"has no member-0 with an adapter_config\.json"):
        LoRAEnsemble.from_pretrained(vit_backbone(), tmp_path / "nothing")
    with pytest.raises(ValueError, match="has member-2, this ensemble has 1 members: pass another folder"):
        LoRAEnsemble(PeftModel.from_pretrained(vit_backbone(), folder / "member-0")).save_pretrained(folder)
    with pytest.raises(ValueError, match="num_members is 0"):
        finetune_lora_ensemble(vit_backbone(), SHORT, *rows, tmp_path / "runs", num_members=0)
    named = get_peft_model(vit_backbone(), lora_config(vit_backbone()), adapter_name="mine")
    with pytest.raises(ValueError, match=r'members\[0\] has the adapters mine: pass one adapter, named "default"'):
        finetune_members([named], SHORT, *rows, output_dir=tmp_path / "runs", **ARGUMENTS)
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ImportError, match=r"finetune_lora_ensemble\(\) needs peft: pip install peft"):
        finetune_lora_ensemble(vit_backbone(), SHORT, *rows, tmp_path / "runs")
    with pytest.raises(ImportError, match="LoRAEnsemble needs peft: pip install peft"):
        LoRAEnsemble.from_pretrained(vit_backbone(), folder)


# Parts of an ensemble


class Killed(BaseException):
    pass


def save_until(ensemble, folder, files: int, monkeypatch) -> None:
    """Saves as a process does that is killed when it has written so many files."""
    written = []

    def write(path, content):
        if len(written) == files:
            raise Killed
        written.append(write_atomically(path, content))

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr("hydra_transformers.baselines.lora_ensemble.write_atomically", write)
        ensemble.save_pretrained(folder)


def test_what_was_cut_off_in_saving_is_refused(adapters, tmp_path, monkeypatch):
    """Three members have six files, and the record of them comes first."""
    ensemble = LoRAEnsemble.from_pretrained(vit_backbone(), adapters)
    for files in range(7):
        cut = tmp_path / str(files)
        save_until(ensemble, cut, files, monkeypatch)
        with pytest.raises(FileNotFoundError, match=r"(has no member-0|, of 3 members: save the LoRAEnsemble again)"):
            LoRAEnsemble.from_pretrained(vit_backbone(), cut)
        ensemble.save_pretrained(cut)
        assert len(_checked_member_folders(cut)) == 3


def test_old_members_beside_new_ones_are_refused(adapters, tmp_path, monkeypatch):
    for index in range(3):
        save_adapter(vit_backbone(), tmp_path / "other" / f"member-{index}", seed=10 + index, lora_alpha=2)
    first, other = (LoRAEnsemble.from_pretrained(vit_backbone(), each) for each in (adapters, tmp_path / "other"))
    for files in (1, 2, 3, 6):
        saved = tmp_path / str(files)
        first.save_pretrained(saved)
        save_until(other, saved, files, monkeypatch)
        with pytest.raises(ValueError, match="is not the file that was saved with the others: save the LoRAEnsemble"):
            LoRAEnsemble.from_pretrained(vit_backbone(), saved)


def test_members_that_are_missing_or_too_many_are_refused(folder, tmp_path):
    ensemble = LoRAEnsemble.from_pretrained(vit_backbone(), folder)
    ensemble.save_pretrained(tmp_path / "saved")
    shutil.copytree(folder / "member-0", tmp_path / "saved" / "member-3")
    with pytest.raises(ValueError, match="has member-3, and was saved with 3 members"):
        LoRAEnsemble.from_pretrained(vit_backbone(), tmp_path / "saved")
    shutil.rmtree(folder / "member-1")  # of adapters without a record
    with pytest.raises(FileNotFoundError, match=r"member-1 has no adapter_config\.json, of 3 members"):
        LoRAEnsemble.from_pretrained(vit_backbone(), folder)


def test_adapters_of_a_deeper_or_a_shallower_backbone_are_refused(adapters):
    """PEFT loads the layers that both have, and says nothing of the others."""
    with pytest.raises(
        ValueError, match=r"do not fit this .* \(no place for .*layers\.2\..* of member-0\): pass the backbone"
    ):
        LoRAEnsemble.from_pretrained(vit_backbone(num_hidden_layers=2), adapters)
    with pytest.raises(ValueError, match=r"do not fit this .* \(no .*layers\.3\..* in member-0\): pass the backbone"):
        LoRAEnsemble.from_pretrained(vit_backbone(num_hidden_layers=4), adapters)


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
    answers, together = [], threading.Barrier(8)

    def work(thread: int) -> None:
        together.wait()
        for number in range(20):
            answers.append((number % 4, predict(ensembles[thread % 2], batches[number % 4])))

    threads = [threading.Thread(target=work, args=(thread,)) for thread in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(answers) == 160
    assert all(torch.equal(answer, expected[number]) for number, answer in answers)
    assert not any(module.training for ensemble in ensembles for module in ensemble.model.modules())
