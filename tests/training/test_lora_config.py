"""LoRA through PEFT on members, fused Hydras and plain backbones."""

import pytest
import torch
from peft import PeftModel, get_peft_model
from transformers import DistilBertConfig, DistilBertForSequenceClassification, TrainingArguments

from hydra_transformers.training import KeepZerosCallback, PostPruningCallback, lora_config
from tests.training.tiny import FAMILIES, QUIET, changed, tiny_model, tiny_trainer, weights_of


def with_adapters(name: str, form: str, **options):
    """A model in float64 with adapters whose weights are all different from zero."""
    model = tiny_model(name, form).double()
    adapted = get_peft_model(model, lora_config(model, r=2, **options))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter_name, parameter in adapted.named_parameters():
            if "lora_" in parameter_name:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return adapted.eval()


def logits(name: str, model) -> torch.Tensor:
    with torch.no_grad():
        outputs = model(**FAMILIES[name].inputs())
    member_logits = getattr(outputs, "member_logits", None)
    return FAMILIES[name].ensemble_logits(outputs) if member_logits is None else member_logits


# The names of projections are a family's own in its backbone alone.
@pytest.mark.parametrize(
    ("name", "form"),
    [(name, "backbone") for name in FAMILIES if name != "wavlm"]
    + [("wavlm", "member")]
    + [(name, form) for name in ("vit", "bert", "clip", "llama") for form in ("member", "fused")],
)
def test_adapters_save_load_and_merge_to_equal_logits(name, form, tmp_path):
    adapted = with_adapters(name, form, targets=("q", "k", "v", "o"))
    expected = logits(name, adapted)
    assert not torch.allclose(expected, logits(name, tiny_model(name, form).double().eval()), atol=1e-3)

    if name in ("vit", "bert", "clip", "llama"):
        adapted.save_pretrained(tmp_path)
        assert {path.suffix for path in tmp_path.iterdir()} <= {".safetensors", ".json", ".md"}
        loaded = PeftModel.from_pretrained(tiny_model(name, form).double(), tmp_path).eval()
        torch.testing.assert_close(logits(name, loaded), expected, rtol=0, atol=0)

    merged = adapted.merge_and_unload()
    assert type(merged) is type(tiny_model(name, form))
    torch.testing.assert_close(logits(name, merged), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["vit", "bert"])
def test_members_do_not_mix_under_adapters(name):
    """The gradient of member i's logits in member j's rows of every adapter is exactly zero."""
    adapted = with_adapters(name, "fused", targets=("q", "k", "v", "o"))
    attentions = [module for module in adapted.modules() if type(module).__name__ == "HydraAttention"]
    for member in range(3):
        adapted.zero_grad()
        adapted(**FAMILIES[name].inputs()).member_logits[:, member].square().sum().backward()
        for layer, attention in enumerate(attentions):
            widths = [len(heads) * 8 for heads in attention.config.kept_heads[layer]]
            for projection, count in ((attention.qkv_proj, 3), (attention.o_proj, 1)):
                if sum(widths) == 0:
                    continue  # nothing is left that could have an adapter
                gradient = projection.lora_B["default"].weight.grad
                for other, rows in enumerate(gradient.split([count * width for width in widths])):
                    assert bool(rows.any()) == (other == member and widths[other] > 0)


@pytest.mark.parametrize(("form", "has_callback"), [("backbone", False), ("member", True), ("fused", True)])
def test_adapters_and_the_classifier_train_whatever_the_callback_names(form, has_callback, tmp_path):
    model = tiny_model("vit", form)
    adapted = get_peft_model(model, lora_config(model, r=2))
    before = weights_of(adapted)
    arguments = TrainingArguments(tmp_path, max_steps=2, learning_rate=0.05, save_strategy="no", **QUIET)
    # Half of each adapter begins with zeros, which are not those of pruning.
    callbacks = [PostPruningCallback(("mlp",), last_n_layers=1), KeepZerosCallback()] if has_callback else []
    tiny_trainer("vit", adapted, arguments, callbacks=callbacks).train()
    assert changed(before, adapted) == {name for name in before if "lora_" in name or "modules_to_save" in name}


def test_the_default_trains_the_joint_projection_with_twice_the_rank_as_alpha():
    config = lora_config(tiny_model("vit", "fused"), r=4)
    # Layer 1 of this model has lost all its heads.
    assert config.target_parameters == [f"vit.layers.{layer}.attention.qkv_proj.weight" for layer in (0, 2)]
    assert (config.r, config.lora_alpha, config.modules_to_save) == (4, 8, ["classifier"])
    assert lora_config(tiny_model("clip", "fused")).modules_to_save is None
    config = lora_config(tiny_model("bert", "backbone"), targets=("o",), lora_dropout=0.1, modules_to_save=None)
    assert config.target_modules == {"attention.output.dense"}
    assert (config.lora_dropout, config.modules_to_save) == (0.1, None)


def test_the_callback_resets_the_classifier_of_the_adapter_and_sets_dropout(tmp_path):
    model = tiny_model("vit", "backbone")
    adapted = get_peft_model(model, lora_config(model, lora_dropout=0.3))
    callback = PostPruningCallback(reset_classifier=True, dropout=0.2)
    tiny_trainer("vit", adapted, TrainingArguments(tmp_path, **QUIET), callbacks=[callback])
    classifier = adapted.get_base_model().classifier
    assert not classifier.modules_to_save["default"].weight.any()
    assert classifier.original_module.weight.any()
    layer = adapted.get_base_model().vit.layers[0]
    assert layer.dropout.p == 0.2
    assert layer.attention.q_proj.lora_dropout["default"].p == 0.3
    with pytest.raises(ValueError, match=r"trunk_layers is 1, but which layers .* is PEFT's choice"):
        PostPruningCallback(trunk_layers=1).on_init_end(None, None, None, model=adapted)


def test_modules_can_be_named_as_they_are():
    sizes = {"dim": 16, "n_layers": 1, "n_heads": 2, "hidden_dim": 16, "vocab_size": 20}
    model = DistilBertForSequenceClassification(DistilBertConfig(**sizes))
    adapted = get_peft_model(model, lora_config(model, targets=("q_lin", "v_lin")))
    trained = {name for name, parameter in adapted.named_parameters() if parameter.requires_grad}
    attention = "base_model.model.distilbert.transformer.layer.0.attention"
    assert trained == {
        *(f"{attention}.{name}_lin.lora_{side}.default.weight" for name in "qv" for side in "AB"),
        *(
            f"base_model.model.{head}.modules_to_save.default.{kind}"
            for head in ("pre_classifier", "classifier")
            for kind in ("weight", "bias")
        ),
    }
    with pytest.raises(ValueError, match=r"DistilBert.* has no module called 'q': pass as targets the names"):
        lora_config(model, targets=("q", "v_lin"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"targets": ("q", "mlp")}, r"targets has \['mlp'\]: choose from q, k, v, o"),
        ({"targets": ("q", "v")}, r"targets has \['q', 'v'\], but q, k and v of HydraViT.* are one weight"),
        ({"lora_dropout": 0.1}, "does not work with lora_dropout"),
        ({"use_dora": True}, "does not work with use_dora"),
    ],
)
def test_what_does_not_work_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        get_peft_model(tiny_model("vit", "fused"), lora_config(tiny_model("vit", "fused"), **options))
    with pytest.raises(ValueError, match=r"WavLMForSequenceClassification, whose attention .* pass AutoHydra"):
        lora_config(tiny_model("wavlm", "backbone"))
