"""`compare`: what fusing checkpoints gains and costs, by validation data."""

from .folders import read_members
from .options import BatchSize, DataOptions, argument, best_device


def compare(
    members: argument(list[str], "DIR_OR_MODEL", "as for `fuse`"), data: DataOptions, batch_size: BatchSize = 32
) -> None:
    """Compare each checkpoint, their ensemble, their average, and them fused at several depths."""
    from ..data.processors import load_processor
    from ..reports import compare_fusions
    from ..serving.saved_models import load_model

    names, configs, processor = read_members(members)
    if processor is None:
        processor = load_processor(names[0], configs[0])
    rows = data.read(configs[0], processor)
    models = [load_model(name, best_device()) for name in names]
    result = compare_fusions(models, rows, batch_size=batch_size)
    print(result)
    depth = result.best.trunk_layers
    print(f"Next: hydra-transformers fuse {' '.join(members)} --trunk-layers {depth or 0} --output ...")
