"""LoRA ensembles (Wang et al., 2023; Mühlematter et al., 2024): one backbone, one small adapter per member."""

import copy
import hashlib
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import nn
from transformers import PreTrainedModel

from .._io.files import write_atomically
from .._io.threads import ONE_PASS
from ..cost import inputs_for, multiply_adds_of
from ..data.prediction import accepted_inputs, answer_of, classifies_tokens, device_of, member_logits_of
from ..fusion import without_weights
from ..models.modeling_hydra import HydraClassifierOutput
from ..training.finetune import finetune_members
from ..training.lora import lora_config
from ..training.recipes import Recipe
from ..training.run_folders import FINISHED, MEMBERS, RUN
from .baseline import check_is_count
from .deep_ensemble import join_members
from .seeding import seeded


if TYPE_CHECKING:
    from peft import PeftModel


CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
AGAIN = "save the LoRAEnsemble again, or where it was being trained call finetune_lora_ensemble again"


class LoRAEnsemble(nn.Module):
    """One backbone with one LoRA adapter and one classifier per member; the members run in turn.

    model: a `PeftModel` with an adapter per member, which the ensemble freezes and uses; `finetune_lora_ensemble` makes one

    Threads may share it; they wait for each other, since it switches between adapters.
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

    @property
    def input_model(self) -> PreTrainedModel:
        return self.model.get_base_model()

    def count_multiply_adds(self) -> int:
        from peft import get_peft_model

        count, inputs = 0, inputs_for(self, 1, "meta")
        for adapter in self.adapters:
            backbone = without_weights(type(self.input_model), self.model.config)
            model = get_peft_model(backbone, copy.deepcopy(self.model.peft_config[adapter]))
            count += multiply_adds_of(model, **inputs)
        return count

    def forward(self, **inputs: Any) -> HydraClassifierOutput:
        backbone, member_logits = self.input_model, []
        inputs = accepted_inputs(backbone, inputs)
        with ONE_PASS:
            for adapter in self.adapters:
                self.model.set_adapter(adapter, inference_mode=True)
                output = self.model(**inputs)
                member_logits.append(member_logits_of(output, type(backbone).__name__, classifies_tokens(backbone)))
        return answer_of(backbone, join_members(member_logits, "adapters"))

    def save_pretrained(self, folder: str | os.PathLike) -> None:
        """Writes the adapters, not the backbone, as folders that PEFT can load: `member-0`, `member-1`, ..."""
        folder = Path(folder)
        numbers = _member_numbers(folder)
        if numbers and numbers[-1] >= self.num_members:
            raise ValueError(
                f"{folder} has member-{numbers[-1]}, this ensemble has {self.num_members} members: pass another folder"
            )
        if any((folder / f"member-{number}" / RUN).exists() for number in numbers):
            raise ValueError(f"{folder} holds a fine-tuning, which could not be resumed then: pass another folder")
        files = {
            f"member-{index}/{name}": content
            for index, adapter in enumerate(self.adapters)
            for name, content in _adapter_files(self.model, adapter).items()
        }
        # The record comes first, so that a save that was cut off is noticed.
        digests = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
        write_atomically(folder / MEMBERS, json.dumps({"members": self.num_members, "files": digests}, indent=1))
        for name, content in files.items():
            write_atomically(folder / name, content)

    @classmethod
    def from_pretrained(cls, backbone: PreTrainedModel, folder: str | os.PathLike) -> "LoRAEnsemble":
        """Loads what `save_pretrained` or `finetune_lora_ensemble` wrote, if it is complete; the backbone is copied."""
        return _with_adapters(backbone, _checked_member_folders(Path(folder)))


def _adapter_files(model: "PeftModel", adapter: str) -> dict[str, bytes]:
    """An adapter's files, as PEFT writes them."""
    weights = {name: weight.contiguous() for name, weight in _adapter_weights(model, adapter).items()}
    with TemporaryDirectory() as folder:
        model.peft_config[adapter].save_pretrained(folder)
        config = Path(folder, CONFIG_FILE).read_bytes()
    return {CONFIG_FILE: config, WEIGHTS_FILE: save(weights, metadata={"format": "pt"})}


def _adapter_weights(model: "PeftModel", adapter: str) -> dict[str, torch.Tensor]:
    from peft import get_peft_model_state_dict

    # Looking for resized embeddings, PEFT would ask the Hub for the backbone's config.
    return get_peft_model_state_dict(model, adapter_name=adapter, save_embedding_layers=False)


def _member_numbers(folder: Path) -> list[int]:
    found = [re.fullmatch(r"member-(\d+)", path.name) for path in folder.glob("member-*")]
    return sorted(int(match[1]) for match in found if match)


def _checked_member_folders(folder: Path) -> list[Path]:
    """`member-0`, `member-1`, ..., as many as the folder's record says; without a record, there must be no gaps."""
    record = json.loads((folder / MEMBERS).read_text()) if (folder / MEMBERS).exists() else {}
    numbers = _member_numbers(folder)
    count = record.get("members", numbers[-1] + 1 if numbers else 0)
    if not count:
        raise FileNotFoundError(f"{folder} has no member-0 with an {CONFIG_FILE}: save a LoRAEnsemble there first")
    members = [folder / f"member-{index}" for index in range(count)]
    for member in members:
        if (member / RUN).exists() and not (member / FINISHED).exists():
            raise ValueError(f"{member} is not finished, of {count} members: call finetune_lora_ensemble again")
        for name in (CONFIG_FILE, WEIGHTS_FILE):
            if not (member / name).is_file():  # PEFT would look for it on the Hub
                raise FileNotFoundError(f"{member} has no {name}, of {count} members: {AGAIN}")
    for name, digest in record.get("files", {}).items():
        if hashlib.sha256((folder / name).read_bytes()).hexdigest() != digest:
            raise ValueError(f"{folder / name} is not the file that was saved with the others: {AGAIN}")
    if numbers[-1] >= count:
        raise ValueError(f"{folder} has member-{numbers[-1]}, and was saved with {count} members: {AGAIN}")
    return members


def _with_adapters(backbone: PreTrainedModel, folders: Sequence[Path]) -> LoRAEnsemble:
    PeftModel = _peft("LoRAEnsemble").PeftModel
    try:
        # PEFT builds the adapters into the model it gets.
        model = PeftModel.from_pretrained(copy.deepcopy(backbone), folders[0], adapter_name=folders[0].name)
        for member in folders[1:]:
            model.load_adapter(member, adapter_name=member.name)
        for member in folders:
            _check_all_was_loaded(backbone, model, member)
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[-1].strip()
        raise ValueError(
            f"the adapters in {folders[0].parent} do not fit this {type(backbone).__name__} ({reason}): pass "
            "the backbone that they were trained on"
        ) from error
    return LoRAEnsemble(model)


def _check_all_was_loaded(backbone: PreTrainedModel, model: "PeftModel", member: Path) -> None:
    """PEFT ignores weights that have no place, and places that have no weights."""
    with safe_open(member / WEIGHTS_FILE, "pt") as file:
        saved = set(file.keys())
    places = set(_adapter_weights(model, member.name))
    # Resized embeddings are saved with an adapter, but belong to the backbone.
    surplus = saved - places - {f"base_model.model.{name}" for name in backbone.state_dict()}
    if surplus:
        raise RuntimeError(f"no place for {min(surplus)} of {member.name}")
    if places - saved:
        raise RuntimeError(f"no {min(places - saved)} in {member.name}")


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
    """Fine-tunes a new adapter and classifier `num_members` times (paper, C.1.4); called again, it resumes.

    Args:
        model: the backbone, a Hugging Face classifier; it stays as it is.
        recipe, train_data, validation_data, options: as in `finetune_members`; the recipe's choice of parts and layers is
            ignored.
        output_dir: gets one folder per member, for `LoRAEnsemble.from_pretrained(model, output_dir)`.
        num_members, r, lora_alpha: how many adapters, their rank, and their scale times the rank; the defaults are the paper's.
        targets: the attention's projections that get an adapter, of "q", "k", "v" and "o"; see `lora_config`.
        seed: member i starts and trains with `seed + i`.
    """
    check_is_count(num_members)
    peft = _peft("finetune_lora_ensemble()")
    members = []
    for index in range(num_members):
        with seeded(seed + index, model):
            config = lora_config(model, r=r, targets=targets, lora_alpha=lora_alpha)
            members.append(peft.get_peft_model(copy.deepcopy(model), config))
    finetune_members(members, recipe, train_data, validation_data, output_dir, seed=seed, **options)
    return _with_adapters(model, [Path(output_dir) / f"member-{index}" for index in range(num_members)])


def _peft(caller: str) -> Any:
    try:
        import peft
    except ImportError as error:
        raise ImportError(f"{caller} needs peft: pip install peft") from error
    return peft
