"""model_cards/ are of a model that was trained: every figure is in experiments/results."""

import pytest
from huggingface_hub import ModelCard

from experiments import cards
from hydra_transformers.hub.card import TO_FILL_IN
from hydra_transformers.hub.member_heads import PRUNED
from hydra_transformers.reports import Report
from scripts import build_model_cards as script
from tests.pages import ROOT


def test_the_cards_in_the_repository_are_up_to_date():
    """Which also compares the sizes of the model with those that were judged."""
    wanted = script.files()
    assert set(wanted) == set((ROOT / "model_cards").glob("*.md"))
    for path, content in wanted.items():
        assert path.read_text(encoding="utf-8") == content, f"{path.name}: run python scripts/build_model_cards.py"


def test_the_card_leaves_nothing_open_and_invents_nothing():
    card = ModelCard.load(ROOT / "model_cards" / f"{script.NAME}.md")
    judged = script.measured()[script.HYDRA]
    assert TO_FILL_IN not in card.text and "Not trained" not in card.text
    found = {result.metric_name: result.metric_value for result in card.data.eval_results}
    assert found["Accuracy"] == judged["test"]["accuracy"]
    assert f"| This model | {judged['parameters']:,} | {judged['work'] / 1e9:.2f} G |" in card.text


@pytest.mark.parametrize(
    ("name", "task", "base_model", "abstains"),
    [
        ("hydra-vit-digits", "image-classification", None, True),
        ("hydra-bert-intents", "text-classification", "sentence-transformers/all-MiniLM-L6-v2", True),
        ("hydra-clip-digits", "zero-shot-image-classification", None, False),
    ],
)
def test_a_pruned_models_card_has_its_metrics_its_heads_and_its_decision(name, task, base_model, abstains):
    card = ModelCard.load(ROOT / "model_cards" / f"{name}.md")
    assert (card.data.pipeline_tag, card.data.license, card.data.base_model) == (task, "apache-2.0", base_model)
    assert "head-pruning" in card.data.tags
    report = Report.from_json(cards.CARDS / name / "report.json")
    found = {(result.metric_type, result.metric_name): result.metric_value for result in card.data.eval_results}
    average = report.average(cards.HYDRA)
    for metric, title in (("auroc", "AUROC"), ("fpr95", "FPR95")):
        assert found[metric, f"{title} (OOD average)"] == pytest.approx(average[metric], abs=1e-6)
    assert found["accuracy", "Accuracy"] == pytest.approx(report.models[cards.HYDRA]["data"]["accuracy"], abs=1e-6)
    assert TO_FILL_IN not in card.text and "me/" not in card.text and f'"org/{name}"' in card.text
    head_map = card.text.split("### Kept heads")[1].split("```")[1]
    assert head_map.count(PRUNED) > 9 and "kept of" in head_map
    assert ("### Decision" in card.text) == abstains
    assert "## Intended use" in card.text and "`AutoModel`" in card.text


def test_every_card_names_its_data_its_license_and_what_it_is_compared_with():
    for name in (script.NAME, *script.PRUNED):
        card = ModelCard.load(ROOT / "model_cards" / f"{name}.md")
        assert card.data.datasets and card.data.license == "apache-2.0"
        assert "| One model |" in card.text
    dinov2 = ModelCard.load(ROOT / "model_cards" / f"{script.NAME}.md")
    assert dinov2.data.base_model == "facebook/dinov2-small"


@pytest.mark.slow
def test_what_a_card_is_made_of_can_be_made_again(tmp_path, capsys):
    """The quickest of them; its numbers depend a little on the machine."""
    assert cards.main(["hydra-clip-digits", "--output", str(tmp_path)]) == 0
    made = tmp_path / "hydra-clip-digits"
    kept = cards.CARDS / "hydra-clip-digits"
    assert {path.name for path in made.rglob("*.json")} == {path.name for path in kept.rglob("*.json")}
    reports = [Report.from_json(folder / "report.json") for folder in (made, kept)]
    accuracies = [report.models[cards.HYDRA]["data"]["accuracy"] for report in reports]
    assert accuracies[0] == pytest.approx(accuracies[1], abs=0.1)
