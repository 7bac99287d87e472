"""BayesVLM: CLIP whose projections are uncertain."""

import json

import pytest
import torch
from PIL import Image
from torch import nn
from transformers import AutoProcessor

from hydra_transformers.baselines import Baseline, BayesVLM, ViLU
from hydra_transformers.baselines.bayesvlm import similarity_moments
from hydra_transformers.cost import count_multiply_adds, count_parameters
from hydra_transformers.data.prediction import ZeroShotClassifier, predict
from hydra_transformers.hub import create_model_card
from hydra_transformers.reports.evaluation import evaluate_uncertainty
from tests.families import CLIP, VIT, images, padded_texts


def pairs(batches: int = 3) -> list[dict[str, torch.Tensor]]:
    return [{"pixel_values": images(seed=seed), **padded_texts(seed=seed)} for seed in range(batches)]


@pytest.fixture(scope="module")
def fitted() -> BayesVLM:
    return BayesVLM(CLIP.backbone()).fit(pairs())


def test_the_distributions_are_those_of_a_computation_by_hand(fitted):
    clip, data = CLIP.backbone(), pairs()
    with torch.no_grad():
        read = {
            "image": torch.cat([clip.vision_model(pixel_values=each["pixel_values"]).pooler_output for each in data]),
            "text": torch.cat(
                [
                    clip.text_model(input_ids=each["input_ids"], attention_mask=each["attention_mask"]).pooler_output
                    for each in data
                ]
            ),
        }
    weights = {"image": clip.visual_projection.weight.detach(), "text": clip.text_projection.weight.detach()}
    embeddings = {side: read[side] @ weights[side].t() for side in read}
    scale = clip.logit_scale.exp().item()
    for side, other in (("image", "text"), ("text", "image")):
        targets, rows = nn.functional.normalize(embeddings[other], dim=-1), len(read[side])
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


def test_without_uncertainty_the_logits_are_clips():
    clip, inputs = CLIP.backbone(), CLIP.inputs()
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
    apart = BayesVLM(CLIP.backbone()).fit(pairs(), pairs_together=4)
    assert not torch.allclose(apart.image_posterior.output_eigenvalues, fitted.image_posterior.output_eigenvalues)
    torch.testing.assert_close(apart.image_posterior.input_eigenvalues, fitted.image_posterior.input_eigenvalues)
    rows = [{name: value[row] for name, value in batch.items()} for batch in pairs() for row in range(4)]
    by_rows = BayesVLM(CLIP.backbone()).fit(rows, batch_size=5)
    torch.testing.assert_close(by_rows.text_posterior.prior_precision, fitted.text_posterior.prior_precision)
    more = BayesVLM(CLIP.backbone()).fit(pairs(), pseudo_count=10.0, prior_precision=1.0)
    once = BayesVLM(CLIP.backbone()).fit(pairs(), prior_precision=1.0)
    assert (more.image_embeddings(images())[1] < once.image_embeddings(images())[1]).all()


def write_published(folder, bayesvlm: BayesVLM) -> None:
    """A folder as the authors have it: factors in float32, and the prior precisions."""
    for side, short in (("image", "img"), ("text", "txt")):
        posterior = getattr(bayesvlm, f"{side}_posterior")
        for name, place in (("A", "input"), ("B", "output")):
            basis, values = getattr(posterior, f"{place}_basis"), getattr(posterior, f"{place}_eigenvalues")
            torch.save((basis * values @ basis.t()).float(), folder / f"{name}_{short}_analytic.pt")
    prior = {"lambda_img": 1708.9, "n_img": 1.0, "lambda_txt": 1255.3, "n_txt": 1.0}
    (folder / "prior_precision_analytic.json").write_text(json.dumps(prior))


def test_published_factors_load(tmp_path, fitted):
    write_published(tmp_path, fitted)
    loaded = BayesVLM(CLIP.backbone()).load_factors(tmp_path)
    torch.testing.assert_close(
        loaded.image_posterior.prior_precision, fitted.image_posterior.prior_precision, rtol=1e-4, atol=0
    )
    torch.testing.assert_close(loaded(**CLIP.inputs()).logits, fitted(**CLIP.inputs()).logits, rtol=1e-3, atol=1e-4)
    published = BayesVLM(CLIP.backbone()).load_factors(tmp_path, with_published_prior=True)
    assert published.text_posterior.prior_precision == pytest.approx(1255.3)
    counted = BayesVLM(CLIP.backbone()).load_factors(tmp_path, pseudo_count=4.0)
    assert counted.text_posterior.pseudo_count == 4
    torch.save(torch.eye(3), tmp_path / "B_txt_analytic.pt")
    with pytest.raises(
        ValueError, match=r"B_txt_analytic.pt is \(3, 3\), and this CLIP's projection needs \(12, 12\)"
    ):
        BayesVLM(CLIP.backbone()).load_factors(tmp_path)
    (tmp_path / "A_img_analytic.pt").unlink()
    with pytest.raises(FileNotFoundError, match=r"A_img_analytic.pt does not exist"):
        BayesVLM(CLIP.backbone()).load_factors(tmp_path)


class Pickled:
    def __reduce__(self):
        return (print, ("this ran",))


def test_files_that_would_run_code_are_refused(tmp_path, fitted, capsys):
    write_published(tmp_path, fitted)
    torch.save(Pickled(), tmp_path / "A_img_analytic.pt")
    with pytest.raises(ValueError, match="does not hold a single tensor"):
        BayesVLM(CLIP.backbone()).load_factors(tmp_path)
    assert "this ran" not in capsys.readouterr().out


def test_as_a_zero_shot_classifier_it_is_judged(fitted):
    prompts = padded_texts(seed=9)
    classifier = fitted.zero_shot(prompts)
    expected = fitted(pixel_values=images(), **prompts).member_logits
    torch.testing.assert_close(predict(classifier, {"pixel_values": images()}), expected)
    data = [{"pixel_values": images(), "labels": torch.arange(4)}]
    report = evaluate_uncertainty(
        classifier, data, ood_data={"far": {"noise": [{"pixel_values": 3 * images(seed=5)}]}}
    )
    assert report.models["BayesVLMClassifier"].num_members == 1
    assert count_parameters(classifier) == count_parameters(fitted) == count_parameters(CLIP.backbone())
    plain = count_multiply_adds(ZeroShotClassifier(CLIP.backbone(), prompts))
    assert plain < count_multiply_adds(classifier) < plain + 5_000


def test_saved_and_loaded_it_answers_the_same(tmp_path, fitted):
    fitted.save_pretrained(tmp_path)
    loaded = Baseline.from_pretrained(tmp_path)
    assert type(loaded) is BayesVLM
    assert torch.equal(loaded(**CLIP.inputs()).logits, fitted(**CLIP.inputs()).logits)


@pytest.mark.slow
@pytest.mark.parametrize("make", [BayesVLM, ViLU], ids=["bayesvlm", "vilu"])
def test_cards_show_code_that_runs(make, tmp_path, monkeypatch):
    card = str(create_model_card(make(CLIP.backbone().float())))
    code = card.split("```python\n")[1].split("```")[0]
    Image.new("RGB", (8, 8)).save(tmp_path / "photo.jpg")
    make(CLIP.backbone().float()).save_pretrained(tmp_path / "repo")

    def processor(text=None, images=None, **_):
        tokens = padded_texts(3)
        return tokens if images is None else {"pixel_values": torch.zeros(1, 3, 8, 8)}

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(AutoProcessor, "from_pretrained", lambda name: processor)
    names: dict = {}
    exec(code.replace(card_name(card), str(tmp_path / "repo")), names)
    assert names["outputs"].member_logits.shape == (1, 1, 3)


def card_name(card: str) -> str:
    return card.split('.from_pretrained("')[1].split('"')[0]


def test_bad_input_gets_one_sentence():
    with pytest.raises(TypeError, match="model is a ViTForImageClassification: pass a CLIPModel"):
        BayesVLM(VIT.backbone())
    with pytest.raises(ValueError, match="batch 0 of data has no input_ids: pass images with a text each"):
        BayesVLM(CLIP.backbone()).fit([{"pixel_values": images()}])
    with pytest.raises(ValueError, match="data has no samples"):
        BayesVLM(CLIP.backbone()).fit([])


def test_factors_of_one_side_alone_are_not_taken(tmp_path):
    bayesvlm = BayesVLM(CLIP.backbone())
    outputs, inputs = bayesvlm.model.visual_projection.weight.shape
    torch.save(torch.eye(inputs), tmp_path / "A_img_analytic.pt")
    torch.save(torch.eye(outputs), tmp_path / "B_img_analytic.pt")
    with pytest.raises(FileNotFoundError, match=r"A_txt_analytic\.pt does not exist"):
        bayesvlm.load_factors(tmp_path)
    for name, size in (("A", bayesvlm.model.text_projection.in_features), ("B", outputs)):
        torch.save(torch.ones(size, size).triu(), tmp_path / f"{name}_txt_analytic.pt")
    with pytest.raises(ValueError, match="a Kronecker factor is not symmetric"):
        bayesvlm.load_factors(tmp_path)
    assert bayesvlm.image_posterior.prior_precision.isinf()


def test_with_labels_the_loss_is_the_cross_entropy_among_the_texts():
    batch = {"pixel_values": images(), **padded_texts(seed=9)}
    labels = torch.tensor([0, 1, 2, 0])
    bayesvlm = BayesVLM(CLIP.backbone())
    output = bayesvlm(**batch, labels=labels)
    torch.testing.assert_close(output.loss, nn.functional.cross_entropy(output.logits, labels))
    torch.testing.assert_close(bayesvlm(**batch, labels=labels, num_items_in_batch=8).loss, output.loss / 2)


def test_images_and_texts_that_are_no_pairs_are_refused():
    with pytest.raises(ValueError, match="batch 0 of data has 3 images and 4 texts: pass one text for each image"):
        BayesVLM(CLIP.backbone()).fit([{"pixel_values": images(3), **padded_texts(4)}])
    with pytest.raises(ValueError, match="pairs_together is 0: pass at least 2, a whole number"):
        BayesVLM(CLIP.backbone()).fit([], pairs_together=0)
