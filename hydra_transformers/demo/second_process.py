"""Loads a saved Hydra the way anyone would from the Hub, and predicts images: second_process.py MODEL IMAGE [IMAGE ...]

Run as a script, it imports nothing of hydra_transformers: the model brings its own code, and its decision. Prints a line of JSON
for each image.
"""

import json
import sys

import torch
from PIL import Image
from transformers import AutoModelForImageClassification, ViTImageProcessorPil


def main(folder: str, *images: str) -> None:
    processor = ViTImageProcessorPil.from_pretrained(folder)
    model = AutoModelForImageClassification.from_pretrained(folder, trust_remote_code=True).eval()
    names = list(model.config.id2label.values())
    for path in images:
        inputs = processor(Image.open(path).convert("RGB"), return_tensors="pt")
        with torch.no_grad():
            answer = model(**inputs)
        members = answer.member_logits[0].softmax(-1)  # (members, classes)
        total = torch.special.entr(members.mean(0)).sum()
        epistemic = total - torch.special.entr(members).sum(-1).mean()
        answered = {
            "label": names[answer.logits[0].argmax()],
            "abstain": answer.abstain[0].item(),
            "members": [dict(zip(names, member, strict=True)) for member in members.tolist()],
            "total": total.item(),
            "epistemic": epistemic.item(),
        }
        print(json.dumps(answered))
    assert "hydra_transformers" not in sys.modules


if __name__ == "__main__":
    main(*sys.argv[1:])
