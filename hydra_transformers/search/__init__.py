"""Choose for me: one call from models and data to the Hydra that fits a target."""

from .candidates import Candidate, Design, pareto_front
from .choice import Target, choose, target_of
from .hydration import hydrate
from .results import Hydrated


__all__ = ["Candidate", "Design", "Hydrated", "Target", "choose", "hydrate", "pareto_front", "target_of"]
