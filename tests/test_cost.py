"""Costs are counted from shapes."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import Qwen2Config, Qwen2ForSequenceClassification, ViTConfig, ViTForImageClassification

from hydra_transformers import HydraQwen2Config, HydraQwen2ForSequenceClassification, HydraViTForImageClassification
from hydra_transformers.cost import (
    compare_costs,
    count_multiply_adds,
    count_parameters,
    inputs_for,
    multiply_adds_of,
    readable_count,
    unpruned_backbone,
)
from hydra_transformers.fusion.probe import example_inputs
from hydra_transformers.fusion.structure import without_weights
from hydra_transformers.reports import cost_table
from tests.families import BERT, CLIP, DEBERTA, LLAMA, ROBERTA, VIT, each_of, vit_backbone
from tests.pages import ROOT


QWEN2_7B = {"hidden_size": 3584, "intermediate_size": 18944, "vocab_size": 152064}
QWEN2_7B |= {"num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4}
HEADS_GONE = [{0: [0], 1: [1, 2]}, {0: [2, 3]}, {2: [0, 1]}]


@pytest.fixture
def hydra():
    backbone = vit_backbone().float()
    members = [HydraViTForImageClassification.from_backbone(backbone, heads) for heads in HEADS_GONE]
    return HydraViTForImageClassification.from_pruned_members(members)


def test_multiply_adds_of_a_vit_are_those_of_its_matrix_products():
    hidden = 32
    layers = 2
    mlp = 48
    tokens = 5
    patch_values = 3 * 4 * 4
    classes = 6
    sizes = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": 4, "intermediate_size": mlp}
    model = ViTForImageClassification(ViTConfig(image_size=8, patch_size=4, num_labels=classes, **sizes))
    projections = 4 * tokens * hidden**2
    attention = 2 * tokens**2 * hidden
    mlp = 2 * tokens * hidden * mlp
    expected = (tokens - 1) * patch_values * hidden + layers * (projections + attention + mlp) + hidden * classes
    assert count_multiply_adds(model) == expected


def test_a_pruned_member_costs_less_than_its_backbone_and_counting_leaves_the_model_as_it_is(hydra):
    before = {name: tensor.clone() for name, tensor in hydra.state_dict().items()}
    heads = [list(layer) for layer in hydra.config.kept_heads]
    backbone = unpruned_backbone(hydra)
    member = hydra.member(0)
    assert count_parameters(member) < count_parameters(backbone)
    assert count_multiply_adds(member) < count_multiply_adds(backbone) < count_multiply_adds(hydra)
    assert hydra.config.kept_heads == heads
    assert all(torch.equal(before[name], tensor) for name, tensor in hydra.state_dict().items())


@each_of([VIT, BERT, CLIP])
def test_the_unpruned_backbone_of_a_hydra_is_the_model_it_was_made_from(family):
    model = family.backbone()
    rebuilt = unpruned_backbone(family.hydra.from_backbone(model))
    assert type(rebuilt) is type(model)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    assert {name: parameter.shape for name, parameter in rebuilt.named_parameters()} == shapes
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model.to("meta")(**example_inputs(model.config, 1, "meta"))
    assert count_multiply_adds(rebuilt) == counter.get_total_flops() // 2


@each_of([BERT, DEBERTA, LLAMA])
def test_texts_are_counted_for_the_hydra_and_its_backbone(family):
    hydra = family.fused("all")
    assert 0 < count_multiply_adds(unpruned_backbone(hydra)) < count_multiply_adds(hydra)


@pytest.mark.slow
def test_towers_cost_the_same_whatever_their_dtype():
    """Made from their configs, they are of that dtype, and what lies between them is of the default one."""
    hydra = CLIP.fused("uniform")
    costs = []
    for dtype in (torch.float32, torch.float64):
        for config in (hydra.config, hydra.config.vision_config, hydra.config.text_config):
            config.dtype = dtype
        costs.append(count_multiply_adds(hydra))
    assert costs[0] == costs[1]


def test_texts_are_no_longer_than_positions_counted_from_behind_the_padding():
    model = ROBERTA.backbone()
    inputs = inputs_for(model, 1)
    assert inputs["input_ids"].shape == (1, model.config.max_position_embeddings - 1)
    model(**inputs)


def test_the_table_has_a_row_per_model_and_no_model_runs(hydra):
    with pytest.raises(TypeError, match="pass a Hydra"):
        unpruned_backbone(vit_backbone())
    hydra.register_forward_hook(lambda *_: pytest.fail("the model ran"))
    costs = compare_costs({"Single": unpruned_backbone(hydra), "Hydra": hydra})
    lines = cost_table(costs).splitlines()
    assert lines[0] == "| Model | Parameters | Multiply-adds |"
    assert lines[2].startswith(f"| Single | {costs['Single'].parameters:,} |") and lines[3].startswith("| Hydra |")


@pytest.mark.parametrize(("count", "text"), [(999, "999"), (1_234_567, "1.23 M"), (17_580_000_000, "17.58 G")])
def test_counts_are_readable(count, text):
    assert readable_count(count) == text


@pytest.mark.slow
def test_the_page_says_what_classifiers_on_a_language_model_take():
    """Members with all heads, with the heads of half of the keys, and with half of the layers merged as well."""
    all_heads = list(range(28))
    half = [[head for head in all_heads if head // 7 in (member % 4, (member + 1) % 4)] for member in range(3)]
    kept = {"all": [[all_heads] * 3] * 28, "half": [half] * 28, "trunk": [[all_heads] * 3] * 14 + [half] * 14}
    text = {"input_ids": torch.ones(1, 512, dtype=torch.long, device="meta")}
    settings = {"num_labels": 2, "pad_token_id": 0, **QWEN2_7B}
    models = {"one": without_weights(Qwen2ForSequenceClassification, Qwen2Config(**settings))}
    for name, kept_heads in kept.items():
        config = HydraQwen2Config(**settings, kept_heads=kept_heads, trunk_layers=14 if name == "trunk" else 0)
        models[name] = without_weights(HydraQwen2ForSequenceClassification, config)
    gigabytes = {name: 2 * model.num_parameters() / 1e9 for name, model in models.items()}
    work = {name: multiply_adds_of(model, **text) for name, model in models.items()}
    page = (ROOT / "docs/how-it-works.md").read_text()
    sizes = (gigabytes["one"], 3 * gigabytes["one"], gigabytes["all"], gigabytes["half"])
    assert all(f" {size:.1f} GB" in page for size in sizes)
    ratios = [f"{work[name] / work['one']:.1f}" for name in ("all", "half", "trunk")]
    assert ratios == ["3.0", "2.8", "1.9"] and all(ratio in page for ratio in ratios)
