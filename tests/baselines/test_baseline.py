"""Baseline: what a baseline around one model of Transformers gets by being one."""

import copy
import json
import threading

import pytest
import torch
from datasets import Dataset
from torch import nn
from transformers import Trainer, TrainingArguments

from hydra_transformers.baselines.baseline import Baseline
from hydra_transformers.data.prediction import predict
from tests.families import BERT, VIT
from tests.training.tiny import QUIET, tiny_dataset, tiny_model


class Shifted(Baseline):
    """Members whose logits differ by a vector of their own."""

    summary = "Shifted answers, {members} members."

    def __init__(self, model, num_members: int = 2, scale: float = 1.0):
        super().__init__(copy.deepcopy(model), num_members=num_members, scale=scale)
        self.shifts = nn.Parameter(torch.zeros(num_members, model.config.num_labels, dtype=model.dtype))

    def member_logits(self, **inputs):
        return self.model(**inputs).logits.unsqueeze(1) + self.arguments["scale"] * self.shifts


def shifted(family=VIT, **arguments) -> Shifted:
    baseline = Shifted(family.backbone(), **arguments).eval()
    nn.init.normal_(baseline.shifts, generator=torch.Generator().manual_seed(0))
    return baseline


@pytest.mark.parametrize("family", [VIT, BERT], ids=lambda family: family.name)
def test_it_answers_and_has_the_mean_of_its_members_losses(family):
    baseline, labels = shifted(family, num_members=3), torch.tensor([0, 1, 2, 0])
    output = baseline(**family.inputs(), labels=labels, name_that_no_model_has=torch.zeros(4))
    expected = family.backbone()(**family.inputs()).logits.unsqueeze(1) + baseline.shifts
    torch.testing.assert_close(output.member_logits, expected)
    torch.testing.assert_close(output.logits.softmax(-1), expected.softmax(-1).mean(1))
    losses = [nn.functional.cross_entropy(expected[:, member], labels) for member in range(3)]
    torch.testing.assert_close(output.loss, torch.stack(losses).mean())
    half = baseline(**family.inputs(), labels=labels, num_items_in_batch=8).loss
    torch.testing.assert_close(half, output.loss / 2)


def test_saved_and_loaded_it_answers_the_same(tmp_path):
    baseline = shifted(scale=0.5).to(torch.bfloat16)
    (tmp_path / "preprocessor_config.json").write_text("{}")
    for _ in range(2):  # over itself, and beside a processor
        baseline.save_pretrained(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "baseline.json",
        "baseline.safetensors",
        "model",
        "preprocessor_config.json",
    ]
    loaded = Baseline.from_pretrained(tmp_path)
    assert type(loaded) is Shifted and loaded.arguments == baseline.arguments and not loaded.training
    assert {tensor.dtype for tensor in loaded.state_dict().values()} == {torch.bfloat16}
    inputs = {"pixel_values": VIT.inputs()["pixel_values"].to(torch.bfloat16)}
    assert torch.equal(predict(loaded, inputs), predict(baseline, inputs))
    assert torch.equal(
        type(baseline.model).from_pretrained(tmp_path / "model")(**inputs).logits, baseline.model(**inputs).logits
    )
    assert Shifted.is_saved_in(tmp_path) and not Shifted.is_saved_in(tmp_path / "model")


def test_what_is_no_whole_baseline_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"there is no folder \./nowhere"):
        Baseline.from_pretrained("./nowhere")
    with pytest.raises(FileNotFoundError, match="so it holds no baseline, or not all of one"):
        Baseline.from_pretrained(tmp_path)
    shifted().save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "baseline.json").read_text())

    class Another(Shifted):
        pass

    with pytest.raises(ValueError, match=r"is a Shifted: load it with Shifted\.from_pretrained"):
        Another.from_pretrained(tmp_path)
    (tmp_path / "baseline.json").write_text(json.dumps(settings | {"baseline": "Lost"}))
    with pytest.raises(ValueError, match="is a Lost, which is not known here: import its class first"):
        Baseline.from_pretrained(tmp_path)
    (tmp_path / "baseline.json").write_text("{")
    with pytest.raises(ValueError, match=r"baseline\.json is broken"):
        Baseline.from_pretrained(tmp_path)
    with pytest.raises(TypeError, match="model is a Linear: pass a model of Transformers"):
        Baseline(nn.Linear(2, 2))


def test_trainer_finds_columns_and_labels_by_itself_and_goes_on_where_it_was(tmp_path):
    """`datasets` columns that the model does not read are left out, and a checkpoint holds all of the baseline."""
    rows = Dataset.from_list([row | {"text": "red"} for row in tiny_dataset("bert")])
    results = []
    for resumed in (False, True):
        baseline = Shifted(tiny_model("bert", "backbone"), num_members=2)
        settings = {"max_steps": 4, "save_steps": 2, "eval_strategy": "steps", "eval_steps": 4, "learning_rate": 0.05}
        arguments = TrainingArguments(
            tmp_path, **settings, **QUIET, gradient_checkpointing=True, gradient_accumulation_steps=2
        )
        trainer = Trainer(model=baseline, args=arguments, train_dataset=rows, eval_dataset=rows)
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2") if resumed else None)
        assert trainer.evaluate()["eval_loss"] > 0
        results.append({name: tensor.clone() for name, tensor in baseline.state_dict().items()})
    assert baseline.shifts.abs().max() > 0
    torch.testing.assert_close(results[1], results[0])


def test_threads_share_it():
    baseline, expected, answers = shifted(), predict(shifted(), VIT.inputs()), []
    threads = [threading.Thread(target=lambda: answers.append(predict(baseline, VIT.inputs()))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(answer, expected) for answer in answers) and len(answers) == 4


def test_without_weights_it_can_be_counted():
    outline = shifted(num_members=4).without_weights()
    assert all(parameter.is_meta for parameter in outline.parameters())
    assert outline(pixel_values=torch.zeros(1, 3, 8, 8, device="meta")).member_logits.shape == (1, 4, 5)


@pytest.mark.parametrize("name", ["AutoTokenizer", "pipeline", "os"])
def test_a_folder_says_only_which_model_it_is_of(name, tmp_path):
    shifted().save_pretrained(tmp_path)
    path = tmp_path / "baseline.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_class": name}))
    with pytest.raises(ValueError, match=f"cannot hold a {name}, which is no model class"):
        Baseline.from_pretrained(tmp_path)


def test_only_safetensors_are_loaded(tmp_path):
    shifted().save_pretrained(tmp_path)
    weights = tmp_path / "model" / "model.safetensors"
    weights.rename(weights.with_name("pytorch_model.bin"))
    with pytest.raises(OSError, match="safetensors"):
        Baseline.from_pretrained(tmp_path)
