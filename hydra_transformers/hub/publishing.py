"""Publishes a Hydra with its code, processor and card, or its page, in one commit on the Hub."""

import importlib.util
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import CommitInfo, CommitOperationAdd, CommitOperationDelete, HfApi, ModelCard, get_token
from huggingface_hub.errors import RemoteEntryNotFoundError
from huggingface_hub.utils import filter_repo_objects
from transformers import PreTrainedModel
from transformers.utils import logging

from ..models.auto import INPUTS
from .card import card_task, create_model_card
from .space import PACKAGE


if TYPE_CHECKING:
    from ..reports import Report

logger = logging.get_logger(f"transformers.{__name__}")  # follows Transformers' verbosity

REPORT_FOLDER = "evaluation"
PLOTS = {"risk_coverage": "Risk and coverage", "reliability_diagram": "Reliability diagram"}
# Weights of an earlier push, whole or in shards, might be loaded in place of these.
LEFT_OVERS = ["model.safetensors", "model-*-of-*.safetensors", "model.safetensors.index.json"]
LEFT_OVERS_OF_SPACE = [f"{PACKAGE.name}/*"]
HANDLER = Path(__file__).with_name("handler.py")  # published as it is
REFUSALS = {
    401: "the Hub does not accept the token: run `hf auth login` again, or pass another token=",
    403: "the token may not write to {repo_id}: use one with write access, and a namespace of your own",
    404: "the Hub has no repository {repo_id}, or this token may not see it: check the name and the token",
}
LIBRARIES = ("huggingface_hub", "httpx", "httpcore", "requests", "urllib3")


class HubError(RuntimeError):
    """The Hub refused, or could not be reached; its message is a sentence that says what to do."""


def push_hydra_to_hub(
    model: PreTrainedModel,
    repo_id: str,
    processor: Any = None,
    report: "Report | None" = None,
    *,
    card: ModelCard | None = None,
    private: bool | None = None,
    token: str | None = None,
    overwrite_card: bool = False,
    **card_arguments: Any,
) -> CommitInfo:
    """Publish a Hydra in one commit: weights, config, code, processor, card and report.

    With a processor also `handler.py`, with which an Inference Endpoint of the Hub answers with
    uncertainty and abstention.

    Args:
        model (`PreTrainedModel`):
            A Hydra, left unchanged.
        repo_id (`str`):
            "me/my-hydra"; created if it does not exist.
        processor (*optional*):
            The image processor, tokenizer or processor that prepares the model's inputs.
        report (`Report`, *optional*):
            From `evaluate_uncertainty`: goes into the card, and as JSON and plots into
            `evaluation/`.
        card (`ModelCard`, *optional*):
            A card of your own; by default `create_model_card` makes it.
        private (`bool`, *optional*):
            Whether a new repository is private; by default your account's setting.
        token (`str`, *optional*):
            By default the one you logged in with (`hf auth login`) or `HF_TOKEN`.
        overwrite_card (`bool`, defaults to `False`):
            Whether to replace a card that is on the Hub, which stays otherwise.
        card_arguments (*optional*):
            Of `create_model_card`: base_model, dataset, license, circuits, fine_tuning, pruning,
            report_model.

    Returns:
        `CommitInfo`: the commit. Unchanged files make no new one, and files of your own in the
        repository stay.
    """
    # Check what needs no network, before a token is asked for.
    card_task(model)
    if card is not None and card_arguments:
        names = ", ".join(card_arguments)
        raise ValueError(f"card is given, so {names} would have no effect: leave one of them out")
    api = _api(token)
    with tempfile.TemporaryDirectory() as temporary:
        # All files in a folder.
        folder = Path(temporary)
        plots = _stage(folder, model, processor, report)
        new_card = card or create_model_card(model, report, repo_id=repo_id, plots=plots, **card_arguments)

        with _one_sentence(repo_id):
            api.create_repo(repo_id, private=private, exist_ok=True)
            existing = None
            if not overwrite_card:
                existing = _file_on_hub(api, repo_id, "README.md")

            # A card and a handler of the owner's own stay.
            if existing in (None, str(new_card)):
                new_card.save(folder / "README.md")
            elif card is not None:
                raise ValueError(f"{repo_id} has another card: pass overwrite_card=True to replace it, or no card")
            else:
                logger.warning(f"{repo_id} has a card, which stays: pass overwrite_card=True to replace it")
            _leave_own_handler(api, repo_id, folder)

            # Not upload_folder, which may divide a large folder into several commits.
            operations = _operations(api, repo_id, folder, LEFT_OVERS)
            return api.create_commit(repo_id, operations, commit_message=f"Upload {type(model).__name__}")


def push_space_to_hub(
    folder: str | os.PathLike, space_id: str, *, private: bool | None = None, token: str | None = None
) -> CommitInfo:
    """Publish a folder that `write_space` wrote as a Space, in one commit.

    Args:
        folder (`str` or `os.PathLike`):
            Published as it is; code of an earlier push is removed, other files stay.
        space_id (`str`):
            "me/my-hydra"; created if it does not exist.
        private (`bool`, *optional*):
            Whether a new Space is private; by default your account's setting.
        token (`str`, *optional*):
            By default the one you logged in with (`hf auth login`) or `HF_TOKEN`.

    Returns:
        `CommitInfo`: the commit.
    """
    folder = Path(folder)
    if not (folder / "app.py").is_file():
        raise ValueError(f"{folder} is not a Space, it has no app.py: write one with write_space")
    api = _api(token)
    with _one_sentence(space_id):
        api.create_repo(space_id, repo_type="space", space_sdk="gradio", private=private, exist_ok=True)
        operations = _operations(api, space_id, folder, LEFT_OVERS_OF_SPACE, "space")
        return api.create_commit(space_id, operations, repo_type="space", commit_message="Upload the page")


def _api(token: str | None) -> HfApi:
    """Return the Hub's interface; raise, before anything is sent, where there is no token."""
    if token is None and get_token() is None:
        raise HubError("there is no token for the Hub: run `hf auth login`, set HF_TOKEN, or pass token=")
    return HfApi(token=token)


def _operations(
    api: HfApi, repo_id: str, folder: Path, left_overs: list[str], repo_type: str | None = None
) -> list[CommitOperationAdd | CommitOperationDelete]:
    """Add all files of the folder, and delete those that an earlier push left over.

    left_overs: patterns of their names
    """
    operations: list[CommitOperationAdd | CommitOperationDelete] = []
    added = set()
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            name = path.relative_to(folder).as_posix()
            operations.append(CommitOperationAdd(name, path))
            added.add(name)
    names_on_hub = api.list_repo_files(repo_id, repo_type=repo_type)
    for name in filter_repo_objects(names_on_hub, allow_patterns=left_overs):
        if name not in added:
            operations.append(CommitOperationDelete(name))
    return operations


def _leave_own_handler(api: HfApi, repo_id: str, folder: Path) -> None:
    """Keep a handler on the Hub that is not ours; ours is known by its first line, and replaced."""
    if not (folder / HANDLER.name).exists():
        return
    existing = _file_on_hub(api, repo_id, HANDLER.name)
    if existing is None:
        return
    first_line, _, _ = existing.partition("\n")
    if "Made by hydra_transformers" not in first_line:
        logger.warning(f"{repo_id} has a handler.py of its own, which stays")
        (folder / HANDLER.name).unlink()


def _stage(folder: Path, model: PreTrainedModel, processor: Any, report: "Report | None") -> dict[str, str]:
    """Write everything but the card; return the card's plots: title -> path."""
    model.save_pretrained(folder)
    if processor is not None:
        processor.save_pretrained(folder)
        can_answer = not INPUTS.keys().isdisjoint(model.config.auto_classes)
        if can_answer:
            shutil.copyfile(HANDLER, folder / HANDLER.name)
    if report is None:
        return {}
    report.to_json(folder / REPORT_FOLDER / "report.json")
    if importlib.util.find_spec("matplotlib") is None:
        logger.warning("matplotlib is not installed: the report is published without plots")
        return {}
    drawn = {path.stem: path.name for path in report.plot(folder / REPORT_FOLDER)}
    return {title: f"{REPORT_FOLDER}/{drawn[name]}" for name, title in PLOTS.items() if name in drawn}


def _file_on_hub(api: HfApi, repo_id: str, name: str) -> str | None:
    """Return the text of a file on the Hub; None where there is none."""
    try:
        path = api.hf_hub_download(repo_id, name, force_download=True)  # never an old one from the cache
    except RemoteEntryNotFoundError:
        return None
    return Path(path).read_text(encoding="utf-8", errors="replace")


@contextmanager
def _one_sentence(repo_id: str) -> Iterator[None]:
    """Turn errors of the Hub and of the network into a `HubError`."""
    try:
        yield
    except Exception as error:
        library = type(error).__module__.split(".")[0].rstrip("2")  # httpx2 from huggingface_hub 2.4 on
        if library not in LIBRARIES and not isinstance(error, (ConnectionError, TimeoutError)):
            raise
        status = getattr(getattr(error, "response", None), "status_code", None)
        if status in REFUSALS:
            raise HubError(REFUSALS[status].format(repo_id=repo_id)) from error
        message = getattr(error, "server_message", None) or str(error)
        first_line, _, _ = message.strip().partition("\n")
        reason = status or type(error).__name__
        raise HubError(f"{repo_id} was not published ({reason}): {first_line}") from error
