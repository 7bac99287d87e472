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
        entity_group: its kind, "PER"; of tags without "B-" and "I-" (POS) every word is an entity,
            its tag the kind
        score: the mean over its words of the probability of their tags
        word, start, end: its text, and where that begins and ends; of a list of words in these
            joined by spaces
        uncertainty, aleatoric, epistemic: entropies in nats, of its least sure word;
            mean_uncertainty: the mean over its words
        abstain: whether one of its words is above the threshold; None where the model was not
            calibrated for that
        detector_score: of its least sure word, by which it abstains
    uncertainty, aleatoric, epistemic: of the least sure word of the text, whether or not it is part
        of an entity
    abstain: whether it abstains on any entity. True for texts that hold nothing and predictions
        that are not numbers
    detector, threshold: by what a calibrated model abstains: above the threshold; None otherwise
    reason: why it abstains, in a sentence; None where it does not
    truncated: whether the model read only the beginning

    A word's prediction is that of its first token, as in training. For other ways to put tokens
    together, ask the plain "token-classification" pipeline with its `aggregation_strategy`.
    """

    def check_model_type(self, supported_models: Any) -> None:
        # Also one that came with its repository, or that a wrapper holds.
        if not classifies_tokens(self.model):
            raise ValueError(f"model is a {type(self.model).__name__}: this pipeline takes token classifiers")

    def _sanitize_parameters(self, top_k: int | None = None, **parameters):
        # Other pipelines have top_k; an entity has one kind.
        if parameters:
            raise ValueError(
                f"{next(iter(parameters))} is not a parameter of this pipeline, which puts words together by their "
                'first tokens: leave it out, or ask pipeline("token-classification")'
            )
        return {}, {}, {}

    def __call__(self, inputs: Any, **parameters):
        return Pipeline.__call__(self, inputs, **parameters)

    def preprocess(self, text: str | list[str], **parameters):
        # A text, or its words.
        is_split = not isinstance(text, str)
        if is_split and not (isinstance(text, (list, tuple)) and all(isinstance(word, str) for word in text)):
            raise TypeError(f"an input is a {type(text).__name__}: pass a text, or a list of words")
        if not self.tokenizer.is_fast:
            raise ValueError(
                f"{type(self.tokenizer).__name__} does not say which word a token belongs to: pass the fast tokenizer "
                "of the model"
            )
        words = None
        whole = text
        if is_split:
            words = text
            text = list(text)
            whole = " ".join(text)

        # Its tokens, and the words that they belong to.
        longest = min(self.tokenizer.model_max_length, most_tokens(self.model))
        options = {"is_split_into_words": is_split, "return_offsets_mapping": True, "verbose": False}
        tokens = self.tokenizer(text, **options)
        is_cut = len(tokens["input_ids"]) > longest
        if is_cut:
            tokens = self.tokenizer(text, truncation=True, max_length=longest, **options)
        is_empty = not has_content(whole)
        places = []
        if not is_empty:
            places = words_of(tokens.word_ids(), tokens["offset_mapping"], words)

        # What the model reads. A tokenizer without special tokens may give none: the model fails on
        # that.
        inputs = {name: torch.tensor([tokens[name]]) for name in self.tokenizer.model_input_names if name in tokens}
        if not tokens["input_ids"]:
            token = self.tokenizer.pad_token_id or self.tokenizer.eos_token_id or 0
            inputs = {name: torch.ones(1, 1, dtype=torch.long) for name in inputs}
            inputs["input_ids"] = torch.full((1, 1), token)
        notes = {"text": whole, "places": places, "empty": is_empty, "truncated": is_cut}
        yield inputs | {"notes": notes, "is_last": True}

    def _forward(self, model_inputs: dict) -> dict[str, Any]:
        notes = model_inputs.pop("notes")
        is_last = model_inputs.pop("is_last")
        outputs = self.model(**model_inputs)
        mask = model_inputs.get("attention_mask")
        if mask is None:
            mask = torch.ones_like(model_inputs["input_ids"])
        kept = {name: outputs[name] for name in KEPT_OUTPUTS if outputs.get(name) is not None}
        return kept | {"mask": mask, "notes": notes, "is_last": is_last}

    def postprocess(self, all_outputs: list[dict], **parameters) -> dict[str, Any]:
        [outputs] = all_outputs
        notes = outputs["notes"]

        # The outputs for words, and their uncertainty.
        words = outputs_of_words(outputs)
        probabilities = words["logits"].double().softmax(dim=-1)
        parts = self.parts_of_uncertainty(words)

        # By what a calibrated model abstains, and on what every model does.
        settings = decision_settings(self.model, words)
        decided = {"abstain": None, "detector": None, "threshold": None, "reason": None}
        if settings is not None:
            decided["detector"] = settings.detector.name
            decided["threshold"] = settings["threshold"]  # as JSON has it
        if decided["threshold"] is not None:
            decided["abstain"] = False
        if notes["empty"]:
            decided |= {"abstain": True, "reason": "The text is empty."}
        elif probabilities.isnan().any():
            decided |= {"abstain": True, "reason": "The answer is not a number."}

        entities = self.described_entities(words, probabilities, parts, notes, decided["abstain"])
        unsure = next((entity for entity in entities if entity["abstain"]), None)
        if decided["reason"] is None and unsure is not None:
            decided["abstain"] = True
            decided["reason"] = (
                f"{decided['detector']} of {unsure['word']!r} is {unsure['detector_score']:.3g}, above the threshold "
                f"{float(decided['threshold']):.3g}."
            )
        worst = {name: max(values, default=0.0) for name, values in parts.items()}
        return {"entities": entities, **worst, **decided, "truncated": notes["truncated"]}

    def parts_of_uncertainty(self, words: dict[str, Tensor]) -> dict[str, list[float]]:
        """Split each word's entropy, in nats."""
        members = words.get("member_logits")
        if members is None:  # a plain model is one member
            members = words["logits"].unsqueeze(0)
        split = entropy_split(members.double().log_softmax(dim=-1).unsqueeze(0))
        return {name: part[0].tolist() for name, part in zip(PARTS_OF_UNCERTAINTY, split, strict=True)}

    def described_entities(
        self,
        words: dict[str, Tensor],
        probabilities: Tensor,
        parts: dict[str, list[float]],
        notes: dict[str, Any],
        abstain: bool | None,
    ) -> list[dict[str, Any]]:
        """Return the fields of each entity in a text.

        words: the outputs of its words
        probabilities: (words, classes)
        parts: of each word's uncertainty
        notes: of `preprocess`
        abstain: True and None are so for all entities; with False each has its own
        """
        names = self.model.config.id2label
        confidence, chosen = probabilities.max(dim=-1)
        tags = [names[index] for index in chosen.tolist()]
        entities = []
        for entity in entities_in(tags, have_prefixes(names.values())):
            place = slice(entity.first, entity.last + 1)
            _, start, _ = notes["places"][entity.first]
            _, _, end = notes["places"][entity.last]
            described = {
                "entity_group": entity.kind,
                "score": confidence[place].mean().item(),
                "word": notes["text"][start:end],
                "start": start,
                "end": end,
            }
            for name, values in parts.items():
                described[name], _ = worst_and_mean(entity, values)
            _, described["mean_uncertainty"] = worst_and_mean(entity, parts["uncertainty"])
            described["abstain"] = abstain
            if abstain is False:
                described["abstain"] = bool(words["abstain"][place].any())
            described["detector_score"] = None
            if "detector_score" in words:
                described["detector_score"] = words["detector_score"][place].max().item()
            entities.append(described)
        return entities


def words_of(
    word_ids: list[int | None], offsets: list[tuple[int, int]], words: list[str] | None
) -> list[tuple[int, int, int]]:
    """Find each word's first token, and where its text begins and ends.

    word_ids, offsets: of the tokens, as a fast tokenizer gives them
    words: the words of a text that came as words, whose offsets count within each; they are joined
        by spaces
    """
    starts = []
    total = 0
    for word in words or ():
        starts.append(total)
        total += len(word) + 1

    places: dict[int, list[int]] = {}
    for token, word in enumerate(word_ids):
        if word is None:
            continue
        start, end = offsets[token]
        if words:
            start += starts[word]
            end += starts[word]
        if word not in places:
            places[word] = [token, start, end]
        places[word][2] = max(places[word][2], end)
    return [tuple(place) for place in places.values()]


def outputs_of_words(outputs: dict[str, Any]) -> dict[str, Tensor]:
    """Return a model's outputs for one text at the first tokens of its words.

    outputs: of `_forward`, with "mask": whether each token is one, and no padding
    """
    tokens = outputs["mask"][0].bool().nonzero().flatten()
    firsts = torch.tensor([place[0] for place in outputs["notes"]["places"]], dtype=torch.long)
    words = {}
    for name in KEPT_OUTPUTS:
        if name in outputs:
            axis_of_tokens = 1 if name == "member_logits" else 0
            words[name] = outputs[name][0].index_select(axis_of_tokens, tokens).index_select(axis_of_tokens, firsts)
    return words
