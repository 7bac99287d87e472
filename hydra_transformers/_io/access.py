"""Errors of the Hub and its libraries as one sentence."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager


NOT_REACHED = {"LocalEntryNotFoundError", "ConnectionError", "TimeoutError", "ConnectError", "ConnectTimeout"}
HTTP_LIBRARIES = ("httpx", "httpcore", "requests", "urllib3", "aiohttp")


class AccessError(OSError):
    """A model or a data set cannot be loaded; the message is one sentence."""


@contextmanager
def access_to(name: str, kind: str) -> Iterator[None]:
    """Turn errors of the Hub and its libraries into one sentence, while something is loaded.

    Args:
        name (`str`): what is loaded: a folder, or a name on the Hub.
        kind (`str`): "model" or "data set".
    """
    try:
        yield
    except AccessError:
        raise
    except Exception as error:
        sentence = _access_problem(error, name, kind)
        if sentence is None:
            raise
        raise AccessError(sentence) from error


def _access_problem(error: BaseException, name: str, kind: str) -> str | None:
    """Return the sentence for an error, None for an error that has nothing to do with access."""
    # Libraries wrap each other's errors: the cause may be anywhere in the chain. Errors are known
    # by the names of their types, so that none of the libraries has to be imported.
    chain = list(_causes(error))
    types = {cls.__name__ for cause in chain for cls in type(cause).__mro__}
    text = " ".join(map(str, chain))
    repository = name.partition(":")[0]

    # Locked, or cut off on purpose.
    if "GatedRepoError" in types or "gated dataset" in text:
        folder = "datasets/" if kind == "data set" else ""
        page = f"https://huggingface.co/{folder}{repository}"
        return f"the {kind} {repository} is gated: ask for access on {page}, and log in with `hf auth login`"
    is_offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
    if "OfflineModeIsEnabled" in types or (is_offline and types & NOT_REACHED):
        return (
            f"the {kind} {name} is not on this machine, and HF_HUB_OFFLINE forbids the download: unset it, or pass a "
            "folder"
        )

    # Not there, or not reached.
    if types & {"RepositoryNotFoundError", "DatasetNotFoundError", "HFValidationError"}:
        return f"there is no folder {name}, and the Hub has no {kind} {repository} that you can see: check the name"
    if types & NOT_REACHED or any(_is_of_http_library(cause) for cause in chain):
        return f"the Hub could not be reached for the {kind} {name}: check the network, or pass a local folder"

    # There, and not readable as it is.
    if "Config name is missing" in text or ("BuilderConfig" in text and "not found" in text):
        listed = re.search(r"\[(.*?)\]", text, re.DOTALL)
        names = "see its page"
        if listed is not None:
            names = listed[1].replace("'", "")
        return f"the data set {name} has several configs, name one as {repository}:CONFIG: {names}"
    if types & {"SafetensorError", "StrictDataclassError"}:
        broken = "its config.json is broken"
        if "SafetensorError" in types:
            broken = "its weights are broken"
        return f"the {kind} {name} cannot be read, {broken} ({in_one_line(error)}): save or fetch it again"
    if isinstance(error, OSError):
        return f"the {kind} {name} cannot be read: {first_line(error)}"
    return None


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error, its cause, the cause of that, and so on."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _is_of_http_library(error: BaseException) -> bool:
    """Whether an error comes from an HTTP library; huggingface_hub and datasets change theirs."""
    library = type(error).__module__.split(".")[0]
    return library.rstrip("2") in HTTP_LIBRARIES


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type's name where it has no message."""
    lines = str(error).strip().splitlines()
    if not lines:
        return type(error).__name__
    return lines[0]


def in_one_line(error: BaseException) -> str:
    """Return an error's message with its lines joined, or its type's name without a message."""
    lines = str(error).strip().splitlines()
    return " ".join(line.strip() for line in lines) or type(error).__name__
