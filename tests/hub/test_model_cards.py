"""model_cards/ are of models that were trained: every figure is in experiments/results, and a run becomes a folder to push."""

import json

import pytest
import torch
from huggingface_hub import ModelCard
from transformers import AutoModelForImageClassification, ViTConfig, ViTForImageClassification

from hydra_transformers import AutoHydra
from hydra_transformers.cost import count_multiply_adds, count_parameters
from hydra_transformers.hub.card import TO_FILL_IN
from hydra_transformers.reports import Report
from scripts import build_model_cards as script
from tests.pages import ROOT


NAMES = sorted(script.SHIPPED)
IMAGES = "hydra-dinov2-small-tinyimagenet"


@pytest.mark.slow
def test_the_cards_in_the_repository_are_up_to_date():
    """Which also compares the sizes of the models with those that were judged."""
    wanted = script.files()
    assert set(wanted) == set((ROOT / "model_cards").glob("*.md"))
    for path, content in wanted.items():
        assert path.read_text(encoding="utf-8") == content, f"{path.name}: run python scripts/build_model_cards.py"


@pytest.mark.parametrize("name", NAMES)
def test_the_cards_leave_nothing_open_and_invent_nothing(name):
    card = ModelCard.load(ROOT / "model_cards" / f"{name}.md")
    judged = script.measured(script.SHIPPED[name].setting)["seeds"]["0"][script.METHOD]
    assert TO_FILL_IN not in card.text and "Not trained" not in card.text
    shipped = script.SHIPPED[name]
    assert (card.data.base_model, card.data.license) == (shipped.start, shipped.license)
    assert (shipped.license is None) == (shipped.start is None)  # inherited, never chosen
    found = {result.metric_name: result.metric_value for result in card.data.eval_results}
    assert found["Accuracy"] == judged["id"]["accuracy"]
    assert f"| This model | {judged['parameters']:,} | {judged['multiply_adds'] / 1e9:.2f} G |" in card.text


@pytest.fixture
def run(tmp_path):
    """What the comparison leaves, of tiny models: three fine-tunings of seed 0 out of nine, and their results."""
    folder = tmp_path / "runs" / "tinyimagenet-dinov2"
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(0)
    members = [ViTForImageClassification(ViTConfig(**sizes, image_size=8, patch_size=4)) for _ in range(3)]
    for index, member in zip((0, 3, 4), members, strict=True):
        member.save_pretrained(folder / f"backbone-{index}" / "member-0")
    hydra = AutoHydra.from_pruned_members(members, trunk_layers=1)
    measured = script.measured("tinyimagenet-dinov2")["seeds"]["0"]
    size = {"parameters": count_parameters(hydra), "multiply_adds": count_multiply_adds(hydra)}
    (folder / "results" / "0").mkdir(parents=True)
    for method in ("single", "deep-ensembles", "soup", script.METHOD, f"{script.METHOD}-temperature"):
        (folder / "results" / "0" / f"{method}.json").write_text(json.dumps(measured[method] | size))
    (folder / "numbers.json").write_text(json.dumps({"seeds": 3, "backbones": 9}))
    return folder


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*point elsewhere", "ignore:members")
def test_a_run_becomes_a_folder_that_is_ready_to_push(run, tmp_path):
    output = tmp_path / IMAGES
    script.write_folder(run, output)
    assert {"README.md", "preprocessor_config.json", "modeling_hydra_vit.py"} <= {
        path.name for path in output.iterdir()
    }
    loaded = AutoModelForImageClassification.from_pretrained(output)
    assert loaded.num_members == 3 and loaded.config.trunk_layers == 1
    report = Report.from_json(output / "evaluation" / "report.json")
    card = (output / "README.md").read_text()
    assert f"{report.models[script.HYDRA]['data']['accuracy']:.2%}"[:-1] in card and TO_FILL_IN not in card


@pytest.mark.slow
def test_what_is_no_such_run_is_refused(run, tmp_path):
    with pytest.raises(
        SystemExit, match="pass the folder of a setting that has a card, tinyimagenet-dinov2, sst2-gte"
    ):
        script.write_folder(run.parent, tmp_path / "output")
    with pytest.raises(SystemExit, match="exists already"):
        script.write_folder(run, run)
    judged = run / "results" / "0" / f"{script.METHOD}.json"
    judged.write_text(json.dumps(json.loads(judged.read_text()) | {"parameters": 7}))
    with pytest.raises(SystemExit, match="parameters, the one that was judged 7"):
        script.write_folder(run, tmp_path / "output")
    (run / "results" / "0" / "soup.json").unlink()
    with pytest.raises(SystemExit, match="have no soup"):
        script.write_folder(run, tmp_path / "output")
    assert not (tmp_path / "output").exists()
