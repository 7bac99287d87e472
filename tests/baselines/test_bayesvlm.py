"""BayesVLM: CLIP whose projections are uncertain."""

import pytest
import torch
from torch import nn

from hydra_transformers.baselines import BayesVLM
from hydra_transformers.baselines.bayesvlm import similarity_moments
from hydra_transformers.cost import count_multiply_adds, count_parameters
from hydra_transformers.data.prediction import predict
from hydra_transformers.data.zero_shot import ZeroShotClassifier
from hydra_transformers.reports import evaluate_uncertainty
from tests.families import CLIP, images, padded_texts


def pairs(batches: int = 3) -> list[dict[str, torch.Tensor]]:
    return [{"pixel_values": images(seed=seed), **padded_texts(seed=seed)} for seed in range(batches)]


def fit(data, **options) -> BayesVLM:
    return BayesVLM(CLIP.backbone()).fit(data, **options)


@pytest.fixture(scope="module")
def fitted() -> BayesVLM:
    return fit(pairs())


def test_the_distributions_are_those_of_a_computation_by_hand(fitted):
    clip = CLIP.backbone()
    data = pairs()
    with torch.no_grad():
        read = {
            "image": torch.cat([clip.vision_model(pixel_values=each["pixel_values"]).pooler_output for each in data]),
            "text": torch.cat([clip.text_model(**padded_texts(seed=seed)).pooler_output for seed in range(3)]),
        }
    weights = {"image": clip.visual_projection.weight.detach(), "text": clip.text_projection.weight.detach()}
    embeddings = {side: read[side] @ weights[side].t() for side in read}
    scale = clip.logit_scale.exp().item()
    for side, other in (("image", "text"), ("text", "image")):
        targets = nn.functional.normalize(embeddings[other], dim=-1)
        rows = len(read[side])
        curvature = torch.zeros(12, 12, dtype=torch.float64)
        for g in embeddings[side]:
            jacobian = torch.autograd.functional.jacobian(lambda x, y=targets: scale * (x / x.norm()) @ y.t(), g)
            p = (scale * (g / g.norm()) @ targets.t()).softmax(-1)
            curvature += jacobian.t() @ (p.diag() - torch.outer(p, p)) @ jacobian
        posterior = getattr(fitted, f"{side}_posterior")
        prior = posterior.prior_precision.sqrt()
        a = read[side].t() @ read[side] / rows**0.5 + prior * torch.eye(32, dtype=torch.float64)
        b = curvature / rows**0.5 + prior * torch.eye(12, dtype=torch.float64)
        expected = (read[side] @ a.inverse() * read[side]).sum(-1, keepdim=True) * b.inverse().diagonal()
        torch.testing.assert_close(posterior.output_variance(read[side]), expected, rtol=1e-6, atol=1e-12)


def published(bayesvlm: BayesVLM) -> dict[str, torch.Tensor]:
    """Factors as the authors have them, in float32."""
    factors = {}
    for side, short in (("image", "img"), ("text", "txt")):
        posterior = getattr(bayesvlm, f"{side}_posterior")
        for name, place in (("A", "input"), ("B", "output")):
            basis = getattr(posterior, f"{place}_basis")
            values = getattr(posterior, f"{place}_eigenvalues")
            factors[f"{name}_{short}"] = (basis * values @ basis.t()).float()
    return factors


def test_published_factors_give_the_same_distributions(fitted):
    factors = published(fitted)
    loaded = BayesVLM(CLIP.backbone()).load_factors(factors)
    for side in ("image", "text"):
        found, expected = (getattr(each, f"{side}_posterior").prior_precision for each in (loaded, fitted))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=0)
    torch.testing.assert_close(loaded(**CLIP.inputs()).logits, fitted(**CLIP.inputs()).logits, rtol=1e-3, atol=1e-4)
    prior = {"image": 1708.9, "text": 1255.3}
    named = BayesVLM(CLIP.backbone()).load_factors(factors, prior_precision=prior, pseudo_count=4.0)
    assert named.text_posterior.prior_precision == pytest.approx(1255.3)
    assert named.image_posterior.prior_precision == pytest.approx(1708.9)
    assert named.text_posterior.pseudo_count == 4
    assert BayesVLM(CLIP.backbone()).load_factors(factors, 7.0).image_posterior.prior_precision == 7


def test_factors_of_another_clip_are_refused_and_leave_it_as_it_was(fitted):
    factors = published(fitted)
    model = BayesVLM(CLIP.backbone())
    before = model(**CLIP.inputs()).logits
    for changed, message in (
        ({"B_txt": torch.eye(3)}, r"factors\['B_txt'\] is of shape \(3, 3\): this CLIP's projection needs \(12, 12\)"),
        ({"A_img": None}, r"factors\['A_img'\] is missing: this CLIP's projection needs \(32, 32\)"),
        (
            {"B_img": torch.full((12, 12), torch.nan)},
            r"factors\['B_img'\] is not a symmetric matrix of finite numbers",
        ),
        ({"B_img": torch.arange(144.0).view(12, 12)}, r"factors\['B_img'\] is not a symmetric matrix"),
    ):
        with pytest.raises(ValueError, match=message):
            model.load_factors(factors | changed)
    with pytest.raises(ValueError, match="prior_precision has image: pass a number for image and for text"):
        model.load_factors(factors, prior_precision={"image": 1.0})
    assert torch.equal(model(**CLIP.inputs()).logits, before)


def test_without_uncertainty_the_logits_are_clips():
    clip = CLIP.backbone()
    inputs = CLIP.inputs()
    expected = clip(**inputs).logits_per_image
    for bayesvlm in (BayesVLM(clip), BayesVLM(clip).fit(pairs(), prior_precision=1e12)):
        torch.testing.assert_close(bayesvlm(**inputs).member_logits[:, 0], expected, rtol=1e-5, atol=1e-6)
    uncertain = BayesVLM(clip).fit(pairs())(**inputs).member_logits[:, 0]
    assert not torch.allclose(uncertain, expected, rtol=1e-2)


def test_similarities_have_about_the_moments_of_drawn_embeddings():
    generator = torch.Generator().manual_seed(0)
    means = [torch.randn(1, 64, generator=generator, dtype=torch.float64) + 0.5 for _ in range(2)]
    variances = [0.1 * torch.rand(1, 64, generator=generator, dtype=torch.float64) for _ in range(2)]
    drawn = [
        nn.functional.normalize(
            mean + variance.sqrt() * torch.randn(20_000, 64, generator=generator, dtype=torch.float64), dim=-1
        )
        for mean, variance in zip(means, variances, strict=True)
    ]
    cosines = (drawn[0] * drawn[1]).sum(-1)
    mean, variance = similarity_moments(means[0], variances[0], means[1], variances[1])
    assert mean.item() == pytest.approx(cosines.mean().item(), abs=2e-3)
    assert 0.8 < variance.item() / cosines.var().item() < 2.5


def test_chunks_of_pairs_that_are_each_others_classes_change_the_factors(fitted):
    apart = fit(pairs(), pairs_together=4)
    assert not torch.allclose(apart.image_posterior.output_eigenvalues, fitted.image_posterior.output_eigenvalues)
    torch.testing.assert_close(apart.image_posterior.input_eigenvalues, fitted.image_posterior.input_eigenvalues)
    rows = [{name: value[row] for name, value in batch.items()} for batch in pairs() for row in range(4)]
    by_rows = fit(rows, batch_size=5)
    torch.testing.assert_close(by_rows.text_posterior.prior_precision, fitted.text_posterior.prior_precision)
    more = fit(pairs(), pseudo_count=10.0, prior_precision=1.0)
    once = fit(pairs(), prior_precision=1.0)
    assert (more.image_embeddings(images())[1] < once.image_embeddings(images())[1]).all()


def test_as_a_zero_shot_classifier_it_is_judged(fitted):
    prompts = padded_texts(seed=9)
    classifier = fitted.zero_shot(prompts)
    expected = fitted(pixel_values=images(), **prompts).member_logits
    torch.testing.assert_close(predict(classifier, {"pixel_values": images()}), expected)
    data = [{"pixel_values": images(), "labels": torch.arange(4)}]
    report = evaluate_uncertainty(classifier, data, ood_data={"far": {"N": [{"pixel_values": 3 * images(seed=5)}]}})
    assert report.num_members == {"PromptClassifier": 1}
    assert count_parameters(classifier) == count_parameters(fitted) == count_parameters(CLIP.backbone())
    plain = count_multiply_adds(ZeroShotClassifier(CLIP.backbone(), prompts))
    assert plain < count_multiply_adds(classifier) < plain + 5_000


def test_with_labels_the_loss_is_the_cross_entropy_among_the_texts():
    batch = {"pixel_values": images(), **padded_texts(seed=9)}
    labels = torch.tensor([0, 1, 2, 0])
    bayesvlm = BayesVLM(CLIP.backbone())
    output = bayesvlm(**batch, labels=labels)
    torch.testing.assert_close(output.loss, nn.functional.cross_entropy(output.logits, labels))
    torch.testing.assert_close(bayesvlm(**batch, labels=labels, num_items_in_batch=8).loss, output.loss / 2)
