"""The test rows under shift: some corruptions at three severities, few enough that every method is judged on all of them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hydra_transformers.reports import Report
from hydra_transformers.shift import corrupt

from .rows import TensorRows


IMAGE_CORRUPTIONS = (
    *("gaussian_noise", "impulse_noise", "defocus_blur", "motion_blur"),
    *("brightness", "contrast", "pixelate", "jpeg_compression"),
)
TEXT_CORRUPTIONS = ("typos", "character_drops", "word_drops")
SEVERITIES = (1, 3, 5)
ROWS = 1_000  # about so many of the test images, the same for every method
METRICS = ("accuracy", "brier", "nll", "ece", "ood_auroc", "shift_auroc")

Shifted = Mapping[str, Mapping[int, Any]]  # {corruption: {severity: rows}}


def shifted_images(
    test: TensorRows, corruptions: Sequence[str] = IMAGE_CORRUPTIONS, severities: Sequence[int] = SEVERITIES
) -> Shifted:
    """Every n-th test image, as many of each class as of the others where they are sorted by class, corrupted as they are
    stored, on the device they are on."""
    rows = test.part(slice(None, None, max(1, len(test) // ROWS)))

    def corrupted(name: str, severity: int) -> TensorRows:
        changed = corrupt(rows.tensors["pixel_values"], name, severity)
        return TensorRows({**rows.tensors, "pixel_values": changed}, rows.prepare)

    return {name: {severity: corrupted(name, severity) for severity in severities} for name in corruptions}


def shifted_texts(texts: list[str], rows_of: Callable[[list[str]], TensorRows]) -> Callable[[TensorRows], Shifted]:
    """For `Splits.shift`: the texts, corrupted before `rows_of` tokenizes them."""

    def shifted(test: TensorRows) -> Shifted:
        device = test.tensors["input_ids"].device
        return {
            name: {severity: rows_of(corrupt(texts, name, severity)).to(device) for severity in SEVERITIES}
            for name in TEXT_CORRUPTIONS
        }

    return shifted


def shift_of(report: Report, model: str) -> dict[str, Any]:
    """What results files keep: {"severities": [...], "corruptions": {name: {metric: [one for each severity]}}}"""
    sweeps: dict[str, dict[str, dict[str, float]]] = {}
    for data_set in report.data_sets("corruption"):
        _, name, severity = report.groups[data_set]
        sweeps.setdefault(name, {})[severity] = report.models[model][data_set]
    return {
        "severities": [int(severity) for severity in next(iter(sweeps.values()))],
        "corruptions": {
            name: {metric: [found[metric] for found in sweep.values()] for metric in METRICS}
            for name, sweep in sweeps.items()
        },
    }
