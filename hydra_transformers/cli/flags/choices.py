"""What there is to choose from: names that the package knows too, written again here since asking it would import torch.

A test compares them with the package's.
"""

OBJECTIVES = ("acc", "ood", "avg")
RECIPES = ("cifar100", "finetune-images", "finetune-texts", "imagenet1k", "sst2", "tune-images", "tune-texts")
SHARED_PARTS = ("embeddings", "layernorm", "mlp")
SEVERITIES = (1, 2, 3, 4, 5)
TEXT_TOKENS = 128
PARTS = ("training", "validation", "test")
FORMATS = ("onnx", "torch")

DETECTORS = (
    "msp",
    "max_logit",
    "energy",
    "entropy",
    "mutual_information",
    "disagreement",
    "gen",
    "kl_matching",
    "she",
    "knn",
    "mahalanobis",
    "relative_mahalanobis",
    "vim",
)
CIRCUIT_SCORES = ("msp", "max_logit", "energy", "entropy", "gen")  # of one model, without a fit
DECIDING_DETECTORS = tuple(name for name in DETECTORS if name != "vim")
