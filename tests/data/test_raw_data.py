"""Raw data sets in every function that takes data; padding texts changes no answer."""

import copy

import pytest
import torch
from datasets import Dataset
from PIL import Image
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    DataCollatorWithPadding,
    ViTImageProcessorPil,
)

from hydra_transformers import AutoHydra, load_data
from hydra_transformers.data.batches import batches, collate
from hydra_transformers.data.prediction import collect_member_logits, predict
from hydra_transformers.pruning import extract_circuit, taylor_scores
from hydra_transformers.reports.evaluation import evaluate_uncertainty
from hydra_transformers.training import finetune_members, recipe
from hydra_transformers.uncertainty import TemperatureScaling
from tests.families import BERT, LLAMA, MODERNBERT, MPNET, for_families
from tests.tiny_data import save_bert


TEXTS = ["a good film", "bad", "a film of joy", "a bad film of a bad film", "joy", "good good"]
LABELS = [1, 0, 1, 0, 1, 1]


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    folder = save_bert(tmp_path_factory.mktemp("bert"))
    return AutoModelForSequenceClassification.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)


def raw() -> Dataset:
    return Dataset.from_dict({"sentence": TEXTS, "other": TEXTS[::-1], "label": LABELS, "idx": list(range(6))})


def test_the_usual_flow_of_map_and_tokenize_needs_nothing_more(bert):
    model, tokenizer = bert
    tokenized = raw().map(lambda row: tokenizer(row["sentence"]))
    alone = torch.cat([predict(model, collate([row])) for row in tokenized])
    together = torch.cat([predict(model, batch) for batch in batches(tokenized, batch_size=4)])
    assert torch.allclose(alone, together, atol=1e-6)
    keys = ["input_ids", "token_type_ids", "attention_mask", "label"]
    loader = DataLoader(tokenized.select_columns(keys), batch_size=4, collate_fn=DataCollatorWithPadding(tokenizer))
    circuits = [
        extract_circuit(model, data, objective="acc", budget=3, batch_size=4, progress=False)
        for data in (tokenized, loader)
    ]
    assert circuits[0].ranking == circuits[1].ranking and circuits[0].scores == circuits[1].scores


@for_families([BERT, MPNET, MODERNBERT, LLAMA])
def test_filling_up_changes_no_answer(family):
    model = family.fused()
    rows = [{"input_ids": torch.arange(5, 5 + length)} for length in (3, 7, 5)]
    alone = torch.cat([predict(model, collate([row])) for row in rows])
    assert torch.allclose(predict(model, collate(rows)), alone, atol=1e-5)


def test_only_tokens_are_filled_up():
    rows = [{"input_ids": [1, 2], "labels": [1.0, 0.0]}, {"input_ids": [1, 2, 3], "labels": [0.0, 1.0]}]
    batch = collate(rows)
    assert batch["labels"].tolist() == [[1.0, 0.0], [0.0, 1.0]]
    assert batch["input_ids"].tolist() == [[1, 2, 0], [1, 2, 3]]
    assert batch["attention_mask"].tolist() == [[1, 1, 0], [1, 1, 1]]
    with pytest.raises(ValueError, match="cannot be stacked"):
        collate([{"x": [1, 2]}, {"x": [1]}])


def test_texts_are_found_by_their_usual_name_and_pairs_by_theirs(bert):
    _, tokenizer = bert
    row = load_data(raw(), tokenizer)[0]
    assert row["input_ids"] == tokenizer(TEXTS[0])["input_ids"] and row["labels"] == 1
    pair = load_data(raw(), tokenizer, text=("sentence", "other"), label="idx", max_length=6)[5]
    expected = tokenizer(TEXTS[5], TEXTS[0], truncation=True, max_length=6)
    assert pair["input_ids"] == expected["input_ids"] and pair["token_type_ids"] == expected["token_type_ids"]
    assert pair["labels"] == 5 and len(pair["input_ids"]) == 6


def test_prepared_texts_go_wherever_data_go(bert, tmp_path):
    model, tokenizer = bert
    data = load_data(raw(), tokenizer)
    extract_circuit(model, data, data, "avg", budget=2, batch_size=4, progress=False)
    report = evaluate_uncertainty(AutoHydra.from_backbone(model), data, {"far": {"same": load_data(raw(), tokenizer)}})
    assert report.models
    assert TemperatureScaling.fit(torch.cat([predict(model, batch) for batch in batches(data)]), torch.tensor(LABELS))
    settings = recipe("tune-texts")
    [tuned] = finetune_members(
        [AutoHydra.from_backbone(model)],
        settings,
        data,
        data,
        output_dir=tmp_path,
        max_steps=2,
        per_device_train_batch_size=3,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
    )
    assert not torch.equal(
        tuned.bert.layers[0].attention.qkv_proj.weight,
        AutoHydra.from_backbone(model).bert.layers[0].attention.qkv_proj.weight,
    )


def pictures(mode: str = "RGB") -> list[dict]:
    colours = [(255, 0, 0), (0, 255, 0), (0, 0, 255)]
    return [
        {"picture": Image.new("RGB", (9, 7), colour).convert(mode), "labels": i} for i, colour in enumerate(colours)
    ]


@pytest.mark.parametrize("mode", ["RGB", "P", "RGBA"])
def test_images_are_found_and_processed_when_they_are_read(mode):
    processor = ViTImageProcessorPil(size={"height": 8, "width": 8})
    [batch] = batches(load_data(pictures(mode), processor))
    expected = processor([row["picture"] for row in pictures()], return_tensors="pt")["pixel_values"]
    assert torch.allclose(batch["pixel_values"], expected, atol=1e-2) and batch["labels"].tolist() == [0, 1, 2]


TWO = [{"first": "a", "second": "b"}]
IMAGES = ViTImageProcessorPil(size={"height": 8, "width": 8})
REFUSALS = {
    "no text column": (
        TWO,
        None,
        {},
        r"more than one text column among first, second: name it as text= \(--text-column\)",
    ),
    "no image column": (TWO, IMAGES, {}, r"no image column among first, second: name it as image= \(--image-column\)"),
    "no such column": (TWO, None, {"text": "words"}, "data has no column 'words': it has first, second"),
    "another kind": (TWO, IMAGES, {"text": "first"}, "'first' does not go with a model of images: name it as image="),
    "three columns": (TWO, None, {"text": ("a", "b", "c")}, "name one column, or two of pairs"),
    "no such label": (TWO, None, {"text": "first", "label": "c"}, "data has no column 'c': it has first, second"),
    "names, no model": (
        TWO,
        None,
        {"text": "first", "label": "second"},
        "the label of row 0 is 'b': pass the model in place",
    ),
    "labels required": (
        TWO,
        None,
        {"text": "first", "labelled": True},
        r"no label column among .* \(--label-column\)",
    ),
    "a split": (TWO, None, {"text": "first", "split": "test"}, "data has no splits: leave out the split 'test'"),
    "no text": (
        [{"text": "a"}, {"text": None}],
        None,
        {},
        r"row 1 of the data cannot be read as a text \(its text is a NoneType\): pass texts in 'text'",
    ),
    "texts": (
        [{"text": "a"}, {"text": ["b"]}],
        None,
        {},
        r"row 1 of the data cannot be read as a text \(its text is a list\): pass texts in 'text'",
    ),
    "no rows": ([], None, {}, "data has no rows: pass at least one"),
    "no data": (
        3,
        None,
        {},
        "data is a int: pass the name of a data set, a folder or file, a Dataset or a list of dict rows",
    ),
    "a batch": ({"text": ["a"]}, None, {}, "data is a dict: pass a Dataset or a list of dict rows"),
    "no dicts": (["a"], None, {}, "a row of data is a str: each row must be a dict of columns"),
    "no processor": (TWO, 3, {}, "model is a int: pass the model, its name or folder, or its tokenizer"),
    "nothing": (
        TWO,
        torch.nn.Identity(),
        {},
        "a Identity has no config, so its processor cannot be found: pass processor=",
    ),
    "no folder": (
        TWO,
        BertConfig(),
        {},
        "the model was not loaded from anywhere: pass its Tokenizer as processor=",
    ),
    "no such folder": ("./nowhere.csv", None, {}, r"there is no folder or file \./nowhere\.csv"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_load_data_refuses_in_one_sentence(name, bert):
    data, model, settings, sentence = REFUSALS[name]
    with pytest.raises((TypeError, ValueError), match=sentence) as raised:
        list(load_data(data, bert[1] if model is None else model, **settings))
    assert "\n" not in str(raised.value)


# Labels that are names


class Reviews(torch.utils.data.Dataset):
    """Rows that can only be read one by one."""

    def __len__(self):
        return len(TEXTS)

    def __getitem__(self, index):
        return {"text": TEXTS[index], "label": ("Bad", "good")[LABELS[index]]}


@pytest.fixture(scope="module")
def named(bert):
    """A model that calls its classes by names, and its tokenizer."""
    model = copy.deepcopy(bert[0])
    model.config.id2label, model.config.label2id = {0: "bad", 1: "good"}, {"bad": 0, "good": 1}
    return model, bert[1]


@pytest.mark.parametrize("form", ["csv", "list", "torch", "datasets"])
def test_labels_that_are_names_become_the_models_class_indices(form, named, tmp_path):
    model, tokenizer = named
    rows = list(Reviews())
    forms = {"list": rows, "torch": Reviews(), "datasets": Dataset.from_list(rows), "csv": tmp_path / "reviews.csv"}
    Dataset.from_list(rows).to_csv(tmp_path / "reviews.csv")
    data = load_data(forms[form], model, processor=tokenizer, label="label")
    assert [row["labels"] for row in data] == LABELS
    other = [*rows, {"text": "a", "label": "ugly"}]
    with pytest.raises(ValueError, match="the class 'ugly', which the model does not know"):
        list(load_data(other, model, processor=tokenizer))


@pytest.mark.filterwarnings("ignore")
def test_tokenized_rows_may_have_names_as_labels_wherever_labels_are_needed(named):
    model, tokenizer = named
    rows = Dataset.from_list(list(Reviews())).map(lambda row: tokenizer(row["text"]))
    numbers = rows.remove_columns("label").add_column("label", LABELS)
    loader = [dict(tokenizer(TEXTS, padding=True)) | {"label": rows["label"]}]
    assert collect_member_logits(model, rows)[1].tolist() == collect_member_logits(model, loader)[1].tolist() == LABELS
    foreign = rows.remove_columns("label").add_column("label", ["ugly"] * len(LABELS))
    found, expected = (
        evaluate_uncertainty({"model": model}, data, {"far": {"foreign": foreign}}).models["model"].id
        for data in (rows, numbers)
    )
    assert found == expected
    assert taylor_scores(model, rows) == taylor_scores(model, numbers)
    assert collate(list(rows), classes=["bad", "good"])["labels"].tolist() == LABELS
    with pytest.raises(ValueError, match="the class 'ugly', which the model does not know"):
        evaluate_uncertainty(model, foreign)
