"""Designs: how a candidate is made, and which ones a model of some layers and heads allows."""

from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ..fusion import encoder_config
from ..models.auto import AutoHydra
from ..models.configuration_hydra import SHARED_PARTS


ONE_MODEL, DEEP_ENSEMBLE, SOUP, HYDRA = "one model", "Deep Ensemble", "soup", "Hydra"

BUDGETS = (1 / 12, 1 / 6, 1 / 3)  # of the heads that compete
TRUNKS = (1 / 4, 1 / 2, 3 / 4)  # of the layers


@dataclass(frozen=True)
class Design:
    """How a candidate is made.

    kind: "one model", "Deep Ensemble", "soup" or "Hydra"
    trunk_layers: how many first layers are merged whole, or for members of one model kept whole
    shared: the parts that members share
    pruned_by: "circuits" (one for each member), "samples" (of one circuit), "taylor", or None where nothing is pruned
    budget: heads that each member loses; with "taylor" heads that each layer loses
    tuned: whether members are fine-tuned after pruning
    """

    kind: str
    members: int = 1
    trunk_layers: int = 0
    shared: tuple[str, ...] = SHARED_PARTS
    pruned_by: str | None = None
    budget: int = 0
    tuned: bool = False

    @property
    def key(self) -> str:
        """The name of its file."""
        if self.kind != HYDRA:
            return self.kind.lower().replace(" ", "-")
        parts = [f"hydra_trunk-{self.trunk_layers}_of-{self.members}_shares-{'-'.join(self.shared) or 'nothing'}"]
        parts += [f"{self.pruned_by}-{self.budget}"] if self.pruned_by else []
        return "_".join([*parts, *(["tuned"] if self.tuned else [])])

    @property
    def name(self) -> str:
        """In words; "Hydra of 3, first 6 layers common, 12 heads pruned each, tuned"."""
        if self.kind == DEEP_ENSEMBLE:
            return f"Deep Ensemble of {self.members}"
        if self.kind != HYDRA:
            return self.kind
        words = [f"Hydra of {self.members}"]
        if set(self.shared) != set(SHARED_PARTS):
            words.append(f"sharing {' and '.join(self.shared) or 'nothing'}")
        if self.trunk_layers:
            words.append(f"first {self.trunk_layers} layers common" if self.trunk_layers > 1 else "first layer common")
        if self.pruned_by:
            heads = f"{self.budget} heads" if self.budget > 1 else "1 head"
            words.append(f"{heads} {PRUNED[self.pruned_by]}")
        return ", ".join([*words, *(["tuned"] if self.tuned else [])])


PRUNED = {
    "circuits": "pruned each",
    "samples": "pruned each, sampled from one circuit",
    "taylor": "pruned in each layer (Taylor)",
}


def trunk_depths(layers: int, equal: int = 0) -> list[int]:
    """How many first layers to merge: as many as are equal already, and a quarter, a half and three quarters."""
    return sorted({equal, *(depth for share in TRUNKS if (depth := int(share * layers)) > equal)})


def trunk_depths_of_copies(layers: int) -> list[int]:
    """How many first layers copies of one model keep whole, the deepest first: its circuits are the cheapest."""
    return sorted({layers // 2, 0}, reverse=True)


def heads_behind(config: PreTrainedConfig, trunk_layers: int) -> int:
    return (config.num_hidden_layers - trunk_layers) * config.num_attention_heads


def budgets_of(config: PreTrainedConfig, trunk_layers: int) -> list[int]:
    """How many heads a member loses, of those behind the trunk: a twelfth, a sixth and a third."""
    heads = heads_behind(config, trunk_layers)
    return sorted({budget for share in BUDGETS if (budget := max(1, round(share * heads))) < heads})


def taylor_budgets(config: PreTrainedConfig) -> list[int]:
    """How many heads each layer loses: a sixth and a third."""
    heads = config.num_attention_heads
    return sorted({lost for share in BUDGETS[1:] if (lost := max(1, round(share * heads))) < heads})


def stand_in(model: PreTrainedModel, members: int, trunk_layers: int, budget: int) -> nn.Module:
    """A Hydra as fast as one whose members lose `budget` heads behind the trunk: which heads does not matter."""
    config = encoder_config(model)
    layers = range(trunk_layers, config.num_hidden_layers)
    places = [(layer, head) for head in range(config.num_attention_heads) for layer in layers][:budget]
    heads = {layer: [head for at, head in places if at == layer] for layer in {layer for layer, _ in places}}
    pruned = AutoHydra.from_backbone(model, heads)
    return AutoHydra.from_pruned_members([pruned] * members, trunk_layers=trunk_layers, allow_equal=True)
