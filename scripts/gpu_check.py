"""Does everything run on this GPU? One command for a machine with torch, transformers, pytest and scikit-learn alone.

    make gpu                                                # or: python scripts/gpu_check.py
    python scripts/gpu_check.py --device cpu                # the same on a CPU, which skips what needs CUDA
    python scripts/gpu_check.py --only "bert, compiled"     # the parts whose name holds these words

Runs every test that asks for CUDA, every benchmark in its smallest form, and for each model family,
eager and compiled, on the device and with it as torch's default device: fuse, fine-tune, save, load, extract a circuit, each
held against the CPU. Prints a line for each, with the end of the error where one failed; what cannot run because a package
is missing is a line of its own. Exits with 1 if anything failed.

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
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import product
from pathlib import Path

import torch


ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from provenance import where_it_ran  # noqa: E402
from scripts.device_checks import MARK  # noqa: E402
from tests.families import FAMILIES, VARIANTS  # noqa: E402


OUTPUT = ROOT / "benchmarks" / "results" / "gpu_check.txt"
NEEDS_CUDA = "needs a CUDA device"  # the reason that the tests give
# What a machine may lack, as it is imported, and as it is installed.
OPTIONAL = {
    "accelerate": "accelerate",
    "datasets": "datasets",
    "evaluate": "evaluate",
    "fastapi": "fastapi",
    "hypothesis": "hypothesis",
    "matplotlib": "matplotlib",
    "peft": "peft",
    "PIL": "pillow",
    "scipy": "scipy",
    "torchvision": "torchvision",
    "uvicorn": "uvicorn",
}
MODES = ("compiled", "eager")
TAIL = 15  # lines of an error that are shown


@dataclass
class Line:
    """What is reported of one thing: status is "ok", "failed", "skipped" or "needs PACKAGE"."""

    status: str
    name: str
    seconds: float
    remark: str = ""
    error: str = ""

    def __str__(self) -> str:
        remark = f" ({self.remark})" if self.remark else ""
        error = self.error.replace(f"{ROOT}/", "")  # the same on every machine
        tail = [f"        {line}" for line in error.strip().splitlines()[-TAIL:]]
        return "\n".join([f"{self.status:18} {self.seconds:6.1f} s  {self.name}{remark}", *tail])


@dataclass(frozen=True)
class Part:
    """A process: its command, and how the lines are made of what it left."""

    name: str
    command: list[str]
    read: Callable[["Finished"], list[Line]]


@dataclass(frozen=True)
class Finished:
    part: Part
    returncode: int
    output: str
    seconds: float

    def failed(self, name: str = "") -> Line:
        return Line("failed", name or self.part.name, self.seconds, f"exit status {self.returncode}", self.output)


def missing_packages() -> list[str]:
    return [name for name in OPTIONAL if importlib.util.find_spec(name) is None]


# Tests


def test_parts(folder: Path, device: str) -> Iterator[Part]:
    """The files with tests that need CUDA, a process for each: there may be no pytest-xdist. All others compute on the CPU."""
    for file in sorted((ROOT / "tests").rglob("test_*.py")):
        if file.name == "test_gpu_check.py" or NEEDS_CUDA not in file.read_text():
            continue
        name, report = str(file.relative_to(ROOT)), folder / f"{file.parent.name}-{file.stem}.xml"
        command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", name]
        yield Part(name, command, lambda finished, report=report: test_lines(finished, report, device))


def test_lines(finished: Finished, report: Path, device: str) -> list[Line]:
    """One line for the file, one for each failed test, and one for what waits for a package."""
    name = finished.part.name
    if not report.exists():
        return [finished.failed()]
    passed, skipped, needing, lines = 0, Counter(), Counter(), []
    for case in ElementTree.parse(report).iter("testcase"):
        outcome = next((child for child in case if child.tag in ("failure", "error", "skipped")), None)
        if outcome is None:
            passed += 1
            continue
        text = f"{outcome.get('message', '')}\n{outcome.text or ''}"
        package = needed_package(text)
        if package:
            is_whole_file = "collection failure" in outcome.get("message", "")
            needing[package] += test_functions(ROOT / name) if is_whole_file else 1
        elif outcome.tag == "skipped":
            skipped[outcome.get("message", "")] += 1
        else:
            lines.append(Line("failed", f"{name}::{case.get('name')}", float(case.get("time", 0)), error=text))
    if device == "cuda" and skipped[NEEDS_CUDA]:
        lines.append(Line("failed", name, 0.0, f"{skipped[NEEDS_CUDA]} tests did not find the CUDA device"))
    counts = [f"{passed} passed", *(f"{count} skipped: {reason}" for reason, count in skipped.items() if count)]
    failures = len(lines)
    counts += [f"{failures} failed"] if failures else []
    for package, count in needing.items():
        lines.append(Line(f"needs {package}", name, 0.0, f"{count} tests"))
    # pytest: 0 all passed, 1 some failed, 2 a file could not be read; anything else is a fault of the run
    expected = (0,) if not failures and not needing else (1, 2)
    if finished.returncode not in expected or not (passed or failures or needing or skipped):
        return [finished.failed(), *lines]
    if not (passed or skipped or failures):  # not a test of the file could be read
        return lines
    return [Line("failed" if failures else "ok", name, finished.seconds, ", ".join(counts)), *lines]


def needed_package(error: str) -> str | None:
    """The package that is missing, where a test failed for no other reason."""
    for name in missing_packages():
        either = f"({re.escape(name)}|{re.escape(OPTIONAL[name])})"
        says_so = rf"No module named '{name}\b|(needs|requires) (the )?`?{either}\b|pip install (\S+ )*{either}\b"
        if re.search(says_so, error):
            return OPTIONAL[name]
    return None


def test_functions(file: Path) -> int:
    return len(re.findall(r"^def test_", file.read_text(), re.MULTILINE))


# Benchmarks


def benchmark_parts(device: str) -> Iterator[Part]:
    """Every script in benchmarks/, every experiment, and compiled models besides."""
    scripts = [f"benchmarks/{script.name}" for script in (ROOT / "benchmarks").glob("*.py") if is_run(script)]
    modules = [f"-m experiments.{script.stem}" for script in (ROOT / "experiments").glob("*.py") if is_run(script)]
    for what in ["-m experiments", *sorted(scripts), *sorted(modules)]:
        name = f"{what} --smallest"
        is_for_cpus = what in scripts and '"--device"' not in (ROOT / what).read_text()
        yield Part(name, [*name.split(), *([] if is_for_cpus else ["--device", device])], benchmark_lines)
    if device == "cpu":
        return
    name = "benchmarks/inference_cost.py --smallest --modes compiled --families vit"
    methods = ["--methods", "Hydra 3 x 8", "Hydra 3, ragged"]
    yield Part(name, [*name.split(), *methods, "--device", device], benchmark_lines)


def is_run(script: Path) -> bool:
    """Whether a file is a script with a smallest form; `experiments.tasks` has none, as it takes a pre-trained model."""
    text = script.read_text()
    return 'if __name__ == "__main__"' in text and '"--smallest"' in text


def benchmark_lines(finished: Finished) -> list[Line]:
    """A script says itself what it leaves out, "needs PACKAGE: what", or fails where it needs one for all it does."""
    name, package = finished.part.name, needed_package(finished.output)
    if finished.returncode and package:
        return [Line(f"needs {package}", name, finished.seconds)]
    if finished.returncode:
        return [finished.failed()]
    left_out = re.findall(r"^(needs [^:\n]+): (.*)$", finished.output, re.MULTILINE)
    return [
        Line("ok", name, finished.seconds),
        *(Line(status, name, 0.0, remark) for status, remark in left_out),
    ]


# Checks


def check_parts(device: str) -> Iterator[Part]:
    """Each family, compiled and eager, with models moved to the device and with the device as torch's default; compiled
    under a default device the first. Compilers take longest, and come first."""
    for mode, placement, family in product(MODES, ("default", "on"), FAMILIES):
        if mode == "compiled" and (family in VARIANTS or (placement == "default" and family is not FAMILIES[0])):
            continue
        name = f"{family.name}, {mode}, {'as default device' if placement == 'default' else 'on'} {device}"
        yield Part(name, ["scripts/device_checks.py", family.name, mode, placement, device], check_lines)


def check_lines(finished: Finished) -> list[Line]:
    marked = [line for line in finished.output.splitlines() if line.startswith(MARK)]
    lines = [Line(**json.loads(line.removeprefix(MARK))) for line in marked]
    if finished.returncode or not lines:
        lines.append(finished.failed(f"{finished.part.name}: the process"))
    return lines


# The run


def run(part: Part, environment: dict[str, str], limit: float) -> Finished:
    start = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, *part.command],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    try:
        output, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
        output += f"\nstopped after {limit:.0f} s"
    return Finished(part, process.returncode, output, time.perf_counter() - start)


def header(device: str) -> str:
    about = where_it_ran(device)
    about["machine"] += f", {os.cpu_count()} cores"
    for name in ("pytest", "scikit-learn", *OPTIONAL.values()):
        try:
            about["versions"] += f", {name} {version(name)}"
        except PackageNotFoundError:
            about.setdefault("not installed", "")
            about["not installed"] += f"{', ' if about['not installed'] else ''}{name}"
    return "\n".join(["GPU check" if device == "cuda" else "GPU check, on a CPU", *map(": ".join, about.items())])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="parts that run at a time")
    parser.add_argument(
        "--limit", type=float, default=1800.0, help="seconds after which a part is stopped, and failed"
    )
    parser.add_argument("--only", nargs="+", metavar="WORDS", help="the parts whose name holds one of these")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="the file that all lines go to")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device is cuda, and torch finds no CUDA device: pass --device cpu for what can run without")
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": "1",
        "TORCHINDUCTOR_COMPILE_THREADS": "2",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }
    if args.device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(max(1, args.workers)) as pool:
        # What takes longest comes first, so that all end together.
        checks = list(check_parts(args.device))
        compiled = [part for part in checks if ", compiled, " in part.name]
        parts = [
            *compiled,
            *test_parts(Path(folder), args.device),
            *benchmark_parts(args.device),
            *(part for part in checks if part not in compiled),
        ]
        if args.only:
            parts = [part for part in parts if any(words in part.name for words in args.only)]
        if not parts:
            parser.error(f"--only: no part is named like {' or '.join(args.only)}")
        report = Report(header(args.device), args.output)
        runs = {pool.submit(run, part, environment, args.limit): place for place, part in enumerate(parts)}
        for finished in as_completed(runs):
            result = finished.result()
            report.add(runs[finished], result.part.read(result))
        if args.device == "cpu":
            what = "tests that need CUDA, benchmarks of compiled models, inductor"
            report.add(len(parts), [Line("skipped", what, 0.0, "--device cpu")])
    if args.only:
        report.add(len(parts) + 1, [Line("skipped", "all but the parts of --only", 0.0, " or ".join(args.only))])
    sys.exit(report.close(time.perf_counter() - start))


class Report:
    """Lines are printed as they come; the file holds them in the order of the parts."""

    def __init__(self, header: str, output: Path):
        self.header, self.output, self.lines = header, output, {}
        output.parent.mkdir(parents=True, exist_ok=True)
        print(header, flush=True)

    def add(self, place: int, lines: list[Line]) -> None:
        self.lines[place] = lines
        print("\n".join(map(str, lines)), flush=True)
        self._write("not finished")

    def close(self, seconds: float) -> int:
        """Writes the last line; 1 if anything failed."""
        counts = Counter(line.status for _, lines in sorted(self.lines.items()) for line in lines)
        summary = ", ".join(f"{count} {status}" for status, count in counts.items())
        self._write(f"{summary}; {seconds:.0f} s in all")
        print(f"{summary}; {seconds:.0f} s in all\n{self.output}")
        return 1 if counts["failed"] else 0

    def _write(self, end: str) -> None:
        lines = [str(line) for _, lines in sorted(self.lines.items()) for line in lines]
        self.output.write_text("\n".join([self.header, "", *lines, "", end]) + "\n")


if __name__ == "__main__":
    main()
