"""The pictures of the pages can be drawn again, in light and dark, and show what the results files have."""

import json
import sys
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from experiments import recipe
from scripts import draw_monitor, draw_results
from scripts.picture_style import IMAGES, LIGHT, dark_path
from tests.pages import ROOT


SCRIPTS = sorted(path.stem for path in (ROOT / "scripts").glob("draw_*.py"))


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_picture_can_be_drawn_again_and_shows_what_it_did(name, tmp_path, monkeypatch):
    script = import_module(f"scripts.{name}")
    monkeypatch.setattr(sys, "argv", [name, str(tmp_path / "drawn.png")])
    script.main()
    for kept in (script.OUTPUT, dark_path(script.OUTPUT)):
        drawn = tmp_path / kept.name.replace(script.OUTPUT.stem, "drawn")
        with Image.open(drawn) as new, Image.open(kept) as old:
            assert new.size == old.size
            assert new.text.get("Description") == old.text.get("Description"), "the numbers are others: draw it again"


def test_every_picture_has_a_dark_one_and_is_on_a_page():
    pages = "".join(page.read_text() for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
    for path in IMAGES.glob("*.png"):
        assert f"images/{path.name}" in pages, path.name
    scripts = [import_module(f"scripts.{name}") for name in SCRIPTS]
    for output in (Path(script.OUTPUT) for script in scripts):
        assert f'srcset="images/{dark_path(output).name}"' in pages or dark_path(output).name in pages


def test_the_monitor_says_of_the_stream_what_the_picture_shows():
    kept = json.loads(draw_monitor.DATA.read_text())
    looks = 6
    again = draw_monitor.simulate(looks * draw_monitor.CASE.batch)
    assert again | {"path": []} == kept | {"path": []}
    assert again["path"] == kept["path"][:looks]


def made_up_results():
    """Two methods of two seeds, whose second is right more often, and the arrays of all rows but one."""
    usual = recipe.asdict(recipe.Recipe())
    rows = []
    arrays = {}
    random = np.random.default_rng(0)
    for members, trunk, epochs, right in ((1, 0, 8, 0.7), (3, 11, 12, 0.9)):
        for seed in (0, 1):
            plan = recipe.asdict(recipe.Plan(recipe.Recipe(epochs=epochs), members=members, trunk=trunk, seed=seed))
            values = {"accuracy": right, "nll_with_temperature": 1 - right}
            number = len(rows)
            rows.append({"kind": "training", "plan": plan, "seed": seed, "work": 100, "test": values})
            arrays[f"{number}/test_doubt"] = np.linspace(0, 1, 1000).astype(np.float16)
            arrays[f"{number}/test_correct"] = random.random(1000) < right
            arrays[f"{number}/draws_answered"] = np.full(3, 0.5, np.float32)
            arrays[f"{number}/draws_wrong"] = np.full(3, 0.04, np.float32)
    del arrays["0/test_doubt"]
    content = {"rows": rows, "recipe_of_budgets": usual, "epochs_of_one_training": 8, "work_of_one_model": 100}
    return content, arrays


def test_the_plot_of_errors_shows_the_rows_that_have_arrays():
    content, arrays = made_up_results()
    numbers = draw_results.numbers_with_arrays(content, arrays)
    assert numbers == {"One model": [1], "Hydra: one run of three members": [2, 3]}
    panel = draw_results.draw_errors(content, arrays, LIGHT).axes[0]
    curves = {line.get_label(): line for line in panel.lines if not line.get_label().startswith("_")}
    assert list(curves) == list(numbers)
    # At full coverage all errors are among the answers.
    errors = [100 * (1 - arrays[f"{number}/test_correct"].mean()) for number in (2, 3)]
    assert curves["Hydra: one run of three members"].get_ydata()[-1] == pytest.approx(np.mean(errors))
    dots = [line for line in panel.lines if line.get_marker() == "."]
    assert len(dots) == 3 and dots[0].get_xdata().tolist() == [50] * 3
