"""Baselines, the models that a Hydra is compared with: Deep Ensembles, BatchEnsemble, Packed-Ensembles, MIMO, MC Dropout, LoRA
ensembles, soups, Laplace on the last layer, temperature scaling; for CLIP also BayesVLM and ViLU.

Each ends in `member_logits` (batch, members, classes). A single model needs nothing: a Hugging Face classifier is one member.
"""

from .baseline import Baseline
from .batch_ensemble import BatchEnsemble
from .bayesvlm import BayesVLM
from .deep_ensemble import DeepEnsemble
from .head_ensemble import HeadEnsemble
from .last_layer_laplace import LastLayerLaplace
from .lora_ensemble import LoRAEnsemble, finetune_lora_ensemble
from .mc_dropout import MCDropout
from .mimo import MIMO, Independence, MIMOCollator
from .packed_ensemble import PackedEnsemble
from .soup import soup
from .temperature import temperature_scaled, temperature_scaled_clip
from .vilu import ViLU, collect_confidences, failure_metrics


__all__ = [
    "MIMO",
    "Baseline",
    "BatchEnsemble",
    "BayesVLM",
    "DeepEnsemble",
    "HeadEnsemble",
    "Independence",
    "LastLayerLaplace",
    "LoRAEnsemble",
    "MCDropout",
    "MIMOCollator",
    "PackedEnsemble",
    "ViLU",
    "collect_confidences",
    "failure_metrics",
    "finetune_lora_ensemble",
    "soup",
    "temperature_scaled",
    "temperature_scaled_clip",
]
