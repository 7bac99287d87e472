"""Analyses of a trained model's heads (sections 3, B.1 to B.3 and C.3 of the paper), each a function with a small result that
has tables and pictures: Proposition 1, what heads see, who is pruned, how many can go."""

from .proposition import PruningUnderNoise, pruning_under_noise


__all__ = ["PruningUnderNoise", "pruning_under_noise"]
