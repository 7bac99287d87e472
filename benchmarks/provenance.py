"""Where and from what a figure comes: machine, versions, date, commit and package, for every results file."""

import ast
import hashlib
import io
import os
import platform
import subprocess
import tokenize
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
    """A hash of the package's code: two figures of one state have the same, whatever else was committed between them, and
    whatever docstrings and comments say."""
    found = hashlib.sha256()
    for path in sorted((root / "hydra_transformers").rglob("*.py")):
        code = code_of(path.read_text(encoding="utf8"))
        found.update(path.relative_to(root).as_posix().encode() + b"\0" + code.encode() + b"\0")
    return found.hexdigest()[:8]


def code_of(source: str) -> str:
    """The lines of a module without docstrings, comments and empty lines."""
    lines = source.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and ast.get_docstring(
            node
        ):
            text = node.body[0]
            lines[text.lineno - 1 : text.end_lineno] = [""] * (text.end_lineno - text.lineno + 1)
    return "\n".join(line.rstrip() for line in lines if line.strip())


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
