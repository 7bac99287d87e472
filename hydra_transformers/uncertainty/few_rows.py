"""How far a share may be off that was found on few rows."""

import math

from scipy.stats import beta, norm


FEW = 500  # rows, from which on a share is within about three points of what was found
CHANCE = 0.9  # of the range that is named


def range_of_share(count: int, rows: int) -> tuple[float, float]:
    """Return where the share of all rows lies up to the `count`-th smallest of `rows` values, in nine of ten cases.

    The share is distributed as Beta(count, rows + 1 - count), if no two values are equal.
    """
    low = float(beta.ppf((1 - CHANCE) / 2, count, rows + 1 - count)) if count > 0 else 0.0
    high = float(beta.ppf((1 + CHANCE) / 2, count, rows + 1 - count)) if count <= rows else 1.0
    return low, high


def highest_share(losses: int, rows: int) -> float:
    """Return the Clopper-Pearson bound of a share: losses among so many rows are as few in one case of ten, or fewer."""
    return float(beta.ppf(CHANCE, losses + 1, rows - losses)) if losses < rows else 1.0


def note_on_share(count: int, rows: int, of_what: str) -> str:
    """Return a sentence that says how far a share may be off, empty where there are many rows.

    Args:
        count (`int`), rows (`int`): so many of the rows were on one side of the threshold.
        of_what (`str`): what the share is of: "of new rows are answered", for example.
    """
    if rows >= FEW:
        return ""
    low, high = range_of_share(count, rows)
    return f"{rows} rows are few: in 9 of 10 calibrations {100 * low:.3g} to {100 * high:.3g} % {of_what}; pass {FEW} or more."


def note_on_risk(wrong: int, answered: int, unit: str) -> str:
    """Return a sentence that says how high a share of errors may be, empty where there are many rows."""
    if answered >= FEW:
        return ""
    highest = f"{100 * highest_share(wrong, answered):.3g} %"
    return (
        f"{answered} answered {unit} are few: up to {highest} of new answers may be wrong, or more, as the threshold was chosen on "
        f"these; pass {FEW} or more."
    )


def note_on_missed(count: int, rows: int) -> str:
    """Return a sentence that says how many labels sets may miss that were found on so many rows, empty where there are many.

    The promise is on average over calibrations. Rows that miss all of their labels or none scatter most, and are
    distributed as in `range_of_share`. count: of the rows whose labels are to be in their sets
    """
    if rows >= FEW:
        return ""
    low, _ = range_of_share(count, rows)
    return f"{rows} rows are few: the sets of a single calibration may miss up to {100 * (1 - low):.3g} %; pass {FEW} or more."


def note_on_error(mean: float, deviation: float, answered: int) -> str:
    """Return a sentence that says how high a mean absolute error may be, empty where there are many rows.

    Args:
        mean (`float`), deviation (`float`): of the errors of the answered rows.
        answered (`int`): how many these are.
    """
    if answered >= FEW:
        return ""
    highest = mean + float(norm.ppf(CHANCE)) * deviation / math.sqrt(answered)
    return (
        f"{answered} answered rows are few: the mean absolute error of new ones may be up to {highest:.3g}, or more, as the "
        f"threshold was chosen on these; pass {FEW} or more."
    )
