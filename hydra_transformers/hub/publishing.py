"""Publishes a model with its code, processor and card, or its page, in one commit on the Hub."""

import importlib.util
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub import CommitInfo, CommitOperationAdd, CommitOperationDelete, HfApi, ModelCard, get_token
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
    RemoteEntryNotFoundError,
)
from huggingface_hub.utils import filter_repo_objects
from transformers import PreTrainedModel
from transformers.utils import logging

from ..baselines import Baseline
from ..baselines.baseline import MODEL_FOLDER
from ..reports.report import UncertaintyReport
from ..reports.task_report import TaskReport
from ..uncertainty import CalibratedClassifier, TemperatureScaling
from .card import create_model_card, split_decision, task_of
from .card_sections import EditedCardError, renewed, replaced
from .handler import KINDS
from .space import EXAMPLES, PACKAGE


logger = logging.get_logger(f"transformers.{__name__}")  # follows Transformers' verbosity

REPORT_FOLDER = "evaluation"
PLOTS = {"uncertainty_split": "Uncertainty by data set", "reliability_diagram": "Reliability diagram"}
# Weights of an earlier push, whole or in shards, might be loaded in place of these.
LEFT_OVERS = ["model.safetensors", "model-*-of-*.safetensors", "model.safetensors.index.json"]
LEFT_OVERS += [f"{MODEL_FOLDER}/{name}" for name in LEFT_OVERS]  # of a baseline
LEFT_OVERS_OF_SPACE = [f"{PACKAGE.name}/*", f"{EXAMPLES}/*"]
HANDLER = Path(__file__).with_name("handler.py")  # published as it is
REFUSALS = {
    401: "the Hub does not accept the token: run `hf auth login` again, or pass another token=",
    403: "the token may not write to {repo_id}: use one with write access, and a namespace of your own",
    404: "the Hub has no repository {repo_id}, or this token may not see it: check the name and the token",
}
NO_TOKEN = "there is no token for the Hub: run `hf auth login`, set HF_TOKEN, or pass token="


class HubError(RuntimeError):
    """The Hub refused, or could not be reached; the message is one sentence that says what to do."""


def push_hydra_to_hub(
    model: PreTrainedModel | Baseline | CalibratedClassifier,
    repo_id: str,
    processor: Any = None,
    report: UncertaintyReport | TaskReport | None = None,
    *,
    temperature: TemperatureScaling | None = None,
    card: ModelCard | None = None,
    private: bool | None = None,
    token: str | None = None,
    commit_message: str | None = None,
    overwrite_card: bool = False,
    **card_arguments: Any,
) -> CommitInfo:
    """Publishes a Hydra in one commit: weights, config, code, processor, card and report. With a processor also
    `handler.py`, with which an Inference Endpoint of the Hub answers with uncertainty and abstention.

    Args:
        model: a Hydra, left unchanged; or a baseline around one model, calibrated or not, which only this package loads.
        repo_id: "me/my-hydra"; created if it does not exist.
        processor: the image processor, tokenizer or processor that prepares the model's inputs.
        report: from `evaluate_uncertainty`: goes into the card, and as JSON and plots into `evaluation/`.
        temperature: published as `temperature.json`. It belongs to these weights: pass a new one with new weights.
        card: a card of your own; by default `create_model_card` makes it. Refused if the card on the Hub has other text
            outside the generated parts.
        private: whether a new repository is private; by default your account's setting. An existing one stays as it is.
        token: by default the one you logged in with (`hf auth login`) or `HF_TOKEN`.
        overwrite_card: replace the whole card on the Hub. Otherwise its generated parts are renewed and the text around
            them stays; a card that was edited inside them, or not made by `create_model_card`, is refused.
        card_arguments: those of `create_model_card`: base_model, dataset, license, circuits, fine_tunings, fine_tuning,
            report_model.

    Pushing again is safe: unchanged files make no new commit, and files of your own in the repository stay.
    """
    inside, _ = split_decision(model)
    task_of(inside)  # refuses other models before asking for a token
    api = _api(token)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        plots = _stage(folder, model, processor, report, temperature)
        is_own = card is not None
        if not is_own:
            card_arguments |= {"repo_id": repo_id, "temperature": temperature, "plots": plots}
            card = create_model_card(model, report, **card_arguments)
        elif card_arguments:
            raise ValueError(
                f"card is given, so {', '.join(card_arguments)} would have no effect: leave one of them out"
            )
        with _one_sentence(repo_id):
            api.create_repo(repo_id, private=private, exist_ok=True)
            existing = None if overwrite_card else _file_on_hub(api, repo_id, "README.md")
            if existing is not None:
                try:
                    card = (replaced if is_own else renewed)(existing, card)
                except EditedCardError as error:
                    raise EditedCardError(
                        f"{repo_id}: {error}: pass overwrite_card=True to replace it, or bring its text in line first"
                    ) from error
            card.save(folder / "README.md")
            _warn_of_unknown_data_sets(api, card)
            _leave_own_handler(api, repo_id, folder)
            # Not upload_folder, which may divide a large folder into several commits.
            return api.create_commit(
                repo_id,
                _operations(api, repo_id, folder, LEFT_OVERS),
                commit_message=commit_message or f"Upload {type(inside).__name__}",
            )


def push_space_to_hub(
    folder: str | os.PathLike, space_id: str, *, private: bool | None = None, token: str | None = None
) -> CommitInfo:
    """Publishes a folder that `write_space` wrote as a Space, in one commit.

    Args:
        folder: published as it is, edited or not; code and examples of an earlier push are removed, other files stay.
        space_id: "me/my-hydra"; created if it does not exist.
        private: whether a new Space is private; by default your account's setting.
        token: by default the one you logged in with (`hf auth login`) or `HF_TOKEN`.
    """
    folder = Path(folder)
    if not (folder / "app.py").is_file():
        raise ValueError(f"{folder} holds no Space, it has no app.py: write one with write_space")
    api = _api(token)
    with _one_sentence(space_id):
        api.create_repo(space_id, repo_type="space", space_sdk="gradio", private=private, exist_ok=True)
        operations = _operations(api, space_id, folder, LEFT_OVERS_OF_SPACE, "space")
        return api.create_commit(space_id, operations, repo_type="space", commit_message="Upload the page")


def _api(token: str | None) -> HfApi:
    if token is None and get_token() is None:
        raise HubError(NO_TOKEN)
    return HfApi(token=token)


def _operations(
    api: HfApi, repo_id: str, folder: Path, left_overs: list[str], repo_type: str | None = None
) -> list[CommitOperationAdd | CommitOperationDelete]:
    """Adds all files of the folder, and deletes those that an earlier push left over."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    added = {path.relative_to(folder).as_posix(): path for path in files}
    there = api.list_repo_files(repo_id, repo_type=repo_type)
    left_over = filter_repo_objects(there, allow_patterns=left_overs)
    return [
        *(CommitOperationAdd(name, path) for name, path in added.items()),
        *(CommitOperationDelete(name) for name in left_over if name not in added),
    ]


def _leave_own_handler(api: HfApi, repo_id: str, folder: Path) -> None:
    """Our handler replaces an earlier one of ours, known by its first line; any other on the Hub stays."""
    if not (folder / HANDLER.name).exists():
        return
    there = _file_on_hub(api, repo_id, HANDLER.name)
    if there is not None and "Made by hydra_transformers" not in there.partition("\n")[0]:
        logger.warning(f"{repo_id} has a handler.py of its own, which stays")
        (folder / HANDLER.name).unlink()


def _stage(
    folder: Path,
    model: PreTrainedModel | Baseline | CalibratedClassifier,
    processor: Any,
    report: UncertaintyReport | TaskReport | None,
    temperature: TemperatureScaling | None,
) -> dict[str, str]:
    """Writes everything but the card, and returns the card's plots: title -> path."""
    model, decision = split_decision(model)
    model.save_pretrained(folder)
    if decision is not None:
        decision.save(folder)
    if processor is not None:
        processor.save_pretrained(folder)
        # The handler loads no baselines, which need this package.
        if isinstance(model, PreTrainedModel) and not KINDS.keys().isdisjoint(model.config.auto_classes):
            shutil.copyfile(HANDLER, folder / HANDLER.name)
    if temperature is not None:
        temperature.save(folder)
    if report is None:
        return {}
    (folder / REPORT_FOLDER).mkdir()
    report.to_json(folder / REPORT_FOLDER / "report.json")
    if isinstance(report, TaskReport):
        return {}  # it has tables only
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


def _warn_of_unknown_data_sets(api: HfApi, card: ModelCard) -> None:
    named = card.data.get("datasets") or []
    for name in [named] if isinstance(named, str) else named:
        if not api.repo_exists(name, repo_type="dataset"):
            warnings.warn(f"the Hub has no data set {name} that you can see, and the card names it", stacklevel=3)


@contextmanager
def _one_sentence(repo_id: str) -> Iterator[None]:
    """Turns errors of the Hub and of the network into a `HubError`."""
    try:
        yield
    except OfflineModeIsEnabled as error:
        raise HubError("the Hub is switched off by HF_HUB_OFFLINE: unset it to publish") from error
    except GatedRepoError as error:
        raise HubError(f"{repo_id} is gated: ask for access on its page, then try again") from error
    except LocalTokenNotFoundError as error:
        raise HubError(NO_TOKEN) from error
    except HfHubHTTPError as error:
        status = getattr(error.response, "status_code", None)
        message = (error.server_message or str(error)).strip().splitlines()[0]
        known = REFUSALS.get(status)
        refused = f"the Hub refused to publish {repo_id} (status {status}): {message}"
        raise HubError(refused if known is None else known.format(repo_id=repo_id)) from error
    except Exception as error:
        if not _is_network_failure(error):
            raise
        raise HubError(
            f"the Hub could not be reached ({type(error).__name__}): check the network, or save the model to a folder "
            "with save_pretrained and publish it later"
        ) from error


def _is_network_failure(error: Exception) -> bool:
    """Whatever HTTP library huggingface_hub is built on."""
    library = type(error).__module__.split(".")[0].rstrip("2")  # httpx2 from huggingface_hub 2.4 on
    known = isinstance(error, (ConnectionError, TimeoutError, LocalEntryNotFoundError))
    return known or library in ("httpx", "httpcore", "requests", "urllib3")
