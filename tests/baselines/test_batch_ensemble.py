"""BatchEnsemble: members that share their matrices and scale what goes in and comes out of them."""

import pytest
import torch

from hydra_transformers.baselines import BatchEnsemble
from hydra_transformers.baselines.batch_ensemble import member_linears
from hydra_transformers.data.prediction import predict
from tests.families import ALBERT, BERT, LLAMA, VIT, each_of, vit_backbone


def trained(family, **arguments) -> BatchEnsemble:
    """One whose factors and biases are those of a training: none is where it started."""
    ensemble = BatchEnsemble(family.backbone(), **arguments).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in ensemble.named_parameters():
            if name.endswith(("factors", "biases")):
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
    return ensemble


@each_of([VIT, BERT])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_ones_are_the_model_bit_for_bit(family, dtype):
    model = family.backbone().to(dtype)
    inputs = {name: value.to(dtype) if value.is_floating_point() else value for name, value in family.inputs().items()}
    # As many rows at a time: how a product is rounded may depend on it.
    tiled = {name: value.repeat(3, *[1] * (value.dim() - 1)) for name, value in inputs.items()}
    expected = model(**tiled).logits.unflatten(0, (3, -1)).transpose(0, 1)
    assert torch.equal(predict(BatchEnsemble(model, num_members=3, std=0.0), inputs), expected)


@each_of([VIT, BERT, ALBERT, LLAMA])
def test_each_member_is_a_plain_model_that_answers_as_it_does(family):
    ensemble = trained(family, num_members=3)
    member_logits = predict(ensemble, family.inputs())
    assert not torch.equal(member_logits[:, 0], member_logits[:, 1])
    for index in range(3):
        member = ensemble.member(index)
        assert type(member) is type(family.backbone())
        assert member.state_dict().keys() == family.backbone().state_dict().keys()
        torch.testing.assert_close(member_logits[:, index], predict(member, family.inputs())[:, 0])
    if family is VIT:  # its matrix is the shared one, scaled by rows and columns
        linear = ensemble.model.classifier
        r = 1 + linear.input_factors[1]
        s = 1 + linear.output_factors[1]
        torch.testing.assert_close(ensemble.member(1).classifier.weight, linear.weight * torch.outer(s, r))


def test_the_start_is_around_one_and_every_member_has_the_models_bias():
    ensemble = BatchEnsemble(vit_backbone(), num_members=4, seed=3)
    factors = torch.cat([1 + linear.input_factors.flatten() for linear in member_linears(ensemble.model)])
    assert abs(factors.mean() - 1) < 0.01 and abs(factors.std() - 0.1) < 0.01
    torch.testing.assert_close(ensemble.member(2).classifier.bias, vit_backbone().classifier.bias)
    wide = member_linears(BatchEnsemble(vit_backbone(), std=0.5).model)[0].input_factors
    torch.testing.assert_close(wide, 5 * member_linears(BatchEnsemble(vit_backbone()).model)[0].input_factors)
