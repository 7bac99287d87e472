"""A config alone rebuilds the model; one that cannot be is refused with a sentence."""

import tracemalloc

import pytest
import torch
from huggingface_hub.errors import StrictDataclassFieldValidationError
from transformers import AutoConfig, AutoModelForImageClassification, ViTConfig

from hydra_transformers import (
    HydraAlbertConfig,
    HydraBeitConfig,
    HydraBertConfig,
    HydraCLIPConfig,
    HydraCLIPTextConfig,
    HydraCLIPVisionConfig,
    HydraGemma3TextConfig,
    HydraGemmaConfig,
    HydraLlamaConfig,
    HydraQwen2Config,
    HydraViTConfig,
    HydraViTForImageClassification,
)
from hydra_transformers.models.configuration_hydra import HydraConfigMixin
from hydra_transformers.models.families import FAMILIES, config_class
from tests.families import BERT, CLIP, DISTILBERT, OWN_LAYERS, SIGLIP_CLASSIFIER, VIT, each_of


SIZES = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32}
RAGGED = [[[0, 1], [3]], [[], [1, 2]]]
CONFIGS = [HydraViTConfig, HydraBertConfig, HydraCLIPTextConfig, HydraCLIPVisionConfig]
OF_LAYERS = [each for each in map(config_class, FAMILIES) if issubclass(each, HydraConfigMixin)]


@each_of(OWN_LAYERS)
def test_the_config_alone_rebuilds_the_model_on_the_meta_device(family, tmp_path):
    hydra = family.fused(shared=("mlp",))
    hydra.config.save_pretrained(tmp_path)

    config = AutoConfig.from_pretrained(tmp_path)
    with torch.device("meta"):
        rebuilt = family.hydra(config)

    assert config.num_members == 3
    assert config.kept_heads == hydra.config.kept_heads
    assert list(config.shared) == ["mlp"]
    expected = {name: parameter.shape for name, parameter in hydra.named_parameters()}
    assert {name: parameter.shape for name, parameter in rebuilt.named_parameters()} == expected


@pytest.mark.parametrize("config_class", CONFIGS)
def test_without_kept_heads_a_config_is_one_member_with_all_heads(config_class):
    config = config_class(**SIZES)
    assert config.kept_heads == [[[0, 1, 2, 3]], [[0, 1, 2, 3]]]
    assert config.num_members == 1


KEYS = {"num_key_value_heads": 2}
HEADS = r"give a list of heads, 0 to 3, each once and in ascending order"
REFUSALS = [
    *(
        (config_class, {"kept_heads": [[[0], [1]], [heads, [1]]]}, rf"kept_heads\[1\]\[0\] is .*: {HEADS}")
        for config_class in CONFIGS
        for heads in ([4], [-1], [2, 2], [2, 1], 0, ["1"])
    ),
    *(
        (HydraViTConfig, {"kept_heads": [[[0], [1]], members]}, r"kept_heads\[1\] is .*for each of the 2 members")
        for members in ([[0]], 1)
    ),
    (HydraViTConfig, {"kept_heads": [[], []]}, r"kept_heads\[0\] has 0 members: use 1 to 1,000"),
    (HydraViTConfig, {"kept_heads": [[[0], [1]]]}, "kept_heads has 1 layers, the model has 2"),
    (HydraViTConfig, {"kept_heads": [[[0]] * 10**6] * 2}, r"kept_heads\[0\] has 1,000,000 members: use 1 to 1,000"),
    (HydraViTConfig, {"num_attention_heads": 10**9}, "num_attention_heads is 1000000000: use 1 to 1,000"),
    (HydraViTConfig, {"shared": ["mlps"]}, "shared names 'mlps': members can share 'embeddings', 'layernorm', 'mlp'"),
    (HydraViTConfig, {"ensemble_loss": "mean"}, "ensemble_loss is 'mean': use 'members'"),
    (
        HydraViTConfig,
        {"num_labels": 1, "problem_type": "single_label_classification"},
        "single_label_class.*num_labels",
    ),
    (HydraBertConfig, {"is_decoder": True}, "HydraBertConfig is an encoder's"),
    (HydraAlbertConfig, {"inner_group_num": 2}, "inner_group_num is 2"),
    (HydraAlbertConfig, {"num_hidden_groups": 3}, "num_hidden_groups is 3 and num_hidden_layers 2"),
    (
        HydraBeitConfig,
        {"image_size": [8, 4], "patch_size": 4},
        r"image_size is \[8, 4\]: a HydraBeit reads square images",
    ),
    (HydraLlamaConfig, {"num_key_value_heads": 3}, "num_attention_heads is 4, num_key_value_heads 3"),
    (
        HydraLlamaConfig,
        {"num_key_value_heads": -2},
        "num_attention_heads is 4, num_key_value_heads -2: pass a multiple",
    ),
    (HydraQwen2Config, KEYS | {"layer_types": ["full_attention", "chunked_attention"]}, "names 'chunked_attention'"),
    (
        HydraQwen2Config,
        KEYS | {"layer_types": ["sliding_attention"] * 2},
        "'sliding_attention', and sliding_window is None",
    ),
    (HydraGemma3TextConfig, {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0: set it to None"),
    (
        HydraGemmaConfig,
        KEYS | {"use_bidirectional_attention": True},
        "use_bidirectional_attention is True: .*, set it to False",
    ),
]


@pytest.mark.parametrize(("config_class", "fields", "words"), REFUSALS)
def test_a_config_that_cannot_be_is_refused(config_class, fields, words):
    tracemalloc.start()
    with pytest.raises(ValueError, match=words):
        config_class(**SIZES | fields)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 50 * 2**20  # also where it asks for absurdly much


@pytest.mark.parametrize("config_class", OF_LAYERS)
def test_no_family_makes_a_list_of_absurdly_many_layers(config_class):
    name = config_class.attribute_map.get("num_hidden_layers", "num_hidden_layers")
    tracemalloc.start()
    with pytest.raises(ValueError, match="use 1 to 1,000"):
        config_class(**{name: 10**6})
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 5 * 2**20


def test_an_unknown_problem_type_is_refused():
    """By Transformers itself in its older versions."""
    with pytest.raises((ValueError, StrictDataclassFieldValidationError), match=r"problem_type.*'?ranking'?"):
        HydraViTConfig(problem_type="ranking")


def test_clip_towers_need_the_same_number_of_members_or_one():
    def config(vision: int, text: int) -> HydraCLIPConfig:
        def tower(members):
            return {**SIZES, "kept_heads": [[[0]] * members] * 2}

        return HydraCLIPConfig(vision_config=tower(vision), text_config=tower(text))

    assert config(3, 1).num_members == config(1, 3).num_members == config(3, 3).num_members == 3
    with pytest.raises(ValueError, match="the vision tower has 3 members and the text tower 2"):
        config(3, 2)


@torch.no_grad()
@each_of([BERT, DISTILBERT, SIGLIP_CLASSIFIER, VIT])
def test_a_width_of_heads_is_believed_where_the_backbone_believes_it(family):
    backbone = family.backbone(head_dim=4)
    hydra = family.hydra.from_backbone(backbone)
    expected = backbone(**family.inputs()).logits
    torch.testing.assert_close(hydra(**family.inputs()).member_logits[:, 0], expected)


@each_of([VIT, CLIP])
def test_a_backbone_checkpoint_is_not_loaded_as_a_hydra(family, tmp_path):
    """Its weights have another layout: loaded as they are, they would silently be nonsense."""
    family.backbone().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"this checkpoint is of type .* pass it to from_backbone\(\)"):
        family.hydra.from_pretrained(tmp_path)


def test_kept_heads_survive_json(tmp_path):
    HydraViTConfig(**SIZES, kept_heads=RAGGED, shared=()).save_pretrained(tmp_path)
    config = HydraViTConfig.from_pretrained(tmp_path)
    assert config.kept_heads == RAGGED
    assert config.shared == []


def test_auto_classes_build_from_the_config_without_trust():
    config = HydraViTConfig(**SIZES, intermediate_size=16, image_size=8, patch_size=4, kept_heads=RAGGED)
    assert isinstance(AutoModelForImageClassification.from_config(config), HydraViTForImageClassification)


def test_a_plain_config_stays_plain():
    assert AutoConfig.for_model("vit").__class__ is ViTConfig


def test_a_config_with_fields_of_an_earlier_version_loads():
    saved = VIT.fused().config.to_dict()
    config = type(VIT.fused().config).from_dict(saved | {"kept_neurons": None, "predicts_variance": False})
    assert config.kept_heads == saved["kept_heads"]
