"""What a Hydra is compared with: Deep Ensembles, BatchEnsemble, Packed-Ensembles, MIMO, MC Dropout, LoRA ensembles, soups,
temperature scaling.

Each ends in `member_logits` (batch, members, classes). A single model needs nothing: a Hugging Face classifier is one member.
"""

from .baseline import Baseline
from .batch_ensemble import BatchEnsemble
from .deep_ensemble import DeepEnsemble
from .head_ensemble import HeadEnsemble
from .lora_ensemble import LoRAEnsemble, finetune_lora_ensemble
from .mc_dropout import MCDropout
from .mimo import MIMO, Independence, MIMOCollator
from .packed_ensemble import PackedEnsemble
from .soup import soup
from .temperature import temperature_scaled


__all__ = [
    "MIMO",
    "Baseline",
    "BatchEnsemble",
    "DeepEnsemble",
    "HeadEnsemble",
    "Independence",
    "LoRAEnsemble",
    "MCDropout",
    "MIMOCollator",
    "PackedEnsemble",
    "finetune_lora_ensemble",
    "soup",
    "temperature_scaled",
]
