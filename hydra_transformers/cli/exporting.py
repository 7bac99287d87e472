"""`export`: a Hydra in a format that runs without this package."""

import argparse
import sys
from pathlib import Path

from ..export import FILES
from ..export import export as write
from ..uncertainty import CalibratedClassifier
from .arguments import check_named_once
from .folders import check_is_new, check_takes_files, load_config, load_model, load_processor
from .judging import check_is_hydra


def export(arguments: argparse.Namespace) -> None:
    check_named_once(arguments.to, "--to")
    check_is_new(arguments.output)
    check_takes_files(arguments.output)
    config = load_config(arguments.model)
    check_is_hydra(config, arguments.model)
    processor = load_processor(arguments.processor or arguments.model, config)
    if CalibratedClassifier.is_saved_in(arguments.model):
        print(
            f"note: {arguments.model} is exported without its decision, which is about the classes of one data set",
            file=sys.stderr,
        )
    model = load_model(arguments.model).float()
    write(model, arguments.output, arguments.to, processor)
    told = (
        "with its calibration" if model.is_calibrated else "not calibrated, so it has no abstain and no prediction_set"
    )
    files = " and ".join(str(Path(arguments.output) / FILES[each]) for each in arguments.to)
    print(f"{files}: {told}; it answers as the model does (docs/export.md tells how to run it).")
