"""The smallest setting: made-up images, a ViT of two layers. It shows that a benchmark runs, in seconds, and nothing else."""

import torch
from transformers import ViTConfig, ViTForImageClassification

from .rows import PrepareImages, TensorRows
from .splits import Splits


def images(count: int, seed: int, labelled: bool = True) -> TensorRows:
    """Images of three classes, told apart by their brightness."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 3, (count,), generator=generator)
    pixels = torch.randint(0, 80, (count, 3, 8, 8), generator=generator) + 60 * labels.view(-1, 1, 1, 1)
    tensors = {"pixel_values": pixels.to(torch.uint8)} | ({"labels": labels} if labelled else {})
    return TensorRows(tensors, PrepareImages((0.5,) * 3, (0.25,) * 3))


def splits() -> Splits:
    return Splits(
        train=images(64, 0),
        validation=images(32, 1),
        circuit_id=images(32, 2),
        circuit_ood=images(32, 3, labelled=False),
        test=images(48, 4),
        ood={"near": {"more": images(32, 6, labelled=False)}, "far": {"noise": images(32, 5, labelled=False)}},
        validation_ood=images(32, 7, labelled=False),
    )


def new_backbone(start: str | None = None, layers: int = 2) -> ViTForImageClassification:
    """Always the same encoder, as if it were pre-trained, with a new classifier."""
    sizes = {"hidden_size": 24, "intermediate_size": 24, "num_hidden_layers": layers, "num_attention_heads": 6}
    config = ViTConfig(
        image_size=8, patch_size=4, num_labels=3, hidden_dropout_prob=0.1, initializer_range=0.3, **sizes
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = ViTForImageClassification(config)
    model.classifier.reset_parameters()
    return model
