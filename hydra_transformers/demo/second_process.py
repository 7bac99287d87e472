"""Loads a saved Hydra the way anyone would from the Hub, and predicts images: second_process.py MODEL IMAGE [IMAGE ...]

Run as a script, it imports nothing of hydra_transformers: the model brings its own code, and its decision. Prints a line of JSON
for each image.
"""

import json
import sys

import torch
from PIL import Image
from transformers import AutoModelForImageClassification, ViTImageProcessorPil


def main(folder: str, *paths: str) -> None:
    processor = ViTImageProcessorPil.from_pretrained(folder)
    model = AutoModelForImageClassification.from_pretrained(folder, trust_remote_code=True).eval()
    names = list(model.config.id2label.values())
    images = [Image.open(path).convert("RGB") for path in paths]
    with torch.no_grad():
        member_logits = model(**processor(images, return_tensors="pt")).member_logits  # (images, members, classes)
    for answer, members in zip(model.predict(images, processor), member_logits.softmax(-1).tolist(), strict=True):
        answer["members"] = [dict(zip(names, member, strict=True)) for member in members]
        print(json.dumps({name: answer[name] for name in ("label", "score", "abstain", "reason", "members")}))
    assert "hydra_transformers" not in sys.modules


if __name__ == "__main__":
    main(*sys.argv[1:])
