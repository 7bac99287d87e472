"""Which heads a Hydra's members keep, as text."""

from transformers import PreTrainedConfig

from ..fusion import tower_configs
from ..models.configuration_hydra import neurons_in


KEPT, PRUNED = "■", "·"


def kept_heads_map(config: PreTrainedConfig) -> str:
    """One line per layer, one column per member, one sign per head of the backbone (■ kept, · pruned), and how many.

    Example:
        >>> from hydra_transformers import HydraViTConfig
        >>> sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32}
        >>> print(kept_heads_map(HydraViTConfig(kept_heads=[[[0, 1], [3]], [[], [0, 1, 2, 3]]], **sizes)))
                   member 0  member 1
        layer 0    ■■··  2   ···■  1
        layer 1    ····  0   ■■■■  4
        kept of 8  2         5

    The last line tells how many layers run once for all members, where there are any.
    """
    return "\n\n".join(
        (f"{tower} tower\n" if tower else "") + _map_of_tower(tower_config)
        for tower, tower_config in tower_configs(config).items()
    )


def _map_of_tower(config: PreTrainedConfig) -> str:
    heads = config.num_attention_heads
    members = range(config.num_members)
    columns = [["", *(f"layer {layer}" for layer in range(len(config.kept_heads)))]]
    columns[0].append(f"kept of {heads * len(config.kept_heads)}")
    for member in members:
        kept = [layer[member] for layer in config.kept_heads]
        signs = ["".join(KEPT if head in of_layer else PRUNED for head in range(heads)) for of_layer in kept]
        lines = [f"{sign}  {len(of_layer)}" for sign, of_layer in zip(signs, kept, strict=True)]
        columns.append([f"member {member}", *lines, str(sum(map(len, kept)))])
    widths = [max(map(len, column)) for column in columns]
    rows = zip(*columns, strict=True)
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines += [_first_layers(config)] if config.trunk_layers else []
    return "\n".join(lines + _kept_neurons(config))


def _kept_neurons(config: PreTrainedConfig) -> list[str]:
    """A line on how many neurons of the MLPs each member keeps, where some went."""
    kept = getattr(config, "kept_neurons", None)
    if kept is None:
        return []
    counts = [sum(len(neurons_in(masks[member])) for masks in kept) for member in range(config.num_members)]
    of_members = ", ".join(f"member {member} {count:,}" for member, count in enumerate(counts))
    return [f"MLP neurons kept of {config.layer_spec.inner_size * len(kept):,}: {of_members}"]


def trunk_sentence(config: PreTrainedConfig) -> str:
    """As in "the first 6 layers run once for all members", for CLIP by tower; nothing where each layer runs for each member."""
    towers = {tower: each for tower, each in tower_configs(config).items() if each.trunk_layers}
    return "; ".join(
        (f"in the {tower} tower " if tower else "") + _first_layers(each) for tower, each in towers.items()
    )


def _first_layers(config: PreTrainedConfig) -> str:
    trunk = config.trunk_layers
    return f"the first {f'{trunk} layers run' if trunk > 1 else 'layer runs'} once for all members"
