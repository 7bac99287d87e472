"""The demo tells its whole story, on data that its steps share fairly, from a pre-trained model that is worth fine-tuning."""

import contextlib
import io
import json

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits
from transformers import AutoModelForImageClassification, ViTImageProcessorPil, pipeline

from hydra_transformers.cli import main
from hydra_transformers.cost import Cost
from hydra_transformers.demo.digits import CHOOSING_DIGIT, JUDGED_DIGITS, KNOWN_DIGITS, Images, load_data
from hydra_transformers.demo.pretraining import (
    SETTINGS,
    SETTINGS_FILE,
    SHIPPED,
    TURNS,
    PretrainingSettings,
    accuracy_on_turns,
    load_shipped_model,
    moved,
    pretrain,
    turned,
)
from hydra_transformers.demo.story import FULL, examples_of, finetuned
from hydra_transformers.demo.wording import (
    Answer,
    Example,
    answer_line,
    comparison,
    comparison_table,
    judgement,
    picture,
)
from hydra_transformers.reports import Report
from hydra_transformers.reports.gains import packed_rows
from hydra_transformers.reports.table import markdown_table


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def data():
    return load_data()


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """The results of a fast demo, and what it printed."""
    output, printed = tmp_path_factory.mktemp("demo") / "demo-output", io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert main(["demo", "--fast", "--output", str(output)]) == 0
    return output, printed.getvalue()


# Data


def rows_of(images) -> set[bytes]:
    return {image.tobytes() for image in images.pixels}


def test_no_image_is_used_for_two_purposes(data):
    known = [data.train, data.validation, data.calibration, data.test]
    choosing = [images for group in data.choosing.values() for images in group.values()]
    sets = [*known, *choosing, *data.near.values(), *data.far.values()]
    assert len(set.union(*map(rows_of, sets))) == sum(map(len, map(rows_of, sets)))


def test_unknown_digits_are_other_digits_and_others_to_choose_by_than_to_judge(data):
    levels, digits = load_digits(return_X_y=True)
    levels = np.round(levels.reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8)
    assert set(KNOWN_DIGITS).isdisjoint({CHOOSING_DIGIT, *JUDGED_DIGITS})
    assert CHOOSING_DIGIT not in JUDGED_DIGITS
    sevens = {image.tobytes() for image in levels[digits == CHOOSING_DIGIT]}
    assert rows_of(data.choosing["near"][f"digit {CHOOSING_DIGIT}"]) < sevens
    for digit in JUDGED_DIGITS:
        assert rows_of(data.near[f"digit {digit}"]) == {image.tobytes() for image in levels[digits == digit]}


def test_labels_are_the_digits_shown(data):
    levels, digits = load_digits(return_X_y=True)
    shown = {
        np.round(image * (255 / 16)).astype(np.uint8).tobytes(): digit
        for image, digit in zip(levels, digits, strict=True)
    }
    for images in (data.train, data.validation, data.calibration, data.test):
        assert [shown[image.tobytes()] for image in images.pixels] == images.labels.tolist()


def test_a_patch_is_the_mean_of_its_pixels(data):
    from sklearn.datasets import load_sample_image

    photo = load_sample_image("flower.jpg").astype(float).mean(-1)
    first = [
        [photo[4 * row : 4 * row + 4, 4 * column : 4 * column + 4].mean() for column in range(8)] for row in range(8)
    ]
    assert np.abs(data.far["photo patches"].pixels[0] - np.array(first)).max() <= 0.5


# Pre-training


def test_the_shipped_model_knows_how_85_percent_of_unseen_images_are_turned(data):
    """Of three ways; a zero looks the same in all of them."""
    assert accuracy_on_turns(load_shipped_model(), data.test) >= 0.85


def test_the_shipped_model_is_small_and_made_with_the_settings_in_the_code():
    assert sum(path.stat().st_size for path in SHIPPED.iterdir()) < 1_000_000
    assert PretrainingSettings(**json.loads((SHIPPED / SETTINGS_FILE).read_text())) == SETTINGS
    config = load_shipped_model().config
    for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "patch_size"):
        assert getattr(config, name) == getattr(SETTINGS, name)
    assert list(config.id2label.values()) == list(TURNS)


SMALL = PretrainingSettings(epochs=1, hidden_size=16, num_attention_heads=2, intermediate_size=16, num_hidden_layers=1)


def test_pretraining_again_gives_the_same_model_and_reads_no_label(data):
    first, second = (
        pretrain(images, SMALL, progress=False).state_dict() for images in (data.train, Images(data.train.pixels))
    )
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_images_are_turned_as_they_are_labelled_and_never_upside_down(data):
    images = data.train.pixel_values[:60]
    inputs, turns = turned(images, torch.Generator().manual_seed(0))
    assert set(turns.tolist()) == set(range(len(TURNS)))
    for image, result, turn in zip(images, inputs, turns.tolist(), strict=True):
        back = {"upright": 0, "turned left": -1, "turned right": 1}[list(TURNS)[turn]]
        assert torch.equal(result.rot90(back, (1, 2)), image)
    assert all(quarters % 4 != 2 for quarters in TURNS.values())


def test_images_are_moved_by_at_most_a_pixel():
    dot = torch.full((200, 3, 8, 8), -1.0)
    dot[:, :, 4, 4] = 1.0
    places = moved(dot, torch.Generator().manual_seed(0))[:, 0].flatten(1).argmax(1)
    assert set(places.tolist()) == {8 * row + column for row in (3, 4, 5) for column in (3, 4, 5)}


def test_a_fine_tuning_is_right_on_95_percent_of_unseen_digits(data, tmp_path):
    [model] = finetuned(load_shipped_model(), data, FULL, tmp_path / "fine-tuning", num_members=1)
    with torch.no_grad():
        predicted = model(data.test.pixel_values).logits.argmax(-1)
    assert (predicted == data.test.labels).float().mean() >= 0.95


# Story


def test_the_demo_tells_every_step(told):
    _, text = told
    for step in range(1, 10):
        assert f"[{step}/9]" in text
    for name in ("Single", "Deep Ensemble", "Hydra, merged", "Hydra", "Hydra, pruned"):
        assert f"\n{name}  " in text, "a row of the table"
    assert any(said in text for said in ("Fuse: ", "Fuse without ", "Do not fuse: ", "Cannot tell: "))
    for pair in (
        "Hydra, merged against Single",
        "Hydra against Deep Ensemble",
        "Hydra against Single",
        "Hydra, pruned against Deep Ensemble",
    ):
        assert f"{pair}: " in text
    assert "digit-" in text and "photo-patch.png" in text


def test_the_demo_leaves_table_reports_and_plots(told):
    output, _ = told
    report = Report.from_json(output / "report.json")
    assert list(report.num_members.values()) == [1, 3, 3, 3, 3]
    assert report.models["Deep Ensemble"]["data"]["disagreement"] > 0, "each fine-tuning is another"
    assert report.data_sets("near") == ["digit 8 (near)", "digit 9 (near)"]
    table = (output / "table.md").read_text()
    assert table.startswith("|  | accuracy ↑ |") and len(table.splitlines()) == 7
    assert f"| Single | {report.models['Single']['data']['accuracy']:.1%} |" in table
    names = {path.stem for path in (output / "plots").glob("*.png")}
    assert {"reliability_diagram", "roc_digit_8_near", "score_histograms"} <= names
    page = (output / "report.html").read_text(encoding="utf-8")
    assert page.count('src="data:image/png') == len(names)
    assert not list(output.parent.glob(".*"))


def test_the_saved_folder_is_a_model_for_pipelines_with_card_and_code(told, data):
    folder = told[0] / "hydra-vit-digits"
    assert {"README.md", "config.json", "model.safetensors", "modeling_hydra_vit.py"} <= {
        path.name for path in folder.iterdir()
    }
    model = AutoModelForImageClassification.from_pretrained(folder).eval()
    processor = ViTImageProcessorPil.from_pretrained(folder)
    image = Image.fromarray(data.test.pixels[0])
    pixels = processor(image.convert("RGB"), return_tensors="pt").pixel_values
    assert torch.allclose(pixels, data.test.pixel_values[:1], atol=1e-6)
    with torch.no_grad():
        expected = model(pixels).logits.softmax(-1).max()
    assert model.is_calibrated and "### Decision" in (folder / "README.md").read_text()
    answer = pipeline("image-classification", model=model, image_processor=processor)(image)[0]
    assert answer["score"] == pytest.approx(expected.item(), abs=1e-5)


def test_the_demo_ends_with_the_saved_models_answers_and_reports_its_accuracy(told, data):
    output, text = told
    examples = examples_of(data)
    assert [example.label is None for example in examples] == [False, True]
    model = AutoModelForImageClassification.from_pretrained(output / "hydra-vit-digits").eval()
    images = [Image.open(output / "examples" / f"{example.name}.png") for example in examples]
    answers = model.predict(images, ViTImageProcessorPil.from_pretrained(output / "hydra-vit-digits"))
    for example, image, answer in zip(examples, images, answers, strict=True):
        assert np.array_equal(np.asarray(image), example.pixels)
        says = "I don't know" if answer["abstain"] else answer["label"]
        right = answer["abstain"] if example.label is None else says == example.label
        assert f'It says "{says}" of {example.name}.png, and is {"right" if right else "wrong"}: it shows' in text
        if answer["abstain"]:
            assert (
                f"{example.name}.png: I don't know. {answer['reason']} (Its guess would be {answer['label']}" in text
            )
    assert Image.open(output / "decision.png").size[0] > 500
    assert f"it answers {shares_answered(model, data.test):.1%} of the digits" in text
    with torch.no_grad():
        right = model(data.test.pixel_values).logits.argmax(-1) == data.test.labels
    hydra = json.loads((output / "report.json").read_text())["models"]["Hydra"]
    assert hydra["data"]["accuracy"] == pytest.approx(right.double().mean().item())
    assert f"{1 - shares_answered(model, data.far['photo patches']):.0%} of photo patches" in text


def shares_answered(model, images) -> float:
    with torch.no_grad():
        return 1 - model(images.pixel_values).abstain.double().mean().item()


@pytest.mark.parametrize(
    ("label", "said", "abstain", "sentence"),
    [
        ("3", "3", False, 'It says "3" of photo-patch.png, and is right: it shows a 3.'),
        ("3", "5", False, 'It says "5" of photo-patch.png, and is wrong: it shows a 3.'),
        ("3", "3", True, 'It says "I don\'t know" of photo-patch.png, and is wrong: it shows a 3.'),
        (
            None,
            "3",
            True,
            'It says "I don\'t know" of photo-patch.png, and is right: it shows nothing that it learned.',
        ),
        (None, "3", False, 'It says "3" of photo-patch.png, and is wrong: it shows nothing that it learned.'),
    ],
)
def test_the_demo_says_whether_the_model_is_right(label, said, abstain, sentence, tmp_path):
    example = Example("photo-patch", np.zeros((8, 8), dtype=np.uint8), label)
    reason = "GEN is 2, above the threshold 1." if abstain else None
    answer = Answer(said, 0.6, abstain, reason, [{"3": 0.4, "5": 0.6}, {"3": 0.8, "5": 0.2}])
    assert judgement(example, answer) == sentence
    guess = f"{said} with 60% confidence"
    says = f"I don't know. GEN is 2, above the threshold 1. (Its guess would be {guess}.)" if abstain else f"{guess}."
    assert answer_line(example, answer) == f"photo-patch.png: {says} The members: 5 (60%), 3 (80%)."
    figure = picture([example], [answer])
    figure.savefig(tmp_path / "it.png")
    title = figure.axes[1]._left_title
    assert title.get_text().replace("\n", " ") == sentence
    assert title.get_window_extent().x1 < figure.bbox.x1 and title.get_window_extent().y1 <= figure.bbox.y1


def report_of(**wrong: int) -> Report:
    """Models that are right but for the first rows; OOD images always score higher."""
    scores, foreign = torch.linspace(0, 1, 200), torch.linspace(2, 3, 200)
    models, rows = {}, {}
    for name, count in wrong.items():
        correct = (torch.arange(200) >= count).double()
        metrics = {"accuracy": correct.mean().item(), "ece": 0.1, "nll": 0.1}
        models[name] = {"data": metrics, "one (near)": {"auroc": 1.0}, "one (far)": {"auroc": 1.0}}
        ood = {group: {"one": foreign} for group in ("near", "far")}
        rows[name] = packed_rows({"correct": correct, "nll": 1 - correct, "score": scores, "ood": ood})
    groups = {"data": ("id", "data", "")} | {f"one ({group})": (group, "one", "") for group in ("near", "far")}
    return Report("single_label_classification", models, groups=groups, rows=rows)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (9, "Fused against Apart: no difference that these rows can show in Accuracy, NLL, near AUROC, far AUROC."),
        (40, "Fused against Apart: worse in Accuracy (-15.0 points, 95 % interval "),
        (0, "Fused against Apart: better in Accuracy (+5.0 points, 95 % interval "),
    ],
)
def test_a_gain_is_claimed_only_where_the_images_can_show_it_and_the_price_is_told(wrong, sentence):
    """One image of 200 is half a point, and noise."""
    report = report_of(Apart=10, Fused=wrong)
    for milliseconds, speed in ((33.0, "1.10 times the time"), (20.0, "1.5 times as fast")):
        costs = {"Apart": Cost(300, 3000, {64: 30.0}), "Fused": Cost(120, 2700, {64: milliseconds})}
        said = comparison(report, costs, "Fused", "Apart", 64)
        assert said.startswith(sentence)
        assert said.endswith(f" Price: {speed}, 0.40 times the parameters, 0.90 times the multiply-adds.")
    assert "| Fused |" in markdown_table(*comparison_table(report, costs, 64))


def test_a_folder_with_something_else_is_left_alone(tmp_path, capsys):
    (tmp_path / "mine.txt").write_text("precious")
    assert main(["demo", "--fast", "--output", str(tmp_path)]) == 2
    assert "holds something other than a demo" in capsys.readouterr().err
    (tmp_path / "file").touch()
    assert main(["demo", "--output", str(tmp_path / "file" / "demo")]) == 2
    assert "file/demo cannot be written into (Not a directory: " in capsys.readouterr().err
    assert (tmp_path / "mine.txt").read_text() == "precious"
