"""A regression model through everything that a classifier goes through: pipelines, commands, server, page, export, cards."""

import json

import pytest
import torch
from fastapi.testclient import TestClient
from transformers import (
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    BertTokenizer,
    ViTConfig,
    ViTForImageClassification,
    ViTImageProcessorPil,
    pipeline,
)

from hydra_transformers import AutoHydra
from hydra_transformers.cli import main
from hydra_transformers.data import load_data
from hydra_transformers.export import FILES, RUNNERS, export
from hydra_transformers.hub import create_model_card
from hydra_transformers.pruning import extract_circuit, taylor_scores
from hydra_transformers.reports import Report, evaluate_uncertainty
from hydra_transformers.serving import HydraPredictor, create_app
from hydra_transformers.training import Recipe, finetune_members
from hydra_transformers.uncertainty import calibrate, predict_decisions
from tests.fresh_process import run_without_package
from tests.tiny_data import SIZES, WORDS, pictures


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
    hydra, tokenizer = AutoHydra.from_pretrained(folder / "hydra"), AutoTokenizer.from_pretrained(folder / "hydra")
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


def test_a_calibrated_single_output_without_a_problem_type_is_a_number():
    model = backbone(0)
    model.config.problem_type = None
    calibrated = calibrate(model, tokenized()).model.eval()
    tokenizer = BertTokenizer(vocab={word: index for index, word in enumerate(WORDS)})
    [answer] = predict_decisions(calibrated, TEXTS[:1], tokenizer)
    assert answer["score"] == pytest.approx(model(**tokenizer(TEXTS[0], return_tensors="pt")).logits.item(), abs=1e-5)
    assert answer["interval"][0][0] < answer["score"] < answer["interval"][0][1]


def test_commands_say_what_kind_of_model_it_is(folder, capsys):
    assert main(["info", str(folder / "hydra")]) == 0
    assert "regression with 1 output(s): LABEL_0" in capsys.readouterr().out


@pytest.mark.slow
def test_the_code_of_the_repository_gives_the_same_numbers_without_the_package(folder, tmp_path):
    code = f"""
import json
from transformers import AutoModelForSequenceClassification, AutoTokenizer
folder = {str(folder / "hydra")!r}
model = AutoModelForSequenceClassification.from_pretrained(folder, trust_remote_code=True)
inputs = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)({TEXTS[0]!r}, return_tensors="pt")
out = model(**inputs)
print(json.dumps([out.logits.tolist(), out.interval.tolist(), out.abstain.tolist()]))
"""
    found = run_without_package(code, folder=tmp_path)
    assert found.returncode == 0, found.stderr
    [expected] = outputs_of(folder, TEXTS[:1])
    logits, interval, abstain = json.loads(found.stdout)
    assert torch.allclose(torch.tensor(logits), expected.logits) and abstain == expected.abstain.tolist()
    assert torch.allclose(torch.tensor(interval), expected.interval)


@pytest.mark.slow
@pytest.mark.parametrize(("aggregate", "to"), [(None, "onnx"), ("mean-2std", "torch")])
def test_exports_carry_interval_and_abstention(folder, tmp_path, aggregate, to):
    hydra = AutoHydra.from_pruned_members([backbone(seed, num_hidden_layers=1) for seed in range(3)]).eval()
    if aggregate is None:
        hydra.calibrate(tokenized(), target={"coverage": 0.5}, alpha=0.2)
    else:
        hydra.config.aggregate = aggregate
    tokenizer = AutoTokenizer.from_pretrained(folder / "hydra")
    run = RUNNERS[to](export(hydra, tmp_path / "exported", to, processor=tokenizer) / FILES[to])
    batch = {name: each for name, each in tokenized(5)[0].items() if name != "labels"}
    found, expected = run(batch), hydra(**batch)
    assert torch.allclose(found["logits"], expected.logits, atol=1e-4)
    if aggregate is None:
        assert torch.allclose(found["interval"], expected.interval, atol=1e-4)
        assert torch.equal(found["abstain"], expected.abstain)


@pytest.mark.slow
def test_commands_calibrate_evaluate_and_describe_it(folder, tmp_path, capsys):
    data = ["--data", str(folder / "data.jsonl")]
    assert main(["calibrate", str(folder / "hydra"), *data, "--risk", "3", "--output", str(tmp_path / "new")]) == 0
    assert "lies in its interval" in capsys.readouterr().out
    assert main(["evaluate", str(tmp_path / "new"), *data]) == 0
    assert "RMSE" in capsys.readouterr().out
    report = tmp_path / "new" / "evaluation" / "report.json"
    assert Report.from_json(report).models["new"]["data"]["interval_coverage"] > 0.5
    assert main(["card", str(tmp_path / "new"), "--report", str(report), "--dataset", "stsb"]) == 0
    card = (tmp_path / "new" / "README.md").read_text()
    assert "RMSE" in card and "(regression)" in card and "lies in its interval" in card and "entropy" not in card
    (tmp_path / "texts.jsonl").write_text('{"text": "a film", "label": "good"}\n' * 40)
    texts = ["--data", str(tmp_path / "texts.jsonl"), "--output", str(tmp_path / "other")]
    assert main(["calibrate", str(folder / "hydra"), *texts]) == 2
    assert "has 'good' in the column 'label', and the model is made for regression" in capsys.readouterr().err


def test_cards_speak_of_numbers(folder):
    hydra = AutoHydra.from_pretrained(folder / "hydra")
    report = evaluate_uncertainty({"Hydra": hydra}, tokenized())
    card = str(create_model_card(hydra, report, dataset="stsb", repo_id="me/numbers"))
    assert "variance between members" in card and "| RMSE ↓ |" in card and "classes in" not in card


def test_heads_are_ranked_by_squared_error():
    model, data = backbone(0), tokenized()

    def by_hand(numbers, targets):
        return -((numbers.squeeze(1).double() - targets.double()) ** 2).mean().item()

    found, expected = (extract_circuit(model, data, objective=objective, budget=3) for objective in ("acc", by_hand))
    assert found.ranking == expected.ranking and found.scores == pytest.approx(expected.scores)
    assert len(taylor_scores(model, data)) == model.config.num_hidden_layers * model.config.num_attention_heads
    with pytest.raises(ValueError, match="made for regression"):
        extract_circuit(model, data, data, objective="avg", budget=1)


@pytest.mark.parametrize("value", [None, float("nan"), "3", [1.0, 2.0]])
def test_labels_that_are_no_numbers_are_refused_with_a_sentence(value):
    tokenizer = BertTokenizer(vocab={word: index for index, word in enumerate(WORDS)})
    data = [{"text": "a film", "label": 0.5}, {"text": "bad", "label": value}]
    with pytest.raises(ValueError, match=r"row [01] of .* give every row a number"):
        load_data(data, backbone(0).config, processor=tokenizer)


@pytest.mark.slow
def test_the_command_fine_tunes_for_numbers_that_are_not_whole(folder, tmp_path, capsys):
    config = BertConfig(vocab_size=len(WORDS), max_position_embeddings=16, **SIZES)
    BertForSequenceClassification(config).save_pretrained(tmp_path / "bert")
    AutoTokenizer.from_pretrained(folder / "hydra").save_pretrained(tmp_path / "bert")
    data = ["--data", str(folder / "data.jsonl"), "--max-steps", "2", "--members", "2"]
    assert main(["finetune", str(tmp_path / "bert"), *data, "--output", str(tmp_path / "members")]) == 0
    assert "new classifiers for numbers, label (regression)" in capsys.readouterr().out
    assert main(["fuse", str(tmp_path / "members"), "--aggregate", "min", "--output", str(tmp_path / "fused")]) == 0
    fused = AutoHydra.from_pretrained(tmp_path / "fused")
    assert fused.config.aggregate == "min" and fused.config.problem_type == "regression"
    assert fused.config.id2label == {0: "label"}


@pytest.mark.slow
def test_commands_judge_and_calibrate_a_reward_model(folder, tmp_path, capsys):
    hydra = AutoHydra.from_pretrained(folder / "hydra")
    hydra.config.aggregate, hydra.decision, hydra.config.decision = "min", None, None
    hydra.save_pretrained(tmp_path / "reward")
    tokenizer = AutoTokenizer.from_pretrained(folder / "hydra")
    tokenizer.save_pretrained(tmp_path / "reward")
    pairs = [
        {"chosen": row["text"], "rejected": other["text"]} for row, other in zip(rows(), rows()[1:], strict=False)
    ]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    assert main(["evaluate", str(tmp_path / "reward"), "--data", str(tmp_path / "pairs.jsonl")]) == 0
    assert "Pair accuracy" in capsys.readouterr().out
    found = Report.from_json(tmp_path / "reward" / "evaluation" / "report.json").models["reward"]["data"]
    loaded = AutoHydra.from_pretrained(tmp_path / "reward")  # with its tokenizer's name
    assert evaluate_uncertainty(loaded, pairs).models[type(loaded).__name__]["data"] == pytest.approx(found, abs=1e-5)
    marked = [{"text": row["text"], "label": place % 2} for place, row in enumerate(rows())]
    (tmp_path / "relevant.jsonl").write_text("".join(json.dumps(row) + "\n" for row in marked))
    words = ["--data", str(tmp_path / "relevant.jsonl"), "--coverage", "0.9", "--output", str(tmp_path / "new")]
    assert main(["calibrate", str(tmp_path / "reward"), *words]) == 0
    assert "count as nothing relevant" in capsys.readouterr().out
    answers = AutoHydra.from_pretrained(tmp_path / "new").predict([row["text"] for row in marked])
    refused = [answer for answer in answers if answer["abstain"]]
    assert refused and all("below the threshold" in answer["reason"] for answer in refused)


@pytest.mark.slow
def test_images_have_numbers_too():
    torch.manual_seed(0)
    sizes = {"image_size": 8, "patch_size": 4, "num_labels": 2, "problem_type": "regression", **SIZES}
    members = [ViTForImageClassification(ViTConfig(**sizes)) for _ in range(2)]
    hydra = AutoHydra.from_pruned_members(members, shared=()).eval()
    batch = {"pixel_values": torch.randn(60, 3, 8, 8), "labels": torch.randn(60, 2)}
    hydra.calibrate([batch], alpha=0.2)
    processor = ViTImageProcessorPil(size={"height": 8, "width": 8})
    [answer] = hydra.predict(pictures([1], seed=0), processor)
    assert len(answer["scores"]) == 2 and len(answer["interval"]) == 2
    for each, (low, high) in zip(answer["scores"], answer["interval"], strict=True):
        assert low < each["score"] < high


@pytest.mark.slow
def test_members_are_fine_tuned_by_their_own_loss(tmp_path):
    [batch] = tokenized()
    data = [{name: each[row] for name, each in batch.items()} for row in range(40)]
    recipe = Recipe("short", {"learning_rate": 1e-2, "num_train_epochs": 3, "label_smoothing_factor": 0.1})
    members = [backbone(seed) for seed in range(2)]
    before = [member(**batch).loss.item() for member in members]
    trained = finetune_members(members, recipe, data, data, tmp_path / "members", progress=False, report_to="none")
    assert all(member(**batch).loss.item() < loss for member, loss in zip(trained, before, strict=True))
