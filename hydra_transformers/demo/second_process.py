"""Loads a saved Hydra the way anyone would from the Hub, and predicts images: second_process.py MODEL IMAGE [IMAGE ...]

Run as a script, it imports nothing of hydra_transformers: the model brings its own code.
"""

import sys

import torch
from PIL import Image
from transformers import AutoModelForImageClassification, ViTImageProcessorPil


def main(folder: str, *images: str) -> None:
    processor = ViTImageProcessorPil.from_pretrained(folder)
    model = AutoModelForImageClassification.from_pretrained(folder, trust_remote_code=True).eval()
    for path in images:
        inputs = processor(Image.open(path).convert("RGB"), return_tensors="pt")
        with torch.no_grad():
            members = model(**inputs).member_logits[0].softmax(-1)  # (members, classes)
        mean = members.mean(0)
        total = torch.special.entr(mean).sum()
        epistemic = total - torch.special.entr(members).sum(-1).mean()
        votes = ", ".join(
            f"{model.config.id2label[vote]} ({members[m, vote]:.0%})"
            for m, vote in enumerate(members.argmax(-1).tolist())
        )
        name = path.replace("\\", "/").split("/")[-1]
        print(
            f"      {name}: {model.config.id2label[mean.argmax().item()]} with {mean.max():.0%} confidence;", end=" "
        )
        print(f"uncertainty {total:.2f} nats, {epistemic:.2f} of it because the members disagree: {votes}")
    assert "hydra_transformers" not in sys.modules


if __name__ == "__main__":
    main(*sys.argv[1:])
