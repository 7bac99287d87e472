"""The predictor without a page, and the parts of the page without a browser: HTML, limits, examples."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from PIL import Image
from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification

from hydra_transformers.baselines import DeepEnsemble
from hydra_transformers.data.prediction import ZeroShotClassifier
from hydra_transformers.models.auto import load_trained
from hydra_transformers.serving import Predictor, page_inputs
from hydra_transformers.serving.page import build_page
from hydra_transformers.serving.page_html import answers_html, heading_html, kept_heads_html, sentence_html
from hydra_transformers.serving.page_inputs import (
    Limits,
    RequestError,
    check_text,
    read_class_names,
    read_examples,
    read_image,
)
from hydra_transformers.uncertainty import calibrate, predict_decisions
from tests.serving.tiny import asked
from tests.tiny_data import CLASSES, SIZES, picture_rows, pictures


TEXTS = ["a film of joy", "a bad film", "good"]


def assert_says(answer: dict, expected: dict) -> None:
    """expected: what `predict_decisions` says with all scores"""
    assert answer.keys() == expected.keys() | {"members"}
    assert all(answer[name] == expected[name] for name in expected if name != "scores")
    found = {each["label"]: each["score"] for each in answer["scores"]}
    assert found == pytest.approx({each["label"]: each["score"] for each in expected["scores"]}, abs=1e-6)
    assert list(found.values()) == sorted(found.values(), reverse=True)
    mean = torch.tensor(answer["members"], dtype=torch.float64).mean(dim=0)
    assert mean.tolist() == pytest.approx(list(found.values()), abs=1e-12)


# Answers


def test_it_says_what_predict_says_with_each_members_probabilities(folders):
    model, images = asked(folders["images"]), pictures([0, 1, 2], seed=4)
    expected = predict_decisions(model.model, images, model.processor, top_k=None)
    answers = [model.answer_with_members(image) for image in images]
    for answer, each in zip(answers, expected, strict=True):
        assert_says(answer, each)
    assert {answer["abstain"] for answer in answers} == {True, False}
    pixel_values = model.processor(images[0], return_tensors="pt").pixel_values
    with torch.no_grad():
        members = model.model(pixel_values).member_logits[0].double().softmax(-1)
    order = [CLASSES.index(each["label"]) for each in answers[0]["scores"]]
    assert torch.allclose(torch.tensor(answers[0]["members"], dtype=torch.float64), members[:, order], atol=1e-6)


def test_a_model_of_texts_and_a_plain_model_are_asked_alike(folders):
    texts, single = asked(folders["texts"]), asked(folders["single"])
    for text, expected in zip(TEXTS, predict_decisions(texts.model, TEXTS, texts.processor, top_k=None), strict=True):
        assert_says(texts.answer_with_members(text), expected)
    [image] = pictures([1])
    answer = single.answer_with_members(image)
    assert_says(answer, predict_decisions(single.model, [image], single.processor, top_k=None)[0])
    assert len(answer["members"]) == 1 and answer["epistemic"] == 0 and answer["abstain"] is None
    assert (texts.reads, single.reads) == ("texts", "images") and single.about["members"] is None


def test_clip_chooses_among_the_classes_of_each_question(folders):
    model, [image] = asked(folders["clip"]), pictures([1])
    assert model.needs_classes
    for names in (["cat", "dog"], ["boat", "cat", "dog"], ["cat", "dog"]):
        prompts = model.processor(text=[f"A photo of a {name}." for name in names], padding=True, return_tensors="pt")
        classifier = ZeroShotClassifier(model.model, prompts, names)
        assert_says(
            model.answer_with_members(image, names),
            predict_decisions(classifier, [image], model.processor, top_k=None)[0],
        )
    for number in range(9):  # prompts are not kept for ever
        model.answer_with_members(image, ["cat", f"dog {chr(97 + number)}"])
    assert len(model._of_classes) == 8
    with pytest.raises(ValueError, match="class_names is missing: clip-hydra chooses among classes that you name"):
        model.answer_with_members(image)


def test_a_calibrated_clip_keeps_its_classes(folders):
    clip = asked(folders["clip"])
    prompts = clip.processor(text=[f"A photo of a {name}." for name in CLASSES], padding=True, return_tensors="pt")
    rows = [
        {
            "pixel_values": clip.processor(images=row["image"], return_tensors="pt").pixel_values[0],
            "labels": row["label"],
        }
        for row in picture_rows(24)
    ]
    classifier = ZeroShotClassifier(clip.model, prompts, CLASSES)
    decided = calibrate(classifier, rows, target={"coverage": 0.5}, temperature=False).model
    model, [image] = Predictor("decided", decided, clip.processor), pictures([1])
    assert not model.needs_classes and model.class_names == CLASSES and len(model.promises) == 4
    assert_says(model.answer_with_members(image), predict_decisions(decided, [image], clip.processor, top_k=None)[0])


def test_a_baseline_is_asked_with_all_of_its_members(folders):
    single = asked(folders["single"])
    ensemble = Predictor("ensemble", DeepEnsemble([single.model, single.model]), single.processor)
    assert len(ensemble.answer_with_members(pictures([1])[0])["members"]) == 2


def test_users_at_once_get_their_own_answers(folders):
    """A tokenizer that pads and cuts fails, or mixes them up, where two threads use it."""
    for model, values in ((asked(folders["texts"]), TEXTS), (asked(folders["images"]), pictures([0, 1, 2], seed=4))):
        alone = [model.answer_with_members(value) for value in values]
        with ThreadPoolExecutor(4) as users:
            assert list(users.map(model.answer_with_members, values * 6)) == alone * 6


def test_a_model_of_one_output_has_to_say_what_it_is():
    model = BertForSequenceClassification(BertConfig(vocab_size=11, num_labels=1, **SIZES))
    with pytest.raises(ValueError, match="one has a single output and no problem_type in its config"):
        build_page(Predictor("one", model, None))


# What is shown


ANSWER = {
    **{"label": "a", "score": 0.6, "uncertainty": 0.7, "aleatoric": 0.6, "epistemic": 0.1},
    **{"abstain": None, "detector": None, "detector_score": None, "threshold": None, "reason": None},
    "prediction_set": None,
    "scores": [{"label": "a", "score": 0.6}, {"label": "b", "score": 0.4}],
    "members": [[0.9, 0.1], [0.3, 0.7]],
}


def test_the_kept_heads_are_drawn_for_each_member(folders):
    model = asked(folders["images"])
    drawn = kept_heads_html(model)
    assert "<p>Heads kept of 8: member 0 7, member 1 6, member 2 6.</p>" in drawn
    assert drawn.count("<svg") == 3 and drawn.count(": 0</title>") == 5 and drawn.count(": 1</title>") == 19
    clip = asked(folders["clip"])
    assert "vision tower" in kept_heads_html(clip) and "text tower" in kept_heads_html(clip)


def test_an_answer_shows_classes_uncertainty_and_members():
    shown = answers_html([("one", ANSWER), ("two", ANSWER | {"members": [[0.6, 0.4]]})])
    assert shown.count('class="hydra-card"') == 2 and shown.count('class="hydra-member"') == 2
    assert "never abstains" in shown and "I don't know" not in shown and "It may be" not in shown
    for part, value in (("total", "0.70"), ("aleatoric", "0.60"), ("epistemic", "0.10")):
        assert shown.count(f"hydra-bar hydra-{part}") == 2 and f">{value}</output>" in shown
    abstaining = answers_html([("one", ANSWER | {"abstain": True, "prediction_set": ["a", "b"]})])
    assert (
        "I don't know<span>its guess: a, 60 %" in abstaining
        and "If it is one of the classes, it may be <b>a</b><b>b</b>" in abstaining
    )
    many = ANSWER | {"abstain": False, "prediction_set": [str(number) for number in range(20)]}
    assert " and 8 more" in answers_html([("one", many)])
    assert "It may be none of them" in answers_html([("one", ANSWER | {"abstain": False, "prediction_set": []})])


def test_an_answer_says_by_what_it_abstains_or_answers():
    judged = ANSWER | {"detector": "msp", "detector_score": -0.6, "threshold": -0.7}
    said = answers_html([("one", judged | {"abstain": True, "reason": "msp is -0.6, above the threshold -0.7."})])
    assert "<small>msp is -0.6, above the threshold -0.7.</small>" in said and "It answers" not in said
    said = answers_html([("one", judged | {"abstain": False, "detector_score": -0.8, "truncated": True})])
    assert "It answers: msp is -0.8, at most -0.7." in said and "it read the beginning" in said


def test_nothing_certain_is_claimed_of_what_is_not():
    shown = answers_html(
        [
            (
                "one",
                ANSWER
                | {"score": 0.9999, "scores": [{"label": "a", "score": 0.9999}, {"label": "b", "score": 0.0001}]},
            )
        ]
    )
    assert "> 99 % sure" in shown and "< 1 %" in shown and "100 %" not in shown


def test_names_from_configs_and_users_are_no_markup(folders):
    evil = '<img src=x onerror="alert(1)">'
    model = asked(folders["images"])
    model.name = evil
    answer = ANSWER | {"label": evil, "prediction_set": [evil], "abstain": True, "reason": evil}
    answer["scores"] = [{"label": evil, "score": 0.6}, {"label": "b", "score": 0.4}]
    for shown in (heading_html(model), answers_html([(evil, answer)]), sentence_html(evil, "problem")):
        assert "<img" not in shown and "&lt;img" in shown


# What users send


def test_images_are_read_within_limits(tmp_path):
    path = tmp_path / "picture.png"
    Image.new("RGBA", (40, 30)).save(path)
    image = read_image(path)
    assert image.mode == "RGB" and image.size == (40, 30)
    with pytest.raises(RequestError, match=r"^picture.png has 40 x 30 pixels, too many: send at most 1,000$"):
        read_image(path, Limits(pixels=1_000))
    with pytest.raises(RequestError, match=r"^mine.png has more than 1e-05 MB: send a smaller file$"):
        read_image(path, Limits(megabytes=1e-5), "mine.png")


def test_files_that_are_no_whole_images_get_a_sentence(tmp_path):
    pictures([0])[0].save(tmp_path / "whole.png")
    (tmp_path / "cut.png").write_bytes((tmp_path / "whole.png").read_bytes()[:60])
    (tmp_path / "text.png").write_text("no image")
    (tmp_path / "program.png").write_text("%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n")
    for name, reason in {
        "cut.png": "is a broken image, its pixels cannot be read: send another$",
        "text.png": "is no image that can be read: send BMP, GIF, JPEG, PNG, WEBP, TIFF$",
        "program.png": "is no image that can be read",
    }.items():
        with pytest.raises(RequestError, match=f"^{name} {reason}"):
            read_image(tmp_path / name)


def test_only_regular_files_are_opened_and_no_word_of_the_system_is_repeated(tmp_path):
    pictures([0])[0].save(tmp_path / "whole.png")
    (tmp_path / "link.png").symlink_to(tmp_path / "whole.png")
    os.mkfifo(tmp_path / "fifo.png")
    for path in ("none.png", "link.png", "fifo.png", ".", "/dev/zero", "/dev/tty", "/proc/self/mem", "/etc/secret"):
        with pytest.raises(RequestError, match=r"^mine\.png cannot be opened: send it again$"):
            read_image(tmp_path / path, name="mine.png")
    for path in ("/proc/self/environ", "/proc/kmsg"):
        with pytest.raises(RequestError, match=r"^mine\.png (is no image|cannot be opened)"):
            read_image(path, name="mine.png")


def test_a_file_that_takes_too_long_is_given_up(tmp_path, monkeypatch):
    is_over = threading.Event()
    monkeypatch.setattr(page_inputs, "SECONDS_TO_READ", 0.05)
    monkeypatch.setattr(page_inputs, "_content", lambda *_: is_over.wait(10))
    with pytest.raises(RequestError, match=r"^slow\.png could not be read within 0\.05 seconds: send another file$"):
        read_image(tmp_path / "slow.png")
    is_over.set()


def test_texts_and_classes_are_read_within_limits():
    assert check_text(" good ") == " good "
    assert read_class_names("cat, dog,\nboat, cat ,") == ["cat", "dog", "boat"]
    for read, text, sentence in (
        (check_text, " ", "There is no text yet"),
        (check_text, "a" * 51, "The text has 51 characters, more than 50"),
        (read_class_names, "cat", "Name at least two classes"),
        (read_class_names, "a,b,c,d", "These are 4 classes, more than 3"),
        (read_class_names, "a" * 51, "The classes have more than 50 characters"),
    ):
        with pytest.raises(RequestError, match=sentence):
            read(text, Limits(characters=50, classes=3))


# Examples


def test_folders_are_groups_of_examples(tmp_path):
    for name in ("b.png", "a.png", "known/c.png", "unknown/d.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        pictures([0])[0].save(tmp_path / name)
    (tmp_path / "known" / ".hidden").write_text("")
    groups = read_examples(tmp_path, "images")
    assert list(groups) == ["Examples", "known", "unknown"]
    assert [path.rpartition("/")[2] for path in groups["Examples"]] == ["a.png", "b.png"]
    (tmp_path / "known" / "e.png").write_text("no image")
    with pytest.raises(ValueError, match=r"an example of .* cannot be shown: e.png is no image"):
        read_examples(tmp_path, "images")


def test_lines_are_examples_of_texts(tmp_path):
    (tmp_path / "reviews.txt").write_text("a good film\n\n a bad film \n")
    (tmp_path / "other.txt").write_text("zwei\n" * 50)
    assert read_examples(tmp_path / "reviews.txt", "texts") == {"Examples": ["a good film", "a bad film"]}
    groups = read_examples(tmp_path, "texts")
    assert list(groups) == ["other", "reviews"] and len(groups["other"]) == 24


def test_examples_that_are_none_get_a_sentence(tmp_path):
    (tmp_path / "latin.txt").write_bytes(b"\xff\xfe\xfa")
    (tmp_path / "empty").mkdir()
    for path, reads, sentence in (
        ("nowhere", "images", "there are no examples"),
        ("latin.txt", "images", "is no folder: pass a folder of images"),
        ("latin.txt", "texts", "is not a text in UTF-8"),
        ("empty", "images", "has no examples in it: pass a folder of images"),
        ("empty", "texts", "has no examples in it: pass a text file"),
    ):
        with pytest.raises(ValueError, match=sentence):
            read_examples(tmp_path / path, reads)


def test_the_models_weights_and_processor_are_left_as_they_were(folders):
    model = load_trained(folders["texts"])
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    Predictor("texts", model, AutoTokenizer.from_pretrained(folders["texts"])).answer_with_members("good")
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
