"""The fused-attention part of every Hydra config: which backbone heads each member keeps, and what members share."""

# What members may share: the mean over the members stands in for each of them.
SHARED_PARTS = ("embeddings", "layernorm", "mlp")

KeptHeads = list[list[list[int]]]

# More layers, members or heads than any model has; a config that asks for them is broken, or means harm.
MOST = 1_000


def dense_heads(num_layers: int, num_heads: int) -> KeptHeads:
    """Kept heads of one member that keeps everything: an unpruned backbone."""
    return [[list(range(num_heads))] for _ in range(num_layers)]


def count_members(kept_heads: KeptHeads) -> int:
    return len(kept_heads[0])


def as_mask(heads_of_members: list[list[int]], num_heads: int) -> list[list[int]]:
    """One layer's kept heads as ones and zeros, [members][heads of the backbone]."""
    return [[int(head in heads) for head in range(num_heads)] for heads in heads_of_members]


def settle_fused_part(config) -> None:
    """Fills in the defaults of a config's `kept_heads` and `shared`, and refuses what cannot be."""
    for field in ("num_hidden_layers", "num_attention_heads"):
        if not 1 <= getattr(config, field) <= MOST:
            raise ValueError(f"{field} is {getattr(config, field)}: a Hydra has 1 to {MOST:,}")
    if config.kept_heads is None:
        config.kept_heads = dense_heads(config.num_hidden_layers, config.num_attention_heads)
    check_kept_heads(config.kept_heads, config.num_hidden_layers, config.num_attention_heads)
    config.shared = list(config.shared)
    check_shared(config.shared)


def check_kept_heads(kept_heads: KeptHeads, num_layers: int, num_heads: int) -> None:
    """Refuses, with a sentence, a `kept_heads[layer][member]` that no model can have."""
    if len(kept_heads) != num_layers:
        raise ValueError(
            f"kept_heads has {len(kept_heads)} layers, num_hidden_layers is {num_layers}: "
            "give one list of members per layer"
        )
    for layer, members in enumerate(kept_heads):
        if not isinstance(members, list):
            raise ValueError(f"kept_heads[{layer}] is {members!r}: give a list of kept heads for each member")
    num_members = count_members(kept_heads)
    if num_members == 0:
        raise ValueError("kept_heads[0] has no member: give at least one list of kept heads per layer")
    if num_members > MOST:
        raise ValueError(f"kept_heads[0] has {num_members:,} members: a Hydra has at most {MOST:,}")
    for layer, members in enumerate(kept_heads):
        if len(members) != num_members:
            raise ValueError(
                f"kept_heads[{layer}] has {len(members)} members, kept_heads[0] has {num_members}: "
                "every layer needs every member (an empty list for a member that keeps no head there)"
            )
        for member, heads in enumerate(members):
            _check_heads(heads, num_heads, f"kept_heads[{layer}][{member}]")


def _check_heads(heads: list[int], num_heads: int, where: str) -> None:
    if not isinstance(heads, list) or not all(type(head) is int for head in heads):
        raise ValueError(f"{where} is {heads!r}: give a list of head numbers")
    for head in heads:
        if not 0 <= head < num_heads:
            raise ValueError(f"{where} names head {head}: the backbone has heads 0 to {num_heads - 1}")
    if len(set(heads)) != len(heads):
        raise ValueError(f"{where} names a head twice: {heads}")
    if sorted(heads) != heads:
        raise ValueError(f"{where} is {heads}: give the heads in ascending order")


def check_shared(shared: list[str]) -> None:
    """Refuses names in `shared` that are no part of a Hydra."""
    if isinstance(shared, str):
        raise TypeError(f"shared is {shared!r}: pass a list of parts, [{shared!r}]")
    for name in shared:
        if name not in SHARED_PARTS:
            raise ValueError(f"shared names {name!r}: members can share {', '.join(map(repr, SHARED_PARTS))}")


def check_num_members(given: int | None, config) -> None:
    """Refuses a number of members beside `kept_heads` that says something else."""
    if given is not None and given != config.num_members:
        raise ValueError(
            f"num_members is {given}, kept_heads has {config.num_members}: give kept_heads[layer][member] for each of "
            "them and leave num_members out"
        )


def settle_problem_type(config) -> None:
    """Says once what the labels are, as Transformers' loss would: what `logits` mean never changes after that."""
    if config.problem_type is None:
        config.problem_type = "regression" if config.num_labels == 1 else "single_label_classification"


def check_ensemble_loss(ensemble_loss: str) -> None:
    if ensemble_loss not in ("members", "ensemble"):
        raise ValueError(
            f"ensemble_loss is {ensemble_loss!r}: use 'members' (mean of the members' losses) "
            "or 'ensemble' (loss of the ensemble's answer)"
        )


def check_model_type(config_dict: dict, config_class: type) -> None:
    """Refuses a backbone's config: its weights have another layout and would load as nonsense."""
    found = config_dict.get("model_type", config_class.model_type)
    if found != config_class.model_type:
        raise ValueError(
            f"this checkpoint is of type {found!r}, {config_class.__name__} reads {config_class.model_type!r}: load a "
            "backbone with its own Transformers class and pass it to from_backbone()"
        )


def keep_after_pruning(kept: list[list[int]], heads_to_prune: dict[int, list[int]] | None) -> list[list[int]]:
    """Heads that one member keeps per layer once `heads_to_prune` (`{layer: [heads]}`) are gone from `kept`."""
    if not isinstance(heads_to_prune, dict | None):
        raise TypeError(f"heads_to_prune is a {type(heads_to_prune).__name__}: pass one member's, {{layer: [heads]}}")
    for layer, heads in (heads_to_prune or {}).items():
        if not str(layer).lstrip("-").isdigit():
            raise ValueError(f"heads_to_prune names {layer!r}: pass {{layer: [heads]}}, layers by their numbers")
        if isinstance(heads, (int, str)):
            raise ValueError(f"heads_to_prune[{layer}] is {heads!r}: pass a list of heads")
    heads_to_prune = {int(layer): list(heads) for layer, heads in (heads_to_prune or {}).items()}
    for layer, heads in heads_to_prune.items():
        if not 0 <= layer < len(kept):
            raise ValueError(f"heads_to_prune names layer {layer}: the model has layers 0 to {len(kept) - 1}")
        for head in heads:
            if head not in kept[layer]:
                raise ValueError(
                    f"heads_to_prune[{layer}] names head {head!r}: the model has the heads {kept[layer]} in this layer"
                )
    return [[head for head in heads if head not in heads_to_prune.get(layer, [])] for layer, heads in enumerate(kept)]
