"""PostPruningCallback: what trains, what stays, and what it refuses."""

import math
import re
import shutil

import pytest
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from hydra_transformers.training import HydraTrainer, PostPruningCallback
from hydra_transformers.training.callbacks import LogitScaleCallback
from hydra_transformers.training.parameter_groups import PARTS, layer_dropouts, places
from tests.training.tiny import FORMS, QUIET, changed, tiny_dataset, tiny_model, tiny_trainer, weights_of


def two_steps(tmp_path, **overrides) -> TrainingArguments:
    """Steps with weight decay, which would move a parameter even where it gets no gradient."""
    arguments = {"max_steps": 2, "learning_rate": 0.01, "weight_decay": 0.1, "lr_scheduler_type": "constant"}
    return TrainingArguments(tmp_path, save_strategy="no", **QUIET, **arguments, **overrides)


def can_train(model) -> set[str]:
    """All but what has no effect: the LayerNorm in front of an attention without heads, and weights
    without elements."""
    names = {name for name, parameter in model.named_parameters() if parameter.numel() > 0}
    return {name for name in names if not (NORM_OF_ATTENTION.match(name) and heads_behind(model, name) == 0)}


NORM_OF_ATTENTION = re.compile(
    r"(?P<tower>\w+)\.layers\.(?P<layer>\d)\.(attention_norm|layernorm_before)(\.(?P<member>\d))?\.\w+"
)


def heads_behind(model, name: str) -> int | None:
    found = NORM_OF_ATTENTION.match(name)
    config = getattr(model.config, found["tower"].replace("_model", "_config"), model.config)
    if not hasattr(config, "kept_heads") or not config.layer_spec.norm_first:
        return None  # behind the sum, it has an effect without heads too
    heads = config.kept_heads[int(found["layer"])]
    return sum(map(len, heads)) if found["member"] is None else len(heads[int(found["member"])])


@pytest.mark.parametrize(
    ("family", "form"),
    [*(("vit", form) for form in FORMS), ("bert", "backbone"), ("bert", "fused"), ("clip", "fused")],
)
def test_embeddings_stay_bit_for_bit_and_all_else_trains(family, form, tmp_path):
    model = tiny_model(family, form)
    before = weights_of(model)
    tiny_trainer(family, model, two_steps(tmp_path), callbacks=[PostPruningCallback()]).train()
    assert changed(before, model) == {name for name in can_train(model) if "embeddings." not in name}


@pytest.mark.parametrize(
    ("trainable", "expected"),
    [
        (("attention",), ".attention."),
        (("mlp",), ".mlp."),
        (("layernorm",), "norm."),
        (("classifier",), "classifier."),
        (("embeddings",), ".embeddings."),
    ],
)
def test_each_part_can_train_alone(trainable, expected, tmp_path):
    model = tiny_model("vit", "fused")
    before = weights_of(model)
    tiny_trainer("vit", model, two_steps(tmp_path), callbacks=[PostPruningCallback(trainable)]).train()
    assert changed(before, model) == {name for name in can_train(model) if expected in name}


def test_the_classifier_of_bert_includes_its_pooler_and_that_of_clip_its_projections():
    callback = PostPruningCallback("classifier")
    bert = {name for name, trains in callback.trains(tiny_model("bert", "backbone")).items() if trains}
    clip = {name for name, trains in callback.trains(tiny_model("clip", "member")).items() if trains}
    assert bert == {"bert.pooler.dense.weight", "bert.pooler.dense.bias", "classifier.weight", "classifier.bias"}
    assert clip == {"visual_projection.weight", "text_projection.weight", "logit_scale"}


def test_the_last_layer_takes_the_final_layernorm_along():
    callback = PostPruningCallback(("attention", "layernorm"), last_n_layers=1)
    vit = {name for name, trains in callback.trains(tiny_model("vit", "backbone")).items() if trains}
    parts = ("layers.2.attention.", "layers.2.layernorm_before.", "layers.2.layernorm_after.", "layernorm.")
    assert {name.removeprefix("vit.").split(".weight")[0].split(".bias")[0] for name in vit} == {
        *(f"layers.2.attention.{projection}_proj" for projection in "qkvo"),
        *(part.strip(".") for part in parts[1:]),
    }
    clip = {name for name, trains in callback.trains(tiny_model("clip", "unshared")).items() if trains}
    assert not any("pre_layernorm" in name or "layers.1." in name for name in clip)
    assert any("text_model.final_layer_norm" in name for name in clip)
    assert any("vision_model.layers.2." in name for name in clip)


@pytest.mark.parametrize(("family", "form"), [("vit", "member"), ("bert", "backbone"), ("clip", "fused")])
def test_a_trunk_does_not_train_nor_what_comes_before_it(family, form):
    model = tiny_model(family, form)
    everything = PostPruningCallback(PARTS).trains(model)
    found = PostPruningCallback(PARTS, trunk_layers=2).trains(model)
    where = places(model)
    frozen = {name for name in found if everything[name] and not found[name]}
    assert frozen == {name for name in found if everything[name] and where[name].layers_to_end > 1}
    assert any("embeddings" in name for name in frozen) and len({name for name in found if found[name]}) > 5
    assert PostPruningCallback(PARTS, trunk_layers=0).trains(model) == everything
    assert PostPruningCallback(PARTS, trunk_layers=0.3).trains(model) == everything  # of three layers none
    assert PostPruningCallback(PARTS, trunk_layers=0.75).trains(model) == found


@pytest.mark.parametrize(("name", "form"), [("clip", "fused"), ("clip", "backbone"), ("siglip", "unshared")])
def test_a_locked_tower_stays_bit_for_bit_with_its_projection(name, form, tmp_path):
    model = tiny_model(name, form)
    before = weights_of(model)
    callback = PostPruningCallback(PARTS, towers=("text",))
    trainer = HydraTrainer(model, two_steps(tmp_path), train_dataset=tiny_dataset("clip"), callbacks=[callback])
    trainer.train()

    moved = changed(before, model)
    locked = ("vision_model.", "visual_projection.")
    # Softmax does not see a shift of all keys: the gradient of a plain model's bias of keys is
    # rounding, if anything.
    expected = {parameter for parameter in can_train(model) if not parameter.startswith(locked)}
    assert {parameter for parameter in expected - moved if "k_proj.bias" not in parameter} == set()
    assert moved - expected == set()
    assert any(parameter.startswith("logit_scale") for parameter in moved)
    trained = {parameter for parameter, trains in callback.trains(model).items() if trains}
    other = {
        parameter for parameter, trains in PostPruningCallback(PARTS, towers="vision").trains(model).items() if trains
    }
    everything = {parameter for parameter, trains in PostPruningCallback(PARTS).trains(model).items() if trains}
    assert trained | other == everything
    assert trained & other == {parameter for parameter in before if parameter.startswith("logit_")}


class SettingTheLogitScale(TrainerCallback):
    """What a step of the optimizer might do."""

    def __init__(self, value: float):
        self.value = value

    def on_optimizer_step(self, args, state, control, **kwargs):
        kwargs["model"].logit_scale.data.fill_(self.value)


@pytest.mark.parametrize(("found", "bounded"), [(3.0, 2.0), (1.5, 1.5), (-1.0, 0.0)])
def test_the_logit_scale_stays_within_its_bounds(found, bounded, tmp_path):
    model = tiny_model("clip", "fused")
    model.logit_scale.data.fill_(1.0)
    callbacks = [SettingTheLogitScale(found), LogitScaleCallback(math.exp(2.0))]
    tiny_trainer("clip", model, two_steps(tmp_path), callbacks=callbacks).train()
    assert model.logit_scale.tolist() == pytest.approx([bounded] * 3)


@pytest.mark.parametrize(("name", "form"), [("vit", "fused"), ("roberta", "fused"), ("ast", "backbone")])
def test_a_classifier_of_several_layers_that_was_reset_trains(name, form, tmp_path):
    """With zeros in all of them, their weights would never get a gradient."""
    model = tiny_model(name, form)
    arguments = TrainingArguments(tmp_path, max_steps=3, learning_rate=0.05, save_strategy="no", **QUIET)
    trainer = tiny_trainer(name, model, arguments, callbacks=[PostPruningCallback(PARTS, reset_classifier=True)])
    with torch.no_grad():
        batch = trainer.data_collator([trainer.train_dataset[row] for row in range(4)])
        logits = model(**{key: value for key, value in batch.items() if key != "labels"}).logits
    assert torch.equal(logits, logits[:, :1].expand_as(logits)), "the answers are equal before the training"
    before = weights_of(model)
    trainer.train()
    assert changed(before, model) >= {each for each in before if "classifier" in each}


def test_resuming_does_not_reset_the_classifier_again(tmp_path):
    arguments = {"save_steps": 1, "learning_rate": 0.1, "lr_scheduler_type": "constant", **QUIET}

    def train(steps, resume):
        model = tiny_model("vit", "member")
        trainer = tiny_trainer(
            "vit",
            model,
            TrainingArguments(tmp_path, max_steps=steps, **arguments),
            callbacks=[PostPruningCallback("classifier", reset_classifier=True)],
        )
        trainer.train(resume_from_checkpoint=resume)
        return model.classifier.weight

    unbroken = train(2, None).clone()
    shutil.rmtree(tmp_path / "checkpoint-2")
    resumed = train(2, True)
    torch.testing.assert_close(resumed, unbroken, rtol=0, atol=0)


def test_dropout_is_set_inside_the_layers_and_not_in_the_config(tmp_path):
    model = tiny_model("vit", "fused")
    tiny_trainer("vit", model, two_steps(tmp_path), callbacks=[PostPruningCallback(dropout=0.3)])
    assert [module.p for module in layer_dropouts(model)] == [0.3] * 6, "behind attention and MLP of three layers"
    assert model.vit.embeddings.dropout.p == 0.0
    assert model.config.hidden_dropout_prob == 0.0


def test_a_model_or_optimizer_that_is_not_the_prepared_one_raises_with_the_remedy(tmp_path):
    def trainer_of(model, **options):
        options = {"callbacks": [PostPruningCallback("classifier")], **options}
        return tiny_trainer("vit", model, two_steps(tmp_path), **options)

    late = trainer_of(tiny_model("vit", "member"), callbacks=[])
    late.add_callback(PostPruningCallback())
    rebuilt = Trainer(
        model_init=lambda: tiny_model("vit", "member"),
        args=two_steps(tmp_path),
        train_dataset=tiny_dataset("vit"),
        callbacks=[PostPruningCallback()],
    )
    unfrozen = trainer_of(tiny_model("vit", "member"))
    unfrozen.model.vit.layers.requires_grad_(True)
    model = tiny_model("vit", "member")
    optimizer = torch.optim.SGD(model.classifier.parameters(), lr=0.1)
    other = trainer_of(model, callbacks=[PostPruningCallback()], optimizers=(optimizer, None))
    for trainer, words in (
        (late, r"added after the Trainer was built.*Trainer\(callbacks=\[\.\.\.\]\)"),
        (rebuilt, r"pass Trainer\(model=\.\.\.\) in place of model_init"),
        (unfrozen, r"vit\.layers\.0\.\S+ was unfrozen after.*trainable"),
        (other, r"vit\.layers\.0\.\S+ shall train, but the optimizer does not hold it"),
    ):
        with pytest.raises(RuntimeError, match=words):
            trainer.train()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"trainable": ("attention", "heads")}, r"trainable has \['heads'\]: choose from embeddings, attention, mlp"),
        ({"last_n_layers": 0}, "last_n_layers is 0: pass at least 1"),
        ({"trunk_layers": -1}, "trunk_layers is -1: pass 0 or more"),
        ({"trunk_layers": 1.0}, "trunk_layers is 1.0: pass a share of the layers below 1"),
        ({"dropout": 1.0}, "dropout is 1.0: pass a probability"),
        ({"reset_classifier": True}, "HydraCLIPModel has no classifier to reset"),
        ({"dropout": 0.1}, "HydraCLIPModel has no dropout inside its layers"),
        ({"trunk_layers": 4}, "trunk_layers is 4: the model has 3 layers"),
        ({"towers": ("image",)}, r'towers is \(\'image\',\): pass some of "vision" and "text"'),
        ({"towers": ()}, r'towers is \(\): pass some of "vision" and "text"'),
    ],
)
def test_wrong_arguments_and_what_a_model_does_not_have_are_refused(arguments, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        tiny_trainer("clip", tiny_model("clip"), two_steps(tmp_path), callbacks=[PostPruningCallback(**arguments)])


def test_towers_and_a_logit_scale_are_those_of_clip(tmp_path):
    with pytest.raises(ValueError, match=r"towers is \('text',\): a HydraViTForImageClassification has one encoder"):
        tiny_trainer("vit", tiny_model("vit"), two_steps(tmp_path), callbacks=[PostPruningCallback(towers="text")])
    with pytest.raises(
        ValueError, match="HydraViTForImageClassification has no logit_scale: leave LogitScaleCallback"
    ):
        tiny_trainer("vit", tiny_model("vit"), two_steps(tmp_path), callbacks=[LogitScaleCallback()]).train()
    clip = tiny_model("clip")
    with torch.no_grad():
        clip.logit_scale.fill_(math.log(117.0))
    with pytest.raises(ValueError, match=r"maximum is 100\.0, and the model's logit scale is 117: pass a larger one"):
        tiny_trainer("clip", clip, two_steps(tmp_path), callbacks=[LogitScaleCallback()]).train()
    with pytest.raises(ValueError, match=r"maximum is 1\.0: pass a number above 1"):
        LogitScaleCallback(1.0)
