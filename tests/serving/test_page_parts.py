"""The parts of the page without a browser: HTML, limits, examples."""

import os

import pytest
from PIL import Image
from transformers import BertConfig, BertForSequenceClassification

from hydra_transformers.serving import HydraPredictor, answerer
from hydra_transformers.serving.answerer import RequestError
from hydra_transformers.serving.page_html import answer_html, heading_html, sentence_html
from tests.serving.tiny import asked
from tests.tiny_data import SIZES, pictures


ANSWER = {
    **{"label": "a", "score": 0.6, "uncertainty": 0.7, "aleatoric": 0.6, "epistemic": 0.1},
    **{"abstain": None, "detector": None, "detector_score": None, "threshold": None, "reason": None},
    "prediction_set": None,
    "scores": [{"label": "a", "score": 0.6}, {"label": "b", "score": 0.4}],
    "members": [[0.9, 0.1], [0.3, 0.7]],
}


def shown(**changes) -> str:
    return answer_html(ANSWER | changes)


def test_an_answer_shows_classes_uncertainty_and_members():
    card = shown()
    assert card.count('class="hydra-member"') == 2 and card.count("<i style=") == 2 + 4
    assert "never abstains" in card and "I don't know" not in card and "It may be" not in card
    for part, value in (("total", "0.70"), ("aleatoric", "0.60"), ("epistemic", "0.10")):
        assert f"hydra-bar hydra-{part}" in card and f">{value}</output>" in card
    assert 'class="hydra-member"' not in shown(members=[[0.6, 0.4]])
    abstaining = shown(abstain=True, prediction_set=["a", "b"])
    assert "I don't know<span>its guess: a, 60 %" in abstaining
    assert "If it is like the validation data, it may be <b>a</b><b>b</b>" in abstaining
    assert " and 8 more" in shown(abstain=False, prediction_set=[str(number) for number in range(20)])
    assert "It may be none of them" in shown(abstain=False, prediction_set=[])

    said = shown(abstain=True, reason="msp is -0.6, above the threshold -0.7.", truncated=True)
    assert "<small>msp is -0.6, above the threshold -0.7.</small>" in said and "it read the beginning" in said


def test_nothing_certain_is_claimed_of_what_is_not():
    scores = [{"label": "a", "score": 0.9999}, {"label": "b", "score": 0.0001}]
    card = shown(score=0.9999, scores=scores)
    assert "> 99 % sure" in card and "< 1 %" in card and "100 %" not in card


def test_names_from_configs_and_users_are_no_markup(images, monkeypatch):
    evil = '<img src=x onerror="alert(1)">'
    monkeypatch.setattr(images, "name", evil)
    scores = [{"label": evil, "score": 0.6}, {"label": "b", "score": 0.4}]
    card = shown(label=evil, prediction_set=[evil], abstain=True, reason=evil, scores=scores)
    for html in (heading_html(images), card, sentence_html(evil, "problem")):
        assert "<img" not in html and "&lt;img" in html


@pytest.mark.slow
def test_a_model_of_one_output_has_to_say_what_it_is(pages):
    model = BertForSequenceClassification(BertConfig(vocab_size=11, num_labels=1, **SIZES))
    with pytest.raises(ValueError, match="one has a single output and no problem_type in its config"):
        pages.build_page(HydraPredictor(model, name="one"), {})


# What users send


@pytest.fixture(scope="module")
def images(folders):
    return asked(folders["images"])


@pytest.fixture
def sent(tmp_path):
    """A folder with files of all kinds."""
    pictures([0])[0].save(tmp_path / "whole.png")
    Image.new("RGBA", (40, 30)).save(tmp_path / "picture.png")
    Image.new("I;16", (8, 8), 300).save(tmp_path / "deep.png")
    (tmp_path / "cut.png").write_bytes((tmp_path / "whole.png").read_bytes()[:60])
    (tmp_path / "text.png").write_text("no image")
    (tmp_path / "program.png").write_text("%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n")
    (tmp_path / "link.png").symlink_to(tmp_path / "whole.png")
    os.mkfifo(tmp_path / "fifo.png")
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "limits", "sentence"),
    [
        ("picture.png", {"PIXELS": 1_000}, r"mine has 40 x 30 pixels, too many: send at most 1,000"),
        ("picture.png", {"MEGABYTES": 0}, "mine has more than 0 MB: send a smaller file"),
        ("deep.png", {}, "mine has the mode I;16, of more than 256 levels"),
        ("cut.png", {}, "mine is a broken image, its pixels cannot be read: send another"),
        ("text.png", {}, "mine is not an image that can be read: send BMP, GIF, JPEG, PNG, WEBP"),
        ("program.png", {}, "mine is not an image that can be read"),
        *[(name, {}, "mine cannot be opened: send it again") for name in ("none.png", "link.png", "fifo.png", ".")],
        *[(name, {}, "mine cannot be opened: send it again") for name in ("/dev/zero", "/dev/tty", "/etc/secret")],
        ("/proc/self/environ", {}, r"mine (is no|cannot be opened)"),
    ],
)
def test_files_that_cannot_be_shown_get_a_sentence(name, limits, sentence, sent, pages, images, monkeypatch):
    for limit, value in limits.items():
        monkeypatch.setattr(answerer if limit == "PIXELS" else pages, f"MOST_{limit}", value)
    with pytest.raises(RequestError, match=f"^{sentence}"):
        pages.read_sent(images, (sent / name, "mine"))
    monkeypatch.undo()
    image = pages.read_sent(images, (sent / "picture.png", "mine"))
    assert image.mode == "RGB" and image.size == (40, 30)


@pytest.mark.slow
def test_texts_are_read_within_limits(pages, folders, monkeypatch):
    texts = asked(folders["texts"])
    monkeypatch.setattr(answerer, "MOST_CHARACTERS", 50)
    assert pages.read_sent(texts, " good ") == " good "
    assert pages.read_sent(texts, "a", "b") == {"text": "a", "text_pair": "b"}
    with pytest.raises(RequestError, match="The text has 51 characters, too many: send at most 50"):
        pages.read_sent(texts, "a" * 51)


# Examples


@pytest.mark.slow
def test_folders_are_groups_of_examples(pages, tmp_path, images):
    for name in ("b.png", "a.png", "known/c.png", "unknown/d.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        pictures([0])[0].save(tmp_path / name)
    (tmp_path / "known" / ".hidden").write_text("")
    groups = pages.read_examples(tmp_path, images)
    assert list(groups) == ["Examples", "known", "unknown"]
    assert [path.rpartition("/")[2] for path in groups["Examples"]] == ["a.png", "b.png"]
    (tmp_path / "known" / "e.png").write_text("no image")
    with pytest.raises(ValueError, match=r"e\.png is not an image"):
        pages.read_examples(tmp_path, images)


@pytest.mark.slow
def test_lines_are_examples_of_texts(pages, tmp_path, folders, images):
    (tmp_path / "reviews.txt").write_text("a good film\n\n a bad film \n")
    (tmp_path / "other.txt").write_text("zwei\n" * 50)
    texts = asked(folders["texts"])
    assert pages.read_examples(tmp_path / "reviews.txt", texts) == {"Examples": ["a good film", "a bad film"]}
    assert len(pages.read_examples(tmp_path / "other.txt", texts)["Examples"]) == 24
    (tmp_path / "empty").mkdir()
    for path, model, sentence in (
        ("nowhere", images, "there are no examples in .*nowhere: pass a folder of images"),
        ("other.txt", images, "there are no examples in .*: pass a folder"),
        ("empty", texts, "there are no examples in .*: pass a text file"),
    ):
        with pytest.raises(ValueError, match=sentence):
            pages.read_examples(tmp_path / path, model)
