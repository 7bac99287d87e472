"""The page's cards for numbers, rewards, several labels and tokens."""

import pytest
import torch
from transformers import AutoTokenizer, BertForTokenClassification

from hydra_transformers import load_data
from hydra_transformers.serving import HydraPredictor
from hydra_transformers.serving.page_html import answer_html, heading_html
from tests.serving.tiny import text_hydra
from tests.tiny_data import WORDS, names_of, save_bert


TAGS = ["O", "B-FILM", "I-FILM"]
TEXTS = ["a film of joy", "a bad film", "good", "a bad bad film of joy"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return AutoTokenizer.from_pretrained(save_bert(tmp_path_factory.mktemp("bert")))


def numbers_of(hydra):
    torch.manual_seed(1)
    tokens = torch.randint(5, len(WORDS), (60, 6))
    with torch.no_grad():
        return tokens, hydra(input_ids=tokens).logits


def card(hydra, tokenizer, text):
    predictor = HydraPredictor(hydra, tokenizer, name="mine")
    return answer_html(predictor.answer_with_members(text)), predictor


def test_a_number_stands_with_its_interval_and_its_members_and_a_low_reward_is_nothing_relevant(tokenizer):
    hydra = text_hydra(num_labels=1, problem_type="regression")
    tokens, numbers = numbers_of(hydra)
    hydra.calibrate([{"input_ids": tokens, "labels": numbers[:, 0]}], alpha=0.2, target={"coverage": 0.5})
    said = {}
    for text in TEXTS:
        [answer] = hydra.predict([text], tokenizer)
        [(low, high)] = answer["interval"]
        shown, predictor = card(hydra, tokenizer, text)
        assert f"{answer['score']:.4g}" in shown and f"between {low:.4g} and {high:.4g}" in shown
        assert ("I don't know" in shown) == answer["abstain"] and shown.count('class="hydra-member"') == 3
        assert "aleatoric" not in shown and f">{answer['epistemic']:.3g}</output>" in shown
        said[answer["abstain"]] = shown
    assert set(said) == {True, False}
    assert "model · regression</p>" in heading_html(predictor)
    hydra.config.decision, hydra.decision = None, None
    assert "without an interval · not calibrated" in card(hydra, tokenizer, TEXTS[0])[0]
    hydra.config.aggregate = "mean-1std"  # a reward
    hydra.calibrate(
        [{"input_ids": tokens, "labels": (numbers[:, 0] > numbers.median()).float()}], target={"coverage": 0.5}
    )
    for text in TEXTS:
        [answer] = hydra.predict([text], tokenizer)
        shown, predictor = card(hydra, tokenizer, text)
        assert ("Nothing relevant" in shown) == answer["abstain"] and "model · reward</p>" in heading_html(predictor)


def test_labels_stand_with_their_thresholds(tokenizer):
    names = ["joy", "anger", "<b>", "calm", "fear", "love", "hate"]
    hydra = text_hydra(problem_type="multi_label_classification", **names_of(names))
    tokens, logits = numbers_of(hydra)
    flipped = torch.rand(logits.shape, generator=torch.Generator().manual_seed(2)) < 0.1
    labels = ((logits > logits.mean(dim=0)) ^ flipped).float()
    hydra.calibrate([{"input_ids": tokens, "labels": labels}], alpha=0.3, target={"coverage": 0.5})
    for text in TEXTS:
        [answer] = hydra.predict([text], tokenizer, top_k=None)
        shown, predictor = card(hydra, tokenizer, text)
        assert shown.count('<s style="left:') == len(names) and "<b><" not in shown
        assert ", ".join(answer["labels"]).replace("<b>", "&lt;b&gt;") in shown and "t may have" in shown
        found = predictor.answer_with_members(text)
        lowest = torch.tensor(hydra.config.decision["log_odds"]).sigmoid().tolist()
        order = [names.index(each["label"]) for each in found["scores"]]
        assert found["thresholds"] == pytest.approx([lowest[place] for place in order], abs=1e-6)
        mean = torch.tensor(found["members"]).mean(dim=0)
        assert mean.tolist() == pytest.approx([each["score"] for each in found["scores"]], abs=1e-5)
    assert "multi label classification, 7 labels" in heading_html(predictor)


def test_entities_are_marked_in_the_text_and_doubtful_ones_apart(tokenizer):
    tagger = text_hydra(BertForTokenClassification, **names_of(TAGS))
    rows = [{"tokens": text.split(), "tags": []} for text in TEXTS * 15]
    for row in rows:
        [answer] = tagger.predict([row["tokens"]], tokenizer)
        spans = {(each["start"], each["end"]) for each in answer["entities"]}
        place, row["tags"] = 0, []
        for word in row["tokens"]:
            begins = any(start == place for start, _ in spans)
            inside = any(start < place < end for start, end in spans)
            row["tags"].append("B-FILM" if begins else "I-FILM" if inside else "O")
            place += len(word) + 1
    tagger.calibrate(load_data(rows, tagger, processor=tokenizer), target={"coverage": 0.5})
    marked = [0, 0]
    for text in TEXTS:
        text = f"{text} <img>"
        [answer] = tagger.predict([text], tokenizer)
        shown, predictor = card(tagger, tokenizer, text)
        doubted = sum(each["abstain"] for each in answer["entities"])
        assert shown.count("hydra-entity") == len(answer["entities"]) and shown.count("hydra-doubted") == doubted
        assert "<img>" not in shown and "&lt;" in shown and "FILM" in shown
        marked = [marked[0] + doubted, marked[1] + len(answer["entities"]) - doubted]
    assert all(marked) and "token classification, 3 labels" in heading_html(predictor)


@pytest.mark.slow
def test_the_page_asks_for_pairs_where_a_model_scores(tokenizer):
    from hydra_transformers.serving.page import _respond, build_page

    scorer = HydraPredictor(text_hydra(num_labels=1, problem_type="regression"), tokenizer, name="scorer")
    tagger = HydraPredictor(text_hydra(BertForTokenClassification, **names_of(TAGS)), tokenizer, name="tagger")
    assert "Second text" in str(build_page(scorer, {}).get_config_file())
    assert "Second text" not in str(build_page(tagger, {}).get_config_file())
    pair = scorer.answer_with_members({"text": "good", "text_pair": "a bad film"})
    assert f"{pair['score']:.4g}" in _respond(scorer, "good", "a bad film")
    assert f"{pair['score']:.4g}" not in _respond(scorer, "good", "")
