"""The token classification pipeline with the uncertainty of each entity."""

from typing import Any

import torch
from torch import Tensor
from transformers.pipelines import Pipeline, TokenClassificationPipeline

from .ensembling import entropy_split
from .entities import entities_in, have_prefixes, worst_and_mean
from .inputs import has_content, most_tokens
from .pipeline_hydra import decision_settings
from .task import PARTS_OF_UNCERTAINTY, classifies_tokens


KEPT_OUTPUTS = ("logits", "member_logits", "detector_score", "abstain")


class HydraTokenClassificationPipeline(TokenClassificationPipeline):
    """Gives for each text, or list of words

    entities: a dict for each
        entity_group: its kind, "PER"; of tags without "B-" and "I-" (POS) every word is an entity, its tag the kind
        score: the mean over its words of the probability of their tags
        word, start, end: its text, and where that begins and ends; of a list of words in these joined by spaces
        uncertainty, aleatoric, epistemic: entropies in nats, of its least sure word; mean_uncertainty: the mean over its words
        abstain: whether one of its words is above the threshold; None where the model was not calibrated for that
        detector_score: of its least sure word, by which it abstains
    uncertainty, aleatoric, epistemic: of the least sure word of the text, whether or not it is part of an entity
    abstain: whether it abstains on any entity. True for texts that hold nothing and predictions that are not numbers
    detector, threshold: by what a calibrated model abstains: above the threshold; None otherwise
    reason: why it abstains, in a sentence; None where it does not
    truncated: whether the model read only the beginning

    A word's prediction is that of its first token, as in training. For other ways to put tokens together, ask the plain
    "token-classification" pipeline with its `aggregation_strategy`.
    """

    def check_model_type(self, supported_models: Any) -> None:
        # Also one that came with its repository, or that a wrapper holds.
        if not classifies_tokens(self.model):
            raise ValueError(f"model is a {type(self.model).__name__}: this pipeline takes token classifiers")

    def _sanitize_parameters(self, top_k: int | None = None, **parameters):
        # Other pipelines have top_k; an entity has one kind.
        if parameters:
            raise ValueError(
                f"{next(iter(parameters))} is not a parameter of this pipeline, which puts words together by their first tokens: "
                'leave it out, or ask pipeline("token-classification")'
            )
        return {}, {}, {}

    def __call__(self, inputs: Any, **parameters):
        return Pipeline.__call__(self, inputs, **parameters)

    def preprocess(self, text: str | list[str], **parameters):
        is_split = not isinstance(text, str)
        if is_split and not (isinstance(text, (list, tuple)) and all(isinstance(word, str) for word in text)):
            raise TypeError(f"an input is a {type(text).__name__}: pass a text, or a list of words")
        if not self.tokenizer.is_fast:
            raise ValueError(
                f"{type(self.tokenizer).__name__} does not say which word a token belongs to: pass the fast tokenizer of the model"
            )
        whole = " ".join(text) if is_split else text
        is_empty = not has_content(whole)
        longest = min(self.tokenizer.model_max_length, most_tokens(self.model))
        options = {"is_split_into_words": is_split, "return_offsets_mapping": True, "verbose": False}
        tokens = self.tokenizer(list(text) if is_split else text, **options)
        is_cut = len(tokens["input_ids"]) > longest
        if is_cut:
            tokens = self.tokenizer(list(text) if is_split else text, truncation=True, max_length=longest, **options)
        places = words_of(tokens.word_ids(), tokens["offset_mapping"], text if is_split else None)
        inputs = {name: torch.tensor([tokens[name]]) for name in self.tokenizer.model_input_names if name in tokens}
        if not tokens["input_ids"]:  # of a tokenizer without special tokens: the model fails on it
            token = self.tokenizer.pad_token_id or self.tokenizer.eos_token_id or 0
            inputs = {name: torch.full((1, 1), {"input_ids": token}.get(name, 1)) for name in inputs}
        notes = {"text": whole, "places": [] if is_empty else places, "empty": is_empty, "truncated": is_cut}
        yield inputs | {"notes": notes, "is_last": True}

    def _forward(self, model_inputs: dict) -> dict[str, Any]:
        notes, is_last = model_inputs.pop("notes"), model_inputs.pop("is_last")
        outputs = self.model(**model_inputs)
        mask = model_inputs.get("attention_mask")
        mask = torch.ones_like(model_inputs["input_ids"]) if mask is None else mask
        kept = {name: outputs[name] for name in KEPT_OUTPUTS if outputs.get(name) is not None}
        return kept | {"mask": mask, "notes": notes, "is_last": is_last}

    def postprocess(self, all_outputs: list[dict], **parameters) -> dict[str, Any]:
        [outputs] = all_outputs
        notes, tokens, names = outputs["notes"], outputs["mask"][0].bool(), self.model.config.id2label
        firsts = torch.tensor([place[0] for place in notes["places"]], dtype=torch.long)
        words = {name: _of_words(name, outputs[name][0], tokens, firsts) for name in KEPT_OUTPUTS if name in outputs}
        probabilities = words["logits"].double().softmax(dim=-1)
        confidence, chosen = probabilities.max(dim=-1)
        members = words["member_logits"] if "member_logits" in words else words["logits"].unsqueeze(0)
        parts = entropy_split(members.double().log_softmax(dim=-1).unsqueeze(0))
        parts = {name: part[0].tolist() for name, part in zip(PARTS_OF_UNCERTAINTY, parts, strict=True)}
        settings = decision_settings(self.model, words)
        detector = None if settings is None else settings.detector.name
        threshold = None if settings is None else settings["threshold"]  # as JSON has it
        abstain, reason = None if threshold is None else False, None
        if notes["empty"] or probabilities.isnan().any():
            abstain, reason = True, "The text is empty." if notes["empty"] else "The answer is not a number."
        entities = []
        for entity in entities_in([names[index] for index in chosen.tolist()], have_prefixes(names.values())):
            place = slice(entity.first, entity.last + 1)
            start, end = notes["places"][entity.first][1], notes["places"][entity.last][2]
            described = {"entity_group": entity.kind, "score": confidence[place].mean().item()}
            described |= {"word": notes["text"][start:end], "start": start, "end": end}
            described |= {name: worst_and_mean(entity, values)[0] for name, values in parts.items()}
            described["mean_uncertainty"] = worst_and_mean(entity, parts["uncertainty"])[1]
            described["abstain"] = abstain if abstain is not False else bool(words["abstain"][place].any())
            has_scores = "detector_score" in words
            described["detector_score"] = words["detector_score"][place].max().item() if has_scores else None
            entities.append(described)
        unsure = next((entity for entity in entities if entity["abstain"]), None)
        if reason is None and unsure is not None:
            abstain = True
            reason = f"{detector} of {unsure['word']!r} is {unsure['detector_score']:.3g}, above the threshold "
            reason += f"{float(threshold):.3g}."
        worst = {name: max(values, default=0.0) for name, values in parts.items()}
        decided = {"abstain": abstain, "detector": detector, "threshold": threshold, "reason": reason}
        return {"entities": entities, **worst, **decided, "truncated": notes["truncated"]}


def words_of(
    word_ids: list[int | None], offsets: list[tuple[int, int]], words: list[str] | None
) -> list[tuple[int, int, int]]:
    """Of each word its first token, and where its text begins and ends.

    word_ids, offsets: of the tokens, as a fast tokenizer gives them
    words: the words of a text that came as words, whose offsets count within each; they are joined by spaces
    """
    starts, total = [], 0
    for word in words or ():
        starts.append(total)
        total += len(word) + 1
    places: dict[int, list[int]] = {}
    for token, word in enumerate(word_ids):
        if word is None:
            continue
        shift = starts[word] if words else 0
        start, end = (shift + place for place in offsets[token])
        if word not in places:
            places[word] = [token, start, end]
        places[word][2] = max(places[word][2], end)
    return [tuple(place) for place in places.values()]


def _of_words(name: str, values: Tensor, tokens: Tensor, firsts: Tensor) -> Tensor:
    """The values of one row at the first tokens of its words; tokens: whether each token is one, and no padding."""
    dim = 1 if name == "member_logits" else 0
    return values.index_select(dim, tokens.nonzero().flatten()).index_select(dim, firsts)
