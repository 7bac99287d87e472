"""Processes that have not imported the package: where it is not installed, or where it comes after Transformers.

They are forks of a server, which is a fork of the process of the tests: made when that has imported Transformers, which takes
many seconds, and not yet the package.
"""

import json
import os
import subprocess
import sys
import traceback
from pathlib import Path
from typing import TextIO


WITHOUT_PACKAGE = "import sys\nsys.modules['hydra_transformers'] = None  # importing it fails\n"
SERVER: list[TextIO] = []  # where it reads tasks, and where it says how they ended


def run_without_package(code: str, *arguments: object, folder: Path, answers: str = "") -> subprocess.CompletedProcess:
    """Runs `code` in `folder`, with `arguments` in sys.argv[1:] and `answers` as its input; importing the package fails."""
    return run_fresh(WITHOUT_PACKAGE + code, *arguments, folder=folder, answers=answers)


def run_fresh(code: str, *arguments: object, folder: Path, answers: str = "") -> subprocess.CompletedProcess:
    """As `run_without_package`, but the package can be imported. Code of repositories is kept in `folder`/modules."""
    files = {name: str(folder / name) for name in ("stdin", "stdout", "stderr")}
    for name, path in files.items():
        Path(path).write_text(answers if name == "stdin" else "")
    task = {"code": code, "arguments": [str(each) for each in arguments], "folder": str(folder), "files": files}
    tasks, ends = SERVER
    tasks.write(json.dumps(task) + "\n")
    tasks.flush()
    status = os.waitstatus_to_exitcode(int(ends.readline()))
    printed = {name: Path(files[name]).read_text() for name in ("stdout", "stderr")}
    return subprocess.CompletedProcess([], status, **printed)


def start_server() -> None:
    import safetensors.torch  # noqa: F401
    from transformers import AutoModelForImageClassification, AutoTokenizer, Trainer, pipeline  # noqa: F401

    assert "hydra_transformers" not in sys.modules, "imported before the server was forked"
    (tasks, to_server), (from_server, ends) = os.pipe(), os.pipe()
    if os.fork():
        os.close(tasks)
        os.close(ends)
        SERVER.extend((os.fdopen(to_server, "w"), os.fdopen(from_server)))
    else:
        os.close(to_server)  # its end is the end of the server
        os.close(from_server)
        try:
            _serve(os.fdopen(tasks), os.fdopen(ends, "w"))
        finally:
            os._exit(0)


def _serve(tasks: TextIO, ends: TextIO) -> None:
    """Runs each task in a fork, and writes how that ended."""
    from tests.processes import fix_arithmetic

    fix_arithmetic()
    for line in tasks:
        child = os.fork()
        if not child:
            _run(**json.loads(line))
        ends.write(f"{os.waitpid(child, 0)[1]}\n")
        ends.flush()


def _run(code: str, arguments: list[str], folder: str, files: dict[str, str]) -> None:
    from transformers import dynamic_module_utils

    for number, path in enumerate(files.values()):
        os.dup2(os.open(path, os.O_RDWR), number)
    sys.stdin, sys.stdout, sys.stderr = (os.fdopen(number, mode) for number, mode in enumerate("rww"))
    os.chdir(folder)
    sys.argv[1:] = arguments
    sys.path.insert(0, "")
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
