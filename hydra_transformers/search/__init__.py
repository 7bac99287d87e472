"""Choose for me: one call from models and data to the Hydra that fits a target."""

from .candidates import Candidate, pareto_front
from .designs import Design
from .hydration import hydrate
from .results import Hydrated
from .targets import Target, choose, target_of


__all__ = ["Candidate", "Design", "Hydrated", "Target", "choose", "hydrate", "pareto_front", "target_of"]
