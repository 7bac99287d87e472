"""Publishing: a Hydra with code, processor and card in one commit on the Hub, and its page."""

from .card import create_model_card
from .member_heads import kept_heads_map
from .publishing import push_hydra_to_hub, push_space_to_hub
from .space import write_space


__all__ = ["create_model_card", "kept_heads_map", "push_hydra_to_hub", "push_space_to_hub", "write_space"]
