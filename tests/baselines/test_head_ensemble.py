"""HeadEnsemble: several classifiers on one backbone."""

import pytest
import torch
from transformers import Trainer, TrainingArguments

from hydra_transformers.baselines import HeadEnsemble
from hydra_transformers.cost import count_multiply_adds, count_parameters
from hydra_transformers.data.prediction import predict
from tests.families import BERT, FAMILIES, VIT, vit_backbone
from tests.training.tiny import QUIET, tiny_dataset, tiny_model


CLASSIFIERS = [family for family in FAMILIES if not family.has_towers]


@pytest.mark.parametrize("family", CLASSIFIERS, ids=lambda family: family.name)
def test_every_head_reads_what_the_models_own_reads(family, tmp_path):
    """A model with the member's head in place of its own gives the member's logits; saved and loaded, it is the same."""
    ensemble = HeadEnsemble(family.backbone(), num_members=2, seed=1)
    member_logits = predict(ensemble, family.inputs())
    head = ensemble.model.get_submodule(ensemble.head)
    for member in range(2):
        model = family.backbone()
        with torch.no_grad():
            for name, tensor in head.named_parameters():  # a weight and, but for decoders, a bias
                model.get_submodule(ensemble.head).get_parameter(name).copy_(tensor.chunk(2)[member])
        torch.testing.assert_close(member_logits[:, member], predict(model, family.inputs())[:, 0])
    ensemble.save_pretrained(tmp_path)
    assert torch.equal(predict(HeadEnsemble.from_pretrained(tmp_path), family.inputs()), member_logits)
    plain = predict(ensemble.plain_model(), family.inputs())[:, 0]
    torch.testing.assert_close(plain, member_logits.mean(1))


def test_the_heads_differ_and_are_seeded():
    vit_backbone()  # is made once
    state = torch.get_rng_state()
    first, again, other = (predict(HeadEnsemble(vit_backbone(), seed=seed), VIT.inputs()) for seed in (0, 0, 1))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert not torch.allclose(first[:, 0], first[:, 1])
    assert torch.equal(torch.get_rng_state(), state)


def test_a_member_learns_as_if_it_were_alone():
    ensemble = HeadEnsemble(BERT.backbone(), num_members=3).eval()
    ensemble(**BERT.inputs()).member_logits[:, 1].sum().backward()
    gradient = ensemble.model.get_submodule(ensemble.head).weight.grad
    assert gradient.chunk(3)[1].any() and not torch.stack(gradient.chunk(3))[[0, 2]].any()
    trained = [name for name, parameter in ensemble.named_parameters() if parameter.requires_grad]
    assert trained == [f"model.{ensemble.head}.{each}" for each in ("weight", "bias")]
    assert all(parameter.requires_grad for parameter in HeadEnsemble(BERT.backbone(), frozen=False).parameters())


def test_it_trains_with_trainer(tmp_path):
    ensemble = HeadEnsemble(tiny_model("vit", "backbone"), num_members=2)
    before = {name: tensor.clone() for name, tensor in ensemble.state_dict().items()}
    arguments = TrainingArguments(tmp_path, max_steps=2, learning_rate=0.1, save_strategy="no", **QUIET)
    Trainer(model=ensemble, args=arguments, train_dataset=tiny_dataset("vit")).train()
    changed = {name for name, tensor in ensemble.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed == {"model.classifier.weight", "model.classifier.bias"}


def test_it_costs_a_head_per_member():
    model = vit_backbone()
    ensemble = HeadEnsemble(model, num_members=4)
    assert count_multiply_adds(ensemble) == count_multiply_adds(model) + 3 * 32 * 5
    assert count_parameters(ensemble) == count_parameters(model) + 3 * 33 * 5


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match="num_members is 0"):
        HeadEnsemble(vit_backbone(), num_members=0)
    with pytest.raises(TypeError, match="which has members already"):
        HeadEnsemble(VIT.fused())
