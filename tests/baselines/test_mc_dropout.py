"""MCDropout: one model, sampled with its dropout on."""

import operator
import threading

import pytest
import torch
from accelerate import dispatch_model
from torch import nn
from transformers import BartConfig, BartForSequenceClassification
from transformers.modeling_outputs import ImageClassifierOutput

from hydra_transformers._io.threads import copy_sharing_weights
from hydra_transformers.baselines import MCDropout
from hydra_transformers.data.prediction import predict
from tests.families import BERT, VIT, bert_backbone, images, vit_backbone


P = 0.2
WITH_DROPOUT = {"hidden_dropout_prob": P, "attention_probs_dropout_prob": P}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def in_training_mode(model, inputs, seed: int) -> torch.Tensor:
    """Plain Transformers: the logits (batch, classes) of a model whose config has the dropout, in train mode."""
    torch.manual_seed(seed)
    with torch.no_grad():
        return model.train()(**inputs).logits


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("family", [VIT, BERT], ids=lambda family: family.name)
def test_a_sample_is_what_the_model_says_in_train_mode(family, attention):
    """With all dropouts, those on attention weights included, and the probability given to a model that has none."""
    fields = {"attn_implementation": attention}
    expected = in_training_mode(family.backbone(**WITH_DROPOUT, **fields), family.inputs(), seed=4)
    sampled = MCDropout(family.backbone(**NO_DROPOUT, **fields), num_samples=1, p=P, seed=4)
    own = MCDropout(family.backbone(**WITH_DROPOUT, **fields), num_samples=1, seed=4)
    with torch.no_grad():
        assert torch.equal(sampled(**family.inputs()).member_logits[:, 0], expected)
        assert torch.equal(own(**family.inputs()).member_logits[:, 0], expected)


@pytest.mark.parametrize("family", [VIT, BERT], ids=lambda family: family.name)
def test_the_samples_of_a_row_lie_side_by_side(family):
    """Samples run as one batch: sample s of row r is row s * rows + r of the repeated batch."""
    inputs = family.inputs()
    repeated = {name: torch.cat([value] * 3) for name, value in inputs.items()}
    expected = in_training_mode(family.backbone(**WITH_DROPOUT), repeated, seed=1)
    member_logits = predict(MCDropout(family.backbone(**WITH_DROPOUT), num_samples=3, seed=1), inputs)
    assert torch.equal(member_logits, expected.reshape(3, 4, -1).transpose(0, 1))


def test_a_hydra_is_sampled_with_all_its_members():
    hydra = VIT.fused()
    member_logits = predict(MCDropout(hydra, num_samples=3, p=P, seed=2), VIT.inputs())
    assert member_logits.shape == (4, 9, 5)
    assert len(member_logits[0].unique(dim=0)) == 9
    backbones = [vit_backbone(seed, **WITH_DROPOUT) for seed in range(3)]
    pairs = zip(backbones, VIT.heads_to_prune, strict=True)
    noisy = VIT.hydra.from_pruned_members([VIT.hydra.from_backbone(backbone, heads) for backbone, heads in pairs])
    torch.manual_seed(2)
    repeated = torch.cat([images()] * 3)
    with torch.no_grad():
        expected = noisy.train()(pixel_values=repeated).member_logits
    torch.testing.assert_close(member_logits, expected.reshape(3, 4, 3, 5).transpose(0, 1).flatten(1, 2))


def test_a_pass_holds_as_many_samples_as_fit():
    sampled = MCDropout(vit_backbone(), num_samples=7, p=P, seed=0)
    sampled.rows_per_pass = 9  # two samples of four rows
    seen = []
    sampled.model.register_forward_hook(lambda module, args, output: seen.append(len(output.logits)))
    member_logits = predict(sampled, VIT.inputs())
    assert seen == [8, 8, 8, 4]
    assert len(member_logits[0].unique(dim=0)) == 7
    sampled.rows_per_pass = 1
    assert predict(sampled, VIT.inputs()).shape == (4, 7, 5)


def test_without_a_seed_each_call_samples_anew_and_no_dropout_is_the_model():
    anew = MCDropout(vit_backbone(), p=P)
    assert not torch.equal(predict(anew, VIT.inputs()), predict(anew, VIT.inputs()))
    nearly = predict(MCDropout(vit_backbone(), num_samples=2, p=1e-12), VIT.inputs())
    torch.testing.assert_close(nearly[:, 0], vit_backbone()(**VIT.inputs()).logits.detach())


@pytest.mark.parametrize("training", [True, False])
def test_modes_and_probabilities_are_restored_even_after_an_error(training):
    model = bert_backbone().train(training)
    model.bert.encoder.layer[0].train(not training)
    modes = [module.training for module in model.modules()]
    sampled = MCDropout(model, p=0.4)
    sampled(**BERT.inputs())
    with pytest.raises(IndexError):
        sampled(input_ids=torch.full((2, 3), 10_000))
    assert [module.training for module in model.modules()] == modes
    assert {module.p for module in model.modules() if isinstance(module, nn.Dropout)} == {0.1}


class WithBatchNorm(nn.Module):
    """A classifier with a dropout, a normalisation by batch statistics and a module that changes in train mode."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.dropout = nn.Dropout(0.5)
        self.seen = []

    def forward(self, features):
        self.seen.append((self.training, self.norm.training, self.dropout.training))
        return ImageClassifierOutput(logits=self.dropout(self.norm(features)))


def test_nothing_but_dropout_is_switched_on():
    model = WithBatchNorm().train()
    mean = model.norm.running_mean.clone()
    MCDropout(model, num_samples=2)(features=torch.randn(3, 4) + 1)
    assert model.seen == [(False, False, True)]
    assert torch.equal(model.norm.running_mean, mean)
    assert model.training and model.norm.training


def test_whole_layers_are_not_left_out():
    sizes = {"d_model": 16, "encoder_layers": 2, "decoder_layers": 1, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    model = BartForSequenceClassification(BartConfig(vocab_size=20, encoder_layerdrop=0.9, **sizes, **heads)).eval()
    ran = []
    model.model.encoder.layers[0].register_forward_hook(lambda *_: ran.append(1))
    sampled = MCDropout(model, num_samples=8, seed=0)
    sampled.rows_per_pass = 1
    with torch.no_grad():
        sampled(input_ids=torch.tensor([[0, 5, 6, 2]]))
    assert len(ran) == 8
    assert model.model.encoder.layerdrop == 0.9


# Threads


def in_threads(count: int, calls: int, ask) -> list:
    """What `ask(number)` gives, asked `calls` times by each of `count` threads at once."""
    answers = []
    together = threading.Barrier(count)

    def work(thread: int) -> None:
        together.wait()
        answers.extend((number, ask(number)) for number in range(thread, calls * count, count))

    threads = [threading.Thread(target=work, args=(thread,)) for thread in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(answers) == count * calls
    return answers


@pytest.mark.slow
@pytest.mark.parametrize("family", [VIT, BERT], ids=lambda family: family.name)
def test_threads_get_the_samples_that_one_alone_gets(family):
    """While others use the very same model, and draw random numbers of their own."""
    model = family.backbone(**WITH_DROPOUT).eval()
    modes = [module.training for module in model.modules()]
    sampled = [MCDropout(model, num_samples=3, seed=seed) for seed in range(3)]
    inputs = family.inputs()
    expected = [predict(each, inputs) for each in sampled] + [predict(model, inputs)]

    def ask(number: int) -> torch.Tensor:
        torch.rand(7)
        return predict((*sampled, model)[number % 4], inputs)

    for number, answer in in_threads(4, 8, ask):
        assert torch.equal(answer, expected[number % 4]), number % 4
    assert [module.training for module in model.modules()] == modes
    assert {module.p for module in model.modules() if isinstance(module, nn.Dropout)} == {P}


def test_a_model_spread_over_devices_is_sampled():
    """Accelerate gives modules a forward of their own, which must be that of the copy."""
    model = vit_backbone(**WITH_DROPOUT).eval()
    expected = predict(MCDropout(model, num_samples=2, seed=0), VIT.inputs())
    hooked = dispatch_model(model, {"vit": "cpu", "classifier": "cpu"}, force_hooks=True)
    assert torch.equal(predict(MCDropout(hooked, num_samples=2, seed=0), VIT.inputs()), expected)


def test_a_compiled_model_is_sampled_as_it_is_or_refused():
    model = vit_backbone(**WITH_DROPOUT).eval()
    expected = predict(MCDropout(model, num_samples=2, seed=0), VIT.inputs())
    with pytest.raises(TypeError, match=r"OptimizedModule was replaced .*: pass the model as it was before"):
        MCDropout(torch.compile(model, backend="eager"), num_samples=2)(**VIT.inputs())
    model.compile(backend="eager")
    assert torch.equal(predict(MCDropout(model, num_samples=2, seed=0), VIT.inputs()), expected)


def test_a_copy_for_sampling_has_the_weights_and_nothing_else_of_the_model():
    model = vit_backbone(**WITH_DROPOUT).eval()
    model.first_layer = [model.vit.layers[0]]  # known to the model by another way too
    copied = copy_sharing_weights(model)
    assert all(map(operator.is_, model.parameters(), copied.parameters()))
    assert not {id(module) for module in model.modules()} & {id(module) for module in copied.modules()}
    assert copied.first_layer[0] is copied.vit.layers[0]
