"""Algorithm 1 as the paper writes it: a plain Transformers model, slices zeroed, scikit-learn's AUROC."""

import copy
from functools import cache

import torch
from sklearn.metrics import roc_auc_score

from tests.families import FAMILIES, Family


@cache
def families_by_class() -> dict[type, Family]:
    return {type(family.backbone()): family for family in FAMILIES}


def output_projections(model) -> dict[tuple, torch.nn.Linear]:
    """The output projection of every layer, by (layer,) or (tower, layer)."""
    found = {}
    family = families_by_class()[type(model)]
    for tower in family.outputs:
        config = config_of_tower(model, tower)
        for layer in range(getattr(config, "num_hidden_groups", config.num_hidden_layers)):
            found[(tower, layer) if tower else (layer,)] = family.output_projection(model, tower, layer)
    return found


def config_of_tower(model, tower: str):
    """That of the vision tower is also that of an image classifier which is one."""
    return getattr(model.config, f"{tower or 'vision'}_config", model.config)


def head_dim_of(model, key: tuple) -> int:
    config = config_of_tower(model, "" if len(key) == 1 else key[0])
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def all_heads(model, towers=("vision", "text")) -> list[tuple]:
    heads = []
    for key, projection in output_projections(model).items():
        if len(key) == 1 or key[0] in towers:
            heads += [(*key, head) for head in range(projection.in_features // head_dim_of(model, key))]
    return heads


def zero_slice(model, head: tuple) -> torch.Tensor:
    """Zeroes the head's columns and returns what they were."""
    key = head[:-1]
    size = head_dim_of(model, head[:-1])
    columns = output_projections(model)[key].weight.data[:, head[-1] * size : (head[-1] + 1) * size]
    before = columns.clone()
    columns.zero_()
    return before


def restore_slice(model, head: tuple, before: torch.Tensor) -> None:
    size = before.shape[1]
    output_projections(model)[head[:-1]].weight.data[:, head[-1] * size : (head[-1] + 1) * size] = before


@torch.no_grad()
def logits_of(model, batches, prompts) -> torch.Tensor:
    outputs = []
    for batch in batches:
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        output = model(**inputs, **(prompts or {}))
        outputs.append(output.logits if prompts is None else output.logits_per_image)
    return torch.cat(outputs)


def judge(model, id_batches, ood_batches, objective, prompts=None) -> tuple[float, float]:
    """The score, and the margin that decides between heads of equal score: how likely the labels are, and how far apart
    the mean confidences."""
    id_logits = logits_of(model, id_batches, prompts)
    scores = []
    margins = []
    if objective in ("acc", "avg"):
        labels = torch.cat([batch["labels"] for batch in id_batches])
        scores.append((id_logits.argmax(-1) == labels).double().mean().item())
        margins.append(-four_digits(torch.nn.functional.cross_entropy(id_logits, labels)))
    if objective in ("ood", "avg"):
        ood_logits = logits_of(model, ood_batches, prompts)
        known, unknown = (logits.softmax(-1).amax(-1) for logits in (id_logits, ood_logits))
        is_ood = [0] * len(known) + [1] * len(unknown)
        scores.append(roc_auc_score(is_ood, -torch.cat([known, unknown]).numpy()))
        margins.append(four_digits(known.mean()) - four_digits(unknown.mean()))
    # scikit-learn adds areas up in floating point; the last digits are not a difference between heads.
    return round(sum(scores) / len(scores), 12), sum(margins) / len(margins)


def four_digits(mean: torch.Tensor) -> float:
    return float(f"{mean.item():.3e}")


def algorithm_1(
    model,
    id_batches,
    ood_batches,
    objective,
    budget,
    prompts=None,
    towers=("vision", "text"),
    trunk_layers=0,
    judge=judge,
):
    """(ranking, scores); heads of equal score go in their order, if `judge` gives them no margin."""
    model = copy.deepcopy(model)
    candidates = [head for head in all_heads(model, towers) if head[-2] >= trunk_layers]
    ranking = []
    scores = []
    for _ in range(budget):
        best = (float("-inf"), float("-inf"))
        best_head = None
        for head in candidates:
            before = zero_slice(model, head)
            reached = judge(model, id_batches, ood_batches, objective, prompts)
            restore_slice(model, head, before)
            if reached > best:
                best = reached
                best_head = head
        zero_slice(model, best_head)
        candidates.remove(best_head)
        ranking.append(best_head)
        scores.append(best[0])
    return ranking, scores
