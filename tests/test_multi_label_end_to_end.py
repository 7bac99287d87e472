"""A multi-label model from end to end: commands, reports, baselines."""

import json

import pytest
import torch
from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification, BertTokenizer

from hydra_transformers import AutoHydra, load_data
from hydra_transformers.baselines import DeepEnsemble
from hydra_transformers.hub import create_model_card
from hydra_transformers.reports import Report, compare_fusions, evaluate_uncertainty
from tests.command_line import run
from tests.tiny_data import SIZES, WORDS, names_of


FEELINGS = ["anger", "joy", "surprise"]


def rows(count: int = 60) -> list[dict]:
    """Texts whose words say their labels: bad is anger, joy is joy, good is surprise."""
    generator = torch.Generator().manual_seed(0)
    words = [[WORDS[place] for place in row] for row in torch.randint(5, len(WORDS), (count, 3), generator=generator)]
    named = {"bad": "anger", "joy": "joy", "good": "surprise"}
    return [{"text": " ".join(row), "labels": sorted({named[word] for word in row if word in named})} for row in words]


@pytest.fixture(scope="module")
def members():
    found = []
    for seed in range(2):
        torch.manual_seed(seed)
        sizes = {"vocab_size": len(WORDS), "max_position_embeddings": 16, "initializer_range": 0.2, **SIZES}
        config = BertConfig(**sizes, **names_of(FEELINGS), problem_type="multi_label_classification")
        found.append(BertForSequenceClassification(config).eval())
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory, members):
    """The fused members with a tokenizer, and the data as a file."""
    path = tmp_path_factory.mktemp("labels")
    AutoHydra.from_pruned_members(members).save_pretrained(path / "hydra")
    BertTokenizer(vocab={word: index for index, word in enumerate(WORDS)}).save_pretrained(path / "hydra")
    (path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows()))
    return path


@pytest.fixture(scope="module")
def data(folder, members):
    found = load_data(folder / "data.jsonl", members[0], processor=AutoTokenizer.from_pretrained(folder / "hydra"))
    return [found[place] for place in range(len(found))]


@pytest.mark.slow
def test_commands_go_from_a_file_of_lists_to_predictions(folder, tmp_path, capsys):
    data = ["--data", folder / "data.jsonl"]
    run("calibrate", folder / "hydra", *data, "--coverage", 0.5, "--alpha", 0.3, "--output", tmp_path / "new")
    assert "of a row's labels are missing from its set" in capsys.readouterr().out
    run("evaluate", tmp_path / "new", *data)
    assert "mAP" in capsys.readouterr().out
    report = tmp_path / "new" / "evaluation" / "report.json"
    assert "set_missed" in Report.from_json(report).models["new"]["data"]
    run("predict", tmp_path / "new", "a bad film", "--json")
    answer = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(answer["labels"]) <= set(answer["prediction_set"])
    assert {each["label"] for each in answer["scores"]} == set(FEELINGS)


@pytest.mark.slow
def test_members_are_compared_before_they_are_fused(members, data):
    report = compare_fusions(members, data).report
    apart = evaluate_uncertainty({"apart": DeepEnsemble(members).eval()}, data).models["apart"]["data"]
    assert report.models["ensemble"]["data"] == pytest.approx(apart, abs=1e-4)


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
