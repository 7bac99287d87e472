"""LoRA ensembles (Wang et al., 2023; Mühlematter et al., 2024): an adapter for each member."""

import copy
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import safe_open
from torch import nn
from transformers import PreTrainedModel

from .._io.threads import ONE_PASS
from ..cost import inputs_for, multiply_adds_of
from ..data.prediction import accepted_inputs, answer_of, member_logits_of
from ..fusion.structure import without_weights
from ..models.modeling_hydra import HydraClassifierOutput
from ..models.task import classifies_tokens
from ..training import Recipe, finetune_members, lora_config
from .baseline import check_is_count
from .deep_ensemble import join_members
from .seeding import seeded


if TYPE_CHECKING:
    from peft import PeftModel


CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"


class LoRAEnsemble(nn.Module):
    """One backbone with one LoRA adapter and one classifier per member; the members run in turn.

    Threads may share it; they wait for each other, since it switches between adapters.

    Args:
        model (`PeftModel`): has an adapter per member; the ensemble freezes and uses it.
            `finetune_lora_ensemble` makes one.
    """

    def __init__(self, model: "PeftModel"):
        super().__init__()
        if not hasattr(model, "peft_config"):
            raise TypeError(f"model is a {type(model).__name__}: pass a PeftModel with one adapter per member")
        self.model = model.requires_grad_(False).eval()
        self.adapters = tuple(model.peft_config)

    @property
    def num_members(self) -> int:
        return len(self.adapters)

    @property
    def input_model(self) -> PreTrainedModel:
        return self.model.get_base_model()

    def count_multiply_adds(self) -> int:
        """Count multiply-adds of all members, with their adapters."""
        from peft import get_peft_model

        count = 0
        inputs = inputs_for(self, 1, "meta")
        for adapter in self.adapters:
            backbone = without_weights(type(self.input_model), self.model.config)
            model = get_peft_model(backbone, copy.deepcopy(self.model.peft_config[adapter]))
            count += multiply_adds_of(model, **inputs)
        return count

    def forward(self, **inputs: Any) -> HydraClassifierOutput:
        """Return `member_logits` (batch, members, classes)."""
        backbone = self.input_model
        inputs = accepted_inputs(backbone, inputs)
        per_token = classifies_tokens(backbone)
        member_logits = []
        with ONE_PASS:
            for adapter in self.adapters:
                self.model.set_adapter(adapter, inference_mode=True)
                output = self.model(**inputs)
                member_logits.append(member_logits_of(output, type(backbone).__name__, per_token))
        return answer_of(backbone, join_members(member_logits, "adapters"))

    @classmethod
    def from_pretrained(cls, backbone: PreTrainedModel, folder: str | os.PathLike) -> "LoRAEnsemble":
        """Load what `finetune_lora_ensemble` wrote; raise if it is not complete.

        Args:
            backbone (`PreTrainedModel`): the model that the adapters were trained on; it is copied.
            folder (`str` or `os.PathLike`): has `member-0`, `member-1`, ...
        """
        count = len(list(Path(folder).glob("member-*")))
        members = [Path(folder) / f"member-{index}" for index in range(max(1, count))]
        for member in members:
            for name in (CONFIG_FILE, WEIGHTS_FILE):
                if not (member / name).is_file():  # PEFT would look for it on the Hub
                    raise FileNotFoundError(f"{member} has no {name}, so the ensemble is not whole: train or save it")
        return _with_adapters(backbone, members)


def _with_adapters(backbone: PreTrainedModel, folders: Sequence[Path]) -> LoRAEnsemble:
    """Load an adapter from each folder; raise where PEFT would silently leave out weights."""
    from peft import PeftModel, get_peft_model_state_dict

    try:
        # PEFT builds the adapters into the model it gets.
        model = PeftModel.from_pretrained(copy.deepcopy(backbone), folders[0], adapter_name=folders[0].name)
        for member in folders[1:]:
            model.load_adapter(member, adapter_name=member.name)

        # Compare what was saved with what the model has a place for.
        # Resized embeddings are saved with an adapter, but belong to the backbone.
        of_backbone = {f"base_model.model.{name}" for name in backbone.state_dict()}
        for member in folders:
            with safe_open(member / WEIGHTS_FILE, "pt") as file:
                saved = set(file.keys())
            # Looking for resized embeddings, PEFT would ask the Hub for the backbone's config.
            expected = set(get_peft_model_state_dict(model, adapter_name=member.name, save_embedding_layers=False))
            unknown = saved - expected - of_backbone
            if unknown:
                raise RuntimeError(f"no place for {min(unknown)} of {member.name}")
            missing = expected - saved
            if missing:
                raise RuntimeError(f"no {min(missing)} in {member.name}")
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[-1].strip()
        raise ValueError(
            f"the adapters in {folders[0].parent} do not fit this {type(backbone).__name__} ({reason}): pass "
            "the backbone that they were trained on"
        ) from error
    return LoRAEnsemble(model)


def finetune_lora_ensemble(
    model: PreTrainedModel,
    recipe: Recipe | str,
    train_data: Any,
    validation_data: Any,
    output_dir: str | os.PathLike,
    num_members: int = 3,
    r: int = 4,
    lora_alpha: float = 8,
    targets: Sequence[str] = ("q", "v"),
    seed: int = 0,
    **options: Any,
) -> LoRAEnsemble:
    """Fine-tune a new adapter and classifier `num_members` times (paper, C.1.4).

    Called again, it resumes. The defaults of `num_members`, `r` and `lora_alpha` are the paper's.

    Args:
        model (`PreTrainedModel`): the backbone, a Hugging Face classifier; it stays as it is.
        recipe (`Recipe` or `str`): as in `finetune_members`, without its choice of parts and
        layers. train_data, validation_data: as in `finetune_members`.
        output_dir (`str` or `os.PathLike`): gets one folder per member, which
            `LoRAEnsemble.from_pretrained` reads.
        num_members (`int`, defaults to 3): how many adapters.
        r (`int`, defaults to 4): their rank.
        lora_alpha (`float`, defaults to 8): their scale times the rank.
        targets (`Sequence[str]`, defaults to `("q", "v")`): the attention's projections that get an
            adapter, of "q", "k", "v" and "o"; see `lora_config`.
        seed (`int`, defaults to 0): member i starts and trains with `seed + i`.
        options: further arguments of `finetune_members`.
    """
    from peft import get_peft_model

    # New adapters and classifiers.
    check_is_count(num_members)
    members = []
    for index in range(num_members):
        with seeded(seed + index, model):
            config = lora_config(model, r=r, targets=targets, lora_alpha=lora_alpha)
            members.append(get_peft_model(copy.deepcopy(model), config))

    # All folders at once, so that an ensemble that lacks members is not taken for a whole one.
    folders = [Path(output_dir) / f"member-{index}" for index in range(num_members)]
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
    finetune_members(members, recipe, train_data, validation_data, output_dir, seed=seed, **options)
    return _with_adapters(model, folders)
