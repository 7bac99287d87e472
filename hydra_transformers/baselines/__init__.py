"""What a Hydra is compared with: Deep Ensembles, MC Dropout, LoRA ensembles, Laplace on the last layer, temperature scaling;
for CLIP also BayesVLM and ViLU.

Each ends in `member_logits` (batch, members, classes). A single model needs nothing: a Hugging Face classifier is one member.
"""

from .baseline import Baseline
from .bayesvlm import BayesVLM
from .deep_ensemble import DeepEnsemble
from .last_layer_laplace import LastLayerLaplace
from .lora_ensemble import LoRAEnsemble, finetune_lora_ensemble
from .mc_dropout import MCDropout
from .temperature import temperature_scaled, temperature_scaled_clip
from .vilu import ViLU, collect_confidences, failure_metrics


__all__ = [
    "Baseline",
    "BayesVLM",
    "DeepEnsemble",
    "LastLayerLaplace",
    "LoRAEnsemble",
    "MCDropout",
    "ViLU",
    "collect_confidences",
    "failure_metrics",
    "finetune_lora_ensemble",
    "temperature_scaled",
    "temperature_scaled_clip",
]
