"""One forward is short enough to follow: the functions of this package that an image passes through."""

import sys
from pathlib import Path

import torch

import hydra_transformers
from tests.families import VIT


ROOT = Path(hydra_transformers.__file__).parent


@torch.no_grad()
def test_a_forward_passes_through_few_functions_in_few_files():
    hydra, inputs, seen = VIT.fused("uniform"), VIT.inputs(), set()

    def watch(frame, event, _):
        path = Path(frame.f_code.co_filename)
        if event == "call" and ROOT in path.parents and not frame.f_code.co_name.startswith("<"):
            seen.add((path.relative_to(ROOT).as_posix(), frame.f_code.co_firstlineno, frame.f_code.co_name))

    sys.setprofile(watch)
    try:
        hydra(**inputs)
    finally:
        sys.setprofile(None)
    functions = "\n".join(f"{path}:{line} {name}" for path, line, name in sorted(seen))
    assert len({path for path, *_ in seen}) <= 2, functions
    assert len(seen) <= 23, functions
