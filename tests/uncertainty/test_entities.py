"""Entities: how they are read from tags, predicted by pipelines, calibrated and measured."""

import json
from contextlib import nullcontext

import pytest
import torch
from scipy.stats import binom
from transformers import pipeline

import hydra_transformers
from hydra_transformers.data import load_data
from hydra_transformers.data.tags import collect_words, rows_of_words
from hydra_transformers.models.entities import entities_in, worst_and_mean
from hydra_transformers.uncertainty import decompose, predict_uncertainty
from hydra_transformers.uncertainty.task import Rows, ValidationRows
from hydra_transformers.uncertainty.token_classification import FoundEntities, TokenFit, entity_metrics, find_entities
from tests import tiny_tags
from tests.fresh_process import run_without_package


# As seqeval reads them, with its default mode: https://github.com/chakki-works/seqeval
@pytest.mark.parametrize(
    "tags, expected",
    [
        ("B-PER I-PER O B-LOC", [("PER", 0, 1), ("LOC", 3, 3)]),
        ("B-PER B-PER", [("PER", 0, 0), ("PER", 1, 1)]),
        ("I-PER I-PER I-LOC", [("PER", 0, 1), ("LOC", 2, 2)]),
        ("B-PER I-LOC", [("PER", 0, 0), ("LOC", 1, 1)]),
        ("S-PER I-PER E-PER I-PER", [("PER", 0, 0), ("PER", 1, 2), ("PER", 3, 3)]),
        ("O O", []),
        ("B-PER O I-PER", [("PER", 0, 0), ("PER", 2, 2)]),
        # the prefixes of BMES and BILOU
        ("B-PER M-PER E-PER S-PER S-PER", [("PER", 0, 2), ("PER", 3, 3), ("PER", 4, 4)]),
        ("B-PER I-PER L-PER U-PER U-PER", [("PER", 0, 2), ("PER", 3, 3), ("PER", 4, 4)]),
    ],
)
def test_entities_are_read_from_tags(tags, expected):
    assert entities_in(tags.split(), by_prefix=True) == expected


def test_without_prefixes_every_word_is_an_entity():
    assert entities_in(["NOUN", "NOUN", "O"], by_prefix=False) == [("NOUN", 0, 0), ("NOUN", 1, 1)]
    assert entities_in(["B-PER", None, "I-PER"], by_prefix=True) == [("PER", 0, 0), ("PER", 2, 2)]


def test_an_entity_is_as_unsure_as_its_worst_word():
    [entity] = entities_in(["B-PER", "I-PER"], by_prefix=True)
    assert worst_and_mean(entity, [0.25, 0.75, 0.9]) == (0.75, 0.5)
    worst, _ = worst_and_mean(entity, [float("nan"), 0.75])
    assert worst != worst


TEXT = "annabelle smith went to paris ."


@pytest.mark.parametrize("strategy", ["none", "simple", "first", "average", "max"])
def test_transformers_own_pipeline_answers_for_the_mean_of_the_members(strategy):
    """With probabilities of the plain models, averaged by hand."""
    options = {"tokenizer": tiny_tags.tokenizer(), "aggregation_strategy": strategy, "ignore_labels": []}
    found = pipeline("token-classification", model=tiny_tags.fused(), **options)(TEXT)

    plain = tiny_tags.backbone()
    forwards = [tiny_tags.backbone(seed) for seed in range(3)]

    class Mean(type(plain)):
        def forward(self, **inputs):
            answers = [model(**inputs).logits.softmax(-1) for model in forwards]
            return {"logits": torch.stack(answers).mean(0).log()}

    plain.__class__ = Mean
    expected = pipeline("token-classification", model=plain, **options)(TEXT)
    assert len(found) == len(expected) > 0
    for mine, theirs in zip(found, expected, strict=True):
        assert mine["score"] == pytest.approx(theirs["score"], abs=1e-5)
        assert {**mine, "score": 0} == {**theirs, "score": 0}


def test_our_pipeline_adds_uncertainty_to_each_entity():
    hydra = tiny_tags.fused()
    reader = tiny_tags.tokenizer()
    texts = [TEXT, "paris", TEXT.split(), "", "smith " * 30]
    answers = pipeline("hydra-token-classification", model=hydra, tokenizer=reader)(texts, batch_size=5)
    alone = hydra.predict(texts, reader)
    for batched, single in zip(answers, alone, strict=True):
        assert batched.keys() == single.keys()
        for mine, theirs in zip(batched["entities"], single["entities"], strict=True):
            assert {k: v for k, v in mine.items() if isinstance(v, (str, int))} == {
                k: v for k, v in theirs.items() if isinstance(v, (str, int))
            }
            assert mine["score"] == pytest.approx(theirs["score"], abs=1e-5)
    first, _, words, empty, long = alone
    assert first["entities"] == words["entities"], "as a text and as its words"
    assert empty["abstain"] is True and empty["entities"] == [] and empty["reason"] == "The text is empty."
    assert long["truncated"] and not first["truncated"]
    assert first["abstain"] is None, "it is not calibrated"
    for entity in first["entities"]:
        assert TEXT[entity["start"] : entity["end"]] == entity["word"]
        assert entity["word"] in TEXT and entity["entity_group"] in ("PER", "LOC")
        assert 0 <= entity["mean_uncertainty"] <= entity["uncertainty"] <= first["uncertainty"]

    # by hand: the first token of each word, the mean of the members' probabilities
    encoded = reader(TEXT, return_tensors="pt")
    with torch.no_grad():
        mean = hydra(**encoded).member_logits.softmax(-1).mean(1)[0]
    firsts = [1, 4, 5, 6, 7, 8]  # "annabelle" is three tokens
    tags = [tiny_tags.TAGS[place] for place in mean[firsts].argmax(-1).tolist()]
    assert [(e["entity_group"], e["word"]) for e in first["entities"]] == [
        (kind, " ".join(TEXT.split()[a : b + 1])) for kind, a, b in entities_in(tags, by_prefix=True)
    ]
    entropy = torch.special.entr(mean[firsts].double()).sum(-1)
    assert first["uncertainty"] == pytest.approx(entropy.max().item(), abs=1e-5)


# Calibration and evaluation


def sampled_rows(hydra, count: int, seed: int) -> list[dict]:
    """Texts of random tokens with tags drawn from the model's own mean probabilities, which are then right: every fourth token
    is the second of its word."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, 10, (count,), generator=generator)
    input_ids = torch.randint(5, 13, (count, 9), generator=generator)
    with torch.no_grad(), getattr(hydra, "uncalibrated", nullcontext)():
        mask = (torch.arange(9) < lengths[:, None]).long()
        probabilities = hydra(input_ids=input_ids, attention_mask=mask).logits.softmax(-1)
    labels = torch.multinomial(probabilities.flatten(0, 1), 1, generator=generator).view(count, 9)
    labels[:, 3::4] = -100
    texts = zip(input_ids.tolist(), labels.tolist(), lengths.tolist(), strict=True)
    return [{"input_ids": text[:length], "labels": tags[:length]} for text, tags, length in texts]


@pytest.fixture(scope="module")
def calibrated():
    hydra = tiny_tags.fused()
    hydra.classifier.weight.data *= 4  # so that it is sure of some words, and not of others
    result = hydra.calibrate(sampled_rows(hydra, 400, 1), target={"risk": 0.3}, confidence=0.9)
    return hydra, result


def test_entities_below_the_threshold_keep_the_promised_risk(calibrated):
    hydra, result = calibrated
    promise = "With 90 % confidence at most 30 % of the answered entities (one drawn from each text) are wrong"
    assert promise in str(result) and promise in result.abstention.guarantee
    assert (
        "Over all entities of a text nothing is promised" in str(result)
        and 0.8 < result.settings["temperature"] < 1.25
    )
    assert 0 < result.abstention.coverage < 1
    rows = sampled_rows(hydra, 200, 2)
    report = hydra_transformers.evaluate_uncertainty(hydra, rows)
    metrics = next(iter(report.models.values()))["data"]
    assert metrics["answered_risk"] <= 0.3 < 1 - metrics["precision"]
    assert 0 < metrics["answered"] < 1 and metrics["entity_aurc"] < 1 - metrics["precision"] and metrics["ece"] < 0.1
    assert "Entity F1" in str(report)


def test_the_promise_is_about_one_entity_of_each_text_and_holds_for_such_draws():
    """Where long texts err more, the share over all entities is higher than over one of each text."""
    generator = torch.Generator().manual_seed(0)
    task = TokenFit(tiny_tags.backbone())
    fits = 60
    broken = 0
    over_all = []

    def texts(count: int) -> tuple[FoundEntities, torch.Tensor]:
        sizes = torch.where(torch.rand(count, generator=generator) < 0.3, 12, 1)  # long texts err twice as often
        places = torch.arange(count).repeat_interleave(sizes)
        error = torch.where(sizes[places] > 1, 0.8, 0.3)
        scores = torch.rand(len(places), generator=generator)
        right = torch.rand(len(places), generator=generator) > error * scores
        return FoundEntities(places, scores, right, len(places)), sizes

    for _ in range(fits):
        found, _ = texts(300)
        rows = ValidationRows(*[Rows(torch.zeros(1), torch.zeros(1))] * 2, None, {"risk": 0.2}, 0.8, None)
        task._entities = lambda rows, decision, found=found: found
        try:
            threshold = task._fit_threshold(rows, None).threshold
        except ValueError:
            continue
        others, sizes = texts(4000)
        answered = others.scores <= threshold
        wrong = ~others.right
        weights = 1 / sizes[others.texts]  # a draw from each text
        broken += bool((weights * (answered & wrong)).sum() > 0.2 * 1.05 * (weights * answered).sum())
        over_all.append(float(wrong[answered].double().mean()))
    assert broken <= binom.ppf(0.999, fits, 0.2)
    assert len(over_all) > fits / 2 and sum(over_all) / len(over_all) > 0.2  # which is why nothing is promised for it


def test_the_temperature_is_the_best_for_logits_that_it_divides():
    hydra = tiny_tags.fused()
    hydra.classifier.weight.data *= 4
    rows = sampled_rows(hydra, 200, 3)
    words, tags = collect_words(hydra, rows, 32)
    order = torch.randperm(200, generator=torch.Generator().manual_seed(0))[:100]
    words, tags = rows_of_words(words[order].double(), tags[order])

    def nll(temperature: float) -> float:
        mean = (words / temperature).softmax(-1).mean(1)
        return -mean.gather(1, tags[:, None]).log().mean().item()

    found = hydra.calibrate(rows).settings["temperature"]
    assert nll(found) < min(nll(found * 0.99), nll(found * 1.01))


def test_forward_marks_tokens_and_an_entity_is_marked_with_any_of_its_words(calibrated):
    hydra, result = calibrated
    inputs = tiny_tags.tokenizer()([TEXT, "paris"], return_tensors="pt", padding=True)
    with torch.no_grad():
        outputs = hydra(**inputs)
        with hydra.uncalibrated():
            plain = hydra(**inputs)
    temperature = result.settings["temperature"]
    threshold = result.settings["threshold"]
    torch.testing.assert_close(outputs.member_logits, plain.member_logits / temperature)
    score = 1 - outputs.logits.exp().amax(-1)
    assert torch.equal(outputs.abstain, score > threshold) and outputs.abstain.shape == (
        2,
        inputs["input_ids"].shape[1],
    )
    [answer] = hydra.predict([TEXT], tiny_tags.tokenizer())
    firsts = torch.tensor([1, 4, 5, 6, 7, 8])
    scores = dict(zip(TEXT.split(), score[0][firsts].tolist(), strict=True))
    for entity in answer["entities"]:
        worst = max(scores[word] for word in entity["word"].split())
        assert entity["detector_score"] == pytest.approx(worst, abs=1e-5) and entity["abstain"] == (worst > threshold)
    assert answer["abstain"] == any(entity["abstain"] for entity in answer["entities"])


def test_metrics_of_entities_are_those_of_seqeval():
    """The example of its README: one of two predicted entities is right, of two that are there."""
    there = [["O", "O", "O", "B-MISC", "I-MISC", "I-MISC", "O"], ["B-PER", "I-PER", "O"]]
    found = [["O", "O", "B-MISC", "I-MISC", "I-MISC", "I-MISC", "O"], ["B-PER", "I-PER", "O"]]
    classes = ["O", "B-MISC", "I-MISC", "B-PER", "I-PER"]
    answers = torch.full((2, 1, 7, 5), torch.nan)
    labels = torch.full((2, 7), -100)
    for row in range(2):
        for word, (tag, right) in enumerate(zip(found[row], there[row], strict=True)):
            answers[row, 0, word] = 9 * torch.nn.functional.one_hot(torch.tensor(classes.index(tag)), 5)
            labels[row, word] = classes.index(right)
    entities = find_entities(answers, labels, torch.zeros(2, 7), classes)
    assert entity_metrics(entities) == {"precision": 0.5, "recall": 0.5, "entity_f1": 0.5}


def test_uncertainty_of_data_is_given_for_each_word():
    hydra = tiny_tags.fused()
    rows = tiny_tags.rows(5)
    data = load_data(rows, hydra, processor=tiny_tags.tokenizer())
    parts = predict_uncertainty(hydra, data)
    words = max(len(row["tokens"]) for row in rows)
    assert parts.total.shape == parts.prediction.shape == (5, words)
    for row, text in enumerate(rows):
        assert parts.total[row].isnan().sum() == (parts.prediction[row] == -100).sum() == words - len(text["tokens"])
    unlabelled = predict_uncertainty(hydra, load_data(rows, hydra, processor=tiny_tags.tokenizer(), labelled=False))
    assert torch.equal(unlabelled.prediction, parts.prediction)
    logits = torch.randn(2, 3, 4, 5, dtype=torch.float64)
    whole = decompose(logits)
    flat = decompose(logits.transpose(1, 2).flatten(0, 1))
    assert torch.equal(whole.epistemic.flatten(), flat.epistemic) and whole.total.shape == (2, 4)


# Answers where the package cannot be imported, with the pipelines that came with the model.
WITHOUT_THE_PACKAGE = """
import json, sys
import torch, transformers
folder, text = sys.argv[1:]
model = transformers.AutoModelForTokenClassification.from_pretrained(folder, trust_remote_code=True)
reader = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
with torch.no_grad():
    outputs = model(**reader(text, return_tensors="pt"))
ours = transformers.pipeline("hydra-token-classification", model=folder, trust_remote_code=True)
theirs = transformers.pipeline("token-classification", model=model, tokenizer=reader, aggregation_strategy="first")
print(json.dumps({"logits": outputs.member_logits.tolist(), "abstain": outputs.abstain.tolist(), "entities": ours(text)["entities"],
                  "theirs": len(theirs(text))}))
"""


@pytest.mark.slow
def test_a_calibrated_model_answers_alike_where_the_package_is_not_importable(calibrated, tmp_path):
    hydra, _ = calibrated
    hydra.save_pretrained(tmp_path / "hydra")
    tiny_tags.tokenizer().save_pretrained(tmp_path / "hydra")
    result = run_without_package(WITHOUT_THE_PACKAGE, tmp_path / "hydra", TEXT, folder=tmp_path)
    assert result.returncode == 0, result.stderr
    found = json.loads(next(line for line in result.stdout.splitlines() if line.startswith("{")))
    with torch.no_grad():
        expected = hydra(**tiny_tags.tokenizer()(TEXT, return_tensors="pt"))
    torch.testing.assert_close(torch.tensor(found["logits"]), expected.member_logits)
    assert found["abstain"] == expected.abstain.tolist() and found["theirs"] > 0
    [answer] = hydra.predict([TEXT], tiny_tags.tokenizer())
    assert [each["word"] for each in found["entities"]] == [each["word"] for each in answer["entities"]]
    assert [each["abstain"] for each in found["entities"]] == [each["abstain"] for each in answer["entities"]]
