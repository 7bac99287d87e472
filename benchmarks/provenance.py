"""Where and from what a figure comes: machine, versions, date, commit and package, for every results file."""

import hashlib
import os
import platform
import subprocess
from datetime import date
from pathlib import Path

import torch
import transformers


ROOT = Path(__file__).resolve().parent.parent


def where_it_ran(device: str) -> dict[str, str]:
    """{"machine", "versions", "date", "commit", "package"}; `device`: "cuda" or "cpu"."""
    if torch.device(device).type == "cuda":
        machine = torch.cuda.get_device_name(device)
    else:
        machine = f"CPU ({platform.machine()}), {torch.get_num_threads()} threads"
    versions = {"Python": platform.python_version(), "torch": torch.__version__}
    versions["transformers"] = transformers.__version__
    return {
        "machine": machine,
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
        "date": date.today().isoformat(),
        "commit": commit(),
        "package": package(),
    }


def package(root: Path = ROOT) -> str:
    """A hash of the package's code: two figures of one state have the same, whatever else was committed between them."""
    found = hashlib.sha256()
    for path in sorted((root / "hydra_transformers").rglob("*.py")):
        found.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return found.hexdigest()[:8]


def commit(root: Path = ROOT) -> str:
    """What GIT_COMMIT says, for copies of a commit; otherwise the commit that lies in `root`, and whether files were
    changed since."""
    if "GIT_COMMIT" in os.environ:
        return os.environ["GIT_COMMIT"]
    try:
        if Path(_git(root, "rev-parse", "--show-toplevel")).resolve() == root.resolve():
            # Results are written while others are still being measured.
            changed = _git(
                root,
                "status",
                "--porcelain",
                "--untracked-files=no",
                "--",
                ".",
                ":(exclude)benchmarks/results",
                ":(exclude)experiments/results",
            )
            return _git(root, "rev-parse", "--short=12", "HEAD") + (" with changes" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        pass
    return "unknown (no git repository; GIT_COMMIT is not set)"


def _git(root: Path, *arguments: str) -> str:
    command = ["git", "-C", str(root), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
