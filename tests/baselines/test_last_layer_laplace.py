"""LastLayerLaplace: a classifier whose last layer is uncertain."""

import copy

import pytest
import torch
from torch import nn
from transformers import DeiTForImageClassificationWithTeacher

from hydra_transformers.baselines import LastLayerLaplace
from hydra_transformers.data.prediction import predict
from tests.families import BERT, DECODERS, DEIT, LLAMA, VIT, WHISPER, each_of, images, padded_texts


def rows(family, batches: int = 4) -> list[dict[str, torch.Tensor]]:
    def make(seed: int) -> dict[str, torch.Tensor]:
        if family.reads_audio:
            return family.sounds(seed=seed)
        return {"pixel_values": images(seed=seed)} if family.reads_images else padded_texts(seed=seed)

    return [{**make(seed), "labels": torch.zeros(4, dtype=torch.long)} for seed in range(batches)]


@each_of([VIT, BERT, LLAMA, WHISPER])
def test_it_is_the_brute_force_posterior_of_the_last_linear_layer(family):
    model = family.backbone()
    data = rows(family)
    laplace = LastLayerLaplace(model).fit(data)
    head = next(
        module
        for module in reversed(list(model.modules()))
        if isinstance(module, nn.Linear) and module.out_features == model.config.num_labels
    )
    read = []
    handle = head.register_forward_hook(lambda _, inputs, output: read.append((inputs[0].detach(), output.detach())))
    for batch in data:
        model(**{name: value for name, value in batch.items() if name != "labels"})
        if family in DECODERS:  # whose head reads every token, and the answer is the last one's
            rows_and_last = torch.arange(4), batch["attention_mask"].sum(dim=1) - 1
            read[-1] = tuple(each[rows_and_last] for each in read[-1])
    handle.remove()
    ones = 0 if head.bias is None else 1
    features = torch.cat([nn.functional.pad(inputs.double(), (0, ones), value=1.0) for inputs, _ in read])
    logits = torch.cat([outputs.double() for _, outputs in read])
    p = logits.softmax(-1)
    curvature = (torch.diag_embed(p) - p.unsqueeze(2) * p.unsqueeze(1)).sum(0)
    whole = torch.kron(curvature, features.t() @ features) / len(features)
    prior = float(laplace.posterior.prior_precision)
    covariance = (whole + prior * torch.eye(len(whole), dtype=torch.float64)).inverse()
    first = features[:4]
    maps = torch.stack([torch.kron(torch.eye(p.shape[1], dtype=torch.float64), row.unsqueeze(0)) for row in first])
    variances = (maps @ covariance @ maps.mT).diagonal(dim1=1, dim2=2)
    expected = logits[:4] / (1 + torch.pi / 8 * variances).sqrt()
    found = predict(laplace, data[0])
    assert found.shape == (4, 1, p.shape[1])
    torch.testing.assert_close(found[:, 0].double(), expected, rtol=1e-4, atol=1e-6)
    assert not torch.allclose(found[:, 0].double(), logits[:4], rtol=1e-3)


def test_members_are_models_with_last_layers_of_their_own():
    model = VIT.backbone()
    data = rows(VIT)
    laplace = LastLayerLaplace(model, num_samples=3).fit(data, seed=5)
    found = predict(laplace, data[0])
    assert found.shape == (4, 3, 5) and laplace.num_members == 3
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.classifier.weight += laplace.samples[1, :, :-1]
        other.classifier.bias += laplace.samples[1, :, -1]
        torch.testing.assert_close(found[:, 1], other(pixel_values=data[0]["pixel_values"]).logits)
    many = LastLayerLaplace(model, num_samples=4000).fit(data)
    variance = many.posterior.output_variance(many._apply_head(many.model(**VIT.inputs()).logits)[0])
    torch.testing.assert_close(predict(many, data[0]).var(dim=1), variance.detach(), rtol=0.1, atol=0)
    assert not torch.equal(LastLayerLaplace(model, num_samples=3).fit(data, seed=6).samples, laplace.samples)


def test_before_it_is_fitted_and_with_a_sure_prior_it_answers_as_the_model_does():
    model = BERT.backbone()
    inputs = BERT.inputs()
    expected = model(**inputs).logits
    for laplace in (LastLayerLaplace(model), LastLayerLaplace(model).fit(rows(BERT), prior_precision=1e12)):
        torch.testing.assert_close(predict(laplace, inputs)[:, 0], expected, rtol=1e-6, atol=1e-6)


def test_the_batch_size_and_the_labels_leave_no_trace_and_the_model_stays_as_it_was():
    model = VIT.backbone()
    data = rows(VIT)
    model.train()
    before = copy.deepcopy(model.state_dict())
    expected = LastLayerLaplace(model).fit(data)
    unlabelled = [{"pixel_values": image} for batch in data for image in batch["pixel_values"]]
    found = LastLayerLaplace(model).fit(unlabelled, batch_size=3)
    for name, value in expected.posterior.state_dict().items():
        assert name.endswith("basis") or torch.allclose(found.posterior.state_dict()[name], value, rtol=1e-9)
    assert model.training and isinstance(model.classifier, nn.Linear) and expected.training is True
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_logits_that_another_module_makes_are_refused():
    class Doubled(type(VIT.backbone())):
        def forward(self, *args, **kwargs):
            output = super().forward(*args, **kwargs)
            output.logits = 2 * output.logits
            return output

    model = VIT.backbone()
    model.__class__ = Doubled
    with pytest.raises(ValueError, match="the logits of Doubled are not the outputs of its classifier"):
        LastLayerLaplace(model).fit(rows(VIT))
    two_heads = DeiTForImageClassificationWithTeacher(DEIT.backbone().config).double()
    with pytest.raises(ValueError, match="are not the outputs of its distillation_classifier"):
        LastLayerLaplace(two_heads).fit(rows(DEIT))


def test_data_that_say_nothing_of_the_weights_are_refused():
    """Where every probability is 0 or 1, the best prior would know nothing, and every answer be a guess."""
    model = VIT.backbone()
    with torch.no_grad():
        model.classifier.weight *= 1e6
    with pytest.raises(ValueError, match="the data say nothing about these weights"):
        LastLayerLaplace(model).fit(rows(VIT))
    assert LastLayerLaplace(model).fit(rows(VIT), prior_precision=1.0).posterior.prior_precision == 1
