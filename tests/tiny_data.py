"""Tiny models with their processors, and tiny data sets, in folders: what the command line works on."""

from pathlib import Path

import datasets
import numpy as np
import torch
from PIL import Image
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertTokenizer,
    CLIPConfig,
    CLIPImageProcessorPil,
    CLIPModel,
    CLIPProcessor,
    CLIPTokenizer,
    SiglipConfig,
    SiglipImageProcessorPil,
    SiglipModel,
    SiglipProcessor,
    ViTConfig,
    ViTForImageClassification,
    ViTImageProcessorPil,
)


SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32}
CLASSES = ["red", "green", "blue"]  # a class is the channel that is brightest
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "film", "good", "bad", "of", "joy"]


def names_of(classes: list[str]) -> dict:
    return {"id2label": dict(enumerate(classes)), "label2id": {name: index for index, name in enumerate(classes)}}


def save_vit(folder: Path, classes: list[str] = CLASSES) -> Path:
    torch.manual_seed(0)
    config = ViTConfig(image_size=8, patch_size=4, initializer_range=0.2, **names_of(classes), **SIZES)
    ViTForImageClassification(config).save_pretrained(folder)
    ViTImageProcessorPil(size={"height": 8, "width": 8}).save_pretrained(folder)
    return folder


def save_bert(folder: Path) -> Path:
    torch.manual_seed(0)
    config = BertConfig(vocab_size=len(WORDS), max_position_embeddings=16, initializer_range=0.2, **SIZES)
    BertForSequenceClassification(config).save_pretrained(folder)
    BertTokenizer(vocab={word: index for index, word in enumerate(WORDS)}).save_pretrained(folder)
    return folder


def save_clip(folder: Path) -> Path:
    torch.manual_seed(0)
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)] + ["."]
    pieces = ["<|startoftext|>", "<|endoftext|>", *letters, *(f"{letter}</w>" for letter in letters)]
    text = {"vocab_size": len(pieces), "max_position_embeddings": 24, "bos_token_id": 0, "eos_token_id": 1}
    vision = {"image_size": 8, "patch_size": 4}
    config = CLIPConfig(text_config=text | SIZES, vision_config=vision | SIZES, projection_dim=8)
    CLIPModel(config).save_pretrained(folder)
    tokenizer = CLIPTokenizer(vocab={piece: row for row, piece in enumerate(pieces)}, merges=[], model_max_length=24)
    images = CLIPImageProcessorPil(size={"shortest_edge": 8}, crop_size={"height": 8, "width": 8})
    CLIPProcessor(images, tokenizer).save_pretrained(folder)
    return folder


def save_siglip(folder: Path) -> Path:
    torch.manual_seed(0)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "photo", "of", ".", "this", "is", *CLASSES]
    # 64 tokens, to which Transformers' pipeline pads texts
    text = {"vocab_size": len(words), "max_position_embeddings": 64, "bos_token_id": 2, "eos_token_id": 3}
    vision = {"image_size": 8, "patch_size": 4}
    model = SiglipModel(SiglipConfig(text_config=text | SIZES, vision_config=vision | SIZES))
    with torch.no_grad():
        model.logit_scale.fill_(2.0)
        model.logit_bias.fill_(-1.0)
    model.save_pretrained(folder)
    vocabulary = {word: index for index, word in enumerate(words)}
    tokenizer = BertTokenizer(vocab=vocabulary, model_max_length=64, model_input_names=["input_ids"])
    SiglipProcessor(SiglipImageProcessorPil(size={"height": 8, "width": 8}), tokenizer).save_pretrained(folder)
    return folder


def pictures(labels: list[int], seed: int = 0) -> list[Image.Image]:
    """One 8 x 8 picture per label, brightest in the label's channel."""
    pixels = np.random.default_rng(seed).integers(0, 120, (len(labels), 8, 8, 3), dtype=np.uint8)
    for image, label in zip(pixels, labels, strict=True):
        image[..., label] += 130
    return [Image.fromarray(image) for image in pixels]


def picture_rows(count: int = 24, names: list[str] = CLASSES, seed: int = 0) -> datasets.Dataset:
    """Rows with image and label; the class called "red" is red, whatever its index among `names`."""
    labels = [index % len(names) for index in range(count)]
    images = pictures([CLASSES.index(names[label]) for label in labels], seed)
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=names)})
    return datasets.Dataset.from_dict({"image": images, "label": labels}, features=features)


def grey_rows(count: int = 10) -> datasets.Dataset:
    """Pictures of no class, without labels."""
    pixels = np.random.default_rng(5).integers(0, 255, (count, 8, 8), dtype=np.uint8)
    features = datasets.Features({"photo": datasets.Image()})
    return datasets.Dataset.from_dict({"photo": [Image.fromarray(image) for image in pixels]}, features=features)


def review_rows(count: int = 16) -> datasets.Dataset:
    texts = ["a film of joy", "a bad film"]
    features = datasets.Features(
        {"sentence": datasets.Value("string"), "label": datasets.ClassLabel(names=["negative", "positive"])}
    )
    rows = {"sentence": [texts[row % 2] for row in range(count)], "label": [1 - row % 2 for row in range(count)]}
    return datasets.Dataset.from_dict(rows, features=features)
