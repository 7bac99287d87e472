"""All analyses at once; noise; the page and the experiment."""

import json
import sys
import warnings

import pytest
import torch

from experiments import analysis as experiment
from experiments import heads as analysis
from experiments.heads import analyse_heads, head_plots, with_noise
from experiments.heads.head_report import TaylorByLayer
from hydra_transformers._io.files import write_atomically
from hydra_transformers.pruning import taylor_prune
from hydra_transformers.pruning.heads import as_heads
from tests.pages import ROOT, run_python_blocks
from tests.pruning.backbones import clip, family, images, texts, vit


PAGE = "docs/analysis.md"


@pytest.fixture(autouse=True)
def without_rendering(monkeypatch):
    """Pictures are drawn elsewhere; here their files are empty."""
    monkeypatch.setattr(head_plots, "write_png", lambda figure, path: write_atomically(path, b""))


@pytest.mark.slow
def test_one_call_answers_all_questions_and_says_so_in_a_folder(tmp_path):
    model, id_data, ood_data, _ = family("vit", torch.float32)
    steps = []
    report = analyse_heads(
        model,
        id_data,
        ood_data,
        id_data,
        {"other": ood_data},
        budget=3,
        budgets=[3],
        random_orders=1,
        noise_rows=8,
        tell=steps.append,
    )
    assert {point.order for point in report.sweep.points} == {
        "Taylor, by layer",
        "Taylor",
        "CircAcc",
        "CircOOD",
        "CircAvg",
        "random",
    }
    assert (
        set(report.comparison.head_sets)
        == set(report.proposition.changes)
        == {point.order for point in report.sweep.points}
    )
    assert all(len(heads) == 3 for heads in report.comparison.head_sets.values())
    assert "circuit for 'avg'" in steps
    changes = report.proposition.changes["Taylor"]
    assert changes["clean"].rows == changes["noisy"].rows == 5 + 4  # every third of 13 and of 12
    path = report.save(tmp_path / "heads")
    assert path.read_text() == report.to_markdown(shown(path.read_text()))
    written = {path.name for path in (tmp_path / "heads").iterdir()}
    assert {"report.md", "results.json", "circuits", "budgets.png", "heads_pca.png", "proposition.png"} <= written
    results = json.loads((tmp_path / "heads" / "results.json").read_text())
    assert set(results) == {"budget", "sweep", "comparison", "separation", "proposition", "scores"}
    assert report.tables()["sweep/Accuracy (%)"] in path.read_text()


def shown(text: str) -> dict[str, list[str]]:
    """By title of a part its pictures."""
    found: dict[str, list[str]] = {}
    for part in text.split("\n## ")[1:]:
        lines = part.splitlines()
        found[lines[0]] = [line.removeprefix("![](").rstrip(")") for line in lines if line.startswith("![](")]
    return found


def test_taylor_by_layer_answers_where_every_layer_can_lose_as_many():
    model, id_data, _, _ = family("vit", torch.float32)
    by_layer = TaylorByLayer(model, id_data, {})
    assert by_layer(2) is None and by_layer(9) is None
    assert by_layer(6) == as_heads(taylor_prune(model, id_data, heads_per_layer=1).heads_to_prune)


def test_noise_is_the_same_for_a_seed_and_leaves_labels_and_ends_of_texts():
    pictures = [{"pixel_values": images(4, 0), "labels": torch.arange(4)}]
    [noisy], [again], [other] = (with_noise(pictures, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(noisy["pixel_values"], again["pixel_values"]) and torch.equal(noisy["labels"], torch.arange(4))
    assert not torch.equal(noisy["pixel_values"], other["pixel_values"])
    assert (noisy["pixel_values"] - pictures[0]["pixel_values"]).std() == pytest.approx(0.5, rel=0.1)
    assert torch.equal(with_noise(pictures, pixels=0.0)[0]["pixel_values"], pictures[0]["pixel_values"])

    rows = texts(40, 0)
    [changed] = with_noise([rows], tokens=0.5)
    is_other = changed["input_ids"] != rows["input_ids"]
    last = rows["attention_mask"].sum(dim=1) - 1
    assert not is_other[:, 0].any() and not is_other[torch.arange(40), last].any()
    assert not is_other[rows["attention_mask"] == 0].any()
    inner = rows["attention_mask"].sum() - 80
    assert 0.35 < is_other.sum() / inner < 0.55  # some are replaced by themselves
    turned = {name: rows[name].flip(1) for name in ("input_ids", "attention_mask")}  # padded on the left
    [changed] = with_noise([turned], tokens=1.0)
    is_other, first = changed["input_ids"] != turned["input_ids"], turned["attention_mask"].argmax(dim=1)
    assert not is_other[:, -1].any() and not is_other[torch.arange(40), first].any() and is_other.any()
    with pytest.raises(ValueError, match="no pixel_values, input_values or input_ids"):
        with_noise([{"values": torch.ones(2, 3)}])


@pytest.mark.parametrize("build", [vit, clip])
def test_a_budget_that_cannot_be_is_refused_before_any_work(build):
    with pytest.raises(ValueError, match="budget is 99: the model has"):
        analyse_heads(build(), [], [], [], [], budget=99)
    with pytest.raises(ValueError, match="budgets is 99: the model has"):
        analyse_heads(build(), [], [], [], [], budgets=[1, 99])
    with pytest.raises(ValueError, match="budgets is empty"):
        analyse_heads(build(), [], [], [], [], budgets=[])


@pytest.mark.parametrize(
    "options, sentence",
    [
        ({"data": [{"pixel_values": images(5, 0), "labels": torch.zeros(5).long()}]}, "data has 5 rows"),
        ({"data": [{"pixel_values": images(20, 0)}]}, "data has no labels"),
        (
            {"noisy_data": [{"pixel_values": images(5, 0), "labels": torch.full((5,), 9)}]},
            "noisy_data has the label 9",
        ),
        ({"other_head_sets": {"Taylor": [(0, 0)]}}, "a set named 'Taylor', which is made here"),
        ({"other_head_sets": {"mine": [(9, 9)]}}, r"other_head_sets\['mine'\] has the head \(9, 9\)"),
        ({"random_orders": -1}, "random_orders is -1"),
        ({"class_prompts": {}}, "class_prompts is for CLIP"),
    ],
)
def test_what_would_be_refused_at_the_end_is_refused_before_any_work(options, sentence):
    model, id_data, ood_data, _ = family("vit")
    steps = []
    with pytest.raises(ValueError, match=sentence):
        analyse_heads(
            model, id_data, ood_data, **({"data": id_data, "ood_data": ood_data, "tell": steps.append} | options)
        )
    assert not steps


@pytest.mark.slow
def test_the_python_blocks_of_the_page_run_in_order(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # random models score at chance
        run_python_blocks(PAGE, at_least=6)
    assert (tmp_path / "heads" / "report.md").exists() and (tmp_path / "pictures" / "budgets.png").exists()


def test_the_page_shows_every_function():
    functions = [name for name in analysis.__all__ if name[0].islower()]
    assert all(name in (ROOT / PAGE).read_text() for name in functions)


@pytest.mark.slow
def test_the_experiment_runs_on_made_up_data(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["analysis", "--smallest", "--device", "cpu", "--seconds", "0"])
    experiment.main()
    printed = capsys.readouterr().out
    assert "## How many can go" in printed and "48 test rows" in printed and not list(tmp_path.iterdir())


def test_the_tables_of_a_page_come_from_results_files(tmp_path):
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "results.json").write_text(json.dumps({"tables": {"one/sweep/Accuracy (%)": "| new |"}}))
    page = tmp_path / "page.md"
    marks = "Before\n<!-- table: one/sweep/Accuracy-(%) -->\n{}\n<!-- end -->\n"
    other = "<!-- table: another/sweep/ECE -->\nNot run yet.\n<!-- end -->\n"
    page.write_text(marks.format("| old |") + other)
    experiment.write_page(tmp_path, page)
    assert page.read_text() == marks.format("| new |") + other, "of a setting without results nothing changes"


def test_results_are_not_written_over(tmp_path, monkeypatch):
    (tmp_path / "sst2-gte").mkdir()
    (tmp_path / "sst2-gte" / "results.json").write_text("{}")
    monkeypatch.setattr(sys, "argv", ["analysis", "--setting", "sst2-gte", "--results", str(tmp_path)])
    with pytest.raises(SystemExit, match="holds results"):
        experiment.main()
