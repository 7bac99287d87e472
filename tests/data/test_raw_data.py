"""Raw data sets, by their columns, wherever data are taken; texts of different lengths are filled up exactly."""

import pytest
import torch
from datasets import Dataset
from PIL import Image
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    ViTImageProcessorPil,
)

from hydra_transformers import AutoHydra, prepare
from hydra_transformers.data.prediction import batches, collate, predict
from hydra_transformers.pruning import extract_circuit
from hydra_transformers.reports.evaluation import evaluate_uncertainty
from hydra_transformers.training import finetune_members, recipe
from hydra_transformers.uncertainty import TemperatureScaling
from tests.families import FAMILIES
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


@pytest.mark.parametrize(
    "family",
    [each for each in FAMILIES if not (each.reads_images or each.reads_audio)],
    ids=lambda family: family.name,
)
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
    row = prepare(raw(), tokenizer)[0]
    assert row["input_ids"] == tokenizer(TEXTS[0])["input_ids"] and row["labels"] == 1
    pair = prepare(raw(), tokenizer, text=("sentence", "other"), label="idx", max_length=6)[5]
    expected = tokenizer(TEXTS[5], TEXTS[0], truncation=True, max_length=6)
    assert pair["input_ids"] == expected["input_ids"] and pair["token_type_ids"] == expected["token_type_ids"]
    assert pair["labels"] == 5 and len(pair["input_ids"]) == 6


def test_prepared_texts_go_wherever_data_go(bert, tmp_path):
    model, tokenizer = bert
    data = prepare(raw(), tokenizer)
    extract_circuit(model, data, data, "avg", budget=2, batch_size=4, progress=False)
    report = evaluate_uncertainty(AutoHydra.from_backbone(model), data, {"far": {"same": prepare(raw(), tokenizer)}})
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
    [batch] = batches(prepare(pictures(mode), processor))
    expected = processor([row["picture"] for row in pictures()], return_tensors="pt")["pixel_values"]
    assert torch.allclose(batch["pixel_values"], expected, atol=1e-2) and batch["labels"].tolist() == [0, 1, 2]


def test_what_cannot_be_prepared_is_told_in_a_sentence(bert):
    _, tokenizer = bert
    processor = ViTImageProcessorPil(size={"height": 8, "width": 8})
    two = [{"first": "a", "second": "b"}]
    with pytest.raises(ValueError, match="data has texts in 'first', 'second': name the column as text="):
        prepare(two, tokenizer)
    with pytest.raises(ValueError, match=r"data has no column of images, it has 'first', 'second': name .* image="):
        prepare(two, processor)
    with pytest.raises(ValueError, match="data has no column 'sentence': it has 'first', 'second'"):
        prepare(two, tokenizer, text="sentence")
    with pytest.raises(ValueError, match="does not go with a ViTImageProcessorPil: an image processor reads images"):
        prepare(two, processor, text="first")
    with pytest.raises(ValueError, match="the label of row 0 is 'b': pass class indices"):
        prepare(two, tokenizer, text="first", label="second")[0]
    for value, kind in ((None, "NoneType"), (["a", "b"], "list")):
        with pytest.raises(ValueError, match=f"row 1 of the data has a {kind} as its text: pass texts"):
            prepare([{"text": "a"}, {"text": value}], tokenizer)[1]
    with pytest.raises(TypeError, match="data is a str: pass a Dataset"):
        prepare("imdb", tokenizer)
    with pytest.raises(TypeError, match="processor is a NoneType: pass the model's tokenizer, image processor"):
        prepare(two, None)
    with pytest.raises(ValueError, match="data has no rows"):
        prepare([], tokenizer)
    with pytest.raises(ValueError, match="pass one column, or two of pairs"):
        prepare(two, tokenizer, text=("a", "b", "c"))
