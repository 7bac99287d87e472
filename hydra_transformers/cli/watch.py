"""`watch`: does a calibrated model keep its promises in use?"""

import sys
from pathlib import Path

from .options import argument, option


def watch(
    files: argument(list[Path], "FILE", "a file that --monitor wrote; those of several processes are combined"),
    labels: option(
        Path | None,
        "the file of `predict --audit` with labels: they are counted for the promised risk, in FILE.labels.json, "
        "which is read with FILE from then on",
        "FILE",
    ) = None,
) -> None:
    """Say whether a calibrated model keeps its promises in use."""
    for file in files:
        if file.is_dir():
            raise ValueError(f"{file} is a folder: pass the files that --monitor wrote, such as {file}/*.json")
    from ..uncertainty import Monitor

    if labels is not None:
        if len(files) > 1:
            raise ValueError(f"--labels is for one file, and there are {len(files)}: pass one of them")
        _count_labels(files[0], labels)
    beside = []
    for file in map(_labels_file, files):
        if file.exists() and file not in files:
            beside.append(file)
    print(Monitor.read(*files, *beside))


def _labels_file(file: Path) -> Path:
    """Return the file of labels beside that of a monitor, which its process may write any time."""
    return file.with_suffix(".labels.json")


def _count_labels(file: Path, labels: Path) -> None:
    """Count audited answers with labels for the promises of a monitor."""
    from ..uncertainty import Monitor
    from ..uncertainty.audits import count_reviews, read_reviews

    watched = Monitor.read(file)
    monitor = Monitor(watched.settings, watched.level)
    if _labels_file(file).exists():
        monitor.load(_labels_file(file))
    reviews = read_reviews(labels, watched.settings["task"], watched.column)
    count_reviews(monitor, reviews)
    monitor.save(_labels_file(file))
    print(reviews.sentence)
    if "risk" not in monitor.promises:
        print(
            "note: this calibration promises no risk, so that labels count for nothing: pass --risk to calibrate",
            file=sys.stderr,
        )
    if reviews.unused_labels:
        names = ", ".join(reviews.unused_labels[:5])
        print(
            f"note: labels that no audited row has as its prediction: {names}; are they spelt right?", file=sys.stderr
        )
