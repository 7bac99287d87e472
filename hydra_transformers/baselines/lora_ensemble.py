"""LoRA ensembles (Wang et al., 2023; Mühlematter et al., 2024): one backbone, one small adapter per member."""

import copy
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..files import write_atomically
from ..models.ensembling import HydraClassifierOutput
from ..prediction import accepted_inputs, answer_of, device_of, member_logits_of
from ..training.finetune import finetune_members
from ..training.lora import lora_config
from ..training.recipes import Recipe
from .deep_ensemble import joined
from .seeding import seeded


if TYPE_CHECKING:
    from peft import PeftModel


CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"


class LoRAEnsemble(nn.Module):
    """One backbone with one LoRA adapter, and one classifier, per member; the members answer in turn.

    model: a `PeftModel`, each adapter of which is a member; it becomes part of the ensemble, which freezes it and switches
        between its adapters. `finetune_lora_ensemble` makes one of a backbone.
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
    def device(self) -> torch.device:
        return device_of(self.model)

    def forward(self, **inputs: Any) -> HydraClassifierOutput:
        backbone = self.model.get_base_model()
        inputs = accepted_inputs(backbone, inputs)
        answers = []
        for adapter in self.adapters:
            self.model.set_adapter(adapter, inference_mode=True)
            answers.append(member_logits_of(self.model(**inputs), type(backbone).__name__))
        return answer_of(backbone, joined(answers, "adapters"))

    def save_pretrained(self, folder: str | os.PathLike) -> None:
        """Writes the adapters, `member-0`, `member-1`, ..., each a folder that PEFT can load too; not the backbone."""
        from peft import get_peft_model_state_dict
        from safetensors.torch import save

        found = member_folders(folder)
        if len(found) > self.num_members:
            raise ValueError(
                f"{folder} has {found[-1].name}, this ensemble has {self.num_members} members: pass another folder"
            )
        for index, adapter in enumerate(self.adapters):
            # Told not to look for resized embeddings, PEFT does not ask the Hub for the backbone's config.
            weights = get_peft_model_state_dict(self.model, adapter_name=adapter, save_embedding_layers=False)
            weights = {name: weight.contiguous() for name, weight in weights.items()}
            member = Path(folder) / f"member-{index}"
            write_atomically(member / WEIGHTS_FILE, save(weights, metadata={"format": "pt"}))
            self.model.peft_config[adapter].save_pretrained(member)

    @classmethod
    def from_pretrained(cls, backbone: PreTrainedModel, folder: str | os.PathLike) -> "LoRAEnsemble":
        """The ensemble saved in `folder`, or trained there by `finetune_lora_ensemble`; the backbone stays as it is."""
        folders = member_folders(folder)
        if not folders:
            raise FileNotFoundError(f"{folder} has no member-0 with an {CONFIG_FILE}: save a LoRAEnsemble there first")
        return _with_adapters(backbone, folders)


def member_folders(folder: str | os.PathLike) -> list[Path]:
    """The folders `member-0`, `member-1`, ... of adapters, as far as they go."""
    folders: list[Path] = []
    while (member := Path(folder) / f"member-{len(folders)}").joinpath(CONFIG_FILE).is_file():
        folders.append(member)
    return folders


def _with_adapters(backbone: PreTrainedModel, folders: Sequence[Path]) -> LoRAEnsemble:
    PeftModel = _peft("LoRAEnsemble").PeftModel
    for member in folders:
        if not (member / WEIGHTS_FILE).is_file():  # PEFT would look for it on the Hub
            raise FileNotFoundError(f"{member} has no {WEIGHTS_FILE}: save the LoRAEnsemble again")
    try:
        # PEFT would build the adapters into the model that was passed in.
        model = PeftModel.from_pretrained(copy.deepcopy(backbone), folders[0], adapter_name=folders[0].name)
        for member in folders[1:]:
            model.load_adapter(member, adapter_name=member.name)
    except RuntimeError as error:
        raise ValueError(
            f"the adapters in {folders[0].parent} do not fit this {type(backbone).__name__} ({_last_line(error)}): pass "
            "the backbone that they were trained on"
        ) from error
    return LoRAEnsemble(model)


def _last_line(error: Exception) -> str:
    return str(error).strip().splitlines()[-1].strip()


def finetune_lora_ensemble(
    model: PreTrainedModel,
    recipe: Recipe | str,
    train_dataset: Any,
    eval_dataset: Any,
    output_dir: str | os.PathLike,
    num_members: int = 3,
    r: int = 4,
    lora_alpha: float = 8,
    targets: Sequence[str] = ("q", "v"),
    seed: int = 0,
    learning_rates: str | Sequence[float] | None = None,
    compute_metrics: Callable[[Any], dict[str, float]] | None = None,
    data_collator: Callable | None = None,
    processing_class: Any = None,
    **training_arguments,
) -> LoRAEnsemble:
    """Fine-tunes the model `num_members` times, each time a new adapter and the classifier only (paper, C.1.4).

    Args:
        model: the backbone, a Hugging Face classifier; it stays as it is.
        recipe, train_dataset, eval_dataset, learning_rates, compute_metrics, data_collator, processing_class,
            training_arguments: as in `finetune_members`. What the recipe says of the parts and layers that train does not
            count here, all else of it does.
        output_dir: gets one folder per member, from which `LoRAEnsemble.from_pretrained(model, output_dir)` loads them.
        num_members, r, lora_alpha: how many adapters, their rank, and their scale times the rank; the paper's are 3, 4, 8.
        targets: the attention's projections that get an adapter, of "q", "k", "v" and "o"; see `lora_config`.
        seed: member i starts from the adapter, and trains in the order, of `seed + i`.

    Call it again with the same arguments and it goes on where it was, as `finetune_members` does.
    """
    if num_members < 1:
        raise ValueError(f"num_members is {num_members}: pass at least 1")
    peft = _peft("finetune_lora_ensemble()")
    members = []
    for index in range(num_members):
        with seeded(seed + index, model):
            config = lora_config(model, r=r, targets=targets, lora_alpha=lora_alpha)
            members.append(peft.get_peft_model(copy.deepcopy(model), config))
    finetune_members(
        members,
        recipe,
        train_dataset,
        eval_dataset,
        output_dir,
        seed=seed,
        learning_rates=learning_rates,
        compute_metrics=compute_metrics,
        data_collator=data_collator,
        processing_class=processing_class,
        **training_arguments,
    )
    return _with_adapters(model, [Path(output_dir) / f"member-{index}" for index in range(num_members)])


def _peft(what: str) -> Any:
    try:
        import peft
    except ImportError as error:
        raise ImportError(f"{what} needs peft: pip install peft") from error
    return peft
