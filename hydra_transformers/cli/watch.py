"""`watch`: does a calibrated model keep its promises in use?"""

from pathlib import Path

from .options import argument


def watch(
    files: argument(list[Path], "FILE", "a file that --monitor wrote; those of several processes are combined"),
) -> None:
    """Say whether a calibrated model keeps its promises in use."""
    for file in files:
        if file.is_dir():
            raise ValueError(f"{file} is a folder: pass the files that --monitor wrote, such as {file}/*.json")
    from ..uncertainty import Monitor

    print(Monitor.read(*files))
