"""BatchEnsemble (Wen et al., 2020): members share matrices and scale their inputs and outputs."""

import copy

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..models.auto import hydra_class
from .baseline import Baseline, check_is_classifier, check_is_count
from .layer_replacement import linear_of, replace
from .mc_dropout import num_rows, repeated


class BatchEnsemble(Baseline):
    """A classifier with M members whose linear layers share their matrix W.

    Member i has W ∘ (s_i r_iᵀ) and its own bias. All members run in one forward, stacked along the
    batch. Everything trains. The parameters are r - 1 and s - 1, so that weight decay pulls members
    towards the model, not towards zero.

    Args:
        model (`PreTrainedModel`): a classifier of a family that Hydras support; it is copied.
            WavLM, which reads weights without calling their layers, and DeBERTa, whose layers also
            read a table of positions, are not accepted.
        num_members (`int`, defaults to 4): M.
        std (`float`, defaults to 0.1): how far r and s start from one. 0.1 suits pre-trained
            weights; 0.5, usual for new ones, destroys most of what a checkpoint has learned. With 0
            every member is the model, bit for bit.
        seed (`int`, defaults to 0): for r and s.
    """

    def __init__(self, model: PreTrainedModel, num_members: int = 4, std: float = 0.1, seed: int = 0):
        check_is_classifier(model)
        # Raises for other families, in which linear layers may read other rows than the batch's.
        if not hydra_class(model).supports_lora_on_qkvo or getattr(model.config, "relative_attention", False):
            raise TypeError(
                f"{type(model).__name__} reads weights without calling their layers, or a table of positions with "
                "them: pass another classifier"
            )
        check_is_count(num_members)
        if not std >= 0:
            raise ValueError(f"std is {std!r}: pass a number that is not negative")
        super().__init__(copy.deepcopy(model), num_members=num_members, std=std, seed=seed)

        # By exact type: subclasses of nn.Linear may hold other numbers, or be read by other
        # modules.
        linears = [module for module in self.model.modules() if type(module) is nn.Linear]
        generator = torch.Generator("cpu").manual_seed(seed)

        def shared_by_members(linear: nn.Linear) -> MemberLinear:
            return MemberLinear(linear, num_members).start(std, generator)

        replace(self.model, shared_by_members, linears)

    def member_logits(self, **inputs: Tensor) -> Tensor:
        rows = num_rows(inputs)
        stacked = {name: repeated(value, rows, self.num_members) for name, value in inputs.items()}
        logits = self.model(**stacked).logits  # (members * batch, classes)
        return logits.unflatten(0, (self.num_members, -1)).transpose(0, 1)

    def member(self, index: int) -> PreTrainedModel:
        """Return one member as a plain Transformers model.

        Args:
            index (`int`): which one, from 0.
        """
        model = copy.deepcopy(self.model)
        replace(model, lambda linear: linear.of_member(index), member_linears(model))
        return model


class MemberLinear(nn.Module):
    """A linear layer of M members on rows (members * batch, ..., in), member 0's first.

    y = ((x ∘ r_i) Wᵀ + b) ∘ s_i + c_i, so member i's bias is b ∘ s_i + c_i. b stays as it was: with
    r = s = 1 and c = 0, the outputs are the layer's to the last bit.

    input_factors: r - 1, (members, in)
    output_factors: s - 1, (members, out)
    biases: c, (members, out)
    """

    def __init__(self, linear: nn.Linear, num_members: int):
        super().__init__()
        self.num_members = num_members
        self.in_features = linear.in_features
        self.out_features = linear.out_features

        # What members share.
        self.weight = linear.weight
        bias = None
        if linear.bias is not None:
            bias = linear.bias.detach()
        self.register_buffer("bias", bias)

        # What each has of its own.
        self.input_factors = nn.Parameter(self.weight.new_zeros(num_members, linear.in_features))
        self.output_factors = nn.Parameter(self.weight.new_zeros(num_members, linear.out_features))
        biases = None
        if linear.bias is not None:
            biases = nn.Parameter(self.weight.new_zeros(num_members, linear.out_features))
        self.register_parameter("biases", biases)

    @torch.no_grad()
    def start(self, std: float, generator: torch.Generator) -> "MemberLinear":
        """Draw the factors, such that every member keeps the layer's bias; return itself."""
        for factors in (self.input_factors, self.output_factors):
            noise = torch.randn(factors.shape, generator=generator, device="cpu", dtype=torch.float64)
            factors.copy_((std * noise).to(factors.dtype))
        if self.biases is not None:
            self.biases.copy_(-self.output_factors * self.bias)
        return self

    def forward(self, inputs: Tensor) -> Tensor:
        """(members * batch, ..., in) -> (members * batch, ..., out)"""
        if inputs.shape[0] % self.num_members:
            raise ValueError(
                f"a linear layer reads {inputs.shape[0]} rows, which are not those of {self.num_members} members: "
                "pass another model"
            )

        def per_row(per_member: Tensor) -> Tensor:
            """(members, features) -> (members, 1, ..., features)"""
            return per_member.view(self.num_members, *[1] * (inputs.dim() - 1), -1)

        inputs_of_members = inputs.unflatten(0, (self.num_members, -1))
        scaled = inputs_of_members * per_row(1 + self.input_factors)
        outputs = nn.functional.linear(scaled, self.weight, self.bias)
        outputs = outputs * per_row(1 + self.output_factors)
        if self.biases is not None:
            outputs = outputs + per_row(self.biases)
        return outputs.flatten(0, 1)

    @torch.no_grad()
    def of_member(self, index: int) -> nn.Linear:
        """Return one member's layer, as a plain one."""
        r = 1 + self.input_factors[index]
        s = 1 + self.output_factors[index]
        bias = None
        if self.bias is not None:
            bias = self.bias * s + self.biases[index]
        return linear_of(self.weight * s.unsqueeze(1) * r, bias)


def member_linears(model: nn.Module) -> list[MemberLinear]:
    """Return all layers that members share."""
    return [module for module in model.modules() if isinstance(module, MemberLinear)]
