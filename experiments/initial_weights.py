"""Weights for a ViT to start from that look like those of a trained one (arXiv:2305.09828): with few images, a ViT takes
long to find out by itself that what is near belongs together."""

import torch
from torch import Tensor
from transformers import ViTForImageClassification


@torch.no_grad()
def mimic_trained_attention(model: ViTForImageClassification) -> None:
    """Each head's queries and keys match a token with itself and, by their position embeddings, with its neighbours; what
    values and the output projection make of a token is about its negative."""
    hidden, heads = model.config.hidden_size, model.config.num_attention_heads
    embeddings = model.vit.embeddings
    embeddings.position_embeddings.zero_()
    side = model.config.image_size // model.config.patch_size
    embeddings.position_embeddings[0, 1:] = waves(side, hidden)
    for layer in model.vit.layers:
        attention = layer.attention
        queries, keys = attention.q_proj.weight.chunk(heads), attention.k_proj.weight.chunk(heads)
        for query, key in zip(queries, keys, strict=True):
            left, right = factors(near_identity(hidden, 0.7, 0.7))
            query.copy_(left[:, : len(query)].T)
            key.copy_(right[: len(key)])
        left, right = factors(near_identity(hidden, 0.4, -0.4))
        attention.v_proj.weight.copy_(left.T)
        attention.o_proj.weight.copy_(right.T)


def near_identity(size: int, noise: float, share: float) -> Tensor:
    """(size, size)"""
    return noise * torch.randn(size, size) / size**0.5 + share * torch.eye(size)


def factors(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Two matrices of the same size whose product it is, the largest singular values first."""
    left, values, right = torch.linalg.svd(matrix)
    return left * values.sqrt(), values.sqrt().unsqueeze(1) * right


def waves(side: int, hidden: int) -> Tensor:
    """Sines and cosines of the column and of the row of every patch: (side * side, hidden)"""
    rows, columns = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    frequencies = 10_000.0 ** -torch.linspace(0, 1, hidden // 4 + 1)[:-1]
    angles = [places.flatten().unsqueeze(1) * frequencies for places in (columns, rows)]
    return torch.cat([wave(angle) for angle in angles for wave in (torch.sin, torch.cos)], dim=1)
