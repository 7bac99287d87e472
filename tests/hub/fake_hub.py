"""A Hub that only takes notes, and tiny Hydras to publish."""

import inspect

import pytest
from huggingface_hub import CommitOperationDelete, HfApi
from huggingface_hub.errors import RemoteEntryNotFoundError

from hydra_transformers.hub import publishing
from tests.families import Family


def hydra_of(family: Family):
    return family.fused().float()


class FakeHub:
    """Stands in for HfApi: keeps the files that were committed, and notes what was asked of it."""

    def __init__(self):
        self.files: dict[str, bytes] = {}
        self.calls: list[tuple[str, dict]] = []
        self.fails_with: Exception | None = None

    def __call__(self, token=None):
        self.token = token
        return self

    @staticmethod
    def check(name, *positional, **arguments):
        """Refuses a call that the real HfApi would not take."""
        inspect.signature(getattr(HfApi, name)).bind(None, *positional, **arguments)

    def create_repo(self, repo_id, **arguments):
        self.check("create_repo", repo_id, **arguments)
        if self.fails_with is not None:
            raise self.fails_with
        self.calls.append(("create_repo", {"repo_id": repo_id, **arguments}))

    def hf_hub_download(self, repo_id, filename, **arguments):
        self.check("hf_hub_download", repo_id, filename, **arguments)
        if filename not in self.files:
            raise RemoteEntryNotFoundError(f"no {filename}", response=FakeResponse(404))
        self.path.write_bytes(self.files[filename])
        return str(self.path)

    def list_repo_files(self, repo_id, **arguments):
        self.check("list_repo_files", repo_id, **arguments)
        return list(self.files)

    def create_commit(self, repo_id, operations, **arguments):
        self.check("create_commit", repo_id, operations, **arguments)
        before = dict(self.files)
        for operation in operations:
            if isinstance(operation, CommitOperationDelete):
                del self.files[operation.path_in_repo]
            else:
                with operation.as_file() as file:
                    self.files[operation.path_in_repo] = file.read()
        names = sorted({*before, *self.files})
        changed = [name for name in names if before.get(name) != self.files.get(name)]
        self.calls.append(("create_commit", {**arguments, "changed": changed}))
        return "commit"


class FakeResponse:
    """What the errors of huggingface_hub read of a response."""

    def __init__(self, status_code: int):
        self.status_code = status_code
        self.headers: dict = {}
        self.request = None


def commits(hub: FakeHub) -> list[dict]:
    return [arguments for name, arguments in hub.calls if name == "create_commit"]


@pytest.fixture
def hub(monkeypatch, tmp_path):
    hub = FakeHub()
    hub.path = tmp_path / "downloaded.md"
    monkeypatch.setattr(publishing, "HfApi", hub)
    monkeypatch.setattr(publishing, "get_token", lambda: "token")
    return hub
