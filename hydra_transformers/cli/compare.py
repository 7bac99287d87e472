"""`compare`: what fusing checkpoints gains and costs, by validation data."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from .folders import models_named
from .options import BatchSize, DataOptions, FarData, NearData, argument, best_device, option


if TYPE_CHECKING:
    from ..reports import FusionComparison


def compare(
    members: argument(list[str], "DIR_OR_MODEL", "as for `fuse`"),
    data: DataOptions,
    near: NearData = None,
    far: FarData = None,
    batch_size: BatchSize = 32,
    output: option(Path | None, "write the tables to this file, too (.md)", "FILE") = None,
) -> None:
    """Compare each checkpoint, their ensemble, their average, and them fused with more and fewer layers merged."""
    from .._io.files import check_takes_files, write_atomically
    from ..data.processors import check_same_processors, load_processor
    from ..serving.saved_models import load_config, load_model

    names = models_named(members)
    configs = [load_config(name) for name in names]
    if output is not None:
        check_takes_files(output.parent)
    processor = load_processor(names[0], configs[0])
    check_same_processors(names, configs, processor)
    rows = data.read(configs[0], processor)
    ood_rows = data.read_groups(configs[0], processor, near, far)
    models = [load_model(name, best_device()) for name in names]
    from ..reports import compare_fusions

    result = compare_fusions(models, rows, ood_rows, batch_size=batch_size)
    print(result)
    if output is not None:
        write_atomically(output, result.to_markdown())
    depth = result.best.trunk_layers
    print(f"Next: hydra-transformers fuse {' '.join(members)} --trunk-layers {depth or 0} --output ...")


def compared(
    models: list[Any], name: str, config: Any, processor: Any, data: str, split: str | None
) -> "FusionComparison":
    """The comparison by which `fuse --data` chooses."""
    from ..data.processors import load_processor
    from ..reports import compare_fusions

    rows = DataOptions(data=data, split=split).read(config, processor or load_processor(name, config))
    return compare_fusions(models, rows)
