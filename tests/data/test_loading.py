"""`load_data`: rows of files, folders, DataFrames and data sets; splits, parts and columns."""

import json

import datasets
import pandas as pd
import pytest
import torch
from PIL import Image
from transformers import AutoTokenizer, BertConfig, ViTConfig, ViTImageProcessorPil

from hydra_transformers import load_data
from hydra_transformers.data.batches import batches
from hydra_transformers.data.loading import classes_in, load_if_named, remember_max_length
from hydra_transformers.data.processors import check_same_processors, load_processor
from hydra_transformers.data.rows import DataSource, load_rows
from tests.tiny_data import CLASSES, names_of, picture_rows, pictures, save_clip


def prepared(folder, vit, classes=CLASSES, labelled=True, **source):
    config = ViTConfig(image_size=8, patch_size=4, **names_of(classes))
    processor = ViTImageProcessorPil.from_pretrained(vit)
    return load_data(folder, config, processor=processor, labelled=labelled, **source)


def bert_config(classes=("negative", "positive"), **settings):
    return BertConfig(vocab_size=11, max_position_embeddings=16, **names_of(list(classes)), **settings)


def prepared_file(name, content, tokenizer, folder, **source):
    (folder / name).write_text(content)
    return load_data(folder / name, bert_config(), processor=tokenizer, **{"labelled": True, **source})


# Images


IMAGES = ViTImageProcessorPil(size={"height": 8, "width": 8})


def test_a_saved_data_set_becomes_rows_that_the_model_takes(vit, tmp_path):
    expected = torch.tensor([channel.getdata() for channel in pictures([0, 1, 2, 0, 1, 2])[1].split()]).view(3, 8, 8)
    for decode in (True, False):  # images may be kept as bytes
        picture_rows(6).cast_column("image", datasets.Image(decode=decode)).save_to_disk(tmp_path / str(decode))
        data = prepared(tmp_path / str(decode), vit)
        assert len(data) == 6 and data[1]["labels"] == 1
        assert torch.allclose(data[1]["pixel_values"], expected / 255 * 2 - 1, atol=1e-6)


def test_images_of_a_list_are_found_and_processed_when_they_are_read():
    colours = [Image.new("RGB", (9, 7), colour) for colour in ("red", "lime", "blue")]
    rows = [{"picture": image.convert("P"), "labels": index} for index, image in enumerate(colours)]
    expected = IMAGES(colours, return_tensors="pt")["pixel_values"]
    for data in (rows, pd.DataFrame(rows)):
        [batch] = batches(load_data(data, IMAGES))
        assert torch.allclose(batch["pixel_values"], expected, atol=1e-2) and batch["labels"].tolist() == [0, 1, 2]


def test_a_folder_of_images_in_folders_of_classes_is_a_data_set_with_parts(vit, tmp_path):
    for split, count in (("train", 4), ("validation", 2), ("test", 3)):
        for name, label in (("red", 0), ("green", 1), ("blue", 2)):
            (tmp_path / split / name).mkdir(parents=True)
            for index, image in enumerate(pictures([label] * count)):
                image.save(tmp_path / split / name / f"{index}.png")
    parts = {part: prepared(tmp_path, vit, part=part) for part in PARTS}
    assert {part: len(data) for part, data in parts.items()} == {"training": 12, "validation": 6, "test": 9}
    colours = {(row["labels"], row["pixel_values"].mean(dim=(1, 2)).argmax().item()) for row in parts["validation"]}
    assert colours == {(0, 0), (1, 1), (2, 2)}


def test_out_of_distribution_data_needs_no_labels_and_may_have_other_columns(vit, tmp_path):
    picture_rows(3).remove_columns("label").rename_column("image", "photo").save_to_disk(tmp_path)
    with pytest.warns(UserWarning, match="has no column 'image': another one is read"):
        data = prepared(tmp_path, vit, labelled=False, column="image")
    assert set(data[0]) == {"pixel_values"}
    with pytest.raises(ValueError, match="no label column among photo"):
        prepared(tmp_path, vit)


# Splits, limits and parts


def test_splits_are_chosen_by_preference_or_by_name_or_as_a_slice(vit, tmp_path):
    datasets.DatasetDict({"train": picture_rows(9), "test": picture_rows(6)}).save_to_disk(tmp_path)
    assert len(prepared(tmp_path, vit)) == 6
    whole = prepared(tmp_path, vit, split="train")
    some = prepared(tmp_path, vit, split="train[:4]")
    assert (len(whole), len(some)) == (9, 4)
    assert torch.equal(some[3]["pixel_values"], whole[3]["pixel_values"])
    assert len(prepared(tmp_path, vit, split="test[50%:]")) == 3
    assert len(prepared(tmp_path, vit, split="train+test[:1]")) == 10
    for split in ("validation", "validation[:4]"):
        with pytest.raises(
            ValueError, match=r"has no split 'validation': it has train, test; part='validation' .* tenth"
        ):
            prepared(tmp_path, vit, split=split)
    with pytest.raises(ValueError, match="has no rows in the split train"):
        prepared(tmp_path, vit, split="train[:0]")


def test_a_limit_draws_rows_of_all_classes_and_always_the_same(vit, tmp_path):
    picture_rows(60).sort("label").save_to_disk(tmp_path)
    labels = [row["labels"] for row in prepared(tmp_path, vit, limit=12)]
    assert len(labels) == 12 and set(labels) == {0, 1, 2}
    assert labels == [row["labels"] for row in prepared(tmp_path, vit, limit=12)]


PARTS = ("training", "validation", "test")


def test_parts_are_the_splits_that_exist_and_others_are_cut_out_of_the_first(vit, tmp_path):
    splits = {"train": picture_rows(60), "validation": picture_rows(12), "test": picture_rows(120)}
    parts = {part: prepared(splits, vit, part=part) for part in PARTS}
    assert [len(parts[part]) for part in PARTS] == [60, 12, 120]
    assert parts["validation"].notes[0] == "data: 12 rows of the split validation"
    del splits["validation"]
    parts = {part: prepared(splits, vit, part=part) for part in PARTS}
    assert [len(parts[part]) for part in PARTS] == [54, 6, 120]
    assert "54 rows of the split train, a random part for training" in parts["training"].notes[0]
    assert "6 rows of the split train, a random part for validation" in parts["validation"].notes[0]
    train, held_out = ({row["pixel_values"].sum().item() for row in parts[part]} for part in PARTS[:2])
    assert not train & held_out
    # A split that is named is cut, whatever others there are.
    assert len(prepared(splits, vit, split="train", part="test")) == 6
    # A test split without labels is not a test set.
    rows = picture_rows(12)
    hidden = rows.remove_columns("label").add_column("label", [-1] * 12, feature=rows.features["label"])
    splits = {"train": picture_rows(60), "dev": picture_rows(12), "test": hidden}
    assert [len(prepared(splits, vit, part=part)) for part in PARTS] == [54, 12, 6]


def test_rows_say_whether_they_were_cut_whatever_the_data_are_called(tmp_path):
    """With splits of its own, one row of each class may be all there is to learn from."""
    folder = tmp_path / "a random part"
    folder.mkdir()
    names = "".join(f"film {number},{number}th\n" for number in range(9))
    for split in ("train", "validation", "test"):
        (folder / f"{split}.csv").write_text(f"text,label\n{names}")
    whole = load_rows(DataSource(folder, part="all"))
    assert (len(whole.rows), whole.split, whole.is_cut) == (9, "train", False)
    assert len(classes_in(DataSource(folder, part="all"))[0]) == 9

    alone = load_rows(DataSource(folder / "train.csv", part="training"))
    assert (len(alone.rows), alone.split, alone.is_cut) == (7, None, True)
    cut = load_rows(DataSource(folder, "train", "validation"))
    assert (len(cut.rows), cut.split, cut.is_cut) == (1, "train", True)
    with pytest.raises(ValueError, match="has another label in each row"):
        classes_in(DataSource(folder / "train.csv", part="all"))


@pytest.mark.parametrize("form", [datasets.Dataset.from_list, pd.DataFrame, list])
def test_splits_are_tables_or_lists_and_pairs_of_texts_have_no_labels_in_any(form, tokenizer):
    rows = [{"chosen": "good", "rejected": "bad"}] * 40
    splits = {"train": form(rows), "test": form(rows[:7])}
    sizes = [len(load_data(splits, tokenizer, part=part, column="chosen", labelled=False)) for part in PARTS]
    assert sizes == [36, 4, 7]
    splits = {name: form([{"text": "good", "label": 1}] * count) for name, count in (("train", 40), ("test", 7))}
    assert [len(load_data(splits, tokenizer, part=part, labelled=True)) for part in PARTS] == [36, 4, 7]


# Files and DataFrames


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".jsonl"])
def test_a_file_is_a_data_set_without_splits(suffix, tokenizer, tmp_path):
    rows = [("a; film, of joy", "positive"), ("a bad film", "negative")]
    lines = ["text\tlabel", *("\t".join(row) for row in rows)]
    if suffix == ".csv":
        lines = ["text,label", *(f'"{text}",{label}' for text, label in rows)]
    if suffix == ".jsonl":
        lines = [json.dumps({"text": text, "label": label}) for text, label in rows]
    data = prepared_file(f"reviews{suffix}", "\n".join(lines) + "\n", tokenizer, tmp_path)
    assert data.labels == [1, 0] and data.rows["text"][0] == "a; film, of joy"
    assert data.notes[0].endswith("2 rows")
    assert len(load_data(tmp_path, bert_config(), processor=tokenizer, split="train")) == 2


@pytest.mark.parametrize("is_folder", [False, True])
def test_blank_lines_of_a_csv_file_are_rows(is_folder, tokenizer, tmp_path):
    """Whoever joins by row number would otherwise get the answers to other texts."""
    (tmp_path / "texts.csv").write_text("text\na film\n\nbad\n")
    place = tmp_path if is_folder else tmp_path / "texts.csv"
    with pytest.raises(ValueError, match=r"1 of 3 rows of .* have no text in the column 'text', the first is row 1"):
        load_data(place, bert_config(), processor=tokenizer)


def test_a_dataframe_is_read_without_its_index(tokenizer):
    frame = pd.DataFrame({"utterance": ["a film", "bad"], "intent": ["positive", "negative"]}, index=[7, 3])
    data = load_data(frame, bert_config(), processor=tokenizer, label="intent")
    assert data.labels == [1, 0] and data.rows.column_names == ["utterance", "intent"]
    assert data[1]["input_ids"] == tokenizer("bad")["input_ids"]
    frame["intent"] = frame["intent"].astype("category")
    assert load_data(frame, bert_config(), processor=tokenizer, label="intent").labels == [1, 0]
    frame.loc[3, "utterance"] = None
    with pytest.raises(ValueError, match="1 of 2 rows of data have no text"):
        load_data(frame, bert_config(), processor=tokenizer, label="intent")


def test_a_dataframe_goes_wherever_data_goes(bert):
    frame = pd.DataFrame({"text": ["a film", "bad"], "label": [1, 0]})
    loaded = load_if_named({"near": frame}, bert, split="train")["near"]
    assert [row["labels"] for row in loaded] == [1, 0]
    tokenized = pd.DataFrame({"input_ids": [[2, 5, 3], [2, 3]], "label": [1, 0]}, index=[4, 4])
    for data in (tokenized, load_if_named(tokenized, bert)):
        [batch] = batches(data)
        assert batch["input_ids"].tolist() == [[2, 5, 3], [2, 3, 0]] and batch["labels"].tolist() == [1, 0]
    with pytest.raises(TypeError, match=r"text \(str\), label \(int\)\): pass load_data\(data, model\)"):
        list(batches(frame))


@pytest.mark.parametrize("builder", ["csv", "text"])
def test_a_folder_named_like_a_builder_is_read_and_not_what_lies_around_it(builder, tokenizer, tmp_path, monkeypatch):
    (tmp_path / builder).mkdir()
    (tmp_path / builder / "reviews.csv").write_text("text,label\na film of joy,1\nbad,0\n")
    for name in ("others.csv", "others.txt"):
        (tmp_path / name).write_text("text,label\na,0\nfilm,0\nof,0\n")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "others[1].csv").write_text("text,label\na film of joy,1\nbad,0\n")  # a name, not a pattern
    assert load_data("others[1].csv", bert_config(), processor=tokenizer).labels == [1, 0]
    assert load_data(builder, bert_config(), processor=tokenizer, labelled=True).labels == [1, 0]
    (tmp_path / builder).rename(tmp_path / "other")
    with pytest.raises(ValueError, match=f"there is no folder {builder} here"):
        load_data(builder, bert_config(), processor=tokenizer)


@pytest.mark.parametrize(
    ("name", "content", "settings", "words"),
    [
        ("half.csv", "text,label\na,0.5\nbad,1\n", {}, "the column 'label' of .* holds 0.5, which is not a class"),
        ("several.jsonl", '{"text": "a", "label": [0, 1]}\n', {}, r"holds \[0, 1\], which is not a class"),
        ("missing_names.csv", "text,label\na,positive\nbad,\n", {}, "has 1 rows without a label"),
        ("none.csv", "text,label\na,positive\nbad,None\n", {}, "has the class 'None', which the model does not know"),
        ("na.csv", "text,label\na,1\nbad,N/A\n", {}, "'label' of .* has numbers and 'N/A': leave the cell empty"),
        ("large.csv", "text,label\na film,7\nbad,0\n", {}, "the label 7, the classes are 0 to 1"),
        ("no_text.csv", "text,label\na,1\n,0\n", {}, "1 of 2 rows of .* have no text in the column 'text'"),
        ("zero.csv", "", {}, "zero.csv cannot be read: it is empty"),
        ("header.csv", "text,label\n", {}, "header.csv cannot be read: it has no rows"),
        ("zero.jsonl", "", {}, "zero.jsonl cannot be read: it is empty"),
        ("broken.json", '{"text": [', {}, "broken.json cannot be read: JSON parse error"),
        ("ragged.csv", "text,label\na,film,0\nbad,film,1\n", {}, "line 2 of .*ragged.csv has 3 cells, .* names 2"),
        ("reviews.txt", "a", {}, "is not a .csv, .tsv, .json, .jsonl, .parquet file"),
        ("pairs.csv", "premise,hypothesis,label\na,b,1\n", {}, "more than one text column among premise, hypothesis"),
        ("split.csv", "text,label\na,1\n", {"split": "test"}, r"no split 'test': it has train; .* \(--split test\)"),
        ("few.csv", "text,label\na,1\nb,0\n", {"part": "test"}, "has 2 rows, too few to split them"),
    ],
)
def test_a_file_that_does_not_fit_raises_in_one_sentence(name, content, settings, words, tokenizer, tmp_path):
    with pytest.raises(ValueError, match=words) as raised:
        prepared_file(name, content, tokenizer, tmp_path, **settings)
    assert "\n" not in str(raised.value)


# Columns


def test_texts_are_found_by_their_usual_name_or_beside_a_named_label(tokenizer):
    rows = [{"sentence": "a film", "other": "bad", "label": 1}, {"sentence": "joy", "other": "of", "label": 0}]
    data = load_data(rows, tokenizer)
    assert data[0]["input_ids"] == tokenizer("a film")["input_ids"] and data[0]["labels"] == 1
    for others in ({"utterance": "a film", "label": "bad"}, {"utterance": "a film"}, {"label": "a film"}):
        row = load_data([{**others, "text": "good"}], tokenizer, label="text", labelled=False)[0]
        assert row["input_ids"] == tokenizer("a film")["input_ids"]
    pair = load_data(rows, tokenizer, column=("sentence", "other"), max_length=4)[0]
    expected = tokenizer("a film", "bad", truncation=True, max_length=4)
    assert pair["input_ids"] == expected["input_ids"] and pair["token_type_ids"] == expected["token_type_ids"]


def test_of_two_label_columns_the_one_with_a_usual_name_is_taken(vit):
    coarse = datasets.ClassLabel(names=["warm", "cold"])
    rows = picture_rows(3).rename_column("label", "fine").add_column("coarse", [0, 1, 1], feature=coarse)
    assert [row["labels"] for row in prepared(rows.rename_column("fine", "fine_label"), vit)] == [0, 1, 2]
    with pytest.raises(ValueError, match=r"more than one label column among .*: name it as label= \(--label\)"):
        prepared(rows, vit)


def test_the_length_of_a_training_is_saved_with_the_tokenizer(tokenizer, tmp_path):
    config = bert_config()
    long = [{"text": "a film " * 20}]
    for asked, expected in ((9, 9), (None, 12)):
        remember_max_length(tokenizer, config, asked, default=12)
        tokenizer.save_pretrained(tmp_path / str(asked))
        loaded = AutoTokenizer.from_pretrained(tmp_path / str(asked))
        assert len(load_data(long, config, processor=loaded)[0]["input_ids"]) == expected
        tokenizer.model_max_length = 10**30
    with pytest.raises(ValueError, match="is 17: the model reads at most 16 tokens"):
        remember_max_length(tokenizer, config, 17, default=12)
    assert len(load_data(long, config, processor=tokenizer)[0]["input_ids"]) == 16


def test_models_whose_saved_processors_differ_are_not_read_together(vit, tmp_path):
    config = ViTConfig(architectures=["ViTForImageClassification"])
    names = [vit, tmp_path / "same", tmp_path / "none", tmp_path / "other"]
    for name, size in ((names[1], 8), (names[3], 9)):
        ViTImageProcessorPil(size={"height": size, "width": size}).save_pretrained(name)
    names[2].mkdir()  # a model may have none
    check_same_processors(names[:3], [config] * 3, load_processor(vit, config))
    with pytest.raises(ValueError, match=r"other prepares its inputs differently from .* \(size differs\): pass"):
        check_same_processors(names, [config] * 4, load_processor(vit, config))


def test_clip_takes_its_classes_from_the_data(tmp_path):
    folder = save_clip(tmp_path / "clip")
    data = load_data(picture_rows(3, names=["blue", "red"]), folder)
    assert data.class_names == ["blue", "red"] and [row["labels"] for row in data] == [0, 1, 0]
    assert data[0]["pixel_values"].shape == (3, 8, 8)
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("string")})
    rows = {"image": pictures([0, 1, 2]), "label": ["red", None, "blue"]}
    with pytest.raises(ValueError, match="has 1 rows without a label"):
        load_data(datasets.Dataset.from_dict(rows, features=features), folder)


TWO = [{"first": "a", "second": "b"}]
MISSING = {"image": [*pictures([0, 1]), None], "label": [0, 1, 2]}
MISSING = datasets.Dataset.from_dict(MISSING, features=picture_rows(1).features)


@pytest.mark.parametrize(
    ("data", "model", "settings", "words"),
    [
        (TWO, None, {}, r"more than one text column among first, second: name it as column= \(--column\)"),
        (TWO, IMAGES, {}, r"no image column among .*, and the model reads images: name it as column= \(--column\)"),
        (TWO, None, {"column": "words"}, "data has no column 'words': it has first, second"),
        (TWO, IMAGES, {"column": ("first", "second")}, "name one, or two of pairs for a model of texts"),
        (TWO, None, {"column": ("a", "b", "c")}, "name one, or two of pairs"),
        (TWO, None, {"column": "first", "label": "c"}, "data has no column 'c': it has first, second"),
        (TWO, None, {"column": "first", "label": "second"}, "are names: pass the model in place of its processor"),
        (TWO, None, {"column": "first", "labelled": True}, r"no label column among .* \(--label\)"),
        (TWO, None, {"column": "first", "split": "test"}, "data has no splits: leave out the split 'test'"),
        ([{"text": "a"}, {"text": None}], None, {}, r"row 1 of the data cannot be read as text \(it is a NoneType\)"),
        ([{"image": "a.png"}], IMAGES, {"column": "image"}, r"row 0 of the data .* as image \(it is a str\)"),
        (MISSING, IMAGES, {}, "1 of 3 rows of data have no image in the column 'image', the first is row 2"),
        ([{"image": Image.new("I;16", (8, 8))}], IMAGES, {}, "row 0 of the data .*mode I;16, of more than 256 levels"),
        ([], None, {}, "data has no rows"),
        (["a"], None, {}, "a row of data is a str: each row must be a dict of columns"),
        (torch.utils.data.Subset(TWO, [0]), None, {}, "data is a Subset: pass a DataFrame, a Dataset of datasets, or"),
        (TWO, 3, {}, "model is a int: pass the model, its name or folder, or its tokenizer"),
        (TWO, torch.nn.Identity(), {}, "model is a Identity: .* of a model without a config its processor= besides"),
        (
            TWO,
            BertConfig(),
            {},
            "was not loaded from .* has no Tokenizer saved with it: save one there, or pass processor=",
        ),
        ("./nowhere.csv", None, {}, r"there is no folder or file \./nowhere\.csv"),
    ],
)
def test_what_cannot_be_loaded_raises_in_one_sentence(data, model, settings, words, tokenizer):
    with pytest.raises((TypeError, ValueError), match=words) as raised:
        list(load_data(data, tokenizer if model is None else model, **settings))
    assert "\n" not in str(raised.value)
