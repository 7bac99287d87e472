"""Every detector is what its definition says, whatever model it reads and however the data is batched."""

import copy

import numpy as np
import pytest
import torch
from scipy.special import softmax
from sklearn.covariance import EmpiricalCovariance, oas
from sklearn.neighbors import NearestNeighbors

from hydra_transformers.baselines import DeepEnsemble, MCDropout
from hydra_transformers.data.prediction import predict
from hydra_transformers.models.detection import DETECTORS, Answers, answers_of, score
from hydra_transformers.uncertainty import Detector
from hydra_transformers.uncertainty.detector_fits import BankFit
from hydra_transformers.uncertainty.features import collect_answers
from tests.families import AST, BERT, CLIP_CLASSIFIER, DINOV2, DISTILBERT, LLAMA, MODERNBERT, ROBERTA, VIT, each_of


MEMBERS = 3
CLASSES = 4
DIM = 6
FITTED = [name for name, method in DETECTORS.items() if method.state]
HEADS = [
    (torch.randn(CLASSES, DIM, generator=torch.Generator().manual_seed(m)).double(), torch.arange(CLASSES) * 0.1 + m)
    for m in range(MEMBERS)
]


def answers(rows: int, seed: int = 0, spread: float = 1.0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Features around a centre of their class, far from 0, and logits that mostly know it."""
    generator = np.random.default_rng(seed)
    labels = np.arange(rows) % CLASSES
    centers = np.random.default_rng(99).normal(0, 3, (CLASSES, MEMBERS, DIM)) + 5
    scales = np.linspace(0.5, 2, DIM)
    features = centers[labels] + spread * scales * generator.normal(size=(rows, MEMBERS, DIM))
    weights, biases = (np.stack([np.asarray(head[part]) for head in HEADS]) for part in (0, 1))
    logits = np.einsum("bmd,mcd->bmc", features, weights) / 20 + biases
    logits[np.arange(rows), :, labels] += 8 / spread
    return torch.tensor(logits), torch.tensor(features), torch.tensor(labels)


TRAIN = answers(240)
TEST = answers(30, seed=1, spread=2.0)


def fitted(name: str, train=TRAIN, **settings) -> Detector:
    return Detector(name, **settings).fit_answers(*train)


# Each score by its definition, of one member: logits (rows, classes) and features (rows, dim)


def gaussian_distance(features, mean, precision):
    centred = features - mean
    return np.einsum("bd,de,be->b", centred, precision, centred)


def reference_mahalanobis(train, logits, features):
    _, known, labels = train
    means = np.stack([known[labels == label].mean(axis=0) for label in range(CLASSES)])
    precision = EmpiricalCovariance(assume_centered=True).fit(known - means[labels]).precision_
    return np.min([gaussian_distance(features, mean, precision) for mean in means], axis=0)


def reference_relative(train, logits, features):
    whole = EmpiricalCovariance().fit(train[1])
    background = gaussian_distance(features, whole.location_, whole.precision_)
    return reference_mahalanobis(train, logits, features) - background


def reference_knn(train, logits, features, k=50):
    unit = [each / np.linalg.norm(each, axis=-1, keepdims=True) for each in (train[1], features)]
    return NearestNeighbors(n_neighbors=k).fit(unit[0]).kneighbors(unit[1])[0][:, -1]


def reference_gen(train, logits, features):
    p = -np.sort(-softmax(logits, axis=-1), axis=-1)[:, :100]
    return np.sum(p**0.1 * (1 - p) ** 0.1, axis=-1)


REFERENCES = {
    "mahalanobis": reference_mahalanobis,
    "relative_mahalanobis": reference_relative,
    "knn": reference_knn,
    "gen": reference_gen,
}


def of_member(given, member):
    logits, features, labels = (np.asarray(each) for each in given)
    return logits[:, member], features[:, member], labels


def mean_of(given):
    """The answers of the ensemble as one model."""
    logits, features, labels = (np.asarray(each) for each in given)
    return np.log(softmax(logits, axis=-1).mean(axis=1)), features.mean(axis=1), labels


@pytest.mark.parametrize("name", REFERENCES)
def test_the_score_is_that_of_the_definition(name):
    """The mean of the members' own; of gen that of the ensemble as one model."""
    reference = REFERENCES[name]
    parts = [(of_member(TRAIN, m), *of_member(TEST, m)[:2]) for m in range(MEMBERS)]
    expected = np.mean([reference(*part) for part in parts], axis=0)
    if name == "gen":
        expected = reference(mean_of(TRAIN), *mean_of(TEST)[:2])
    detector = fitted(name) if name in FITTED else Detector(name)
    np.testing.assert_allclose(detector(*TEST[:2]), expected, rtol=1e-8, atol=1e-8)


def test_msp_and_entropy_by_members():
    given = answers_of(TEST[0], None)
    probabilities = TEST[0].softmax(-1)
    torch.testing.assert_close(score("msp", given, "members"), 1 - probabilities.amax(-1).mean(1))
    expected = -(probabilities * probabilities.log()).sum(-1).mean(1)
    torch.testing.assert_close(score("entropy", given, "members"), expected)


def test_gen_tells_sure_answers_apart_in_float32():
    """1 - p is 0 for both in float32."""
    logits = torch.tensor([[[30.0, 0.0, 0.0]], [[24.0, 0.0, 0.0]]])
    low, high = Detector("gen")(logits)
    exact = [
        2 * (p * (1 - p)) ** 0.1 + (1 - p) ** 0.1 * (2 * p) ** 0.1
        for p in (1 / (np.exp(30) + 2), 1 / (np.exp(24) + 2))
    ]
    assert low < high
    np.testing.assert_allclose([low, high], exact, rtol=1e-6)


# Fitting in a stream


@pytest.mark.parametrize("size", [1, 7])
@pytest.mark.parametrize("name", FITTED)
def test_how_the_rows_are_batched_leaves_no_trace(name, size, monkeypatch):
    monkeypatch.setattr("hydra_transformers.uncertainty.detectors.ROWS_PER_PASS", size)
    batched = fitted(name)
    monkeypatch.undo()
    torch.testing.assert_close(batched(*TEST[:2]), fitted(name)(*TEST[:2]), rtol=1e-9, atol=1e-9)


def test_the_bank_is_a_sample_of_all_rows_and_does_not_depend_on_batches():
    angles = torch.linspace(0, 1, 1000)
    rows = torch.stack([angles.cos(), angles.sin()], dim=1).unsqueeze(1)  # (rows, 1 member, 2), of length 1
    kept = []
    for size in (1, 33, 1000):
        bank = BankFit(k=1, bank_size=50, seed=3)
        for part in rows.split(size):
            bank.update(Answers(features=part), None)
        kept.append(bank.state(2)["bank"][0, :, 1].asin().tolist())
    assert kept[0] == kept[1] == kept[2] == sorted(kept[0])
    assert len(set(kept[0])) == 50
    means = []
    for seed in range(40):
        bank = BankFit(k=1, bank_size=50, seed=seed)
        bank.update(Answers(features=rows), None)
        means.append(float(bank.rows[:, 0, 1].asin().mean()))
    assert abs(np.mean(means) - 0.5) < 0.025  # 0.5 ± 0.0063


# Numerics


def test_fewer_rows_than_dimensions_are_shrunk():
    generator = np.random.default_rng(0)
    features = generator.normal(size=(20, 1, 40)) * np.linspace(0.5, 2, 40)
    labels = np.arange(20) % 2
    logits = torch.tensor(generator.normal(size=(20, 1, 2)))
    detector = Detector("mahalanobis").fit_answers(logits, torch.tensor(features), torch.tensor(labels))
    means = np.stack([features[labels == label, 0].mean(axis=0) for label in range(2)])
    covariance, shrinkage = oas(features[:, 0] - means[labels], assume_centered=True)
    assert 0 < shrinkage < 1
    ood = generator.normal(size=(7, 1, 40))
    expected = [gaussian_distance(ood[:, 0], mean, np.linalg.inv(covariance)) for mean in means]
    scores = detector(torch.zeros(7, 1, 2), torch.tensor(ood))
    np.testing.assert_allclose(scores, np.min(expected, axis=0), rtol=1e-8)


def test_directions_in_which_features_never_vary_do_not_count():
    logits, features, labels = TRAIN
    constant = torch.cat([features, torch.full((240, MEMBERS, 2), 3.0)], dim=-1)
    detector = Detector("relative_mahalanobis").fit_answers(logits, constant, labels)
    ood = torch.cat([TEST[1], torch.full((30, MEMBERS, 2), 3.0)], dim=-1)
    torch.testing.assert_close(detector(TEST[0], ood), fitted("relative_mahalanobis")(*TEST[:2]), rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("name", FITTED)
def test_autocast_rounds_no_score(name):
    detector = fitted(name)
    state = {each: tensor.float() for each, tensor in detector.state.items()}
    given = answers_of(*(each.float() for each in TEST[:2]), state)
    expected = score(name, given, **detector.settings)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(score(name, given, **detector.settings), expected)


@pytest.mark.parametrize("name", ["mahalanobis", "relative_mahalanobis"])
def test_distances_to_classes_that_lie_far_apart_are_no_rounding_errors(name):
    """The squares of these features are a million times the distances."""
    logits, features, labels = TRAIN
    rows = (features + 1000 * torch.eye(CLASSES, DIM)[labels].unsqueeze(1)).float()
    low = fitted(name, (logits, rows, labels))
    scores = low(logits, rows)
    torch.testing.assert_close(
        scores, fitted(name, (logits, rows.double(), labels))(logits, rows.double()), rtol=1e-3, atol=1e-3
    )
    one_by_one = [low(logits[row : row + 1], rows[row : row + 1]) for row in range(20)]
    torch.testing.assert_close(torch.cat(one_by_one), scores[:20], rtol=1e-6, atol=1e-6)


# Classes without rows


def test_a_class_without_rows_is_no_class_to_be_near_to():
    logits, features, labels = (each[TRAIN[2] != 2] for each in TRAIN)
    with pytest.warns(UserWarning, match="no rows of class 2 .1 of 4 classes"):
        detector = fitted("mahalanobis", (logits, features, labels))
    assert detector.state["class_means"].shape == (MEMBERS, CLASSES - 1, DIM)
    of_class = TRAIN[2] == 2
    assert detector(TRAIN[0], TRAIN[1])[of_class].mean() > 2 * detector(TRAIN[0], TRAIN[1])[~of_class].mean()


# Features


def head_input(model, inputs):
    """What the last linear map of a plain Transformers classifier gets, by a hook of one's own."""
    model = copy.deepcopy(model)
    seen = []
    head = getattr(model, "score", None) or model.classifier
    head = getattr(head, "out_proj", None) or getattr(head, "dense", head)  # of two maps the last; AST's norm and map
    head.register_forward_hook(lambda module, given, output: seen.append(given[0]))
    with torch.no_grad():
        model.eval()(**inputs)
    if seen[0].dim() == 2:
        return seen[0]
    return seen[0][torch.arange(len(seen[0])), inputs["attention_mask"].sum(dim=1) - 1]  # a decoder's last tokens


# One for each kind of head: on a token, a pooler, tokens and their mean, two maps, a norm and a map, pooled or last tokens.
CLASSIFIERS = [VIT, BERT, DINOV2, ROBERTA, DISTILBERT, AST, MODERNBERT, CLIP_CLASSIFIER, LLAMA]


@each_of(CLASSIFIERS)
def test_features_are_what_the_last_linear_map_reads(family):
    inputs = family.inputs()
    backbone = family.backbone()
    logits, features, labels = collect_answers(backbone, [inputs])
    torch.testing.assert_close(features[:, 0], head_input(backbone, inputs), rtol=0, atol=0)
    torch.testing.assert_close(logits, predict(backbone, inputs), rtol=0, atol=0)
    assert labels is None
    members = [family.hydra.from_backbone(family.backbone(seed)) for seed in range(2)]
    hydra = family.hydra.from_pruned_members(members, shared=())
    logits, features, _ = collect_answers(hydra, [inputs])
    torch.testing.assert_close(logits, predict(hydra, inputs), rtol=0, atol=0)
    for seed in range(2):
        torch.testing.assert_close(features[:, seed], head_input(family.backbone(seed), inputs))


@each_of([VIT, BERT, ROBERTA])
def test_baselines_have_one_feature_for_each_member(family):
    inputs = family.inputs()
    backbone = family.backbone()
    other = family.backbone(1)
    hydra = family.hydra.from_backbone(other)
    _, features, _ = collect_answers(DeepEnsemble([backbone, hydra]), [inputs])
    torch.testing.assert_close(features[:, 0], head_input(backbone, inputs))
    torch.testing.assert_close(features[:, 1], head_input(other, inputs))
    sampled = MCDropout(backbone, num_samples=5, p=0.2, seed=0)
    sampled.rows_per_pass = 8  # two samples in a pass
    logits, features, _ = collect_answers(sampled, [inputs])
    head = getattr(backbone.classifier, "out_proj", backbone.classifier)
    assert features.shape[:2] == (4, 5)
    torch.testing.assert_close(torch.nn.functional.linear(features, head.weight, head.bias), logits)


# Models and data sets


def labelled_images(rows: int, seed: int = 0, spread: float = 1.0) -> list[dict]:
    generator = torch.Generator().manual_seed(seed)
    pixels = spread * torch.randn(rows, 3, 8, 8, generator=generator, dtype=torch.float64)
    return [{"pixel_values": each, "labels": row % 5} for row, each in enumerate(pixels)]


@pytest.mark.parametrize("name", DETECTORS)
def test_a_detector_fits_and_scores_data_of_any_model(name):
    hydra = VIT.hydra.from_pruned_members(VIT.members(), shared=())
    train = labelled_images(60)
    test = labelled_images(9, seed=1)
    detector = Detector(name, **({"k": 3} if name == "knn" else {}))
    if detector.needs_fit:
        assert detector.fit(hydra, train, batch_size=7) is detector
        again = Detector(name, **({"k": 3} if name == "knn" else {}))
        again.fit_answers(*collect_answers(hydra, train))
        # Inverses of covariances of few rows magnify rounding, which differs with the size of batches, by 1e8.
        expected = detector.score(hydra, test)
        torch.testing.assert_close(again(*collect_answers(hydra, test)[:2]), expected, rtol=2e-6, atol=2e-6)
    scores = detector.score(hydra, test, batch_size=4)
    assert scores.shape == (9,) and scores.dtype == torch.float64 and scores.device.type == "cpu"
    torch.testing.assert_close(scores, detector(*collect_answers(hydra, test)[:2]))


# Edge cases


def test_an_empty_batch_has_no_scores():
    assert fitted("knn")(TEST[0][:0], TEST[1][:0]).shape == (0,)
    assert Detector("msp")(TEST[0][:0]).shape == (0,)


@pytest.mark.parametrize("name", FITTED)
def test_float32_features_give_the_scores_of_float64(name):
    low = fitted(name, tuple(each.float() if each.is_floating_point() else each for each in TRAIN))
    assert {tensor.dtype for tensor in low.state.values()} == {torch.float32}
    scores = low(TEST[0].float(), TEST[1].float())
    torch.testing.assert_close(scores, fitted(name)(*TEST[:2]), rtol=1e-3, atol=1e-3)


def test_a_failed_fit_leaves_the_detector_as_it_was():
    detector = fitted("knn")
    before = detector(*TEST[:2])
    with pytest.raises(ValueError, match="k is 50"):
        detector.fit_answers(*(each[:20] for each in TRAIN))
    assert torch.equal(detector(*TEST[:2]), before)
