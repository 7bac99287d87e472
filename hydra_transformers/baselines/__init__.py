"""Models to compare a Hydra with. Each answers with `member_logits` (batch, members, classes)."""

from ..fusion.soup import soup
from .baseline import Baseline
from .batch_ensemble import BatchEnsemble
from .bayesvlm import BayesVLM
from .deep_ensemble import DeepEnsemble
from .last_layer_laplace import LastLayerLaplace
from .lora_ensemble import LoRAEnsemble, finetune_lora_ensemble
from .mc_dropout import MCDropout
from .mimo import MIMO, MIMOCollator
from .packed_ensemble import PackedEnsemble
from .temperature_scaled import temperature_scaled, temperature_scaled_clip
from .vilu import ViLU, collect_confidences, failure_metrics


__all__ = [
    "MIMO",
    "Baseline",
    "BatchEnsemble",
    "BayesVLM",
    "DeepEnsemble",
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
