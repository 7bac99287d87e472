"""Corrupted data goes wherever data goes, in every form."""

import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, Subset
from transformers import AutoImageProcessor, AutoTokenizer, ViTForImageClassification

from hydra_transformers import load_data
from hydra_transformers.data.batches import batches
from hydra_transformers.reports import Report, evaluate_uncertainty
from hydra_transformers.shift import corrupt, corrupted, corrupted_sets
from hydra_transformers.shift.corruptions import CORRUPTIONS
from hydra_transformers.uncertainty import classification_metrics, ood_metrics, ood_score
from tests.tiny_data import picture_rows, review_rows, save_bert, save_vit


@pytest.fixture(scope="module")
def vit(tmp_path_factory):
    folder = save_vit(tmp_path_factory.mktemp("vit"))
    return ViTForImageClassification.from_pretrained(folder).eval(), AutoImageProcessor.from_pretrained(folder)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return AutoTokenizer.from_pretrained(save_bert(tmp_path_factory.mktemp("bert")))


def pixels_of(data, batch_size=5):
    return torch.cat([batch["pixel_values"] for batch in batches(data, batch_size)])


def test_every_form_of_data_is_corrupted_alike(vit):
    _, processor = vit
    rows = load_data(picture_rows(12), processor)
    loader = DataLoader(rows, batch_size=4)
    expected = corrupt(pixels_of(rows), "impulse_noise", 2, processor=processor)
    for data in (rows, loader, DataLoader(Subset(rows, range(12)), batch_size=3)):  # which know their processor
        assert torch.equal(pixels_of(corrupted(data, "impulse_noise", 2)), expected)
    plain = {"list of batches": list(loader), "list of rows": list(rows)}
    for data in plain.values():
        assert torch.equal(pixels_of(corrupted(data, "impulse_noise", 2, processor=processor)), expected)
    once = corrupted(plain["list of batches"], "impulse_noise", 2, processor=processor)
    assert torch.equal(torch.cat([batch["pixel_values"] for batch in once]), expected)
    assert torch.equal(torch.cat([batch["labels"] for batch in once]), torch.arange(12) % 3)
    shared = [batch["pixel_values"] for rank in (0, 1) for batch in batches(once, rank=rank, world_size=2)]
    assert torch.equal(torch.cat([shared[0], shared[2], shared[1]]), expected)


def test_data_that_are_corrupted_already_keep_their_scale(vit):
    _, processor = vit
    rows = load_data([{"image": Image.new("RGB", (8, 8), (140, 180, 220))}], processor)
    once = corrupted(rows, "pixelate", 1)
    assert pixels_of(once).min() > 0 and pixels_of(once).max() < 1  # which could be taken for an image in [0, 1]
    expected = corrupt(pixels_of(once), "brightness", 2, processor=processor)
    assert torch.equal(pixels_of(corrupted(once, "brightness", 2)), expected)


def test_a_report_on_corrupted_sets_is_that_of_data_corrupted_by_hand(vit, tmp_path):
    model, processor = vit
    rows = load_data(picture_rows(24), processor)
    far = [{"pixel_values": torch.randn(9, 3, 8, 8)}]
    sets = corrupted_sets(rows, ["noise", "contrast"])
    report = evaluate_uncertainty(model, rows, {"far": {"noise": far}}, corruptions=sets)
    result = report.models["ViTForImageClassification"]
    corruptions = list(dict.fromkeys(report.groups[name][1] for name in report.data_sets("corruption")))
    assert corruptions == [n for n in CORRUPTIONS if n.endswith("noise")] + ["contrast"]
    clean = pixels_of(rows)
    labels = torch.arange(24) % 3
    with torch.no_grad():
        logits = {
            "clean": model(clean).logits.unsqueeze(1),
            "shot": model(corrupt(clean, "shot_noise", 4, processor=processor)).logits.unsqueeze(1),
            "far": model(far[0]["pixel_values"]).logits.unsqueeze(1),
        }
    judged = result["shot_noise, severity 4"]
    by_hand = classification_metrics(logits["shot"], labels)
    for metric in ("accuracy", "nll", "ece", "brier"):
        assert judged[metric] == pytest.approx(by_hand[metric], abs=1e-5)
    scores = {name: ood_score(each) for name, each in logits.items()}
    assert judged["shift_auroc"] == pytest.approx(ood_metrics(scores["clean"], scores["shot"])["auroc"], abs=5e-3)
    assert judged["ood_auroc"] == pytest.approx(ood_metrics(scores["shot"], scores["far"])["auroc"], abs=5e-3)
    severities = report.severities("ViTForImageClassification")
    every = [result[name]["nll"] for name in report.data_sets("corruption")]
    assert severities["average"]["nll"] == pytest.approx(sum(every) / len(every))
    text = report.to_markdown()
    assert "| severity 2 |" in text and "| average |" in text and "AUROC against clean (%) |" in text
    report.to_json(tmp_path / "report.json")
    assert Report.from_json(tmp_path / "report.json") == report


def test_texts_are_corrupted_before_they_are_tokenized(tokenizer):
    rows = review_rows(16)
    data = load_data(rows, tokenizer)
    changed = corrupted(data, "word_drops", 5, seed=2)
    column = data.columns[0]
    texts = corrupt(list(rows[column]), "word_drops", 5, seed=2)
    assert [row["input_ids"] for row in changed] == [tokenizer(text)["input_ids"] for text in texts]
    assert [row["labels"] for row in changed] == [row["labels"] for row in data] and texts != list(rows[column])
    twice = corrupted(changed, "typos", 3)
    typed = [tokenizer(text)["input_ids"] for text in corrupt(texts, "typos", 3)]
    assert [row["input_ids"] for row in twice] == typed
    assert list(corrupted_sets(data)) == [name for name, each in CORRUPTIONS.items() if each.kind == "text"]


def test_data_that_cannot_be_corrupted_raise_before_anything_is_evaluated(vit):
    model, processor = vit
    rows = load_data(picture_rows(6), processor)
    calls = (
        (lambda: corrupted_sets([{"input_ids": torch.ones(4, 3)}], "typos"), "before they are tokenized"),
        (lambda: corrupted_sets([{"input_values": torch.ones(2, 3, 4)}], "noise"), "audio is not corrupted"),
        (lambda: corrupted_sets(rows, ["contrast", "typos"]), "typos is for texts, and the data are images"),
        (lambda: corrupted_sets(rows, severities=[0]), "from 1 to 5"),
        (lambda: corrupted(rows, "noise", 1), "no corruption is called 'noise'"),
        (
            lambda: list(corrupted([{"pixel_values": torch.randn(2, 3, 8, 8)}], "contrast", 1)),
            "pass the processor that made them",
        ),
    )
    for call, words in calls:
        with pytest.raises(ValueError, match=words):
            call()
    once = iter([{"pixel_values": torch.rand(2, 3, 8, 8)}])
    with pytest.raises(TypeError, match="is an iterator"):
        evaluate_uncertainty(model, once, corruptions=corrupted_sets(once, "contrast"))
    with pytest.raises(TypeError, match=r"pass corrupted_sets\(data, names\)"):
        evaluate_uncertainty(model, rows, corruptions="contrast")
