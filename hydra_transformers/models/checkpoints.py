"""Saving, loading and pushing a Hydra, so that what is loaded is what was saved."""

import os
from pathlib import Path

import torch
from huggingface_hub import HfApi
from torch import nn
from transformers import initialization as init

from .kept_heads import as_mask


# A checkpoint is one of them; where both lie in a folder, Transformers loads the first.
WHOLE, INDEX_OF_SHARDS = "model.safetensors", "model.safetensors.index.json"
SHARDS = "model-*-of-*.safetensors"


class CheckpointMixin:
    """Gives every attention of a Hydra the buffer `kept_heads_mask` (members, heads of the backbone).

    It goes into the checkpoint beside the weights: packed rows do not tell whose they are, and a config.json that was
    changed would deal them out to other members.
    """

    _keys_to_ignore_on_load_missing = [r"kept_heads_mask$"]  # checkpoints from before it was saved

    def post_init(self):
        for attention, kept_heads in zip(self._attentions(), getattr(self.config, "kept_heads", ()), strict=False):
            attention.named_mask = as_mask(kept_heads, self.config.num_attention_heads)
            attention.register_buffer("kept_heads_mask", torch.tensor(attention.named_mask, dtype=torch.uint8))
        super().post_init()

    def _attentions(self) -> list[nn.Module]:
        """Those of an encoder, in the order of its layers; a model around encoders has none of its own."""
        return [layer.attention for layer in getattr(self, "layers", ())]

    @torch.no_grad()
    def _init_weights(self, module: nn.Module):
        super()._init_weights(module)
        if hasattr(module, "kept_heads_mask"):
            mask = torch.tensor(module.named_mask, dtype=torch.uint8, device=module.kept_heads_mask.device)
            init.copy_(module.kept_heads_mask, mask)

    @classmethod
    def from_pretrained(cls, *args, **kwargs):
        loaded = super().from_pretrained(*args, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        for name, module in model.named_modules():
            if hasattr(module, "kept_heads_mask"):
                check_same_heads(module.kept_heads_mask, module.named_mask, name)
        return loaded

    def _load_from_state_dict(self, state_dict, prefix, *args):
        for layer, attention in enumerate(self._attentions()):
            name = f"{prefix}layers.{layer}.attention"
            saved = state_dict.setdefault(f"{name}.kept_heads_mask", attention.kept_heads_mask)
            check_same_heads(saved, attention.named_mask, name)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def save_pretrained(self, save_directory: str | os.PathLike, *args, **kwargs):
        # Every Auto class that can load the folder; Transformers by itself would only add the one of this class.
        self.config.auto_map = dict(self.config.auto_classes)
        saved = super().save_pretrained(save_directory, *args, **kwargs)
        whole, index = Path(save_directory, WHOLE), Path(save_directory, INDEX_OF_SHARDS)
        if whole.exists() and index.exists():
            # One of them is of an earlier save, and may be loaded in place of this one.
            min(whole, index, key=lambda path: path.stat().st_mtime_ns).unlink()
        return saved

    def _upload_modified_files(self, working_dir, repo_id, *args, token=None, revision=None, **kwargs):
        commit = super()._upload_modified_files(working_dir, repo_id, *args, token=token, revision=revision, **kwargs)
        pushed = os.listdir(working_dir)
        if WHOLE in pushed or INDEX_OF_SHARDS in pushed:
            left_over = [WHOLE] if INDEX_OF_SHARDS in pushed else [INDEX_OF_SHARDS, SHARDS]
            remove_from_hub(left_over, repo_id, token, revision=getattr(commit, "pr_revision", None) or revision)
        return commit


def check_same_heads(saved: torch.Tensor, named: list[list[int]], attention: str) -> None:
    """Refuses weights that were saved for other heads than the config names.

    saved: (members, heads), as it was saved with the weights of the attention of this name
    named: the same by the config
    """
    if saved.is_meta or saved.tolist() == named:
        return  # on the meta device nothing was loaded
    before, now = ([[head for head, kept in enumerate(m) if kept] for m in mask] for mask in (saved.tolist(), named))
    raise ValueError(
        f"the weights of {attention} were saved for the heads {before} of each member, config.kept_heads names {now}: use "
        "the config.json that was saved with them"
    )


def remove_from_hub(patterns: list[str], repo_id: str, token: str | bool | None, revision: str | None) -> None:
    """Removes files of an earlier push, where there are any."""
    api = HfApi(token=token)
    there = api.list_repo_files(repo_id, revision=revision)
    found = [name for name in there if any(Path(name).match(pattern) and "/" not in name for pattern in patterns)]
    if found:
        message = "Remove the weights of an earlier push"
        api.delete_files(repo_id, delete_patterns=found, revision=revision, commit_message=message)
