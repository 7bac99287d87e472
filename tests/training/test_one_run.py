"""HydraTrainer: a Hydra of a pre-trained model is fine-tuned as one, and is an ensemble
afterwards."""

import copy
import itertools
import re
import shutil
from functools import partial

import datasets
import numpy as np
import pytest
import torch
from torch.nn import functional as F
from transformers import BertTokenizer, PreTrainedModel, Trainer, TrainingArguments

from hydra_transformers import AutoHydra, HydraTrainer, HydraTrainingArguments
from hydra_transformers.training import DivergedError, compute_accuracy, lora_config
from hydra_transformers.training.trainer import balanced_weights
from tests.tiny_data import save_bert
from tests.training.tiny import QUIET, Interrupting, assert_same_weights, changed, tiny_dataset, tiny_model, weights_of


def hydra_of(name: str = "vit", **options) -> PreTrainedModel:
    fields = {"hidden_dropout_prob": 0.1} if name in ("vit", "bert") else {}
    return AutoHydra.from_backbone(
        tiny_model(name, "backbone", **fields), **{"num_members": 3, "num_labels": 3} | options
    )


def arguments_for(folder, **options) -> HydraTrainingArguments:
    usual = {"per_device_train_batch_size": 4, "num_train_epochs": 3, "save_strategy": "epoch", "learning_rate": 1e-3}
    return HydraTrainingArguments(folder, **usual | QUIET | options)


def trainer_for(model, folder, name: str = "vit", trainer=HydraTrainer, **options) -> Trainer:
    data = {key: options.pop(key) for key in ("train_dataset", "callbacks", "compute_metrics") if key in options}
    data = {"train_dataset": tiny_dataset(name), "eval_dataset": tiny_dataset(name, 6, seed=2)} | data
    return trainer(model=model, args=arguments_for(folder, **options), **data)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="memory is pinned for an accelerator")
def test_nothing_warns_of_pinned_memory_without_an_accelerator(tmp_path, recwarn):
    arguments = HydraTrainingArguments(tmp_path, max_steps=1, report_to="none", disable_tqdm=True)
    HydraTrainer(hydra_of(num_members=2), arguments, train_dataset=tiny_dataset("vit")).train()
    assert not [warning for warning in recwarn if "pin_memory" in str(warning.message)]
    assert arguments.dataloader_pin_memory is False


def batch_of(name: str, rows: int = 6) -> dict[str, torch.Tensor]:
    data = tiny_dataset(name, rows)
    return {key: torch.stack([torch.as_tensor(row[key]) for row in data]) for key in data[0]}


def in_float64(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key: each.double() if each.is_floating_point() else each for key, each in batch.items()}


# Learning rates


def rates_of(trainer: Trainer) -> dict[str, float]:
    """Return the learning rate of each trained parameter, by name."""
    names = {id(parameter): name for name, parameter in trainer.model.named_parameters()}
    groups = trainer.create_optimizer().param_groups
    rates = {names[id(parameter)]: group["lr"] for group in groups for parameter in group["params"]}
    assert len(rates) == sum(len(group["params"]) for group in groups), "each in one group"
    return rates


@pytest.mark.parametrize("is_hydra", [True, False])
@pytest.mark.parametrize("name", ["vit", "bert", "llama"])
def test_learning_rates_fall_from_layer_to_layer_and_classifiers_have_their_own(name, is_hydra, tmp_path):
    model = hydra_of(name) if is_hydra else tiny_model(name, "backbone")
    trainer = trainer_for(model, tmp_path, name, learning_rate=1e-4, layer_decay=0.5, classifier_learning_rate=2e-3)
    optimizer = trainer.create_optimizer()
    assert trainer.create_optimizer() is optimizer
    rates = rates_of(trainer)
    assert len(rates) == len(list(model.parameters()))
    depth = model.config.num_hidden_layers
    for parameter, rate in rates.items():
        layer = re.search(r"layers?\.(\d+)\.", parameter)
        if layer:
            expected = 1e-4 * 0.5 ** (depth - 1 - int(layer[1]))
        elif "embed" in parameter:
            expected = 1e-4 * 0.5**depth
        elif parameter.startswith(f"{model.base_model_prefix}."):  # the last norm, BERT's pooler
            expected = 1e-4
        else:
            expected = 2e-3
        assert rate == pytest.approx(expected), parameter
    assert "bert.pooler.dense.weight" in rates or name != "bert"


def test_one_rate_for_all_leaves_the_groups_as_trainer_makes_them(tmp_path):
    for model in (hydra_of(num_members=1), tiny_model("vit", "backbone")):
        trainer = trainer_for(model, tmp_path, layer_decay=1.0, classifier_learning_rate=None)
        assert len(trainer.create_optimizer().param_groups) == 2
        assert set(rates_of(trainer).values()) == {1e-3}


def test_adapters_learn_at_the_rate_of_their_layer(tmp_path):
    peft = pytest.importorskip("peft")
    hydra = hydra_of()
    adapted = peft.get_peft_model(hydra, lora_config(hydra, r=2))
    rates = rates_of(trainer_for(adapted, tmp_path, learning_rate=1e-4, layer_decay=0.5))
    last = hydra.config.num_hidden_layers - 1
    for layer in range(last + 1):
        found = [rate for name, rate in rates.items() if f"layers.{layer}." in name]
        assert found == pytest.approx([1e-4 * 0.5 ** (last - layer)] * len(found)) and found
    assert {rate for name, rate in rates.items() if "classifier" in name} == {1e-3}


def test_an_optimizer_of_ones_own_keeps_its_rates(tmp_path):
    """Rates that were passed with an optimizer are not changed by those of the arguments."""
    data = {"train_dataset": tiny_dataset("vit")}
    arguments = arguments_for(tmp_path, learning_rate=1e-4)
    optimizer = (torch.optim.SGD, {"lr": 0.1})
    trainer = HydraTrainer(hydra_of(), arguments, optimizer_cls_and_kwargs=optimizer, **data)
    assert set(rates_of(trainer).values()) == {0.1}


def test_a_model_that_is_not_known_trains_at_one_rate_and_says_so(tmp_path, caplog):
    class Unknown(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1))

        def forward(self, pixel_values, labels=None):
            return {"loss": self.weight.sum()}

    trainer = trainer_for(Unknown(), tmp_path, learning_rate=1e-4)
    assert set(rates_of(trainer).values()) == {1e-4}
    assert "all layers get the same learning rate" in caplog.text


# Members


@pytest.mark.parametrize("name", ["vit", "bert", "wav2vec2"])
def test_members_do_not_mix_and_the_gradient_of_the_trunk_is_the_sum_of_theirs(name):
    model = hydra_of(name).double().eval()
    batch = in_float64(batch_of(name))

    def gradients(loss) -> dict[str, torch.Tensor]:
        model.zero_grad()
        loss.backward(retain_graph=True)
        return {key: each.grad.clone() for key, each in model.named_parameters() if each.grad is not None}

    outputs = model(**batch)
    losses = [F.cross_entropy(logits, batch["labels"]) / 3 for logits in outputs.member_logits.unbind(1)]
    together = gradients(outputs.loss)
    apart = [gradients(loss) for loss in losses]
    trunk = [key for key in together if "layers.0." in key or "embeddings" in key]
    assert trunk
    for key in trunk:
        torch.testing.assert_close(together[key], sum(each[key] for each in apart), rtol=1e-8, atol=1e-12)
    rows = model.classifier.weight.grad.shape[0] // 3 if hasattr(model.classifier, "weight") else 0
    for member, each in enumerate(apart):
        for key, gradient in each.items():
            if ".mlp." in key and "layers.2." in key and f".mlp.{member}." not in key:
                assert not gradient.any(), "exactly zero in another member's MLP"
        attention = each[next(key for key in each if key.endswith("layers.2.attention.qkv_proj.weight"))]
        for other, part in enumerate(attention.chunk(3)):
            assert part.any() == (other == member)
        if rows:
            assert [bool(part.any()) for part in each["classifier.weight"].split(rows)] == [
                other == member for other in range(3)
            ]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "task"), [("vit", None), ("wav2vec2", None), ("bert", "regression")])
def test_a_trained_hydra_is_its_members_and_learns(name, task, tmp_path):
    options = {"problem_type": task, "num_labels": 1} if task else {}
    model = hydra_of(name, **options)
    rows = tiny_dataset(name)
    if task:
        rows = [{**row, "labels": float(row["labels"])} for row in rows]
    trainer = trainer_for(model, tmp_path, name, train_dataset=rows, num_train_epochs=5, logging_steps=1)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert np.mean(losses[-3:]) < np.mean(losses[:3])
    model = model.double().eval()
    inputs = in_float64(batch_of(name))
    del inputs["labels"]
    with torch.no_grad():
        together = model(**inputs).member_logits
        for index in range(3):
            alone = model.member(index)(**inputs).member_logits[:, 0]
            torch.testing.assert_close(alone, together[:, index], rtol=0, atol=1e-10)
    assert not torch.allclose(together[:, 0], together[:, 1])


@pytest.mark.parametrize("problem_type", ["multi_label_classification", "token_classification"])
def test_other_tasks_train(problem_type, tmp_path):
    model = hydra_of("bert", problem_type=problem_type)
    inputs = [{"input_ids": row["input_ids"]} for row in tiny_dataset("bert")]
    multi_label = problem_type == "multi_label_classification"
    labels = [torch.eye(3)[index % 3] if multi_label else row["input_ids"] % 3 for index, row in enumerate(inputs)]
    rows = [row | {"labels": label} for row, label in zip(inputs, labels, strict=True)]
    before = weights_of(model)
    trainer = trainer_for(model, tmp_path, "bert", train_dataset=rows, num_train_epochs=1)
    trainer.train()
    assert changed(before, model) >= {"classifier.weight", "bert.layers.0.mlp.fc1.weight"}


# Runs


@pytest.mark.slow
def test_a_run_that_was_cut_off_is_the_same_run_after_it_resumed(tmp_path):
    whole = hydra_of()
    cut = hydra_of()
    trainer_for(whole, tmp_path / "whole").train()
    with pytest.raises(KeyboardInterrupt):
        trainer_for(cut, tmp_path / "cut", train_dataset=Interrupting(tiny_dataset("vit"), 21)).train()
    resumed = hydra_of(seed=7)
    trainer_for(resumed, tmp_path / "cut").train(resume_from_checkpoint=True)
    assert_same_weights(resumed, whole)
    assert not all(torch.equal(one, other) for one, other in zip(cut.parameters(), whole.parameters(), strict=True))
    ended = hydra_of(seed=8)
    trainer_for(ended, tmp_path / "cut").train_to_end()
    assert_same_weights(ended, whole)


@pytest.mark.slow
def test_a_checkpoint_that_is_not_whole_is_left_out(tmp_path):
    whole = hydra_of()
    resumed = hydra_of()
    trainer_for(whole, tmp_path).train()
    (tmp_path / "checkpoint-9" / "optimizer.pt").unlink()
    (tmp_path / "checkpoint-6" / "trainer_state.json").write_text('{"global_step": 6, "max')
    (tmp_path / "checkpoint-12").mkdir()
    trainer_for(resumed, tmp_path).train_to_end()
    assert_same_weights(resumed, whole)


def test_a_plain_trainer_works_only_without_the_rates(tmp_path, caplog):
    plain = hydra_of()
    same = hydra_of()
    trainer_for(plain, tmp_path / "plain", trainer=Trainer, num_train_epochs=1).train()
    rates = {"layer_decay": 1.0, "classifier_learning_rate": None}
    trainer_for(same, tmp_path / "same", num_train_epochs=1, **rates).train()
    assert_same_weights(plain, same)
    arguments = TrainingArguments(tmp_path / "other", **QUIET | {"max_steps": 1, "report_to": "none"})
    HydraTrainer(hydra_of(), arguments, train_dataset=tiny_dataset("vit")).train()
    assert "all layers and the classifiers get the same learning rate" in caplog.text


@pytest.mark.slow
def test_gradient_checkpointing_changes_nothing_and_bfloat16_keeps_float32_weights(tmp_path):
    models = [hydra_of(), hydra_of()]
    for model, checkpointing in zip(models, (False, True), strict=True):
        options = {"gradient_checkpointing": checkpointing, "max_steps": 3, "save_strategy": "no"}
        trainer_for(model, tmp_path, **options).train()
    for (name, expected), found in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5, msg=name)
    model = hydra_of()
    before = weights_of(model)
    trainer_for(model, tmp_path, bf16=True, num_train_epochs=1).train()
    assert changed(before, model) and {each.dtype for each in model.parameters()} == {torch.float32}


# Losses


def loss_of(trainer: HydraTrainer, batch: dict, **options) -> torch.Tensor:
    return trainer.compute_loss(trainer.model, dict(batch), **options)


class Rows(list):
    """Has no end when it is iterated over, as a Dataset of torch may."""

    def __iter__(self):
        return itertools.cycle(self[:])


def test_label_smoothing_and_class_weights_are_of_each_members_loss(tmp_path):
    rows = tiny_dataset("vit", 9) + tiny_dataset("vit", 3)[:1] * 3
    trainer = trainer_for(
        hydra_of(), tmp_path, train_dataset=rows, label_smoothing_factor=0.1, class_weights="balanced"
    )
    trainer.model.eval()
    batch = batch_of("vit")
    weights = torch.tensor([12 / (3 * 6), 12 / (3 * 3), 12 / (3 * 3)])
    for data in (rows, Rows(rows), iter(rows)):
        torch.testing.assert_close(balanced_weights(data, 3), weights)
    members = trainer.model(batch["pixel_values"]).member_logits.unbind(1)
    options = {"label_smoothing": 0.1, "reduction": "sum"}
    losses = [F.cross_entropy(logits, batch["labels"], weights, **options) / 6 for logits in members]
    torch.testing.assert_close(loss_of(trainer, batch), torch.stack(losses).mean())
    halves = [{key: each[part] for key, each in batch.items()} for part in (slice(0, 2), slice(2, 6))]
    accumulated = sum(loss_of(trainer, half, num_items_in_batch=torch.tensor(6)) for half in halves)
    torch.testing.assert_close(accumulated, torch.stack(losses).mean())


def test_a_step_over_accumulated_batches_with_smoothed_labels_is_that_of_the_loss_by_hand(tmp_path):
    """Layers and classifiers each move by their learning rate times the gradient over all rows."""
    model = hydra_of()
    model.config.hidden_dropout_prob = 0.0
    model = type(model)(model.config).eval()
    expected = copy.deepcopy(model)
    batch = batch_of("vit", 12)
    before = weights_of(model)
    rates = {"learning_rate": 0.01, "layer_decay": 0.5, "classifier_learning_rate": 0.1}
    accumulated = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 3, "max_steps": 1}
    plain = {"optim": "sgd", "weight_decay": 0.0, "max_grad_norm": 0.0, "save_strategy": "no"}
    plain |= {"lr_scheduler_type": "constant", "warmup_steps": 0}
    trainer_for(model, tmp_path, label_smoothing_factor=0.1, **rates, **accumulated, **plain).train()
    targets = 0.9 * F.one_hot(batch["labels"], 3) + 0.1 / 3
    members = expected(batch["pixel_values"]).member_logits.log_softmax(-1).unbind(1)
    (sum(-(targets * logs).sum(-1).mean() for logs in members) / 3).backward()
    for name, weight in expected.named_parameters():
        layer = re.search(r"layers\.(\d)\.", name)
        if layer:
            rate = 0.01 * 0.5 ** (model.config.num_hidden_layers - 1 - int(layer[1]))
        elif "embeddings" in name:
            rate = 0.01 * 0.5**model.config.num_hidden_layers
        else:
            rate = 0.01 if name.startswith("vit.") else 0.1
        step = model.get_parameter(name) - before[name]
        torch.testing.assert_close(step, -rate * weight.grad, rtol=1e-3, atol=1e-6, msg=name)


@pytest.mark.slow
def test_adapters_on_a_hydra_train_alone_and_resume_to_the_same_weights(tmp_path):
    peft = pytest.importorskip("peft")

    def adapted() -> torch.nn.Module:
        torch.manual_seed(0)
        hydra = hydra_of()
        return peft.get_peft_model(hydra, lora_config(hydra, r=2))

    options = {"num_train_epochs": 2, "label_smoothing_factor": 0.1}
    whole = adapted()
    resumed = adapted()
    before = weights_of(whole)
    trainer_for(whole, tmp_path, **options).train()
    trained = changed(before, whole)
    assert trained == {name for name in before if "lora_" in name or "modules_to_save" in name}
    shutil.rmtree(tmp_path / "checkpoint-6")
    trainer_for(resumed, tmp_path, **options).train(resume_from_checkpoint=True)
    assert_same_weights(resumed, whole)


@pytest.mark.parametrize("trainer", [Trainer, HydraTrainer])
def test_a_number_of_minus_100_is_a_label_like_others(trainer, tmp_path):
    model = hydra_of("bert", num_labels=1, problem_type="regression").eval()
    numbers = [-100.0, 1.0, 2.0, 3.0]
    batch = {"input_ids": batch_of("bert", 4)["input_ids"], "labels": torch.tensor(numbers)}
    expected = model(**batch).loss
    for labels in (batch["labels"], torch.full((4,), -100.0)):
        given = batch | {"labels": labels}
        subject = trainer_for(model, tmp_path, "bert", trainer=trainer)
        items = subject._get_num_items_in_batch([given], torch.device("cpu"))
        loss = subject.compute_loss(model, dict(given), num_items_in_batch=items)
        torch.testing.assert_close(loss, model(**given).loss)
    halves = [{key: each[part] for key, each in batch.items()} for part in (slice(0, 1), slice(1, 4))]
    if trainer is HydraTrainer:
        items = subject._get_num_items_in_batch(halves, torch.device("cpu"))
        parts = [subject.compute_loss(model, dict(half), num_items_in_batch=items) for half in halves]
        torch.testing.assert_close(sum(parts), expected)


def test_accumulated_batches_count_by_their_labels_in_models_that_give_means(tmp_path):
    """BERT of Transformers is told how many labels there are, and divides by those of each batch
    alone."""
    model = tiny_model("bert", "backbone").eval()
    whole = batch_of("bert")
    trainer = trainer_for(model, tmp_path, "bert")
    parts = [{name: tensor[rows] for name, tensor in whole.items()} for rows in (slice(0, 4), slice(4, 6))]
    losses = [loss_of(trainer, part, num_items_in_batch=torch.tensor(6)) for part in parts]
    torch.testing.assert_close(sum(losses), model(**whole).loss)


# Trainings that diverge


def test_a_loss_or_weight_that_is_not_finite_ends_the_training_and_is_not_saved(tmp_path):
    rows = [{**row, "pixel_values": torch.full((3, 8, 8), torch.nan)} for row in tiny_dataset("vit")]
    with pytest.raises(DivergedError, match="the loss is nan in step 1"):
        trainer_for(hydra_of(), tmp_path, train_dataset=rows).train()
    trainer = trainer_for(hydra_of(), tmp_path, eval_strategy="epoch")
    trainer.eval_dataset = rows
    with pytest.raises(DivergedError, match="eval_loss is nan after step 3"):
        trainer.train()
    shutil.rmtree(tmp_path, ignore_errors=True)
    broken = hydra_of()
    trainer = trainer_for(broken, tmp_path)
    with torch.no_grad():
        broken.vit.layernorm[0].weight.fill_(torch.inf)
    with pytest.raises(DivergedError, match="weights are not finite"):
        trainer.save_model(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


# Data and refusals


def test_a_table_and_raw_rows_are_read_with_the_processor(tmp_path):
    pandas = pytest.importorskip("pandas")
    model = AutoHydra.from_backbone(save_bert(tmp_path), num_members=2)
    given = {"processing_class": BertTokenizer.from_pretrained(tmp_path), "compute_metrics": compute_accuracy}
    names = list(model.config.id2label.values())
    rows = [{"text": f"a {word} film", "label": names[index]} for index, word in enumerate(("good", "bad"))] * 4
    arguments = arguments_for(tmp_path, max_steps=2, eval_strategy="steps", save_strategy="no")
    weights = []
    for data in (rows, pandas.DataFrame(rows)):
        subject = copy.deepcopy(model)
        trainer = HydraTrainer(subject, arguments, train_dataset=data, eval_dataset=data, **given)
        trainer.train()
        assert "eval_accuracy" in trainer.evaluate()
        weights.append(weights_of(subject))
    tokens = datasets.Dataset.from_dict({"input_ids": [[2, 5, 3]] * 2, "labels": [0, 1]})
    HydraTrainer(model, arguments, None, tokens.to_iterable_dataset(), tokens, **given)
    tokens = tokens.cast_column("labels", datasets.ClassLabel(names=names[::-1]))
    for read in (partial(HydraTrainer, model, None, None), model.calibrate):
        with pytest.raises(ValueError, match="column 'labels' has the model's classes in another order"):
            read(tokens)
    assert all(torch.equal(weights[0][name], weight) for name, weight in weights[1].items())


def test_models_that_trainer_makes_get_the_same_data(tmp_path):
    rows = tiny_dataset("bert")
    models = []
    rows[::2] = [{**row, "input_ids": row["input_ids"][:4]} for row in rows[::2]]
    for model in ({"model_init": lambda: hydra_of("bert")}, {"model": hydra_of("bert")}):
        arguments = arguments_for(tmp_path, max_steps=2, save_strategy="no")
        trainer = HydraTrainer(args=arguments, train_dataset=rows, **model)
        trainer.train()
        models.append(trainer.model)
    assert_same_weights(*models)


def test_what_a_model_cannot_be_trained_with_gets_one_sentence(tmp_path):
    wrong = {
        "class_weights is 'rare'": {"class_weights": "rare"},
        "classifier_learning_rate is -1.0": {"classifier_learning_rate": -1.0},
        "layer_decay is 0.0": {"layer_decay": 0.0},
        "layer_decay is 1.5": {"layer_decay": 1.5},
        "mixing is 2": {"mixing": 2},
    }
    for words, options in wrong.items():
        with pytest.raises(ValueError, match=words):
            arguments_for(tmp_path, **options)
    numbers = hydra_of("bert", num_labels=1, problem_type="regression")
    for options in ({"label_smoothing_factor": 0.1}, {"class_weights": "balanced"}):
        with pytest.raises(ValueError, match="are for models that choose one class"):
            trainer_for(numbers, tmp_path, "bert", **options)
