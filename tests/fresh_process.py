"""Processes that have not imported the package: where it is not installed, or where it comes after Transformers.

They are forks of one that has imported Transformers, which takes many seconds and is asked for by many tests.
"""

import atexit
import json
import os
import subprocess
import sys
import traceback
from functools import cache
from pathlib import Path


WITHOUT_PACKAGE = "import sys\nsys.modules['hydra_transformers'] = None  # importing it fails\n"


def run_without_package(code: str, *arguments: object, folder: Path, answers: str = "") -> subprocess.CompletedProcess:
    """Runs `code` in `folder`, with `arguments` in sys.argv[1:] and `answers` as its input; importing the package fails."""
    return run_fresh(WITHOUT_PACKAGE + code, *arguments, folder=folder, answers=answers)


def run_fresh(code: str, *arguments: object, folder: Path, answers: str = "") -> subprocess.CompletedProcess:
    """As `run_without_package`, but the package can be imported. Code of repositories is kept in `folder`/modules."""
    files = {name: str(folder / name) for name in ("stdin", "stdout", "stderr")}
    for name, path in files.items():
        Path(path).write_text(answers if name == "stdin" else "")
    task = {"code": code, "arguments": [str(each) for each in arguments], "folder": str(folder), "files": files}
    server = _server()
    server.stdin.write(json.dumps(task) + "\n")
    server.stdin.flush()
    status = os.waitstatus_to_exitcode(int(server.stdout.readline()))
    printed = {name: Path(files[name]).read_text() for name in ("stdout", "stderr")}
    return subprocess.CompletedProcess([], status, **printed)


@cache
def _server() -> subprocess.Popen:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    server = subprocess.Popen([sys.executable, __file__], env=os.environ | {"HF_HUB_OFFLINE": "1"}, **pipes)
    atexit.register(server.kill)
    return server


def _serve() -> None:
    """Runs each task of stdin in a fork, and prints how that ended."""
    import safetensors.torch  # noqa: F401
    from transformers import AutoModelForImageClassification, AutoTokenizer, Trainer, pipeline  # noqa: F401

    sys.path.append(str(Path(__file__).parents[1]))  # for code that imports what tests share
    from tests.processes import fix_arithmetic

    fix_arithmetic()
    for line in sys.stdin:
        child = os.fork()
        if not child:
            _run(**json.loads(line))
        print(os.waitpid(child, 0)[1], flush=True)


def _run(code: str, arguments: list[str], folder: str, files: dict[str, str]) -> None:
    from transformers import dynamic_module_utils

    for number, path in enumerate(files.values()):
        os.dup2(os.open(path, os.O_RDWR), number)
    os.chdir(folder)
    sys.argv[1:], sys.path[0] = arguments, ""
    dynamic_module_utils.HF_MODULES_CACHE = str(Path(folder) / "modules")
    status = 0
    try:
        exec(compile(code, "<fresh process>", "exec"), {"__name__": "__main__"})
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    _serve()
