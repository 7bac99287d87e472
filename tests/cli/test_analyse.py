"""`hydra-transformers analyse`: a folder with a report, results and pictures; never over another."""

import json

import pytest

from hydra_transformers._io.files import write_atomically
from hydra_transformers.analysis import head_plots
from hydra_transformers.cli import main
from hydra_transformers.pruning import Circuit
from tests.tiny_data import grey_rows, picture_rows, save_clip, save_vit


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("workplace")
    save_vit(folder / "vit")
    save_clip(folder / "clip")
    picture_rows(30).save_to_disk(folder / "pictures")
    grey_rows(16).save_to_disk(folder / "grey")
    return folder


def words(workplace, output, *more, model="vit"):
    data = ["--data", workplace / "pictures", "--ood", f"grey={workplace / 'grey'}"]
    return [str(word) for word in ("analyse", workplace / model, *data, "--output", output, *more)]


@pytest.mark.slow
def test_it_writes_a_report_results_circuits_and_pictures(workplace, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(head_plots, "write_png", lambda figure, path: write_atomically(path, b""))  # drawn elsewhere
    assert main(words(workplace, tmp_path / "heads", "--budget", 2, "--budgets", 2, 4, model="clip")) == 0
    assert "### Accuracy (%)" in capsys.readouterr().out
    report = (tmp_path / "heads" / "report.md").read_text()
    assert "heads chosen on 15 rows" in report and "judged on 15 other rows and 8 of grey" in report
    assert all(f"## {title}" in report for title in ("How many can go", "Who is pruned", "What heads see"))
    results = json.loads((tmp_path / "heads" / "results.json").read_text())
    assert results["budget"] == 2 and {point["budget"] for point in results["sweep"]["points"]} == {2, 4}
    assert len(Circuit.load(tmp_path / "heads" / "circuits" / "avg.json").ranking) == 4
    shown = [line.split("(")[1].rstrip(")") for line in report.splitlines() if line.startswith("![](")]
    assert "budgets.png" in shown and all((tmp_path / "heads" / name).exists() for name in shown)


def test_nothing_is_written_over_another_result(workplace, tmp_path, capsys):
    (tmp_path / "heads").mkdir()
    (tmp_path / "heads" / "report.md").write_text("mine")
    assert main(words(workplace, tmp_path / "heads")) == 2
    assert "exists already: pass another --output" in capsys.readouterr().err
    assert (tmp_path / "heads" / "report.md").read_text() == "mine"
