"""Publishing: the model card, and a Hydra with code, processor and card in one commit on the Hub."""

from .card import create_model_card
from .kept_heads_map import kept_heads_map
from .publishing import HubError, push_hydra_to_hub


__all__ = ["HubError", "create_model_card", "kept_heads_map", "push_hydra_to_hub"]
