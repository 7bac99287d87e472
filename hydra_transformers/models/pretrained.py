"""Constructors, saving, loading and pushing of every Hydra model."""

import importlib
import inspect
import math
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import torch
import transformers
from huggingface_hub import HfApi
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.dynamic_module_utils import get_relative_import_files

from .configuration_hydra import PROBLEM_TYPES, SHARED_PARTS, TrunkLayers, saved_with
from .modeling_hydra import Grouped, HydraAttention, LayerScale, make_kept_heads_mask
from .task import TASKS, task_of_config


# A checkpoint is one of the first two; where both lie in a folder, Transformers loads the first.
WHOLE = "model.safetensors"
INDEX_OF_SHARDS = "model.safetensors.index.json"
SHARDS = "model-*-of-*.safetensors"
# Files that a decision brings along, be there others of these names from another version or not.
OF_DECISIONS = ("decision", "detection", "weights_digest", "task")
Model = TypeVar("Model", bound="HydraModelMixin")


class HydraModelMixin:
    """Every Hydra. A family sets

    - `backbone_classes`: the classes of Transformers that it is built from; by default that of its
      own name without "Hydra". `backbone_rules.py` tells where these have its parameters,
    - `architecture`: its name, as people call it,
    - `per_member_parameters`: bare parameters with one row per member,
    - `backbone_config_key`: the part of a backbone's config that it is made from, where that is not
      all of it,
    - `own_fields`: config fields that are always so, whatever a backbone's says,
    - `supports_lora_on_qkvo`: False where the backbone's attention reads the weights of q, k, v and
      o without calling them,
    - `unused_prefixes`: prefixes of parameters that do not affect the output,
    - `is_base_model`: on the class without a head, which then takes what it needs from a model with
      one.

    Checkpoints hold `kept_heads_mask` of each attention: packed rows do not tell whose they are.
    """

    backbone_classes: tuple[type, ...] = ()
    per_member_parameters: tuple[str, ...] = ()
    backbone_config_key: str | None = None
    own_fields: dict[str, bool] = {}
    unused_prefixes: tuple[str, ...] = ()
    supports_lora_on_qkvo: bool = True
    is_base_model: bool = False
    _can_record_outputs = {"attentions": HydraAttention}
    _supports_flex_attn = False  # its masks cannot be repeated for the members
    _keys_to_ignore_on_load_missing = [r"kept_heads_mask$"]  # of weights that were put together by hand

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        for auto_class, path in cls.config_class.auto_classes.items():
            if path.endswith(f".{cls.__name__}"):
                cls._auto_class = auto_class  # so that Transformers saves the code with it
        cls.__doc__ = inspect.getdoc(cls)  # where it has none, that of its mixin
        # None for subclasses of a user or of FSDP, which keep what they inherit.
        backbone_class = getattr(transformers, cls.__name__.removeprefix("Hydra"), None)
        if "PreTrained" not in cls.__name__ and "backbone_classes" not in vars(cls) and backbone_class is not None:
            cls.backbone_classes = (backbone_class,)

    @classmethod
    def from_backbone(
        cls: type[Model],
        model: PreTrainedModel | str | os.PathLike,
        heads_to_prune: dict | None = None,
        check: bool = True,
        **options: Any,
    ) -> Model:
        """Build a Hydra of this class from a Transformers model: see `AutoHydra.from_backbone`,
        whose options it takes."""
        return package("fusion").from_backbone(cls, model, heads_to_prune, check, **options)

    @classmethod
    def from_pruned_members(
        cls: type[Model],
        members: Sequence[PreTrainedModel],
        shared: Sequence[str] = SHARED_PARTS,
        trunk_layers: TrunkLayers = None,
        allow_equal: bool = False,
        check: bool = True,
    ) -> Model:
        """Fuse members into one Hydra of this class: see `AutoHydra.from_pruned_members`."""
        return package("fusion").from_pruned_members(cls, members, shared, trunk_layers, allow_equal, check)

    def member(self: Model, index: int) -> Model:
        """Return member `index` as a one-member Hydra of its own; shared parts are copied into
        it."""
        return package("fusion").member(self, index)

    def post_init(self) -> None:
        self.num_members: int = self.config.num_members
        self.decision: torch.nn.Module | None = None
        settings = getattr(self.config, "decision", None)
        if settings is not None and not self.is_base_model:
            # By name: models that are not calibrated ship without these files.
            module = importlib.import_module(".decision", __package__)
            num_weights = sum(weight.numel() for weight in self.parameters())
            self.decision = module.decision_of(settings, num_weights)
            self._keep_in_fp32_modules_strict = ["decision"]
        super().post_init()

    @property
    def is_calibrated(self) -> bool:
        """Whether a calibration is applied: not while it trains, nor with other weights
        (`Decision.is_current`)."""
        return self.decision is not None and not self.training and self._has_its_weights()

    @torch.compiler.assume_constant_result  # a compiled model is looked at when it is compiled
    def _has_its_weights(self) -> bool:
        return self.decision.is_current(self)

    def calibrate(self, data: Any, ood_data: Any = None, **options: Any) -> Any:
        """Fit a temperature, a detector with its threshold, and prediction sets, which become part
        of the model: saved, loaded and pushed with it, and applied to its predictions. See
        `hydra_transformers.uncertainty.calibrate`."""
        return package("uncertainty.calibration").calibrate(self, data, ood_data, **options)

    def predict(self, inputs: Any, processor: Any = None, batch_size: int = 1, **parameters: Any) -> list[dict]:
        """Return a dict for each of several texts, images (of PIL, or their paths) or audio: label,
        score, how uncertain and why, whether to abstain, and which classes it may be. See
        `pipeline_hydra.predict`."""
        from .pipeline_hydra import predict  # not above: that would import all pipelines with every model

        return predict(self, self.pipeline_class(), inputs, processor, batch_size, **parameters)

    @contextmanager
    def uncalibrated(self) -> Iterator[None]:
        """Predict as before the calibration: `with hydra.uncalibrated():`."""
        decision = self.decision
        self.decision = None
        try:
            yield
        finally:
            self.decision = decision

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "peft_config" and self.decision is not None:  # PEFT's only trace of an adapter that will be merged
            self.decision.compare_again()

    def initial_std(self, module: Grouped) -> float:
        """Return how widely a packed layer's fresh weights spread."""
        return self.config.initializer_range

    @torch.no_grad()
    def _init_weights(self, module: torch.nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, Grouped):
            init.normal_(module.weight, mean=0.0, std=self.initial_std(module))
            if module.bias is not None:
                init.zeros_(module.bias)
        if isinstance(module, LayerScale):
            init.constant_(module.weight, self.config.layer_spec.layer_scale)
        if module is self.decision:
            for tensor in module.buffers():
                init.constant_(tensor, math.nan)  # what is not loaded then shows
        if hasattr(module, "kept_heads_mask"):
            mask = make_kept_heads_mask(module.kept_heads, module.config.num_attention_heads)
            init.copy_(module.kept_heads_mask, mask.to(module.kept_heads_mask.device))

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> torch.nn.Embedding:
        """Resize the word embeddings, as in Transformers; raise, before anything changes, where
        members have their own."""
        # Transformers resizes the weight in place before it sets the embeddings, which is what
        # raises.
        self.set_input_embeddings(self.get_input_embeddings())
        return super().resize_token_embeddings(*args, **kwargs)

    @classmethod
    def from_pretrained(cls: type[Model], *args: Any, **kwargs: Any) -> Model:
        settings = {"use_safetensors": True} | kwargs  # nothing else is ever saved
        returns_info = settings.get("output_loading_info")
        settings["output_loading_info"] = True
        model, info = super().from_pretrained(*args, **settings)

        # Raise where the weights are of another model than the config.
        check_same_parts(model, info["missing_keys"], info["unexpected_keys"])
        for module in model.modules():
            if hasattr(module, "kept_heads_mask"):
                module.check_same_heads(module.kept_heads_mask)
        if model.decision is not None:
            model.decision.check_loaded()
            model.decision.compare(model)
        if returns_info:
            return model, info
        return model

    def save_pretrained(self, save_directory: str | os.PathLike, *args: Any, **kwargs: Any) -> Any:
        # Every Auto class that can load the folder; Transformers by itself would only add the one
        # of this class.
        self.config.auto_map = dict(self.config.auto_classes)
        # AutoModel then makes the encoder with a pooler where there is one, and its weights are in
        # the folder.
        for name, value in getattr(self, "encoder_options", {}).items():
            setattr(self.config, name, value)
        for_any_client = {}
        if self.decision is not None and self.decision.compare(self):  # which says so where its weights are others
            for_any_client = self.decision.settings.fields_for_any_client()
        with saved_with(self.config, for_any_client):
            saved = super().save_pretrained(save_directory, *args, **kwargs)
        self._add_code(Path(save_directory))
        whole = Path(save_directory, WHOLE)
        index = Path(save_directory, INDEX_OF_SHARDS)
        if whole.exists() and index.exists():  # one is of an earlier save, and may be loaded in place of this one
            min(whole, index, key=lambda path: path.stat().st_mtime_ns).unlink()
        return saved

    def _add_code(self, folder: Path) -> None:
        tasks = PROBLEM_TYPES  # an encoder may get a head for any task
        if not self.is_base_model:
            tasks = [task_of_config(self.config).name]
        for task in tasks:
            module, _, name = TASKS[task].rpartition(".")
            if module != "task":  # which every model has
                add_code(Path(__file__).with_name(f"{module}.py"), name, folder)
        if self.decision is not None:
            add_code(Path(inspect.getfile(type(self.decision))), type(self.decision).__name__, folder)

    def _upload_modified_files(self, working_dir, repo_id, *args, token=None, revision=None, **kwargs):
        self._add_code(Path(working_dir))  # `save_pretrained(push_to_hub=True)` uploads before it returns
        commit = super()._upload_modified_files(working_dir, repo_id, *args, token=token, revision=revision, **kwargs)

        # What is left of an earlier push may be loaded in place of this one.
        left_over = {WHOLE, INDEX_OF_SHARDS} - set(os.listdir(working_dir))
        if len(left_over) == 1:
            revision = getattr(commit, "pr_revision", None) or revision
            remove_left_over(HfApi(token=token), repo_id, revision, *left_over)
        return commit


def remove_left_over(api: HfApi, repo_id: str, revision: str | None, name: str) -> None:
    """Delete the weights of an earlier push from a repository.

    name: `WHOLE` or `INDEX_OF_SHARDS`, with which the shards go too
    """
    patterns = [name]
    if name == INDEX_OF_SHARDS:
        patterns.append(SHARDS)
    files = []
    for file in api.list_repo_files(repo_id, revision=revision):
        if "/" not in file and any(fnmatch(file, pattern) for pattern in patterns):
            files.append(file)
    if files:
        message = "Remove the weights of an earlier push"
        api.delete_files(repo_id, delete_patterns=files, revision=revision, commit_message=message)


def check_same_parts(model: HydraModelMixin, missing: Iterable[str], unexpected: Iterable[str]) -> None:
    """Raise for weights that were saved with other parts shared than the config names.

    A part that is not shared has the member's number in its weights' names: those that the model
    misses and those that the file has too many then differ by a number alone.
    """
    prefix = f"{model.base_model_prefix}."
    missing_names = {name.removeprefix(prefix) for name in missing}
    unexpected_names = {name.removeprefix(prefix) for name in unexpected}
    ways = {
        "is saved for all members and named for each": (missing_names, unexpected_names),
        "is saved for each member and named for all": (unexpected_names, missing_names),
    }
    for problem, (of_members, of_all) in ways.items():
        for name in sorted(of_members):
            shared_name = next((other for other in names_without_one_number(name) if other in of_all), None)
            if shared_name is not None:
                raise ValueError(
                    f"the weights were saved with other parts shared than config.shared names ({shared_name} "
                    f"{problem}): use the config.json that was saved with them, and fuse the members again to share "
                    "other parts"
                )


def names_without_one_number(name: str) -> list[str]:
    """Return "mlp.fc1.weight" for "mlp.0.fc1.weight"; one name for each number in it."""
    parts = name.split(".")
    return [".".join(parts[:place] + parts[place + 1 :]) for place, part in enumerate(parts) if part.isdigit()]


def package(part: str) -> ModuleType:
    """Import the part of the installed package that builds and fits models; running them does not
    need it."""
    try:
        return importlib.import_module(f"hydra_transformers.{part}")
    except ModuleNotFoundError as error:
        if str(error.name).partition(".")[0] != "hydra_transformers":
            raise
        raise ImportError(
            "building a Hydra, taking one apart or calibrating it needs the package hydra_transformers, which is not "
            "installed here or too old: pip install --upgrade hydra_transformers"
        ) from error


def add_code(source: Path, name: str, folder: Path) -> None:
    """Add a file that not every model needs to the code in a folder.

    Transformers finds it by an import at the end of the files that all models and all pipelines
    read.

    name: of something in it
    """
    if not source.exists():
        return  # this model came without it
    for path in (source, *map(Path, get_relative_import_files(source))):
        # Others, such as modeling_hydra.py, are there already, and may be of another version than
        # this package's.
        if path.name.startswith(OF_DECISIONS) or not (folder / path.name).exists():
            shutil.copyfile(path, folder / path.name)
    line = f"from .{source.stem} import {name}  # noqa: E402, F401\n"
    for code in (folder / "modeling_hydra.py", folder / "pipeline_hydra.py"):
        if code.exists() and line not in code.read_text(encoding="utf-8"):
            with open(code, "a", encoding="utf-8") as file:
                file.write(f"\n{line}")
