"""Errors of the Hub and its libraries as one sentence."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager


NOT_REACHED = {"LocalEntryNotFoundError", "ConnectionError", "TimeoutError", "ConnectError", "ConnectTimeout"}


class AccessError(OSError):
    """A model or a data set cannot be loaded; the message is one sentence."""


@contextmanager
def access_to(name: str, kind: str) -> Iterator[None]:
    """Turns errors of the Hub and its libraries while `name`, a model or a data set, is loaded into one sentence."""
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
    chain = list(_causes(error))
    types = {cls.__name__ for cause in chain for cls in type(cause).__mro__}
    text = " ".join(map(str, chain))
    repository = name.partition(":")[0]
    is_offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
    if "GatedRepoError" in types or "gated dataset" in text:
        page = f"https://huggingface.co/{'datasets/' if kind == 'data set' else ''}{repository}"
        return f"the {kind} {repository} is gated: ask for access on {page}, and log in with `hf auth login`"
    if "OfflineModeIsEnabled" in types or (is_offline and types & NOT_REACHED):
        return f"the {kind} {name} is not on this machine, and HF_HUB_OFFLINE forbids the download: unset it, or pass a folder"
    if types & {"RepositoryNotFoundError", "DatasetNotFoundError", "HFValidationError"}:
        return f"there is no folder {name}, and the Hub has no {kind} {repository} that you can see: check the name"
    if types & NOT_REACHED or any(_is_of_http_library(cause) for cause in chain):
        return f"the Hub could not be reached for the {kind} {name}: check the network, or pass a local folder"
    if "Config name is missing" in text or ("BuilderConfig" in text and "not found" in text):
        configs = re.search(r"\[(.*?)\]", text, re.DOTALL)
        names = configs[1].replace("'", "") if configs else "see its page"
        return f"the data set {name} has several configs, name one as {repository}:CONFIG: {names}"
    if types & {"SafetensorError", "StrictDataclassError"}:
        what = "its weights are" if "SafetensorError" in types else "its config.json is"
        return f"the {kind} {name} cannot be read, {what} broken ({in_one_line(error)}): save or fetch it again"
    if isinstance(error, OSError):
        return f"the {kind} {name} cannot be read: {first_line(error)}"
    return None


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _is_of_http_library(error: BaseException) -> bool:
    """Whichever one huggingface_hub and datasets are built on."""
    return type(error).__module__.split(".")[0].rstrip("2") in ("httpx", "httpcore", "requests", "urllib3", "aiohttp")


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def in_one_line(error: BaseException) -> str:
    return " ".join(line.strip() for line in str(error).strip().splitlines()) or type(error).__name__
