"""Data by name, folder or file: splits, columns and labels are found, and what does not fit is refused."""

import json

import datasets
import pytest
import torch
from transformers import AutoTokenizer, BertConfig, ViTConfig, ViTImageProcessorPil

from hydra_transformers import load_data
from hydra_transformers.data.batches import batches
from hydra_transformers.data.loading import remember_max_length
from tests.tiny_data import CLASSES, names_of, picture_rows, pictures, review_rows, save_bert, save_clip, save_vit


@pytest.fixture(scope="module")
def vit(tmp_path_factory):
    return save_vit(tmp_path_factory.mktemp("vit"))


def prepared(folder, vit, classes=CLASSES, labelled=True, **source):
    config = ViTConfig(image_size=8, patch_size=4, **names_of(classes))
    processor = ViTImageProcessorPil.from_pretrained(vit)
    return load_data(folder, config, processor=processor, labelled=labelled, **source)


def test_a_saved_data_set_becomes_rows_that_the_model_takes(vit, tmp_path):
    picture_rows(6).save_to_disk(tmp_path)
    data = prepared(tmp_path, vit)
    assert len(data) == 6
    assert data[1]["labels"] == 1
    expected = torch.tensor([channel.getdata() for channel in pictures([0, 1, 2, 0, 1, 2])[1].split()]).view(3, 8, 8)
    assert torch.allclose(data[1]["pixel_values"], expected / 255 * 2 - 1, atol=1e-6)


def test_classes_are_matched_by_name_whatever_their_order_and_spelling(vit, tmp_path):
    picture_rows(6, names=["blue", "red", "green"]).save_to_disk(tmp_path)
    data = prepared(tmp_path, vit, classes=["Red", "GREEN, viridis", "blue"])
    assert [row["labels"] for row in data] == [2, 0, 1, 2, 0, 1]
    assert "matched by name ('blue' is 0 in the data, 2 in the model)" in " ".join(data.notes)


def labels_of(folder, vit, classes, names, labels, **source):
    """What becomes of `labels`, class indices among `names`, for a model with `classes`."""
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=names)})
    rows = {"image": pictures([0] * len(labels)), "label": labels}
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(folder)
    return prepared(folder, vit, classes=classes, **source).labels


@pytest.mark.parametrize(
    "names",
    [
        ["maillot", "maillot, tank suit", "cat"],
        ["maillot, tank suit", "maillot", "cat"],
        ["Cardigan", "cardigan", "cat"],
    ],
)
def test_classes_that_are_called_alike_in_data_and_model_stay_what_they_are(names, vit, tmp_path):
    assert labels_of(tmp_path, vit, names, names, [0, 0, 1, 2]) == [0, 0, 1, 2]


def test_an_exact_name_comes_before_another_spelling_and_that_before_a_synonym(vit, tmp_path):
    classes = ["maillot, tank suit", "Maillot", "maillot", "grey cat, tabby"]
    assert labels_of(tmp_path / "exact", vit, classes, ["maillot", "tabby"], [0, 1]) == [2, 3]
    assert labels_of(tmp_path / "spelt", vit, classes[:2], ["maillot", "tank-suit"], [0, 1]) == [1, 0]


@pytest.mark.parametrize(
    ("classes", "names", "sentence"),
    [
        (["crane, bird", "crane, lift"], ["crane", "other"], "'crane', which may be the model's 0 .* or 1"),
        (["crane", "crane"], ["crane", "other"], "'crane', which may be the model's 0 .* or 1"),
        (["Crane", "crane"], ["CRANE", "other"], "'CRANE', which may be the model's 0 .* or 1"),
        (
            ["maillot", "cat"],
            ["maillot", "maillot, tank suit"],
            "the classes 'maillot' and .* both may be the model's 0",
        ),
        (["cat", "tench"], ["Cat", "cat"], "the classes 'Cat' and 'cat', and both may be the model's 0"),
    ],
)
def test_a_name_that_may_mean_two_things_is_refused_unless_names_are_to_be_ignored(
    classes, names, sentence, vit, tmp_path
):
    with pytest.raises(ValueError, match=sentence):
        labels_of(tmp_path, vit, classes, names, [0, 0])
    assert prepared(tmp_path, vit, classes=classes, labels_in_order=True).labels == [0, 0]


def test_an_ambiguous_name_that_no_row_has_does_no_harm(vit, tmp_path):
    assert labels_of(tmp_path, vit, ["crane", "crane", "cat"], ["crane", "cat"], [1, 1]) == [2, 2]


def test_classes_without_names_in_the_model_are_taken_in_order(vit, tmp_path):
    picture_rows(6, names=["blue", "red", "green"]).save_to_disk(tmp_path)
    data = prepared(tmp_path, vit, classes=["LABEL_0", "LABEL_1", "LABEL_2"])
    assert [row["labels"] for row in data] == [0, 1, 2, 0, 1, 2]


def test_a_class_that_the_model_does_not_know_is_refused_unless_names_are_to_be_ignored(vit, tmp_path):
    picture_rows(6).save_to_disk(tmp_path)
    with pytest.raises(ValueError, match="the class 'blue', which the model does not know"):
        prepared(tmp_path, vit, classes=["red", "green", "pink"])
    assert [row["labels"] for row in prepared(tmp_path, vit, classes=["red", "green", "pink"], labels_in_order=True)][
        :3
    ] == [0, 1, 2]


def test_a_class_that_no_row_has_does_no_harm(vit, tmp_path):
    rows = picture_rows(6)
    rows.filter(lambda row: row["label"] < 2).save_to_disk(tmp_path)
    assert {row["labels"] for row in prepared(tmp_path, vit, classes=["red", "green", "pink"])} == {0, 1}


def test_too_many_classes_for_the_model_are_refused(vit, tmp_path):
    picture_rows(6).save_to_disk(tmp_path)
    with pytest.raises(ValueError, match="has 3 classes, the model 2"):
        prepared(tmp_path, vit, classes=["LABEL_0", "LABEL_1"])


def test_rows_without_a_label_are_refused(vit, tmp_path):
    rows = picture_rows(3)
    hidden = rows.remove_columns("label").add_column("label", [-1, -1, -1], feature=rows.features["label"])
    hidden.save_to_disk(tmp_path)
    with pytest.raises(ValueError, match="rows without a label"):
        prepared(tmp_path, vit)


def test_of_two_label_columns_the_one_with_the_models_number_of_classes_is_taken(vit, tmp_path):
    coarse = datasets.ClassLabel(names=["warm", "cold"])
    picture_rows(3).rename_column("label", "fine").add_column("coarse", [0, 1, 1], feature=coarse).save_to_disk(
        tmp_path
    )
    assert [row["labels"] for row in prepared(tmp_path, vit)] == [0, 1, 2]


def test_a_folder_of_images_in_folders_of_classes_is_a_data_set(vit, tmp_path):
    for name, image in zip(CLASSES, pictures([0, 1, 2]), strict=True):
        (tmp_path / "pictures" / name).mkdir(parents=True)
        image.save(tmp_path / "pictures" / name / "one.png")
    data = prepared(tmp_path / "pictures", vit)
    colours = {row["labels"]: row["pixel_values"].mean(dim=(1, 2)).argmax().item() for row in data}
    assert colours == {0: 0, 1: 1, 2: 2}


def test_splits_are_chosen_by_preference_or_by_name(vit, tmp_path):
    splits = {"train": picture_rows(9), "test": picture_rows(6)}
    datasets.DatasetDict(splits).save_to_disk(tmp_path)
    assert len(prepared(tmp_path, vit)) == 6
    assert len(prepared(tmp_path, vit, split="train")) == 9
    with pytest.raises(ValueError, match="has no split 'validation': it has train, test"):
        prepared(tmp_path, vit, split="validation")


def test_a_part_of_a_split_is_read_as_on_the_hub(vit, tmp_path):
    splits = {"train": picture_rows(9), "test": picture_rows(6)}
    datasets.DatasetDict(splits).save_to_disk(tmp_path)
    data = prepared(tmp_path, vit, split="train[:4]")
    assert len(data) == 4
    assert data.split == "train[:4]"
    assert torch.equal(data[3]["pixel_values"], prepared(tmp_path, vit, split="train")[3]["pixel_values"])
    assert len(prepared(tmp_path, vit, split="test[50%:]")) == 3
    assert len(prepared(tmp_path, vit, split="train+test[:1]")) == 10
    for split in ("train[:4", "validation[:4]"):
        with pytest.raises(ValueError, match=r"it has train, test, of which a part is written as \"train\[:1000\]\""):
            prepared(tmp_path, vit, split=split)
    with pytest.raises(ValueError, match="has no rows in the split train"):
        prepared(tmp_path, vit, split="train[:0]")


def test_a_split_of_data_without_splits_is_refused(vit, tmp_path):
    picture_rows(6).save_to_disk(tmp_path)
    with pytest.raises(ValueError, match="has no splits: leave out the split 'test'"):
        prepared(tmp_path, vit, split="test")


def test_a_limit_draws_rows_of_all_classes_and_always_the_same(vit, tmp_path):
    picture_rows(60).sort("label").save_to_disk(tmp_path)
    labels = [row["labels"] for row in prepared(tmp_path, vit, limit=12)]
    assert len(labels) == 12
    assert set(labels) == {0, 1, 2}
    assert labels == [row["labels"] for row in prepared(tmp_path, vit, limit=12)]


def test_a_missing_column_is_named_with_those_that_are_there(vit, tmp_path):
    picture_rows(3).save_to_disk(tmp_path)
    with pytest.raises(ValueError, match="has no column 'picture': it has image, label"):
        prepared(tmp_path, vit, image="picture")


def test_a_column_of_another_kind_is_no_column_of_images(vit, tmp_path):
    picture_rows(3).add_column("path", ["a.png"] * 3).save_to_disk(tmp_path)
    with pytest.raises(ValueError, match=r"the column 'path' of .* holds texts, no images: name another"):
        prepared(tmp_path, vit, image="path")


def test_images_that_the_data_keeps_as_bytes_are_opened(vit, tmp_path):
    picture_rows(3).save_to_disk(tmp_path / "open")
    picture_rows(3).cast_column("image", datasets.Image(decode=False)).save_to_disk(tmp_path / "bytes")
    opened, as_bytes = (prepared(tmp_path / name, vit)[1]["pixel_values"] for name in ("open", "bytes"))
    assert torch.equal(opened, as_bytes)


def test_other_data_needs_no_labels_and_may_call_its_images_otherwise(vit, tmp_path):
    picture_rows(3).remove_columns("label").rename_column("image", "photo").save_to_disk(tmp_path)
    data = prepared(tmp_path, vit, labelled=False, image="image")
    assert set(data[0]) == {"pixel_values"}
    with pytest.raises(ValueError, match="no label column among photo"):
        prepared(tmp_path, vit)


def test_a_missing_image_is_refused_before_any_is_read(vit, tmp_path):
    features = picture_rows(1).features
    rows = {"image": [*pictures([0, 1]), None], "label": [0, 1, 2]}
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(tmp_path)
    with pytest.raises(ValueError, match=r"1 of 3 rows of .* have no image in the column 'image'"):
        prepared(tmp_path, vit)


def test_a_file_that_is_not_there_is_no_name_on_the_hub(vit, tmp_path):
    with pytest.raises(ValueError, match="there is no folder or file"):
        prepared(tmp_path / "nothing", vit)


# Texts


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return AutoTokenizer.from_pretrained(save_bert(tmp_path_factory.mktemp("bert")))


def bert_config(classes=("negative", "positive")):
    return BertConfig(vocab_size=11, max_position_embeddings=16, **names_of(list(classes)))


def test_texts_of_a_batch_are_filled_up_to_the_longest(tokenizer, tmp_path):
    review_rows(4).save_to_disk(tmp_path)
    data = load_data(tmp_path, bert_config(), processor=tokenizer, labelled=True)
    assert [row["labels"] for row in data] == [1, 0, 1, 0]
    [batch] = batches(data)
    assert batch["input_ids"].shape == (4, 6) and batch["attention_mask"][1].tolist() == [1, 1, 1, 1, 1, 0]


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".jsonl"])
def test_a_file_is_a_data_set_and_labels_may_be_names(suffix, tokenizer, tmp_path):
    rows = [("a film of joy", "Positive"), ("a bad film", "Negative")]
    separator = "\t" if suffix == ".tsv" else ","
    lines = [separator.join(row) for row in [("text", "label"), *rows]]
    if suffix == ".jsonl":
        lines = [json.dumps({"text": text, "label": label}) for text, label in rows]
    (tmp_path / f"reviews{suffix}").write_text("\n".join(lines) + "\n")
    data = load_data(tmp_path / f"reviews{suffix}", bert_config(), processor=tokenizer, labelled=True)
    assert [row["labels"] for row in data] == [1, 0]


@pytest.mark.parametrize("builder", ["csv", "json", "text", "parquet", "imagefolder"])
def test_a_folder_named_like_a_builder_is_read_and_not_what_lies_around_it(builder, tokenizer, tmp_path, monkeypatch):
    (tmp_path / builder).mkdir()
    (tmp_path / builder / "reviews.csv").write_text("text,label\na film of joy,1\nbad,0\n")
    for name in ("others.csv", "others.txt"):
        (tmp_path / name).write_text("text,label\na,0\nfilm,0\nof,0\n")
    monkeypatch.chdir(tmp_path)
    data = load_data(builder, bert_config(), processor=tokenizer, labelled=True)
    assert data.labels == [1, 0]


def test_the_name_of_a_builder_is_no_data_set(tokenizer, tmp_path, monkeypatch):
    (tmp_path / "others.csv").write_text("text,label\na,0\nfilm,0\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="there is no folder csv here"):
        load_data("csv", bert_config(), processor=tokenizer, labelled=True)


def test_a_file_name_is_no_pattern(tokenizer, tmp_path):
    (tmp_path / "reviews[1].csv").write_text("text,label\na film of joy,1\nbad,0\n")
    (tmp_path / "reviews1.csv").write_text("text,label\na,0\n")
    assert load_data(tmp_path / "reviews[1].csv", bert_config(), processor=tokenizer, labelled=True).labels == [1, 0]


def prepared_file(name, content, tokenizer, tmp_path, **source):
    (tmp_path / name).write_text(content)
    return load_data(tmp_path / name, bert_config(), processor=tokenizer, labelled=True, **source)


def test_whole_numbers_that_came_as_floats_are_classes(tokenizer, tmp_path):
    assert prepared_file("reviews.csv", "text,label\na,1.0\nbad,0.0\n", tokenizer, tmp_path).labels == [1, 0]


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("half.csv", "text,label\na,0.5\nbad,1\n", "the column 'label' of .* holds 0.5, which is no class"),
        ("inf.csv", "text,label\na,inf\nbad,1\n", "holds inf, which is no class"),
        ("several.jsonl", '{"text": "a", "label": [0, 1]}\n', r"holds \[0, 1\], which is no class"),
        ("missing.csv", "text,label\na,1\nbad,\n", "has 1 rows without a label"),
        ("missing_names.csv", "text,label\na,positive\nbad,\n", "has 1 rows without a label"),
        ("none.csv", "text,label\na,positive\nbad,None\n", "csv files also count NA and None"),
        ("no_text.csv", "text,label\na,1\n,0\n", "1 of 2 rows of .* have no text in the column 'text'"),
        ("zero.csv", "", "zero.csv cannot be read: zero.csv is an empty file"),
        ("zero.json", "", "zero.json cannot be read: zero.json is an empty file"),
        ("header.csv", "text,label\n", "header.csv has no rows"),
        ("list.json", "[]", "list.json has no rows"),
        ("broken.json", '{"text": [', "broken.json cannot be read: JSON parse error"),
        ("broken.jsonl", '{"text": "a", "label": 1}\n{"text"', "broken.jsonl cannot be read: JSON parse error"),
        ("broken.parquet", "x", "broken.parquet cannot be read: Parquet"),
        ("ragged.csv", "text,label\na,film,0\nbad,film,1\n", "have more cells than its first line"),
    ],
)
def test_a_broken_file_is_refused_in_one_sentence(name, content, sentence, tokenizer, tmp_path, caplog):
    with pytest.raises(ValueError, match=sentence) as raised:
        prepared_file(name, content, tokenizer, tmp_path)
    assert "\n" not in str(raised.value)
    assert not caplog.records


def test_an_empty_file_in_a_folder_is_named(tokenizer, tmp_path):
    (tmp_path / "zero.csv").write_text("")
    with pytest.raises(ValueError, match=r"cannot be read: zero\.csv is an empty file"):
        load_data(tmp_path, bert_config(), processor=tokenizer, labelled=True)


def test_names_in_order_must_all_be_there(tokenizer, tmp_path):
    source = {"tokenizer": tokenizer, "tmp_path": tmp_path, "labels_in_order": True}
    assert prepared_file("all.csv", "text,label\na,good\nbad,bad\n", **source).labels == [1, 0]
    with pytest.raises(ValueError, match="holds 1 names, the model has 2 classes"):
        prepared_file("one.csv", "text,label\na,good\nbad,good\n", **source)


def test_label_names_need_a_model_with_names(tokenizer, tmp_path):
    (tmp_path / "reviews.csv").write_text("text,label\na film,good\nbad,bad\n")
    with pytest.raises(ValueError, match="are names, and the model has no names for its 2 classes"):
        load_data(tmp_path / "reviews.csv", bert_config(["LABEL_0", "LABEL_1"]), processor=tokenizer, labelled=True)


def test_a_column_of_numbers_is_no_column_of_texts(tokenizer, tmp_path):
    with pytest.raises(ValueError, match=r"the column 'label' of .* holds int64, no texts: name another"):
        prepared_file("reviews.csv", "text,label\na,1\nbad,0\n", tokenizer, tmp_path, text="label")


def test_two_possible_text_columns_are_for_the_user_to_choose_from(tokenizer, tmp_path):
    (tmp_path / "pairs.csv").write_text("premise,hypothesis,label\na film,joy,0\nbad,good,1\n")
    with pytest.raises(ValueError, match="more than one text column among premise, hypothesis, label"):
        load_data(tmp_path / "pairs.csv", bert_config(), processor=tokenizer, labelled=True)
    data = load_data(tmp_path / "pairs.csv", bert_config(), processor=tokenizer, text="premise")
    assert [row["labels"] for row in data] == [0, 1]


def test_a_text_may_be_a_field_of_a_column(tokenizer, tmp_path):
    rows = [{"translation": {"de": "guter Film", "en": "good film"}}, {"translation": {"de": "schlecht", "en": "bad"}}]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = load_data(tmp_path / "pairs.jsonl", bert_config(), processor=tokenizer, text="translation.en")
    assert [row["input_ids"] for row in data] == tokenizer(["good film", "bad"])["input_ids"]


def test_a_number_that_is_no_class_of_the_model_is_refused(tokenizer, tmp_path):
    (tmp_path / "reviews.csv").write_text("text,label\na film,7\nbad,0\n")
    with pytest.raises(ValueError, match="the label 7, the model has the classes 0 to 1"):
        load_data(tmp_path / "reviews.csv", bert_config(), processor=tokenizer, labelled=True)


@pytest.mark.parametrize("separator", [";", "\t", "|"])
@pytest.mark.parametrize("is_folder", [False, True])
def test_the_separator_of_a_csv_file_is_found(separator, is_folder, tokenizer, tmp_path):
    lines = [("text", "label"), ('"a film, of joy"', "positive"), ("a bad film", "negative")]
    (tmp_path / "reviews.csv").write_text("\n".join(map(separator.join, lines)) + "\n")
    data = load_data(tmp_path if is_folder else tmp_path / "reviews.csv", bert_config(), processor=tokenizer)
    assert data.labels == [1, 0] and data.rows["text"][0] == "a film, of joy"


def test_a_semicolon_in_a_text_is_no_separator(tokenizer, tmp_path):
    data = prepared_file("reviews.csv", "text,label\na; b; c,1\nbad; film,0\n", tokenizer, tmp_path)
    assert data.rows["text"][0] == "a; b; c"


def test_the_length_of_a_training_is_saved_with_the_tokenizer(tokenizer, tmp_path):
    config, long = bert_config(), [{"text": "a film " * 20}]
    for asked, expected in ((9, 9), (None, 12)):
        remember_max_length(tokenizer, config, asked, default=12)
        tokenizer.save_pretrained(tmp_path / str(asked))
        loaded = AutoTokenizer.from_pretrained(tmp_path / str(asked))
        assert len(load_data(long, config, processor=loaded)[0]["input_ids"]) == expected
        tokenizer.model_max_length = 10**30
    with pytest.raises(ValueError, match="is 17: the model reads at most 16 tokens"):
        remember_max_length(tokenizer, config, 17, default=12)
    assert len(load_data(long, config, processor=tokenizer)[0]["input_ids"]) == 16


# Parts


PARTS = ("training", "validation", "test")


def parts_of(splits, vit, folder):
    """Per part the number of rows and the note on them."""
    datasets.DatasetDict(splits).save_to_disk(folder)
    found = {part: prepared(folder, vit, part=part) for part in PARTS}
    return {part: len(data) for part, data in found.items()}, {part: data.notes for part, data in found.items()}


def test_parts_are_the_splits_that_exist(vit, tmp_path):
    splits = {"train": picture_rows(60), "validation": picture_rows(12), "test": picture_rows(120)}
    counts, notes = parts_of(splits, vit, tmp_path)
    assert counts == {"training": 60, "validation": 12, "test": 120}
    assert [notes[part][0].partition(": ")[2] for part in PARTS] == [
        "60 rows of the split train",
        "12 rows of the split validation",
        "120 rows of the split test",
    ]
    few = "only 12 rows to evaluate on: differences of a few points between models may be chance"
    assert few in notes["validation"] and not any(
        "rows to evaluate on" in note for note in notes["training"] + notes["test"]
    )


def test_a_part_without_a_split_is_cut_out_of_the_first(vit, tmp_path):
    splits = {"train": picture_rows(60), "test": picture_rows(30)}
    counts, notes = parts_of(splits, vit, tmp_path / "no validation")
    assert counts == {"training": 54, "validation": 6, "test": 30}
    assert "54 rows of the split train, all but what is held out for validation" in notes["training"][0]
    assert "6 rows of the split train, cut out for the part validation" in notes["validation"][0]
    train = {row["pixel_values"].sum().item() for row in prepared(tmp_path / "no validation", vit, part="training")}
    held = {row["pixel_values"].sum().item() for row in prepared(tmp_path / "no validation", vit, part="validation")}
    assert not train & held
    # A split that is named is cut, whatever others there are.
    assert len(prepared(tmp_path / "no validation", vit, split="train", part="test")) == 6


def test_a_test_split_without_labels_judges_nothing(vit, tmp_path):
    rows = picture_rows(12)
    hidden = rows.remove_columns("label").add_column("label", [-1] * 12, feature=rows.features["label"])
    counts, _ = parts_of({"train": picture_rows(60), "dev": picture_rows(12), "test": hidden}, vit, tmp_path)
    assert counts == {"training": 54, "validation": 12, "test": 6}


def test_an_image_folder_has_parts(vit, tmp_path):
    for split, count in (("train", 4), ("validation", 2), ("test", 3)):
        for name, label in (("red", 0), ("green", 1), ("blue", 2)):
            (tmp_path / split / name).mkdir(parents=True)
            for index, image in enumerate(pictures([label] * count)):
                image.save(tmp_path / split / name / f"{index}.png")
    assert {part: len(prepared(tmp_path, vit, part=part)) for part in PARTS} == {
        "training": 12,
        "validation": 6,
        "test": 9,
    }


# CLIP


def test_a_missing_name_is_no_class_of_clip(tmp_path):
    folder = save_clip(tmp_path / "clip")
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("string")})
    rows = {"image": pictures([0, 1, 2]), "label": ["red", None, "blue"]}
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(tmp_path / "data")
    with pytest.raises(ValueError, match="has 1 rows without a label"):
        load_data(tmp_path / "data", folder)


def test_clip_takes_its_classes_from_the_data(tmp_path):
    folder = save_clip(tmp_path / "clip")
    picture_rows(3, names=["blue", "red"]).save_to_disk(tmp_path / "data")
    data = load_data(tmp_path / "data", folder)
    assert data.class_names == ["blue", "red"]
    assert [row["labels"] for row in data] == [0, 1, 0]
    assert data[0]["pixel_values"].shape == (3, 8, 8)
