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
    """The Hub refused, or could not be reached; the message is one sentence that says what to do."""


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
    """Publishes a Hydra in one commit: weights, config, code, processor, card and report. With a processor also
    `handler.py`, with which an Inference Endpoint of the Hub answers with uncertainty and abstention.

    Args:
        model (`PreTrainedModel`): a Hydra, left unchanged.
        repo_id (`str`): "me/my-hydra"; created if it does not exist.
        processor (*optional*): the image processor, tokenizer or processor that prepares the model's inputs.
        report (`Report`, *optional*): from `evaluate_uncertainty`: goes into the card, and as JSON and plots into
            `evaluation/`.
        card (`ModelCard`, *optional*): a card of your own; by default `create_model_card` makes it.
        private (`bool`, *optional*): whether a new repository is private; by default your account's setting.
        token (`str`, *optional*): by default the one you logged in with (`hf auth login`) or `HF_TOKEN`.
        overwrite_card (`bool`, defaults to `False`): whether to replace a card that is on the Hub, which stays otherwise.
        card_arguments (*optional*): of `create_model_card`: base_model, dataset, license, circuits, fine_tuning, pruning,
            report_model.

    Returns:
        `CommitInfo`: the commit. Unchanged files make no new one, and files of your own in the repository stay.
    """
    card_task(model)  # raises on other models before asking for a token
    if card is not None and card_arguments:
        raise ValueError(f"card is given, so {', '.join(card_arguments)} would have no effect: leave one of them out")
    api = _api(token)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        plots = _stage(folder, model, processor, report)
        new = card or create_model_card(model, report, repo_id=repo_id, plots=plots, **card_arguments)
        with _one_sentence(repo_id):
            api.create_repo(repo_id, private=private, exist_ok=True)
            existing = None if overwrite_card else _file_on_hub(api, repo_id, "README.md")
            if existing in (None, str(new)):
                new.save(folder / "README.md")
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
    """Publishes a folder that `write_space` wrote as a Space, in one commit.

    Args:
        folder (`str` or `os.PathLike`): published as it is; code of an earlier push is removed, other files stay.
        space_id (`str`): "me/my-hydra"; created if it does not exist.
        private (`bool`, *optional*): whether a new Space is private; by default your account's setting.
        token (`str`, *optional*): by default the one you logged in with (`hf auth login`) or `HF_TOKEN`.

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
    if token is None and get_token() is None:
        raise HubError("there is no token for the Hub: run `hf auth login`, set HF_TOKEN, or pass token=")
    return HfApi(token=token)


def _operations(
    api: HfApi, repo_id: str, folder: Path, left_overs: list[str], repo_type: str | None = None
) -> list[CommitOperationAdd | CommitOperationDelete]:
    """Adds all files of the folder, and deletes those that an earlier push left over."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    added = {path.relative_to(folder).as_posix(): path for path in files}
    left_over = filter_repo_objects(api.list_repo_files(repo_id, repo_type=repo_type), allow_patterns=left_overs)
    return [
        *(CommitOperationAdd(name, path) for name, path in added.items()),
        *(CommitOperationDelete(name) for name in left_over if name not in added),
    ]


def _leave_own_handler(api: HfApi, repo_id: str, folder: Path) -> None:
    """Our handler replaces an earlier one of ours, known by its first line; any other on the Hub stays."""
    existing = _file_on_hub(api, repo_id, HANDLER.name) if (folder / HANDLER.name).exists() else None
    if existing is not None and "Made by hydra_transformers" not in existing.partition("\n")[0]:
        logger.warning(f"{repo_id} has a handler.py of its own, which stays")
        (folder / HANDLER.name).unlink()


def _stage(folder: Path, model: PreTrainedModel, processor: Any, report: "Report | None") -> dict[str, str]:
    """Writes everything but the card, and returns the card's plots: title -> path."""
    model.save_pretrained(folder)
    if processor is not None:
        processor.save_pretrained(folder)
        if not INPUTS.keys().isdisjoint(model.config.auto_classes):
            shutil.copyfile(HANDLER, folder / HANDLER.name)
    if report is None:
        return {}
    report.to_json(folder / REPORT_FOLDER / "report.json")
    if importlib.util.find_spec("matplotlib") is None:
        logger.warning("matplotlib is not installed: the report is published without plots")
        return {}
    drawn = {path.stem: path for path in report.plot(folder / REPORT_FOLDER)}
    return {title: f"{REPORT_FOLDER}/{drawn[name].name}" for name, title in PLOTS.items() if name in drawn}


def _file_on_hub(api: HfApi, repo_id: str, name: str) -> str | None:
    try:
        path = api.hf_hub_download(repo_id, name, force_download=True)  # never an old one from the cache
    except RemoteEntryNotFoundError:
        return None
    return Path(path).read_text(encoding="utf-8", errors="replace")


@contextmanager
def _one_sentence(repo_id: str) -> Iterator[None]:
    """Turns errors of the Hub and of the network into a `HubError`."""
    try:
        yield
    except Exception as error:
        library = type(error).__module__.split(".")[0].rstrip("2")  # httpx2 from huggingface_hub 2.4 on
        if library not in LIBRARIES and not isinstance(error, (ConnectionError, TimeoutError)):
            raise
        status = getattr(getattr(error, "response", None), "status_code", None)
        message = (getattr(error, "server_message", None) or str(error)).strip().partition("\n")[0]
        reason = f"{repo_id} was not published ({status or type(error).__name__}): {message}"
        raise HubError(REFUSALS[status].format(repo_id=repo_id) if status in REFUSALS else reason) from error
