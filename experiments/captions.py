"""Captions made of class names, and a tokenizer that knows their words and no others."""

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast


# The first is the paper's prompt; the others are for training, so that the text tower does not learn one sentence.
TEMPLATES = (
    "A photo of a {}.",
    "A photo of the {}.",
    "A picture of a {}.",
    "A small picture of a {}.",
    "A blurry photo of a {}.",
    "A close-up photo of a {}.",
    "There is a {} in the picture.",
    "This is a {}.",
)
PADDING = "<pad>"
UNKNOWN = "<unk>"
BEGIN = "<begin>"
END = "<end>"
WORD = re.compile(r"[\w'-]+|[^\w\s]")


def read_class_names(folder: Path, name: str = "train") -> list[list[str]]:
    """The names of every class, the usual one first: `vision64/class_names.json` has them with commas between."""
    path = folder / "vision64" / "class_names.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist: pass the folder with vision64/ as --data")
    return [[each.strip() for each in names.split(",")] for names in json.loads(path.read_text())[name]]


def prompts_for(names: Iterable[str]) -> list[str]:
    """One prompt per class."""
    return [TEMPLATES[0].format(name) for name in names]


def captions_for(names: Sequence[str]) -> list[str]:
    """All captions of a class that goes by several names."""
    return [template.format(name) for name in names for template in TEMPLATES]


def word_tokenizer(texts: Iterable[str], max_length: int) -> PreTrainedTokenizerFast:
    """A tokenizer whose tokens are the words of `texts`, in lower case, between a begin and an end as CLIP has them. The end
    has the highest number, by which CLIP's text tower finds it."""
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors

    words = sorted({word for text in texts for word in WORD.findall(text.lower())})
    vocabulary = {word: number for number, word in enumerate((PADDING, UNKNOWN, *words, BEGIN, END))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(WORD.pattern), behavior="removed", invert=True)
    special = [(name, vocabulary[name]) for name in (BEGIN, END)]
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BEGIN} $A {END}", special_tokens=special)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=max_length,
        pad_token=PADDING,
        unk_token=UNKNOWN,
        bos_token=BEGIN,
        eos_token=END,
        model_input_names=["input_ids", "attention_mask"],
    )


class Captions:
    """The tokens of all captions of all classes, on one device, to draw from."""

    def __init__(self, names: Sequence[Sequence[str]], tokenizer: PreTrainedTokenizerFast, device: torch.device | str):
        of_classes = [captions_for(of_class) for of_class in names]
        counts = torch.tensor([len(captions) for captions in of_classes])
        texts = [caption for captions in of_classes for caption in captions]
        self.tokens = tokenizer(texts, padding=True, return_tensors="pt")["input_ids"].to(device)
        self.counts = counts.to(device)
        self.starts = (counts.cumsum(0) - counts).to(device)

    def draw(self, labels: Tensor) -> Tensor:
        """A caption for each label: (rows,) -> (rows, tokens)"""
        within = (torch.rand(len(labels), device=labels.device) * self.counts[labels]).long()
        return self.tokens[self.starts[labels] + within]
