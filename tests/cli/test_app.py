"""`app` on the command line; the page itself is tested in tests/serving."""

import re
import sys
from types import SimpleNamespace

import pytest

from hydra_transformers import serving
from hydra_transformers.cli import main
from hydra_transformers.serving import page
from tests.tiny_data import pictures, save_bert, save_clip, save_vit


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("workplace")
    save_vit(folder / "vit")
    save_vit(folder / "other", ["cat", "dog", "boat"])
    save_bert(folder / "bert")
    save_clip(folder / "clip")
    (folder / "pictures").mkdir()
    pictures([0])[0].save(folder / "pictures" / "red.png")
    return folder


@pytest.fixture
def launched(monkeypatch):
    """What a page was launched with; none is served."""
    calls = []

    def launch_page(*arguments):
        calls.append(arguments)
        return SimpleNamespace(local_url="http://here/", block_thread=lambda: None)

    monkeypatch.setattr(page, "launch_page", launch_page)
    return calls


def test_help_comes_without_gradio(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "gradio", None)
    assert main(["app", "--help"]) == 0
    assert re.search(r"--examples +PATH", capsys.readouterr().out)


def test_app_hands_models_examples_and_limits_to_the_page(workplace, launched, capsys):
    words = [
        "app",
        str(workplace / "vit"),
        "--examples",
        str(workplace / "pictures"),
    ]
    assert main([*words, "--max-megabytes", "0.5", "--max-characters", "7", "--host", "0.0.0.0", "--port", "80"]) == 0
    [(model, examples, limits, labels, host, port)] = launched
    assert model.name == "vit" and model.class_names == ["red", "green", "blue"]
    assert examples == {"Examples": [str(workplace / "pictures" / "red.png")]}
    assert (limits.megabytes, limits.characters, labels, host, port) == (0.5, 7, (), "0.0.0.0", 80)
    assert "The page of vit is at http://here/" in capsys.readouterr().out


def test_clip_starts_with_the_labels_that_are_named(workplace, launched):
    assert main(["app", str(workplace / "clip"), "--labels", "cat", "dog"]) == 0
    assert launched[0][3] == ["cat", "dog"] and launched[0][0].needs_classes
    assert main(["app", str(workplace / "vit"), "--processor", str(workplace / "other")]) == 0


def test_a_port_that_is_taken_is_named(workplace, monkeypatch, capsys):
    def taken(*_):
        raise OSError("Cannot find empty port in range: 80-80")

    monkeypatch.setattr(page, "launch_page", taken)
    assert main(["app", str(workplace / "vit"), "--port", "80"]) == 2
    assert "the page cannot be served at port 80 of 127.0.0.1" in capsys.readouterr().err


def test_without_gradio_a_sentence_says_what_to_install(workplace, monkeypatch, capsys):
    monkeypatch.delitem(sys.modules, "hydra_transformers.serving.page", raising=False)
    monkeypatch.delattr(serving, "page", raising=False)
    monkeypatch.setitem(sys.modules, "gradio", None)
    assert main(["app", str(workplace / "vit")]) == 2
    assert "the page needs Gradio: pip install" in capsys.readouterr().err
