"""A model of several labels through everything that a classifier goes through: commands, server, page, reports, baselines."""

import json

import pytest
import torch
from fastapi.testclient import TestClient
from transformers import AutoTokenizer

from hydra_transformers import AutoHydra, load_data
from hydra_transformers.baselines import DeepEnsemble, MCDropout, soup
from hydra_transformers.hub import create_model_card
from hydra_transformers.models.auto import load_trained
from hydra_transformers.reports import Report, compare_fusions, evaluate_uncertainty
from hydra_transformers.serving import HydraPredictor, build_page, create_app
from hydra_transformers.uncertainty import calibrate
from tests.command_line import run
from tests.tiny_data import WORDS, save_bert


FEELINGS = ["anger", "joy", "surprise"]


def rows(count: int = 60) -> list[dict]:
    """Texts whose words say their labels: bad is anger, joy is joy, good is surprise."""
    generator = torch.Generator().manual_seed(0)
    words = [[WORDS[place] for place in row] for row in torch.randint(5, len(WORDS), (count, 3), generator=generator)]
    named = {"bad": "anger", "joy": "joy", "good": "surprise"}
    return [
        {"text": " ".join(each), "labels": sorted({named[word] for word in each if word in named})} for each in words
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two fine-tunings, fused, and the data as a file: made by commands."""
    path = tmp_path_factory.mktemp("labels")
    save_bert(path / "bert")
    (path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows()))
    data = ["--data", path / "data.jsonl"]
    steps = ["--members", 2, "--max-steps", 4, "--batch-size", 16]
    run("finetune", path / "bert", *data, *steps, "--output", path / "members")
    run("fuse", path / "members", "--output", path / "hydra")
    return path


@pytest.fixture(scope="module")
def members(folder):
    return [load_trained(folder / "members" / f"member-{index}").eval() for index in range(2)]


@pytest.fixture(scope="module")
def data(folder, members):
    found = load_data(folder / "data.jsonl", members[0], processor=AutoTokenizer.from_pretrained(folder / "bert"))
    return [found[place] for place in range(len(found))]


@pytest.mark.slow
def test_commands_go_from_a_file_of_lists_to_answers(folder, tmp_path, capsys):
    config = json.loads((folder / "hydra" / "config.json").read_text())
    assert config["problem_type"] == "multi_label_classification" and list(config["id2label"].values()) == FEELINGS
    data = ["--data", folder / "data.jsonl"]
    rule = ["--label-risk", 0.6, "--alpha", 0.3]
    run("calibrate", folder / "hydra", *data, *rule, "--output", tmp_path / "new")
    assert "of a row's labels are missing from its set" in capsys.readouterr().out
    run("evaluate", tmp_path / "new", *data)
    assert "mAP" in capsys.readouterr().out
    report = tmp_path / "new" / "evaluation" / "report.json"
    assert "set_missed" in Report.from_json(report).models["new"]["data"]
    run("card", tmp_path / "new", "--report", report, "--dataset", "go_emotions")
    card = (tmp_path / "new" / "README.md").read_text()
    assert "mAP" in card and "any number of the labels" in card and "missing from its set" in card
    capsys.readouterr()
    run("predict", tmp_path / "new", "a bad film", "--json")
    answer = json.loads(capsys.readouterr().out)
    assert set(answer["labels"]) <= set(answer["prediction_set"]) and {
        each["label"] for each in answer["scores"]
    } == set(FEELINGS)
    run(
        "predict",
        tmp_path / "new",
        folder / "data.jsonl",
        "--text-column",
        "text",
        "--output",
        tmp_path / "answers.jsonl",
    )
    lines = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert len(lines) == 60 and all("labels" in line for line in lines)


@pytest.mark.slow
def test_the_server_answers_and_the_page_sends_away(folder):
    predictor = HydraPredictor(folder / "hydra")
    with TestClient(create_app(predictor)) as client:
        [answer] = client.post("/predict", json={"inputs": ["a bad film"]}).json()
    assert set(answer["labels"]) <= set(FEELINGS) and answer["scores"][0].keys() >= {"label", "score", "epistemic"}
    assert "any of 3 labels" in str(build_page(predictor).get_config_file())


@pytest.mark.slow
def test_members_are_compared_before_they_are_fused(members, data):
    report = compare_fusions(members, data).report
    apart = evaluate_uncertainty({"apart": DeepEnsemble(members).eval()}, data).models["apart"]["data"]
    assert report.models["ensemble"]["data"] == pytest.approx(apart, abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "build", [lambda members: MCDropout(members[0], num_samples=3), soup], ids=["dropout", "soup"]
)
def test_other_methods_are_calibrated_and_judged_alike(build, members, data):
    calibrated = calibrate(build(members).eval(), data, alpha=0.2, target={"coverage": 0.8}).model
    [result] = evaluate_uncertainty(calibrated, data).models.values()
    assert result["data"]["set_missed"] <= 0.25 and 0.6 <= result["data"]["answered"] <= 1


@pytest.mark.slow
def test_the_code_of_a_card_gives_the_uncertainty_of_every_label(members):
    hydra = AutoHydra.from_pruned_members(members).eval()
    card = str(create_model_card(hydra, repo_id="me/feelings"))
    assert "log-odds of the members' mean probability" in card
    code = card.partition("outputs = model(**inputs)\n")[2].partition("```")[0]
    inputs = {"input_ids": torch.tensor([[2, 5, 6, 3]])}
    found = {"torch": torch, "model": hydra, "outputs": hydra(**inputs)}
    exec(code, found)
    torch.testing.assert_close(found["total"], found["aleatoric"] + found["epistemic"])
    torch.testing.assert_close(found["mean"], hydra(**inputs).logits.sigmoid())
