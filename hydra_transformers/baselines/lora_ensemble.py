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
from torch import nn
from transformers import PreTrainedModel

from .._io.files import write_atomically
from .._io.threads import ONE_PASS
from ..cost import inputs_for, multiply_adds_of
from ..data.prediction import accepted_inputs, answer_of, device_of, member_logits_of
from ..fusion import without_weights
from ..models.modeling_hydra import HydraClassifierOutput
from ..training.finetune import finetune_members
from ..training.lora import lora_config
from ..training.recipes import Recipe
from ..training.run_folders import FINISHED, MEMBERS, RUN
from .baseline import check_is_count
from .deep_ensemble import joined
from .seeding import seeded


if TYPE_CHECKING:
    from peft import PeftModel


CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"


class LoRAEnsemble(nn.Module):
    """One backbone with one LoRA adapter, and one classifier, per member; the members answer in turn.

    model: a `PeftModel`, each adapter of which is a member; it becomes part of the ensemble, which freezes it and switches
        between its adapters. `finetune_lora_ensemble` makes one of a backbone.

    Threads may share it; as it switches, they wait for each other.
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
            count += multiply_adds_of(
                get_peft_model(backbone, copy.deepcopy(self.model.peft_config[adapter])), **inputs
            )
        return count

    def forward(self, **inputs: Any) -> HydraClassifierOutput:
        backbone = self.model.get_base_model()
        inputs = accepted_inputs(backbone, inputs)
        answers = []
        with ONE_PASS:
            for adapter in self.adapters:
                self.model.set_adapter(adapter, inference_mode=True)
                answers.append(member_logits_of(self.model(**inputs), type(backbone).__name__))
        return answer_of(backbone, joined(answers, "adapters"))

    def save_pretrained(self, folder: str | os.PathLike) -> None:
        """Writes the adapters, `member-0`, `member-1`, ..., each a folder that PEFT can load too; not the backbone."""
        folder = Path(folder)
        numbers = _member_numbers(folder)
        if numbers and numbers[-1] >= self.num_members:
            raise ValueError(
                f"{folder} has member-{numbers[-1]}, this ensemble has {self.num_members} members: pass another folder"
            )
        if any((folder / f"member-{number}" / RUN).exists() for number in numbers):
            raise ValueError(f"{folder} holds a fine-tuning, which goes on from what is there: pass another folder")
        files = {}
        for index, adapter in enumerate(self.adapters):
            for name, content in _adapter_files(self.model, adapter).items():
                files[f"member-{index}/{name}"] = content
        # Written first, so that a part of the files is never taken for all of them, nor old ones for new ones.
        digests = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
        write_atomically(folder / MEMBERS, json.dumps({"members": self.num_members, "files": digests}, indent=1))
        for name, content in files.items():
            write_atomically(folder / name, content)

    @classmethod
    def from_pretrained(cls, backbone: PreTrainedModel, folder: str | os.PathLike) -> "LoRAEnsemble":
        """The ensemble saved in `folder`, or trained there by `finetune_lora_ensemble`; the backbone stays as it is.

        A folder in which a member is missing, unfinished or not the one that was saved is refused.
        """
        return _with_adapters(backbone, member_folders(folder))


def _adapter_files(model: "PeftModel", adapter: str) -> dict[str, bytes]:
    """An adapter's files by name, as PEFT writes them."""
    from peft import get_peft_model_state_dict
    from safetensors.torch import save

    # Told not to look for resized embeddings, PEFT does not ask the Hub for the backbone's config.
    weights = get_peft_model_state_dict(model, adapter_name=adapter, save_embedding_layers=False)
    weights = {name: weight.contiguous() for name, weight in weights.items()}
    with TemporaryDirectory() as folder:
        model.peft_config[adapter].save_pretrained(folder)
        config = Path(folder, CONFIG_FILE).read_bytes()
    return {CONFIG_FILE: config, WEIGHTS_FILE: save(weights, metadata={"format": "pt"})}


def _member_numbers(folder: Path) -> list[int]:
    names = [path.name for path in folder.glob("member-*")]
    return sorted(int(name.removeprefix("member-")) for name in names if re.fullmatch(r"member-\d+", name))


def member_folders(folder: str | os.PathLike) -> list[Path]:
    """The folders `member-0`, `member-1`, ... of a whole ensemble of adapters; a part of one is refused.

    How many there shall be is in the folder's record. One without a record, of adapters that were put there by other
    means, must have no gaps.
    """
    folder = Path(folder)
    record = json.loads((folder / MEMBERS).read_text()) if (folder / MEMBERS).exists() else {}
    numbers = _member_numbers(folder)
    count = record.get("members", numbers[-1] + 1 if numbers else 0)
    if not count:
        raise FileNotFoundError(f"{folder} has no member-0 with an {CONFIG_FILE}: save a LoRAEnsemble there first")
    again = "save the LoRAEnsemble again, or where it was being trained call finetune_lora_ensemble again"
    members = [folder / f"member-{index}" for index in range(count)]
    for member in members:
        if (member / RUN).exists() and not (member / FINISHED).exists():
            raise ValueError(f"{member} is not finished, of {count} members: call finetune_lora_ensemble again")
        for name in (CONFIG_FILE, WEIGHTS_FILE):
            if not (member / name).is_file():  # PEFT would look for it on the Hub
                raise FileNotFoundError(f"{member} has no {name}, of {count} members: {again}")
    for name, digest in record.get("files", {}).items():
        if hashlib.sha256((folder / name).read_bytes()).hexdigest() != digest:
            raise ValueError(f"{folder / name} is not the file that was saved with the others: {again}")
    if numbers[-1] >= count:
        raise ValueError(f"{folder} has member-{numbers[-1]}, and was saved with {count} members: {again}")
    return members


def _with_adapters(backbone: PreTrainedModel, folders: Sequence[Path]) -> LoRAEnsemble:
    PeftModel = _peft("LoRAEnsemble").PeftModel
    try:
        # PEFT would build the adapters into the model that was passed in.
        model = PeftModel.from_pretrained(copy.deepcopy(backbone), folders[0], adapter_name=folders[0].name)
        for member in folders[1:]:
            model.load_adapter(member, adapter_name=member.name)
        for member in folders:
            _check_that_all_was_loaded(backbone, model, member)
    except RuntimeError as error:
        raise ValueError(
            f"the adapters in {folders[0].parent} do not fit this {type(backbone).__name__} ({_last_line(error)}): pass "
            "the backbone that they were trained on"
        ) from error
    return LoRAEnsemble(model)


def _check_that_all_was_loaded(backbone: PreTrainedModel, model: "PeftModel", member: Path) -> None:
    """PEFT leaves out what it finds no place for, and leaves as it was what it finds no weights for."""
    from peft import get_peft_model_state_dict
    from safetensors import safe_open

    with safe_open(member / WEIGHTS_FILE, "pt") as file:
        saved = set(file.keys())
    places = set(get_peft_model_state_dict(model, adapter_name=member.name, save_embedding_layers=False))
    # Resized embeddings are saved with an adapter, and are the backbone's.
    also = {f"base_model.model.{name}" for name in backbone.state_dict()}
    if saved - places - also:
        raise RuntimeError(f"no place for {min(saved - places - also)} of {member.name}")
    if places - saved:
        raise RuntimeError(f"no {min(places - saved)} in {member.name}")


def _last_line(error: Exception) -> str:
    return str(error).strip().splitlines()[-1].strip()


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
    """Fine-tunes the model `num_members` times, each time a new adapter and the classifier only (paper, C.1.4).

    Args:
        model: the backbone, a Hugging Face classifier; it stays as it is.
        recipe, train_data, validation_data, options: as in `finetune_members`. What the recipe says of the parts and layers
            that train does not count here, all else of it does.
        output_dir: gets one folder per member, from which `LoRAEnsemble.from_pretrained(model, output_dir)` loads them.
        num_members, r, lora_alpha: how many adapters, their rank, and their scale times the rank; the paper's are 3, 4, 8.
        targets: the attention's projections that get an adapter, of "q", "k", "v" and "o"; see `lora_config`.
        seed: member i starts from the adapter, and trains in the order, of `seed + i`.

    Call it again with the same arguments and it goes on where it was, as `finetune_members` does.
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


def _peft(what: str) -> Any:
    try:
        import peft
    except ImportError as error:
        raise ImportError(f"{what} needs peft: pip install peft") from error
    return peft
