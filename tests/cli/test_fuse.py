"""`fuse` of models that come without a processor."""

import shutil

import pytest
from transformers import AutoModelForImageClassification, AutoModelForSequenceClassification

from hydra_transformers.cli import main
from tests.tiny_data import save_bert, save_vit


def two_models(folder, save, model_class, *forget):
    """Two models that differ, without the files `forget`."""
    first = save(folder / "one")
    second = shutil.copytree(first, folder / "two")
    model = model_class.from_pretrained(second)
    model.classifier.bias.data += 1
    model.save_pretrained(second)
    for each in (first, second):
        for name in forget:
            (each / name).unlink(missing_ok=True)
    return [str(first), str(second)]


TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "special_tokens_map.json")


@pytest.mark.parametrize(
    ("save", "model_class", "forget"),
    [
        (save_vit, AutoModelForImageClassification, ["preprocessor_config.json"]),
        (save_bert, AutoModelForSequenceClassification, TOKENIZER),
    ],
    ids=["vit", "bert"],
)
def test_models_without_a_processor_are_fused_and_it_is_said_how_to_add_one(
    save, model_class, forget, tmp_path, capsys
):
    models = two_models(tmp_path, save, model_class, *forget)
    assert main(["fuse", *models, "--output", str(tmp_path / "hydra")]) == 0
    said = capsys.readouterr().err
    assert f"note: no processor was found with {models[0]}" in said and "fuse --processor NAME" in said
    assert model_class.from_pretrained(tmp_path / "hydra").num_members == 2
    whole = save(tmp_path / "whole")
    assert main(["fuse", *models, "--processor", str(whole), "--output", str(tmp_path / "other")]) == 0
    assert "no processor" not in capsys.readouterr().err
    assert any((tmp_path / "other" / name).exists() for name in forget)


def test_a_processor_that_is_there_and_cannot_be_read_is_no_missing_one(tmp_path, fails):
    models = two_models(tmp_path, save_vit, AutoModelForImageClassification)
    for model in models:
        (tmp_path / model / "preprocessor_config.json").write_text("{")
    sentence = fails("fuse", *models, "--output", tmp_path / "hydra")
    assert "the ImageProcessor of" in sentence and "cannot be read" in sentence
    assert not (tmp_path / "hydra").exists()
