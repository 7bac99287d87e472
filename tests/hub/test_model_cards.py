"""model_cards/ are of a model that was trained: every figure is in experiments/results."""

from huggingface_hub import ModelCard

from hydra_transformers.hub.card import TO_FILL_IN
from scripts import build_model_cards as script
from tests.pages import ROOT


def test_the_cards_in_the_repository_are_up_to_date():
    """Which also compares the sizes of the model with those that were judged."""
    wanted = script.files()
    assert set(wanted) == set((ROOT / "model_cards").glob("*.md"))
    for path, content in wanted.items():
        assert path.read_text(encoding="utf-8") == content, f"{path.name}: run python scripts/build_model_cards.py"


def test_the_card_leaves_nothing_open_and_invents_nothing():
    card, judged = ModelCard.load(ROOT / "model_cards" / f"{script.NAME}.md"), script.measured()[script.HYDRA]
    assert TO_FILL_IN not in card.text and "Not trained" not in card.text
    found = {result.metric_name: result.metric_value for result in card.data.eval_results}
    assert found["Accuracy"] == judged["test"]["accuracy"]
    assert f"| This model | {judged['parameters']:,} | {judged['work'] / 1e9:.2f} G |" in card.text
