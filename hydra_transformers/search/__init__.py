"""Choose for me: one call from models and data to the Hydra that fits a target."""

from .candidates import Candidate, Design, pareto_front
from .one_call import Hydrated, hydrate
from .targets import Target, choose, target_of


__all__ = ["Candidate", "Design", "Hydrated", "Target", "choose", "hydrate", "pareto_front", "target_of"]
