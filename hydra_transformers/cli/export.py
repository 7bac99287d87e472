"""`export`: a Hydra in a format that runs without this package."""

import sys
from pathlib import Path
from typing import Literal

from .._io.records import check_is_new
from .folders import check_is_hydra
from .options import argument, model_name, option


def export(
    model: argument(str, "MODEL", "a Hydra, by folder or Hub name", parser=model_name),
    output: option(Path, "a new folder: gets the exported model, config.json and the processor", "DIR"),
    to: option(Literal["onnx", "torch"], "onnx (model.onnx), or torch (model.pt2, for torch.export.load)") = "onnx",
) -> None:
    """Write a model as ONNX or for torch.export.load, to run it without this package."""
    from ..exporting import FILES
    from ..exporting import export as write
    from ..serving.saved_models import open_model
    from ..uncertainty import CalibratedClassifier

    opened = open_model(model)
    check_is_hydra(opened.info.config, model)
    check_is_new(output)
    if CalibratedClassifier.is_saved_in(model):
        print(f"note: {model} is exported without its decision, which is for one data set's classes", file=sys.stderr)
    loaded = opened.load().float()
    write(loaded, output, (to,), opened.processor)
    calibration = "with its calibration"
    if not loaded.is_calibrated:
        calibration = "not calibrated, so it has no abstain and no prediction_set"
    print(f"{output / FILES[to]}: {calibration} (docs/export.md shows how to run it).")
