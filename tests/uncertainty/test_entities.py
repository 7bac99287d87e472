"""Entities: how they are read from tags, answered by pipelines, calibrated and judged."""

import pytest
import torch
from transformers import pipeline

from hydra_transformers.models.entities import entities_in, worst_and_mean
from tests import tiny_tags


# As seqeval reads them, with its default mode: https://github.com/chakki-works/seqeval
@pytest.mark.parametrize(
    "tags, expected",
    [
        ("B-PER I-PER O B-LOC", [("PER", 0, 1), ("LOC", 3, 3)]),
        ("B-PER B-PER", [("PER", 0, 0), ("PER", 1, 1)]),
        ("I-PER I-PER I-LOC", [("PER", 0, 1), ("LOC", 2, 2)]),
        ("B-PER I-LOC", [("PER", 0, 0), ("LOC", 1, 1)]),
        ("S-PER I-PER E-PER I-PER", [("PER", 0, 0), ("PER", 1, 2), ("PER", 3, 3)]),
        ("O O", []),
        ("B-PER O I-PER", [("PER", 0, 0), ("PER", 2, 2)]),
    ],
)
def test_entities_are_read_from_tags(tags, expected):
    assert entities_in(tags.split(), by_prefix=True) == expected


def test_without_prefixes_every_word_is_an_entity():
    assert entities_in(["NOUN", "NOUN", "O"], by_prefix=False) == [("NOUN", 0, 0), ("NOUN", 1, 1)]
    assert entities_in(["B-PER", None, "I-PER"], by_prefix=True) == [("PER", 0, 0), ("PER", 2, 2)]


def test_an_entity_is_as_unsure_as_its_worst_word():
    [entity] = entities_in(["B-PER", "I-PER"], by_prefix=True)
    assert worst_and_mean(entity, [0.25, 0.75, 0.9]) == (0.75, 0.5)
    worst, _ = worst_and_mean(entity, [float("nan"), 0.75])
    assert worst != worst


TEXT = "annabelle smith went to paris ."


@pytest.mark.parametrize("strategy", ["none", "simple", "first", "average", "max"])
def test_transformers_own_pipeline_answers_for_the_mean_of_the_members(strategy):
    """With probabilities of the plain models, averaged by hand."""
    options = {"tokenizer": tiny_tags.tokenizer(), "aggregation_strategy": strategy, "ignore_labels": []}
    found = pipeline("token-classification", model=tiny_tags.fused(), **options)(TEXT)

    plain = tiny_tags.backbone()
    forwards = [tiny_tags.backbone(seed) for seed in range(3)]

    class Mean(type(plain)):
        def forward(self, **inputs):
            answers = [model(**inputs).logits.softmax(-1) for model in forwards]
            return {"logits": torch.stack(answers).mean(0).log()}

    plain.__class__ = Mean
    expected = pipeline("token-classification", model=plain, **options)(TEXT)
    assert len(found) == len(expected) > 0
    for mine, theirs in zip(found, expected, strict=True):
        assert mine["score"] == pytest.approx(theirs["score"], abs=1e-5)
        assert {**mine, "score": 0} == {**theirs, "score": 0}


def test_our_pipeline_adds_uncertainty_to_each_entity():
    hydra, reader = tiny_tags.fused(), tiny_tags.tokenizer()
    texts = [TEXT, "paris", TEXT.split(), "", "smith " * 30]
    answers = pipeline("hydra-token-classification", model=hydra, tokenizer=reader)(texts, batch_size=5)
    alone = hydra.predict(texts, reader)
    for batched, single in zip(answers, alone, strict=True):
        assert batched.keys() == single.keys()
        for mine, theirs in zip(batched["entities"], single["entities"], strict=True):
            assert {k: v for k, v in mine.items() if isinstance(v, (str, int))} == {
                k: v for k, v in theirs.items() if isinstance(v, (str, int))
            }
            assert mine["score"] == pytest.approx(theirs["score"], abs=1e-5)
    first, _, words, empty, long = alone
    assert first["entities"] == words["entities"], "as a text and as its words"
    assert empty["abstain"] is True and empty["entities"] == [] and empty["reason"] == "The text is empty."
    assert long["truncated"] and not first["truncated"]
    assert first["abstain"] is None, "it is not calibrated"
    for entity in first["entities"]:
        assert TEXT[entity["start"] : entity["end"]] == entity["word"]
        assert entity["word"] in TEXT and entity["entity_group"] in ("PER", "LOC")
        assert 0 <= entity["mean_uncertainty"] <= entity["uncertainty"] <= first["uncertainty"]

    # by hand: the first token of each word, the mean of the members' probabilities
    encoded = reader(TEXT, return_tensors="pt")
    with torch.no_grad():
        mean = hydra(**encoded).member_logits.softmax(-1).mean(1)[0]
    firsts = [1, 4, 5, 6, 7, 8]  # "annabelle" is three tokens
    tags = [tiny_tags.TAGS[place] for place in mean[firsts].argmax(-1).tolist()]
    assert [(e["entity_group"], e["word"]) for e in first["entities"]] == [
        (kind, " ".join(TEXT.split()[a : b + 1])) for kind, a, b in entities_in(tags, by_prefix=True)
    ]
    entropy = torch.special.entr(mean[firsts].double()).sum(-1)
    assert first["uncertainty"] == pytest.approx(entropy.max().item(), abs=1e-5)


def test_our_pipeline_refuses_what_it_does_not_know():
    hydra, reader = tiny_tags.fused(), tiny_tags.tokenizer()
    with pytest.raises(ValueError, match="aggregation_strategy is no parameter of this pipeline"):
        hydra.predict([TEXT], reader, aggregation_strategy="simple")
    with pytest.raises(TypeError, match="an input is a int: pass a text, or a list of words"):
        hydra.predict([3], reader)
