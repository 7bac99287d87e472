import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, IterableDataset
from transformers import BatchEncoding
from transformers.modeling_outputs import BaseModelOutput

from hydra_transformers.data.batches import batches
from hydra_transformers.data.prediction import SavedLogits, ZeroShotClassifier, collect_member_logits, predict
from tests.families import BERT, CLIP, FEW, VIT, for_families, images, padded_texts


ROWS = [{"x": torch.full((2,), float(i)), "label": i, "name": f"row {i}"} for i in range(7)]


class Rows(torch.utils.data.Dataset):
    def __init__(self, rows):
        self.rows, self.read = rows, []

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        self.read.append(index)
        return self.rows[index]


class Stream(IterableDataset):
    def __iter__(self):
        return iter(ROWS)


def hugging_face_dataset():
    from datasets import Dataset

    return Dataset.from_list([{"x": row["x"].tolist(), "label": row["label"], "name": row["name"]} for row in ROWS])


def whole(iterator):
    parts = list(iterator)
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


@pytest.mark.parametrize(
    "make", [lambda: Rows(ROWS), Stream, hugging_face_dataset], ids=["torch", "stream", "datasets"]
)
def test_a_dataset_of_rows_is_collated_and_texts_are_dropped(make):
    found = list(batches(make(), batch_size=3))
    assert [len(batch["x"]) for batch in found] == [3, 3, 1]
    assert set(found[0]) == {"x", "labels"}
    assert whole(found)["labels"].tolist() == list(range(7))
    assert whole(found)["x"][:, 0].tolist() == list(range(7))


def test_loaders_and_lists_bring_their_own_batches():
    loader = DataLoader(ROWS, batch_size=4)
    assert [len(batch["x"]) for batch in batches(loader, batch_size=1)] == [4, 3]
    ready = [BatchEncoding({"x": torch.zeros(5, 2), "texts": ["a"] * 5})]
    assert [set(batch) for batch in batches(ready)] == [{"x"}]
    assert [set(batch) for batch in batches(iter(ready))] == [{"x"}]


@pytest.mark.parametrize(
    "row",
    [
        {"x": [0.0, 1.0], "labels": 1},
        {"x": torch.zeros(2), "labels": torch.tensor(1)},
        {"input_ids": [1, 2, 3]},
        {"pixel_values": np.zeros((3, 4, 4), dtype=np.float32)},
    ],
)
def test_a_list_of_rows_is_put_into_batches(row):
    [first, last] = batches([row] * 5, batch_size=3)
    for name, value in row.items():
        assert first[name].shape == (3, *np.shape(value)) and last[name].shape == (2, *np.shape(value))


@pytest.mark.parametrize("as_given", [np.array, lambda mask: mask, lambda mask: [np.array(row) for row in mask]])
def test_masks_and_labels_that_are_arrays_or_lists_count(as_given):
    mask = [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]
    inputs = {"input_ids": torch.arange(10).view(2, 5) + 2}
    batch = {**inputs, "attention_mask": as_given(mask), "labels": [1, 0], "name": ["a", "b"], "epoch": 3}
    [found] = batches([batch])
    assert torch.equal(found["attention_mask"], torch.tensor(mask)) and found["labels"].tolist() == [1, 0]
    assert set(found) == {"input_ids", "attention_mask", "labels"}
    backbone = BERT.backbone()
    expected = predict(backbone, {**inputs, "attention_mask": torch.tensor(mask)})
    assert torch.equal(predict(backbone, found), expected)
    assert not torch.equal(predict(backbone, inputs), expected)


def test_a_mask_of_ragged_rows_is_refused_and_not_left_out():
    batch = {"input_ids": torch.zeros(2, 3, dtype=torch.long), "attention_mask": [[1, 1, 1], [1, 1]]}
    with pytest.raises(TypeError, match="attention_mask in batch 0 of data is a list that makes no tensor"):
        list(batches([batch]))
    rows = [{"input_ids": [1, 2], "attention_mask": None}, {"input_ids": [1, 2], "attention_mask": [1, 0]}]
    with pytest.raises(ValueError, match="a row of data has no numbers as its attention_mask"):
        list(batches(rows))


@pytest.mark.parametrize("name", ["label", "labels"])
def test_labels_between_two_classes_are_kept_as_they_are(name):
    rows = [{"x": [0.0, 1.0], name: label} for label in (1, 2.75, 0)]
    [batch] = batches(rows)
    assert batch["labels"].tolist() == [1, 2.75, 0]
    [whole] = batches([{"x": [0.0, 1.0], name: np.int64(label)} for label in (1, 2)])
    assert whole["labels"].dtype == torch.int64


def test_images_that_met_no_processor_are_refused_with_a_sentence():
    from datasets import Dataset

    image = Image.new("RGB", (8, 8))
    sentence = r"image \(\w*Image\w*\), label\): pass load_data\(data, model\)"
    for data in ([{"image": image, "label": 1}] * 3, Dataset.from_list([{"image": image, "label": 1}])):
        with pytest.raises(TypeError, match=sentence):
            list(batches(data))
    with pytest.raises(TypeError, match=r"no tensors but the labels \(its entries: image \(list\), labels\)"):
        list(batches([{"image": [image, image], "labels": torch.tensor([0, 1])}]))


@pytest.mark.parametrize("make", [lambda: Rows(ROWS), Stream, lambda: DataLoader(ROWS, batch_size=2)])
def test_processes_share_the_batches_without_repeating_any(make):
    shares = [whole(batches(make(), 2, rank=rank, world_size=3)) for rank in range(3)]
    assert sorted(int(x) for share in shares for x in share["x"][:, 0]) == list(range(7))


def test_rows_of_other_processes_are_not_loaded():
    data = Rows(ROWS)
    list(batches(data, batch_size=2, rank=1, world_size=2))
    assert set(data.read) == {2, 3, 6}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (DataLoader([(torch.zeros(2), 0)]), "batch 0 of data is a list: each batch must be a dict of tensors"),
        (Rows([(torch.zeros(2), 0)]), "is a tuple: each row must be a dict"),
        ({"x": torch.zeros(2)}, r"data is a dict: .*\[batch\] for a single one"),
        (torch.zeros(3), "data is a Tensor"),
        (None, "data is a NoneType: pass a DataLoader, a list of dict batches"),
        ([{"text": ["a", "b"]}], "batch 0 of data has no tensors .its entries: text"),
        ([{"x": torch.zeros(2), "y": torch.tensor(1)}], "holds single values, so it is a row"),
        (
            DataLoader(Rows([{"x": torch.zeros(2), "labels": 1}]), batch_size=None),
            "holds single values, so it is a row",
        ),
    ],
)
def test_other_data_is_refused_with_a_sentence(data, message):
    with pytest.raises(TypeError, match=message):
        list(batches(data))


def test_rows_of_different_sizes_are_refused_with_a_sentence():
    with pytest.raises(ValueError, match=r"cannot be stacked .*pad them to one length"):
        list(batches(Rows([{"pixel_values": [1.0, 2.0]}, {"pixel_values": [1.0, 2.0, 3.0]}])))
    with pytest.raises(ValueError, match="batch_size is 0"):
        list(batches(Rows(ROWS), batch_size=0))


@for_families(FEW)
def test_a_hydra_predicts_its_members_and_a_plain_model_one(family):
    inputs = family.inputs()
    hydra = family.fused().eval()
    with torch.no_grad():
        assert torch.equal(predict(hydra, inputs), hydra(**inputs).member_logits)
        backbone = family.backbone()
        assert torch.equal(predict(backbone, inputs), family.logits(backbone, **inputs).unsqueeze(1))


def test_labels_and_columns_the_model_does_not_name_are_held_back():
    backbone = VIT.backbone()
    batch = {"pixel_values": images(2), "labels": torch.tensor([0, 99]), "row": torch.arange(2)}
    assert torch.equal(predict(backbone, batch), predict(backbone, {"pixel_values": images(2)}))
    with pytest.raises(ValueError, match=r"takes none of the batch's entries \(row\): it reads .*pixel_values"):
        predict(backbone, {"row": torch.arange(2)})


def test_every_module_is_back_in_its_mode_after_prediction():
    model = VIT.backbone().train()
    model.vit.eval()
    modes = [module.training for module in model.modules()]
    logits = predict(model, {"pixel_values": images(2)})
    assert [module.training for module in model.modules()] == modes
    assert not logits.requires_grad
    with pytest.raises(ValueError):
        predict(model, {"pixel_values": torch.zeros(1, 7, 7, 7)})
    assert [module.training for module in model.modules()] == modes


class Headless(torch.nn.Module):
    def forward(self, x):
        return BaseModelOutput(last_hidden_state=x)


def test_a_model_without_logits_is_refused_with_a_sentence():
    with pytest.raises(TypeError, match="output of Headless has neither logits nor logits_per_image"):
        predict(Headless(), {"x": torch.zeros(2, 3)})


def test_collecting_gives_all_logits_and_labels_in_order():
    logits = torch.randn(7, 2, 3)
    rows = [{"member_logits": row, "labels": i} for i, row in enumerate(logits)]
    collected, labels = collect_member_logits(SavedLogits(), Rows(rows), batch_size=3)
    assert torch.equal(collected, logits) and labels.tolist() == list(range(7))
    assert collect_member_logits(SavedLogits(), [{"member_logits": logits}])[1] is None
    with pytest.raises(ValueError, match="no batches"):
        collect_member_logits(SavedLogits(), [])
    with pytest.raises(ValueError, match="7 rows and 6 labels: give each row one"):
        collect_member_logits(SavedLogits(), [{"member_logits": logits, "labels": torch.arange(6)}])
    with pytest.raises(ValueError, match="1 of 2 batches have labels"):
        collect_member_logits(
            SavedLogits(), [{"member_logits": logits}, {"member_logits": logits, "labels": torch.zeros(7)}]
        )


def test_zero_shot_clip_gives_the_logits_of_clip_itself():
    prompts, pixel_values = padded_texts(batch=5), images(3)
    backbone = CLIP.backbone()
    with torch.no_grad():
        reference = backbone(pixel_values=pixel_values, **prompts).logits_per_image
    member_logits = predict(ZeroShotClassifier(backbone, prompts), {"pixel_values": pixel_values})
    torch.testing.assert_close(member_logits, reference.unsqueeze(1))


def test_zero_shot_hydra_averages_the_members_probabilities(monkeypatch):
    prompts, pixel_values = padded_texts(batch=5), images(3)
    hydra = CLIP.fused().eval()
    monkeypatch.setattr(ZeroShotClassifier, "prompts_per_pass", 2)
    with torch.no_grad():
        reference = hydra(pixel_values=pixel_values, **prompts)
        output = ZeroShotClassifier(hydra, BatchEncoding(prompts)).eval()(pixel_values)
    torch.testing.assert_close(output.member_logits, reference.member_logits)
    torch.testing.assert_close(output.logits, reference.logits_per_image)


def test_prompts_follow_the_weights_after_refresh():
    prompts, pixel_values = padded_texts(batch=5), images(3)
    classifier = ZeroShotClassifier(CLIP.backbone(seed=0), prompts)
    classifier.model.load_state_dict(CLIP.backbone(seed=1).state_dict())
    classifier.refresh()
    expected = predict(ZeroShotClassifier(CLIP.backbone(seed=1), prompts), {"pixel_values": pixel_values})
    torch.testing.assert_close(predict(classifier, {"pixel_values": pixel_values}), expected)


@pytest.mark.parametrize("make", [CLIP.backbone, lambda: CLIP.fused()])
def test_a_zero_shot_classifier_in_bfloat16_answers_as_in_float32(make):
    prompts, pixel_values = padded_texts(batch=5), images(3)
    classifier = ZeroShotClassifier(make().float(), prompts)
    expected = predict(classifier, {"pixel_values": pixel_values.float()})
    found = predict(classifier.to(torch.bfloat16), {"pixel_values": pixel_values.bfloat16()})
    assert found.dtype == torch.float32
    scale = classifier.model.logit_scale.max().exp().item()
    torch.testing.assert_close(found, expected, rtol=0, atol=0.05 * scale)


def test_prompts_that_are_not_tokenized_are_refused_with_a_sentence():
    with pytest.raises(ValueError, match="class_prompts has no input_ids"):
        ZeroShotClassifier(CLIP.backbone(), {"input_ids": [[1, 2]]})
