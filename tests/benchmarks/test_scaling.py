"""The simulation of several GPUs: what it must give where the answer is known, and that its parts are measured."""

import json
import sys

import pytest
import scaling
from scaling import Parts, Work, simulate


PARTS = Parts(
    start=0.0,
    step={64: 0.64, 32: 0.32, 16: 0.16, 8: 0.08, 4: 0.04, 2: 0.02, 1: 0.01},
    gradient_bytes=0,
    load=0.0,
    save=0.0,
    fuse=0.0,
    prepare=0.0,
    batch=1.0,
    removal=0.0,
    exchange={2: 0.0, 4: 0.0, 8: 0.0},
    evaluation=0.0,
)


def faster(name: str, gpus: int) -> float:
    return simulate(PARTS, Work(), 1)[name] / simulate(PARTS, Work(), gpus)[name]


def test_free_exchange_scales_up_to_the_number_of_members_and_batches(monkeypatch):
    assert [faster("members", gpus) for gpus in (2, 3, 8, 64)] == pytest.approx([1.5, 3, 3, 3])
    assert [faster("circuits", gpus) for gpus in (2, 8, 32, 64)] == pytest.approx(
        [2, 8, 32, 32]
    )  # 32 batches of each kind
    monkeypatch.setitem(scaling.ASSUMED, "per message", 0.0)
    assert [faster("batches", gpus) for gpus in (2, 8, 64)] == pytest.approx([2, 8, 64])


def test_exchanges_beyond_the_measured_ones_lie_on_a_line():
    parts = Parts(**{**vars(PARTS), "exchange": {2: 1.0, 4: 2.0, 8: 4.0}})
    assert [scaling.exchange_of(parts, gpus) for gpus in (1, 2, 8, 64)] == [0, 1, 4, 32]


@pytest.mark.slow
def test_the_parts_are_measured_and_the_page_says_where(tmp_path, monkeypatch):
    monkeypatch.setattr(scaling, "MEASURED_PROCESSES", (2, 3))
    words = [scaling.__file__, "--smallest", "--device", "cpu", "--output", str(tmp_path / "scaling_cpu")]
    monkeypatch.setattr(sys, "argv", words)
    scaling.main()
    found = json.loads((tmp_path / "scaling_cpu.json").read_text())
    assert [row["gpus"] for row in found["rows"]] == list(scaling.GPUS)
    assert found["parts"]["start"] > 0 and found["parts"]["step"]["1"] > 0 and found["parts"]["exchange"]["3"] > 0
    page = (tmp_path / "scaling_cpu.md").read_text()
    assert all(f"{key}: {found['machine'][key]}" in page for key in ("machine", "versions", "date", "commit"))
    assert "| 64 | " in page
