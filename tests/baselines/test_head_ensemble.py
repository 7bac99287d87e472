"""HeadEnsemble: several classifiers on one backbone."""

import torch

from hydra_transformers.baselines import HeadEnsemble
from hydra_transformers.data.prediction import predict
from tests.families import BERT, LLAMA, VIT, WHISPER, for_families


@for_families([VIT, BERT, LLAMA, WHISPER])
def test_every_head_reads_what_the_models_own_reads(family):
    """A model with the member's head in place of its own gives the member's logits."""
    ensemble = HeadEnsemble(family.backbone(), num_members=2, seed=1)
    member_logits = predict(ensemble, family.inputs())
    head = ensemble.model.get_submodule(ensemble.head)
    for member in range(2):
        model = family.backbone()
        with torch.no_grad():
            for name, tensor in head.named_parameters():  # a weight and, but for decoders, a bias
                model.get_submodule(ensemble.head).get_parameter(name).copy_(tensor.chunk(2)[member])
        torch.testing.assert_close(member_logits[:, member], predict(model, family.inputs())[:, 0])


def test_a_member_learns_as_if_it_were_alone():
    ensemble = HeadEnsemble(BERT.backbone(), num_members=3).eval()
    ensemble(**BERT.inputs()).member_logits[:, 1].sum().backward()
    gradient = ensemble.model.get_submodule(ensemble.head).weight.grad
    assert gradient.chunk(3)[1].any() and not torch.stack(gradient.chunk(3))[[0, 2]].any()
    trained = [name for name, parameter in ensemble.named_parameters() if parameter.requires_grad]
    assert trained == [f"model.{ensemble.head}.{each}" for each in ("weight", "bias")]
    assert all(parameter.requires_grad for parameter in HeadEnsemble(BERT.backbone(), frozen=False).parameters())
