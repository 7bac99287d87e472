"""Several ViTs of one shape side by side, as one batch of Transformers' own model."""

import copy
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel


def attend_to_all(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    scaling: float,
    dropout: float = 0.0,
    **others,
) -> tuple[Tensor, None]:
    """(batch, heads, tokens, head size) each -> (batch, tokens, heads, head size)

    What Transformers calls "sdpa" gets a mask that masks nothing when compiled or captured, and with a mask there is no
    fast kernel.
    """
    attended = nn.functional.scaled_dot_product_attention(query, key, value, dropout_p=dropout, scale=scaling)
    return attended.transpose(1, 2), None


ATTENTION = "attend_to_all"
AttentionInterface.register(ATTENTION, attend_to_all)


class Part:
    """Some parameters of several models as one tensor of numbers, (models, numbers of a model); those of one shape lie
    together."""

    def __init__(self, models: Sequence[nn.Module], names: Sequence[str]):
        self.names = sorted(names, key=lambda name: models[0].get_parameter(name).shape)
        self.shapes = [models[0].get_parameter(name).shape for name in self.names]
        self.sizes = [shape.numel() for shape in self.shapes]
        rows = [torch.cat([model.get_parameter(name).detach().flatten() for name in self.names]) for model in models]
        self.numbers = torch.stack(rows).requires_grad_()

    def parameters(self) -> dict[str, Tensor]:
        """By name, (models, ...)."""
        parts = self.numbers.split(self.sizes, dim=1)
        return {
            name: part.unflatten(1, shape) for name, part, shape in zip(self.names, parts, self.shapes, strict=True)
        }

    def blocks(self, numbers: Tensor) -> list[Tensor]:
        """Such numbers, of all models, shape by shape: (models, parameters of the shape, ...)."""
        counts = Counter(self.shapes)
        parts = numbers.split([count * shape.numel() for shape, count in counts.items()], dim=1)
        return [part.unflatten(1, (count, *shape)) for part, (shape, count) in zip(parts, counts.items(), strict=True)]


class Stack:
    """The models are trained as if each were alone: all their images are one batch of one model, in which whatever has
    weights gives each model's images that model's."""

    def __init__(self, models: Sequence[PreTrainedModel]):
        named = dict(models[0].named_parameters())
        vectors = [name for name in named if named[name].dim() <= 1]
        others = [name for name in named if named[name].dim() > 1]
        self.vectors = Part(models, vectors)
        self.matrices = Part(models, [name for name in others if ".layers." in name])
        # And the classifier's matrix.
        self.embeddings = Part(models, [name for name in others if ".layers." not in name])
        self.model = copy.deepcopy(models[0]).train()
        self.model.set_attn_implementation(ATTENTION)
        for name, module in list(self.model.named_modules()):
            if isinstance(module, nn.Linear):
                self.model.set_submodule(name, Linears())
            elif isinstance(module, nn.LayerNorm):
                self.model.set_submodule(name, LayerNorms(module.normalized_shape, module.eps))
            elif isinstance(module, nn.Conv2d):
                self.model.set_submodule(name, PatchProjections(module.kernel_size))

    def compile_layers(self) -> None:
        """Each by itself: they are all alike, and compiled once."""
        for layer in self.model.vit.layers:
            layer.compile(dynamic=False, fullgraph=True)

    @property
    def parts(self) -> tuple[Part, Part, Part]:
        return self.matrices, self.embeddings, self.vectors

    def __call__(self, pixel_values: Tensor) -> Tensor:
        """(models * batch, channels, height, width), a model's images together -> logits (models * batch, classes)"""
        parameters = {name: parameter for part in self.parts for name, parameter in part.parameters().items()}
        for name, parameter in parameters.items():
            if name.endswith(("cls_token", "position_embeddings")):  # (models, 1, tokens, hidden)
                parameters[name] = parameter.squeeze(1).repeat_interleave(len(pixel_values) // len(parameter), dim=0)
        return torch.func.functional_call(self.model, parameters, kwargs={"pixel_values": pixel_values}).logits

    @torch.no_grad()
    def clip_grad_norms(self, largest: float) -> None:
        """Each model's by itself."""
        norms = torch.stack([part.numbers.grad.norm(dim=1) for part in self.parts]).norm(dim=0)
        factors = (largest / (norms + 1e-6)).clamp(max=1).unsqueeze(1)
        for part in self.parts:
            part.numbers.grad.mul_(factors)

    @torch.no_grad()
    def copy_to(self, models: Sequence[PreTrainedModel]) -> None:
        for part in self.parts:
            for name, parameters in part.parameters().items():
                for model, parameter in zip(models, parameters, strict=True):
                    model.get_parameter(name).copy_(parameter)


class Weights(nn.Module):
    """Places for the parameters of all models, which come with every call."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.empty(0)), nn.Parameter(torch.empty(0))


class Linears(Weights):
    """weight: (models, output, input) or with more axes for the input; bias: (models, output)"""

    def forward(self, states: Tensor) -> Tensor:
        """(models * batch, ..., input) -> (models * batch, ..., output)"""
        rows = states.reshape(len(self.weight), -1, states.shape[-1])
        product = torch.baddbmm(self.bias.unsqueeze(1), rows, self.weight.flatten(2).mT)
        return product.view(*states.shape[:-1], -1)


def cut_into_patches(pixel_values: Tensor, height: int, width: int) -> Tensor:
    """(batch, channels, height, width) -> (batch, rows of patches, columns of patches, numbers of a patch)"""
    rows, columns = pixel_values.shape[2] // height, pixel_values.shape[3] // width
    pixel_values = pixel_values[..., : rows * height, : columns * width]
    patches = pixel_values.unflatten(3, (columns, width)).unflatten(2, (rows, height))
    return patches.permute(0, 2, 4, 1, 3, 5).flatten(3)


class PatchProjections(Linears):
    def __init__(self, patch_size: tuple[int, int]):
        super().__init__()
        self.patch_size = patch_size

    def forward(self, pixel_values: Tensor) -> Tensor:
        """(models * batch, channels, height, width) -> (models * batch, hidden, rows, columns of patches)"""
        return super().forward(cut_into_patches(pixel_values, *self.patch_size)).permute(0, 3, 1, 2)


class LayerNorms(Weights):
    """weight, bias: (models, hidden)"""

    def __init__(self, normalized_shape: tuple[int, ...], eps: float):
        super().__init__()
        self.normalized_shape, self.eps = normalized_shape, eps

    def forward(self, states: Tensor) -> Tensor:
        """(models * batch, tokens, hidden) -> the same shape"""
        normed = nn.functional.layer_norm(states, self.normalized_shape, eps=self.eps)
        rows = normed.view(len(self.weight), -1, states.shape[-1])
        return torch.addcmul(self.bias.unsqueeze(1), rows, self.weight.unsqueeze(1)).view_as(states)
