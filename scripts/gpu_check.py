"""Does everything run on this GPU? One command for a machine with torch, transformers, pytest and scikit-learn alone.

    make gpu                                                # or: python scripts/gpu_check.py
    python scripts/gpu_check.py --compiled                  # model families compiled as well
    python scripts/gpu_check.py --device cpu                # the same on a CPU, which skips what needs CUDA
    python scripts/gpu_check.py --only "bert, compiled"     # the parts whose name holds these words

Runs every test that asks for CUDA, every benchmark and experiment in its smallest form, and for each model family on the device: fuse,
fine-tune, save, load, extract a circuit, each held against the CPU (`device_checks.py`). Prints a line for each, with the end of the
error where one failed; what needs a package that is not installed, or found no time, is left out. Exits with 1 if anything failed.

All of it goes to `benchmarks/results/gpu_check.txt` (or `--output`), with machine, versions, date and commit. A copy of a
commit takes its name from the environment variable GIT_COMMIT.
"""

import argparse
import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

import torch


ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from provenance import where_it_ran  # noqa: E402
from scripts.device_checks import MARK  # noqa: E402
from tests.families import FAMILIES, VARIANTS  # noqa: E402


OUTPUT = ROOT / "benchmarks" / "results" / "gpu_check.txt"
NEEDS_CUDA = "needs a CUDA device"  # the reason that the tests give
TAIL = 15  # lines of an error that are shown
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TORCHINDUCTOR_COMPILE_THREADS": "2",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
}


@dataclass
class Line:
    """What is reported of one thing: status is "ok", "failed" or "left out"."""

    status: str
    name: str
    seconds: float
    error: str = ""

    def __str__(self) -> str:
        error = self.error.replace(f"{ROOT}/", "")  # the same on every machine
        tail = [f"        {line}" for line in error.strip().splitlines()[-TAIL:]]
        return "\n".join([f"{self.status:9} {self.seconds:6.1f} s  {self.name}", *tail])


def is_run(script: Path) -> bool:
    """Whether a file is a script with a smallest form; some experiments have none, as they take a pre-trained model."""
    text = script.read_text()
    return 'if __name__ == "__main__"' in text and "--smallest" in text


def parts(device: str, compiled: bool) -> Iterator[tuple[str, list[str]]]:
    """(name, the command of a process). What takes longest comes first, so that all end together."""
    families = [(family, "compiled") for family in FAMILIES if compiled and family not in VARIANTS]
    for family, mode in [*families, *((family, "eager") for family in FAMILIES)]:
        yield f"{family.name}, {mode}", ["scripts/device_checks.py", family.name, mode, device]
    scripts = sorted(script for script in (ROOT / "benchmarks").glob("*.py") if is_run(script))
    modules = sorted(script.stem for script in (ROOT / "experiments").glob("*.py") if is_run(script))
    commands = [
        *([f"benchmarks/{script.name}"] for script in scripts),
        *(["-m", f"experiments.{one}"] for one in modules),
    ]
    for command in commands:
        yield " ".join(command), [*command, "--smallest", "--device", device]
    for file in sorted((ROOT / "tests").rglob("test_*.py")):
        if file.name != "test_gpu_check.py" and NEEDS_CUDA in file.read_text():
            name = str(file.relative_to(ROOT))
            yield name, ["-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", name]


def run(name: str, command: list[str], device: str, deadline: float) -> list[Line]:
    start = time.monotonic()
    if start >= deadline:
        return [Line("left out", name, 0.0, "no time was left")]
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(paths)}
    if device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    options = {"cwd": ROOT, "env": environment, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    try:
        done = subprocess.run([sys.executable, *command], timeout=deadline - start, **options)
        output = done.stdout.decode(errors="replace")
        code = done.returncode
    except subprocess.TimeoutExpired as error:
        output = (error.stdout or b"").decode(errors="replace") + "\nstopped: no time was left"
        code = 1
    return lines_of(name, command, device, code, output, time.monotonic() - start)


def lines_of(name: str, command: list[str], device: str, code: int, output: str, seconds: float) -> list[Line]:
    """A line for each step of a family's checks, one for any other process. A test that did not find the GPU has failed; what needs a
    package that this machine does not have was left out."""
    if "scripts/device_checks.py" in command:
        marked = [line.removeprefix(MARK) for line in output.splitlines() if line.startswith(MARK)]
        lines = [Line(**json.loads(line)) for line in marked]
        return [*lines, Line("failed", f"{name}: the process", seconds, output)] if code or not lines else lines
    missing = re.search(r"No module named '(\w+)", output) if code else None
    if missing and importlib.util.find_spec(missing[1]) is None:
        return [Line("left out", name, seconds, f"needs {missing[1]}, which is not installed")]
    has_no_gpu = device == "cuda" and NEEDS_CUDA in output
    return [Line("failed" if code or has_no_gpu else "ok", name, seconds, output if code or has_no_gpu else "")]


class Report:
    """Lines are printed as they come; the file holds them in the order of the parts."""

    def __init__(self, device: str, output: Path):
        about = where_it_ran(device)
        self.header = "\n".join([f"Check of everything on {device}", *map(": ".join, about.items())])
        self.output = output
        self.lines = {}
        print(self.header, flush=True)

    def add(self, place: int, lines: list[Line]) -> None:
        self.lines[place] = lines
        print("\n".join(map(str, lines)), flush=True)
        self.write("not finished")

    def close(self, seconds: float, words: str) -> int:
        """Writes the last line; 1 if anything failed, or nothing was done."""
        counts = Counter(line.status for lines in self.lines.values() for line in lines)
        summary = ", ".join(f"{count} {status}" for status, count in counts.items())
        self.write(f"{summary}; {seconds:.0f} s in all{words}")
        print(f"{summary}; {seconds:.0f} s in all{words}\n{self.output}")
        return 0 if counts["ok"] and not counts["failed"] else 1

    def write(self, end: str) -> None:
        lines = [str(line) for _, lines in sorted(self.lines.items()) for line in lines]
        self.output.write_text("\n".join([self.header, "", *lines, "", end]) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--compiled", action="store_true", help="check model families compiled as well")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="parts that run at a time")
    parser.add_argument("--minutes", type=float, default=60.0, help="after which what runs is stopped, and has failed")
    parser.add_argument("--only", nargs="+", metavar="WORDS", help="the parts whose name holds one of these")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="the file that all lines go to")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device is cuda, and torch finds no CUDA device: pass --device cpu for what can run without")
    chosen = [
        part for part in parts(args.device, args.compiled) if not args.only or any(w in part[0] for w in args.only)
    ]
    if not chosen:
        parser.error(f"--only: no part is named like {' or '.join(args.only)}")
    start = time.monotonic()
    report = Report(args.device, args.output)
    deadline = start + 60 * args.minutes
    with ThreadPoolExecutor(max(1, args.workers)) as pool:
        runs = {pool.submit(run, *part, args.device, deadline): place for place, part in enumerate(chosen)}
        for finished in as_completed(runs):
            report.add(runs[finished], finished.result())
    words = f"; only the parts named like {' or '.join(args.only)}" if args.only else ""
    sys.exit(report.close(time.monotonic() - start, words))


if __name__ == "__main__":
    main()
