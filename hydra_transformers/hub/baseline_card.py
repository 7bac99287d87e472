"""What the card of a baseline says: what it is, what it costs, and how it is loaded."""

from pathlib import Path
from typing import Any

from ..baselines import Baseline
from ..reports.table import escape_markdown
from .cost_table import baseline_cost_table
from .tasks import BASELINE_LIMITS, BASELINE_SNIPPETS, Task


TEMPLATE = Path(__file__).with_name("baseline_card.md")
TAGS = ["uncertainty", "hydra-ensembles", "out-of-distribution-detection"]


def baseline_fields(model: Baseline, task: Task, repo_id: str | None, base_model: str | None) -> dict[str, Any]:
    """What the template says about a baseline."""
    name = type(model).__name__
    repo_id = repo_id or f"me/{name.lower()}"
    snippet = model.usage or BASELINE_SNIPPETS[task.pipeline_tag]
    return {
        "repo_id": repo_id,
        "model_name": repo_id.split("/")[-1],
        "summary": model.summary.format(members=model.num_members),
        "model_class": type(model.model).__name__,
        "of_base_model": f" of [{base_model}](https://huggingface.co/{base_model})" if base_model else "",
        "intended_use": task.intended_use,
        "snippet": snippet.replace("REPO", repo_id).strip(),
        "baseline": name,
        "members": model.num_members,
        "arguments": {
            key: escape_markdown(str(value)) for key, value in model.arguments.items() if key != "num_members"
        },
        "cost": baseline_cost_table(model),
        "limits": BASELINE_LIMITS,
    }
