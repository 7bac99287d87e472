"""BatchEnsemble: members that share their matrices and scale what goes in and comes out of them."""

import copy

import pytest
import torch
from torch import nn
from transformers import (
    BloomConfig,
    BloomForSequenceClassification,
    DebertaV2Config,
    DebertaV2ForSequenceClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
    SegformerConfig,
    SegformerForImageClassification,
    SwinConfig,
    SwinForImageClassification,
    Swinv2Config,
    Swinv2ForImageClassification,
    Trainer,
    TrainingArguments,
    VideoMAEConfig,
    VideoMAEForVideoClassification,
    XLNetConfig,
    XLNetForSequenceClassification,
)

from hydra_transformers.baselines import BatchEnsemble
from hydra_transformers.baselines.batch_ensemble import member_linears
from hydra_transformers.cost import count_multiply_adds, count_parameters
from hydra_transformers.data.prediction import predict
from hydra_transformers.hub import create_model_card
from tests.families import BERT, CLIP, SIGLIP_CLASSIFIER, VIT, randomise, vit_backbone
from tests.training.tiny import QUIET, tiny_dataset, tiny_model


FAMILIES = pytest.mark.parametrize("family", [VIT, BERT], ids=lambda family: family.name)
LAYERS = pytest.mark.parametrize("layers", [None, 1, (0, 2)], ids=str)


def trained(family, **arguments) -> BatchEnsemble:
    """One whose factors and biases are those of a training: none is where it started."""
    ensemble = BatchEnsemble(family.backbone(), **arguments).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for linear in member_linears(ensemble.model):
            for parameter in linear.own_parameters():
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
    return ensemble


@FAMILIES
@LAYERS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_ones_are_the_model_bit_for_bit(family, layers, dtype):
    model = family.backbone().to(dtype)
    inputs = {name: value.to(dtype) if value.is_floating_point() else value for name, value in family.inputs().items()}
    ensemble = BatchEnsemble(model, num_members=3, init="ones", layers=layers)
    # As many rows at a time: how a product is rounded may depend on it.
    tiled = {name: value.repeat(3, *[1] * (value.dim() - 1)) for name, value in inputs.items()}
    expected = model(**tiled).logits.unflatten(0, (3, -1)).transpose(0, 1)
    if layers is None:
        assert torch.equal(predict(ensemble, inputs), expected)
    else:
        torch.testing.assert_close(
            predict(ensemble, inputs), expected, rtol=1e-12 if dtype == torch.float64 else 1e-5, atol=1e-6
        )


@FAMILIES
@LAYERS
def test_each_member_is_a_plain_model_that_answers_as_it_does(family, layers):
    ensemble = trained(family, num_members=3, layers=layers)
    member_logits = predict(ensemble, family.inputs())
    assert member_logits.shape[1] == 3 and not torch.equal(member_logits[:, 0], member_logits[:, 1])
    for index in range(3):
        member = ensemble.member(index)
        assert type(member) is type(ensemble.model)
        assert member.state_dict().keys() == family.backbone().state_dict().keys()
        torch.testing.assert_close(member_logits[:, index], member(**family.inputs()).logits, rtol=1e-10, atol=1e-10)


def test_a_members_matrix_is_the_shared_one_scaled_by_rows_and_columns():
    ensemble = trained(VIT, num_members=2)
    linear = ensemble.model.classifier
    r, s = 1 + linear.input_factors[1], 1 + linear.output_factors[1]
    torch.testing.assert_close(ensemble.member(1).classifier.weight, linear.weight * torch.outer(s, r))


def small_swin() -> SwinForImageClassification:
    """Windows of images are its rows."""
    sizes = {"embed_dim": 8, "depths": [2, 1], "num_heads": [2, 2], "window_size": 2}
    return SwinForImageClassification(SwinConfig(image_size=8, patch_size=2, num_labels=3, **sizes))


def small_swinv2() -> Swinv2ForImageClassification:
    """Linear layers make its position biases."""
    sizes = {"embed_dim": 8, "depths": [1], "num_heads": [2], "window_size": 2}
    return Swinv2ForImageClassification(Swinv2Config(image_size=8, patch_size=2, num_labels=3, **sizes))


def small_deberta() -> DebertaV2ForSequenceClassification:
    """Queries and keys read a table of positions, too."""
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    relative = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "share_att_key": True}
    return DebertaV2ForSequenceClassification(
        DebertaV2Config(**sizes, **relative, vocab_size=40, max_position_embeddings=16, num_labels=3)
    )


@pytest.mark.parametrize(
    ("make", "family", "shared"),
    [(small_swin, VIT, ""), (small_swinv2, VIT, "position_bias"), (small_deberta, BERT, "query_proj")],
    ids=["swin", "swinv2", "deberta"],
)
def test_other_families_take_part_and_share_what_does_not_read_the_batch(make, family, shared):
    torch.manual_seed(0)
    ensemble = BatchEnsemble(make().double().eval(), num_members=2, std=0.5)
    member_logits = predict(ensemble, family.inputs())
    for index in range(2):
        expected = ensemble.member(index)(**family.inputs()).logits
        torch.testing.assert_close(member_logits[:, index], expected, rtol=1e-10, atol=1e-10)
    left = [name for name, module in ensemble.model.named_modules() if type(module) is nn.Linear]
    assert bool(left) == bool(shared) and all(any(part in name for part in (shared, "key_proj")) for name in left)


def test_members_never_mix_and_all_share_the_matrices():
    ensemble = trained(VIT, num_members=3)
    ensemble(**VIT.inputs()).member_logits[:, 1].sum().backward()
    for linear in member_linears(ensemble.model):
        for parameter in linear.own_parameters():
            assert not parameter.grad[[0, 2]].any() and parameter.grad[1].any()
        assert linear.weight.grad.any()


@pytest.mark.parametrize("init", ["normal", "signs"])
def test_the_start_is_seeded_around_one_and_every_member_has_the_models_bias(init):
    state = torch.get_rng_state()
    ensemble, again = (BatchEnsemble(vit_backbone(), num_members=4, init=init, seed=3) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), state)
    torch.testing.assert_close(ensemble.state_dict(), again.state_dict(), rtol=0, atol=0)
    factors = torch.cat(
        [1 + each for linear in member_linears(ensemble.model) for each in (linear.input_factors.flatten(),)]
    )
    if init == "signs":
        assert set(factors.tolist()) == {-1.0, 1.0} and abs(factors.mean()) < 0.1
    else:
        assert abs(factors.mean() - 1) < 0.01 and abs(factors.std() - 0.1) < 0.01
    torch.testing.assert_close(ensemble.member(2).classifier.bias, vit_backbone().classifier.bias)
    wide = member_linears(BatchEnsemble(vit_backbone(), std=0.5).model)[0].input_factors
    torch.testing.assert_close(wide, 5 * member_linears(BatchEnsemble(vit_backbone()).model)[0].input_factors)


@LAYERS
def test_saved_and_loaded_it_answers_the_same(layers, tmp_path):
    ensemble = trained(BERT, num_members=2, layers=layers)
    ensemble.save_pretrained(tmp_path)
    loaded = BatchEnsemble.from_pretrained(tmp_path)
    assert torch.equal(predict(loaded, BERT.inputs()), predict(ensemble, BERT.inputs()))
    names = set(ensemble.own_weights())
    assert all(name.endswith(("input_factors", "output_factors", "biases")) for name in names)


def test_it_trains_with_trainer_and_the_users_model_stays_as_it_was(tmp_path):
    model = tiny_model("bert", "backbone")
    before = copy.deepcopy(model.state_dict())
    ensemble = BatchEnsemble(model, num_members=3, layers=2)
    groups = ensemble.parameter_groups(0.01, fast_factor=2.0, weight_decay=0.1)
    assert sum(len(group["params"]) for group in groups) == len(list(ensemble.parameters()))
    assert [(group["lr"], group["weight_decay"]) for group in groups] == [(0.01, 0.1), (0.02, 0.0)]
    optimizer = torch.optim.AdamW(groups)
    start = {name: parameter.detach().clone() for name, parameter in ensemble.named_parameters()}
    trainer = Trainer(
        model=ensemble,
        args=TrainingArguments(tmp_path, max_steps=3, **QUIET),
        train_dataset=tiny_dataset("bert"),
        optimizers=(optimizer, None),
    )
    trainer.train()
    still = [name for name, parameter in ensemble.named_parameters() if torch.equal(start[name], parameter)]
    assert [name for name in still if "position" not in name] == []
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


@pytest.mark.slow
def test_compiled_it_answers_the_same():
    ensemble = trained(BERT, num_members=2, layers=1)
    torch._dynamo.reset()
    compiled = torch.compile(ensemble, backend="eager", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(**BERT.inputs()).member_logits, ensemble(**BERT.inputs()).member_logits)


@pytest.mark.slow
def test_it_costs_a_forward_per_member_from_the_first_layer_that_is_theirs():
    """Beside that, two factors and a bias per member and linear layer, of which multiply-adds know nothing."""
    model = vit_backbone()
    single = count_multiply_adds(model)
    assert count_multiply_adds(BatchEnsemble(model, num_members=3)) == 3 * single
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    extra = sum(each.in_features + 2 * each.out_features for each in linears)
    biases = sum(each.out_features for each in linears)  # the model's own are no parameters any more
    assert count_parameters(BatchEnsemble(model, num_members=3)) == count_parameters(model) + 3 * extra - biases
    last, head = count_multiply_adds(BatchEnsemble(model, num_members=3, layers=1)), 32 * 5
    patches = 4 * 3 * 4 * 4 * 32
    of_layer = (single - patches - head) // 3
    assert last == patches + 2 * of_layer + 3 * (of_layer + head)


def test_bad_arguments_are_refused():
    for arguments, message in [
        ({"num_members": 0}, "num_members is 0: pass at least 1"),
        ({"init": "zeros"}, "init is 'zeros': pass one of normal, ones, signs"),
        ({"init": "ones", "std": 0.1}, "std is 0.1 and init is 'ones'"),
        ({"std": -1.0}, "std is -1.0"),
        ({"std": float("inf")}, "std is inf"),
        ({"num_members": 2.0}, "num_members is 2.0: pass at least 1, a whole number"),
        ({"layers": "2"}, "layers is '2'"),
        ({"layers": 4}, r"layers is 4: pass how many of the last layers, or their numbers, of 0 to 2"),
        ({"layers": [3]}, r"layers is \[3\]"),
    ]:
        with pytest.raises(ValueError, match=message):
            BatchEnsemble(vit_backbone(), **arguments)
    with pytest.raises(TypeError, match="model is a CLIPModel, no classifier"):
        BatchEnsemble(CLIP.backbone())
    with pytest.raises(TypeError, match="which has members already"):
        BatchEnsemble(VIT.fused())
    with pytest.raises(IndexError, match="member 4 does not exist"):
        BatchEnsemble(vit_backbone()).member(4)


TEXTS = torch.tensor([[5, 6, 7, 8, 9, 4], [7, 9, 11, 5, 3, 4]])
FEW = {"vocab_size": 40, "num_labels": 3}


def small_xlnet() -> XLNetForSequenceClassification:
    """Its states are (tokens, batch, width), and it knows no largest position."""
    return XLNetForSequenceClassification(XLNetConfig(**FEW, d_model=8, n_layer=1, n_head=2, d_inner=8))


def small_bloom() -> BloomForSequenceClassification:
    """Its config has no largest position at all."""
    return BloomForSequenceClassification(BloomConfig(**FEW, hidden_size=8, n_layer=1, n_head=2, pad_token_id=0))


@pytest.mark.parametrize("make", [small_xlnet, small_bloom])
def test_members_without_a_table_of_positions_answer_as_their_plain_models(make):
    model = randomise(make().double(), seed=0)
    ensemble = BatchEnsemble(model, num_members=2, std=0.5).eval()
    member_logits = ensemble(input_ids=TEXTS).member_logits
    for index in range(2):
        expected = ensemble.member(index)(input_ids=TEXTS).logits
        torch.testing.assert_close(member_logits[:, index], expected, rtol=1e-10, atol=1e-10)


def test_a_model_that_picks_rows_of_its_inputs_has_layers():
    """A decoder picks the last token of each row that it was given: behind its layers, there are those of all members."""
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = randomise(LlamaForSequenceClassification(LlamaConfig(**FEW, **sizes, pad_token_id=0)).double(), seed=0)
    ensemble = BatchEnsemble(model, num_members=2, std=0.5, layers=1).eval()
    inputs = {"input_ids": TEXTS, "position_ids": torch.tensor([[0, 1, 2, 3, 4, 5], [2, 3, 4, 5, 6, 7]])}
    expected = torch.stack([ensemble.member(index)(**inputs).logits for index in range(2)], dim=1)
    torch.testing.assert_close(ensemble(**inputs).member_logits, expected)
    assert count_multiply_adds(ensemble) < 1.6 * count_multiply_adds(model)


def test_a_model_that_cannot_be_tried_is_refused():
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    model = VideoMAEForVideoClassification(
        VideoMAEConfig(**sizes, image_size=8, patch_size=4, num_frames=2, num_labels=3)
    )
    with pytest.raises(ValueError, match="VideoMAEForVideoClassification cannot be tried on made-up images, texts or"):
        BatchEnsemble(model)


def test_a_classifier_of_one_tower_is_described_and_has_layers():
    """Its config is that of two, of which it has one."""
    ensemble = BatchEnsemble(SIGLIP_CLASSIFIER.backbone(), num_members=2, std=0.5, layers=1).eval()
    inputs = SIGLIP_CLASSIFIER.inputs()
    expected = torch.stack([ensemble.member(index)(**inputs).logits for index in range(2)], dim=1)
    torch.testing.assert_close(ensemble(**inputs).member_logits, expected)
    assert "| Multiply-adds per image |" in create_model_card(ensemble, repo_id="me/tiny").text


@pytest.mark.slow
def test_a_model_of_images_of_any_size_has_members_and_a_cost():
    """Its config names no size."""
    sizes = {"hidden_sizes": [8] * 4, "depths": [1] * 4, "num_attention_heads": [1] * 4, "mlp_ratios": [1] * 4}
    model = randomise(SegformerForImageClassification(SegformerConfig(**sizes, num_labels=3)).double(), seed=0)
    ensemble = BatchEnsemble(model, num_members=2, std=0.5).eval()
    inputs = {"pixel_values": torch.randn(2, 3, 32, 64, dtype=torch.float64)}
    expected = torch.stack([ensemble.member(index)(**inputs).logits for index in range(2)], dim=1)
    torch.testing.assert_close(ensemble(**inputs).member_logits, expected)
    assert count_multiply_adds(ensemble) == 2 * count_multiply_adds(model)
