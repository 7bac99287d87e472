"""What a calibration promises and what the model then answers, in a line each."""

from .abstention import Abstention
from .class_promises import ClassAbstention
from .costs import CostAbstention


NEVER_ABSTAINS = "It never abstains: no target was given."


def summarize_abstention(abstention: Abstention | None) -> list[str]:
    """Return a line on what is promised, and one on what is answered.

    >>> rule = Abstention.fit([0.1, 0.2, 0.3, 0.9], [1, 1, 1, 0], coverage=0.75)
    >>> for line in summarize_abstention(rule):
    ...     print(line)
    Aimed at, not promised (for that, pass a confidence): at least 75 % of the rows are answered.
    Of the 4 rows that set the threshold it answers 75 %: 0 % of the answers are wrong, 25 % if it answered all.
    """
    if abstention is None:
        return [NEVER_ABSTAINS]
    return [describe_promise(abstention), describe_answers(abstention)]


def describe_sets(task: str, alpha: float | None, has_target: bool) -> list[str]:
    """Return a line on what sets or intervals promise, where that is what users look for.

    Sets of classes are fitted beside every target, and told only where there is none.

    >>> describe_sets("regression", 0.1, has_target=True)
    ['With probability 90 % or more a value lies in its interval, for data like the validation rows.']
    """
    if alpha is None:
        return []
    kept = percent(1 - alpha)
    if task == "regression":
        return [f"With probability {kept} or more a value lies in its interval, for data like the validation rows."]
    if task == "multi_label_classification":
        return [f"On average at most {percent(alpha)} of a row's labels are missing from its set."]
    if has_target:
        return []
    return [f"On average at least {kept} of the prediction sets hold the right class."]


def describe_promise(abstention: Abstention) -> str:
    """Say what holds for new rows like the validation rows, or that nothing is promised."""
    what = describe_target(abstention)
    if abstention.confidence is None:
        return f"Aimed at, not promised (for that, pass a confidence): {what}."
    return f"Promised with {percent(abstention.confidence)} confidence, for data like the validation rows: {what}."


def describe_target(abstention: Abstention) -> str:
    value = percent(abstention.value)
    if isinstance(abstention, CostAbstention):
        if abstention.confidence is None:
            return "the least expected cost of a row"
        return f"a row costs at most {abstention.value:.4g} on average"
    if isinstance(abstention, ClassAbstention) and abstention.target == "missed":
        return f"at most {value} of the true {abstention.label} rows are answered as another label"
    if isinstance(abstention, ClassAbstention):
        return f"of each of {len(abstention.groups)} groups at most the named share of the answers is wrong"
    if not abstention.is_share:
        return f"the mean error of its answers is at most {abstention.value:.4g}"
    return {
        "risk": f"at most {value} of its answers are wrong",
        "coverage": f"at least {value} of the {abstention.unit} are answered",
        "tpr": f"at least {value} of the out-of-distribution {abstention.unit} are not answered",
    }[abstention.target]


def describe_answers(abstention: Abstention) -> str:
    """Say which share of the fitting rows is answered, and how many of the answers are wrong."""
    unit = abstention.unit
    line = f"Of the {abstention.rows:,} {unit} that set the threshold it answers {rounded(abstention.coverage)}"
    if isinstance(abstention, CostAbstention):
        return f"{line}: a row costs {abstention.cost}, {abstention.cost_without} if it answered all."
    if abstention.risk is None or abstention.risk_without is None:
        return f"{line}."
    errors = (
        f"{rounded(abstention.risk)} of the answers are wrong, {rounded(abstention.risk_without)} if it answered all"
    )
    if not abstention.is_share:
        errors = f"their mean error is {abstention.risk:.4g}, {abstention.risk_without:.4g} if it answered all"
    return f"{line}: {errors}."


def percent(share: float) -> str:
    return f"{100 * share:.6g} %"


def rounded(share: float) -> str:
    return f"{100 * share:.3g} %"
