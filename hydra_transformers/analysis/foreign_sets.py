"""Foreign data in the forms in which a caller has it."""

from typing import Any

from ..data.loading import ood_groups


def foreign_sets(ood_data: Any) -> dict[str, Any]:
    """Name -> data, from one set (then called "foreign data"), sets by name, or groups of these."""
    groups = ood_groups(ood_data)
    if not groups:
        raise ValueError("ood_data is None: pass foreign data, or several sets as {name: data}")
    if not isinstance(ood_data, dict):
        return {"foreign data": ood_data}
    named = [(name, data) for sets in groups.values() for name, data in sets.items()]
    if len(dict(named)) < len(named):
        raise ValueError("ood_data has a name in two groups: name each set once")
    return dict(named)
