"""A saved baseline on the command line and on the Hub: judged, calibrated, asked, described and pushed like a Hydra."""

import json
import re

import pytest
import torch
from transformers import AutoImageProcessor, AutoTokenizer

from hydra_transformers.baselines import MIMO, Baseline, BatchEnsemble
from hydra_transformers.cli import main
from hydra_transformers.hub import create_model_card, push_hydra_to_hub
from hydra_transformers.models.auto import load_trained
from hydra_transformers.reports.evaluation import evaluate_uncertainty
from hydra_transformers.uncertainty import CalibratedClassifier, calibrate, predict_uncertainty
from tests.hub.fake_hub import commits, hub  # noqa: F401
from tests.tiny_data import picture_rows, pictures, review_rows, save_bert, save_vit


pytestmark = pytest.mark.filterwarnings("ignore:.*(edge of the search|calibration bins|are right, which fits none)")


def run(*words) -> None:
    assert main([str(word) for word in words]) == 0


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    """A BatchEnsemble and a MIMO with their processors, pictures and reviews."""
    folder = tmp_path_factory.mktemp("workplace")
    vit, bert = load_trained(save_vit(folder / "vit")), load_trained(save_bert(folder / "bert"))
    BatchEnsemble(vit, num_members=3, std=0.3).save_pretrained(folder / "batch-ensemble")
    AutoImageProcessor.from_pretrained(folder / "vit").save_pretrained(folder / "batch-ensemble")
    MIMO(bert, num_members=2).save_pretrained(folder / "mimo")
    AutoTokenizer.from_pretrained(folder / "bert").save_pretrained(folder / "mimo")
    picture_rows(48).save_to_disk(folder / "pictures")
    review_rows(24).save_to_disk(folder / "reviews")
    pictures([1])[0].save(folder / "photo.jpg")
    return folder


def test_the_command_line_judges_describes_and_asks_it(workplace, capsys):
    run("evaluate", workplace / "batch-ensemble", "--data", workplace / "pictures", "--output", workplace / "judged")
    report = json.loads((workplace / "judged" / "report.json").read_text())
    assert report["models"]["batch-ensemble"]["num_members"] == 3
    run("info", workplace / "batch-ensemble")
    told = capsys.readouterr().out
    assert "BatchEnsemble(num_members=3, init='normal', std=0.3" in told and "| One plain model |" in told
    run("predict", workplace / "mimo", "a film of joy", "--json")
    assert json.loads(capsys.readouterr().out)["epistemic"] == pytest.approx(0, abs=1e-6)  # it was not trained yet
    assert main(["benchmark", str(workplace / "mimo")]) == 2
    assert "is a plain bert: pass a Hydra" in capsys.readouterr().err


def test_calibrated_it_is_published_with_its_decision(workplace, hub, tmp_path, capsys):  # noqa: F811
    decided = tmp_path / "decided"
    run(
        "calibrate",
        workplace / "batch-ensemble",
        "--data",
        workplace / "pictures",
        "--coverage",
        0.5,
        "--output",
        decided,
    )
    names = {path.name for path in decided.iterdir()}
    assert {
        "baseline.json",
        "baseline.safetensors",
        "model",
        "decision.safetensors",
        "preprocessor_config.json",
    } <= names
    run("predict", decided, workplace / "photo.jpg", "--json")
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["prediction_set"]
    run("card", decided, "--repo", "me/tiny", "--base-model", "me/vit")
    run("push", decided, "me/tiny")
    assert {"model/model.safetensors", "model/config.json", "baseline.json", "decision.safetensors"} <= set(hub.files)
    assert "config.json" not in hub.files and "modeling_hydra_vit.py" not in hub.files  # which others might load
    card = hub.files["README.md"].decode()
    assert (
        "A BatchEnsemble (Wen et al., 2020) of 3 members" in card and "[me/vit](https://huggingface.co/me/vit)" in card
    )
    assert (
        "answer has the temperature" in card
        and "needs the package hydra-transformers" in card
        and "trust_remote_code" not in card
    )
    published = tmp_path / "published"
    for name, content in hub.files.items():
        (published / name).parent.mkdir(parents=True, exist_ok=True)
        (published / name).write_bytes(content)
    loaded, inputs = Baseline.from_pretrained(published), {"pixel_values": torch.randn(4, 3, 8, 8)}
    again = CalibratedClassifier.load(loaded, published).eval()(**inputs)
    assert torch.equal(
        again.abstain, CalibratedClassifier.load(Baseline.from_pretrained(decided), decided).eval()(**inputs).abstain
    )
    assert len(commits(hub)) == 1


@pytest.mark.parametrize("kind", ["batch-ensemble", "mimo"])
def test_the_code_in_the_card_runs(kind, workplace, monkeypatch, capsys):
    card = create_model_card(Baseline.from_pretrained(workplace / kind), repo_id="me/tiny")
    (code,) = re.findall(r"```python\n(.*?)```", card.text, flags=re.DOTALL)
    monkeypatch.chdir(workplace)
    exec(code.replace('"me/tiny"', repr(str(workplace / kind))), {})
    assert "epistemic 0." in capsys.readouterr().out
    assert "| 3 plain models (Deep Ensemble) |" in card.text or kind == "mimo"
    assert card.data.library_name == "hydra-transformers"
    assert card.data.pipeline_tag == ("text" if kind == "mimo" else "image") + "-classification"


def test_it_is_judged_and_calibrated_like_any_model(workplace):
    model = Baseline.from_pretrained(workplace / "batch-ensemble")
    data = [{"pixel_values": torch.randn(40, 3, 8, 8), "labels": torch.arange(40) % 3}]
    report = evaluate_uncertainty(model, data).models["BatchEnsemble"]
    assert report.num_members == 3 and report.id["mutual_information"] > 1e-4
    assert predict_uncertainty(model, data).total.shape == (40,)
    calibrated = calibrate(model, data, target={"coverage": 0.5}).model.eval()
    assert calibrated(pixel_values=data[0]["pixel_values"]).abstain.float().mean() < 1


def test_circuits_are_of_hydras_alone(workplace, hub):  # noqa: F811
    model = Baseline.from_pretrained(workplace / "mimo")
    with pytest.raises(ValueError, match="circuits and fine_tunings are about Hydras, this is a MIMO: leave them out"):
        push_hydra_to_hub(model, "me/tiny", fine_tunings=True)
