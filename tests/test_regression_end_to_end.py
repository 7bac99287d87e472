"""A regression model from end to end: pipelines, commands, server, export, cards."""

import itertools
import json

import pandas as pd
import pytest
import torch
from fastapi.testclient import TestClient
from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification, BertTokenizer, pipeline

from hydra_transformers import AutoHydra
from hydra_transformers.cli import main
from hydra_transformers.exporting import FILES, RUNNERS, export
from hydra_transformers.pruning import extract_circuit, taylor_scores
from hydra_transformers.reports import Report, evaluate_uncertainty
from hydra_transformers.serving import HydraPredictor, create_app
from hydra_transformers.uncertainty import calibrate, predict_decisions
from tests.tiny_data import SIZES, WORDS


TEXTS = ["a film of joy", "a bad film", "good", "a bad bad film of joy"]


def backbone(seed: int, outputs: int = 1, **sizes) -> BertForSequenceClassification:
    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=len(WORDS),
        max_position_embeddings=16,
        num_labels=outputs,
        problem_type="regression",
        initializer_range=0.2,
        **{**SIZES, **sizes},
    )
    return BertForSequenceClassification(config).eval()


def rows(count: int = 80) -> list[dict]:
    generator = torch.Generator().manual_seed(0)
    words = [WORDS[place] for place in torch.randint(5, len(WORDS), (count * 4,), generator=generator).tolist()]
    numbers = torch.randn(count, generator=generator).tolist()
    return [{"text": " ".join(words[4 * row : 4 * row + 4]), "label": numbers[row]} for row in range(count)]


def tokenized(count: int = 40) -> list[dict]:
    tokenizer = BertTokenizer(vocab={word: index for index, word in enumerate(WORDS)})
    found = rows(count)
    batch = tokenizer([row["text"] for row in found], return_tensors="pt", padding=True)
    return [dict(batch) | {"labels": torch.tensor([row["label"] for row in found])}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A calibrated Hydra of three members with its tokenizer, and its data as a file."""
    path = tmp_path_factory.mktemp("regression")
    hydra = AutoHydra.from_pruned_members([backbone(seed) for seed in range(3)]).eval()
    hydra.calibrate(tokenized(), target={"coverage": 0.5}, alpha=0.2)
    hydra.save_pretrained(path / "hydra")
    BertTokenizer(vocab={word: index for index, word in enumerate(WORDS)}).save_pretrained(path / "hydra")
    (path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows()))
    return path


@torch.no_grad()
def outputs_of(folder, texts=TEXTS):
    hydra = AutoHydra.from_pretrained(folder / "hydra")
    tokenizer = AutoTokenizer.from_pretrained(folder / "hydra")
    return [hydra(**tokenizer(text, return_tensors="pt")) for text in texts]


def test_pipelines_give_the_mean_and_ours_interval_variance_and_abstention(folder):
    expected = outputs_of(folder)
    plain = pipeline("text-classification", model=str(folder / "hydra"))(TEXTS)
    assert [each["score"] for each in plain] == pytest.approx([out.logits.item() for out in expected], abs=1e-5)
    ours = pipeline("hydra-text-classification", model=str(folder / "hydra"))(TEXTS)
    for answer, out in zip(ours, expected, strict=True):
        assert answer["score"] == pytest.approx(out.logits.item(), abs=1e-5)
        assert answer["uncertainty"] == pytest.approx(out.member_logits.var(1, correction=0).item(), abs=1e-5)
        assert answer["interval"] == [pytest.approx(out.interval[0, 0].tolist(), abs=1e-5)]
        assert answer["abstain"] == out.abstain.item() and answer["aleatoric"] is None
        assert (answer["reason"] is None) != answer["abstain"]
    assert {answer["abstain"] for answer in ours} <= {True, False}


def test_columns_server_and_command_answer_alike(folder, capsys):
    expected = AutoHydra.from_pretrained(folder / "hydra").predict(TEXTS)
    predictor = HydraPredictor(folder / "hydra", device="cpu")
    columns = predictor({"text": TEXTS})
    assert [each[0] for each in columns["interval"]] == [pytest.approx(e["interval"][0], abs=1e-5) for e in expected]
    with TestClient(create_app(predictor)) as client:
        answers = client.post("/predict", json={"inputs": TEXTS}).json()
    assert [each["score"] for each in answers] == pytest.approx([each["score"] for each in expected], abs=1e-5)
    assert main(["predict", str(folder / "hydra"), *TEXTS, "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["interval"][0] for line in lines] == [pytest.approx(e["interval"][0], abs=1e-5) for e in expected]
    assert main(["predict", str(folder / "hydra"), TEXTS[0]]) == 0
    assert " to " in capsys.readouterr().out


def test_a_calibrated_single_output_without_a_problem_type_is_regression():
    model = backbone(0)
    model.config.problem_type = None
    calibrated = calibrate(model, tokenized()).model.eval()
    tokenizer = BertTokenizer(vocab={word: index for index, word in enumerate(WORDS)})
    [answer] = predict_decisions(calibrated, TEXTS[:1], tokenizer)
    assert answer["score"] == pytest.approx(model(**tokenizer(TEXTS[0], return_tensors="pt")).logits.item(), abs=1e-5)
    assert answer["interval"][0][0] < answer["score"] < answer["interval"][0][1]


@pytest.mark.slow
@pytest.mark.parametrize("aggregate", [None, "mean-2std"])
def test_exports_carry_interval_and_abstention(folder, tmp_path, aggregate):
    hydra = AutoHydra.from_pruned_members([backbone(seed, num_hidden_layers=1) for seed in range(3)]).eval()
    if aggregate is None:
        hydra.calibrate(tokenized(), target={"coverage": 0.5}, alpha=0.2)
    else:
        hydra.config.aggregate = aggregate
    tokenizer = AutoTokenizer.from_pretrained(folder / "hydra")
    run = RUNNERS["torch"](export(hydra, tmp_path / "exported", "torch", processor=tokenizer) / FILES["torch"])
    batch = {name: each for name, each in tokenized(5)[0].items() if name != "labels"}
    found = run(batch)
    expected = hydra(**batch)
    assert torch.allclose(found["logits"], expected.logits, atol=1e-4)
    if aggregate is None:
        assert torch.allclose(found["interval"], expected.interval, atol=1e-4)
        assert torch.equal(found["abstain"], expected.abstain)


@pytest.mark.slow
def test_commands_calibrate_and_evaluate_it(folder, tmp_path, capsys):
    data = ["--data", str(folder / "data.jsonl")]
    assert main(["calibrate", str(folder / "hydra"), *data, "--risk", "3", "--output", str(tmp_path / "new")]) == 0
    assert "lies in its interval" in capsys.readouterr().out
    assert main(["evaluate", str(tmp_path / "new"), *data]) == 0
    assert "RMSE" in capsys.readouterr().out
    report = tmp_path / "new" / "evaluation" / "report.json"
    assert Report.from_json(report).models["new"]["data"]["interval_coverage"] > 0.5


def test_heads_are_ranked_by_squared_error():
    model = backbone(0)
    data = tokenized()

    def by_hand(numbers, targets):
        return -((numbers.squeeze(1).double() - targets.double()) ** 2).mean().item()

    found, expected = (extract_circuit(model, data, objective=objective, budget=3) for objective in ("acc", by_hand))
    assert found.ranking == expected.ranking and found.scores == pytest.approx(expected.scores)
    assert len(taylor_scores(model, data)) == model.config.num_hidden_layers * model.config.num_attention_heads
    with pytest.raises(ValueError, match="made for regression"):
        extract_circuit(model, data, data, objective="avg", budget=1)


@pytest.mark.slow
def test_commands_evaluate_and_calibrate_a_reward_model(folder, tmp_path, capsys):
    hydra = AutoHydra.from_pretrained(folder / "hydra")
    hydra.config.aggregate, hydra.decision, hydra.config.decision = "min", None, None
    hydra.save_pretrained(tmp_path / "reward")
    tokenizer = AutoTokenizer.from_pretrained(folder / "hydra")
    tokenizer.save_pretrained(tmp_path / "reward")
    pairs = [{"chosen": row["text"], "rejected": other["text"]} for row, other in itertools.pairwise(rows())]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    assert main(["evaluate", str(tmp_path / "reward"), "--data", str(tmp_path / "pairs.jsonl")]) == 0
    assert "Pair accuracy" in capsys.readouterr().out
    found = Report.from_json(tmp_path / "reward" / "evaluation" / "report.json").models["reward"]["data"]
    loaded = AutoHydra.from_pretrained(tmp_path / "reward")  # with its tokenizer's name
    for data in (pairs, pd.DataFrame(pairs)):
        measured = evaluate_uncertainty(loaded, data).models[type(loaded).__name__]["data"]
        assert measured == pytest.approx(found, abs=1e-5)
    marked = [{"text": row["text"], "label": place % 2} for place, row in enumerate(rows())]
    (tmp_path / "relevant.jsonl").write_text("".join(json.dumps(row) + "\n" for row in marked))
    words = ["--data", str(tmp_path / "relevant.jsonl"), "--coverage", "0.9", "--output", str(tmp_path / "new")]
    words += ["--verbose"]
    assert main(["calibrate", str(tmp_path / "reward"), *words]) == 0
    assert "count as nothing relevant" in capsys.readouterr().out
    answers = AutoHydra.from_pretrained(tmp_path / "new").predict([row["text"] for row in marked])
    refused = [answer for answer in answers if answer["abstain"]]
    assert refused and all("below the threshold" in answer["reason"] for answer in refused)
