"""Several processes share the paper's work: each thing is made by one part, and read by those that need that part."""

import shutil
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from experiments.paper import clip, methods, parts, study
from experiments.paper.figures import FIGURES
from experiments.paper.settings import SETTINGS as CLASSIFIERS
from experiments.paper.studies import SETTINGS, smallest_of
from experiments.paper.tables import SHIFTED_TABLES, TABLES
from hydra_transformers.pruning import Circuit, prune_heads
from hydra_transformers.pruning.heads import heads_of
from tests.families import CLIP


class Ensemble(nn.Module):
    """Stands in for one of LoRA adapters."""

    def __init__(self, model=None):
        super().__init__()
        self.model = nn.Module()
        self.model.peft_config = []


def write_once(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        path.write_text("made")


def finetune_members(members, recipe, train, validation, folder, **options):
    write_once(folder / "member-0")
    return [member.eval() for member in members]


def finetune_lora_ensemble(model, recipe, train, validation, folder, **options):
    write_once(folder / "member-0")
    return Ensemble()


def extract_circuit(model, data, ood_data, objective, *, budget, checkpoint, **options):
    """Goes on in the file where a shorter circuit ended."""
    ranked = len(checkpoint.read_text()) if checkpoint.exists() else 0
    if ranked < budget:
        checkpoint.parent.mkdir(parents=True, exist_ok=True)
        checkpoint.write_text("x" * budget)
    return Circuit(heads_of(prune_heads(model))[:budget], [0.5] * budget, 0.5, objective)


def draw_members(model, **options):
    return [prune_heads(model, {0: [0]})]


def oba_prune(model, data, sparsity):
    return model


def evaluate_uncertainty(models, *data, **options):
    return SimpleNamespace(models={name: {"data": {"accuracy": 0.5, "nll": 0.5}} for name in models})


STAND_INS = (finetune_members, finetune_lora_ensemble, extract_circuit, draw_members, oba_prune, evaluate_uncertainty)


@pytest.fixture
def untrained(monkeypatch):
    """Nothing is trained, extracted or measured, but the same files are written and read."""
    for stand_in in STAND_INS:
        for module in (parts, clip):
            if hasattr(module, stand_in.__name__):
                monkeypatch.setattr(module, stand_in.__name__, stand_in)
    for name in ("judged", "judged_under_shift"):
        monkeypatch.setattr(study, name, lambda *of_model: {})
    monkeypatch.setattr(methods, "LoRAEnsemble", Ensemble)

    def build_only(clip_study, name):
        build = clip_study.methods[name].build
        if build is not None and name != "taylor":
            build(clip_study)
        return {}

    monkeypatch.setattr(clip.ClipStudy, "judge", build_only)
    monkeypatch.setattr(clip.ClipStudy, "prompts", lambda clip_study: {})
    monkeypatch.setattr(clip.ClipStudy, "tower_scores", lambda clip_study: {"towers": bool(clip_study.clip)})


def load_clip(start, folder, device):
    write_once(folder / "model")
    return CLIP.backbone().eval(), None


def goals_of_all(work, setting) -> list:
    """What all tables and figures of the setting's task ask for, and a second seed of some rows."""
    found = dict.fromkeys(work.goals(["single", "hydra-circ", "hydra-taylor"], 2 if setting.task != "clip" else 0))
    for table in TABLES.values():
        if SETTINGS[table.settings[0]].task == setting.task:
            found |= dict.fromkeys(work.goals(table.rows(setting), 1, table.number in SHIFTED_TABLES))
    for figure in FIGURES.values():
        if SETTINGS[figure.settings[0]].task == setting.task:
            found |= dict.fromkeys(work.goals(figure.methods(SETTINGS[setting.name], True), 1))
    return list(found)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def written_alone(kind, setting, plan, folder: Path) -> tuple[dict, dict]:
    """Make each part where its needs are done and nothing else; return what it wrote, and what stands behind it."""
    behind: dict[parts.Part, set[parts.Part]] = {}
    written: dict[parts.Part, dict[str, bytes]] = {}
    for part, needs in plan.items():
        behind[part] = set(needs).union(*(behind[need] for need in needs))
        folder.mkdir()
        for need in written:
            if need in behind[part]:
                for path, content in written[need].items():
                    (folder / path).parent.mkdir(parents=True, exist_ok=True)
                    (folder / path).write_bytes(content)
        before = contents(folder)
        kind(setting, None, setting.start, folder, "cpu").make(part)
        written[part] = {path: made for path, made in contents(folder).items() if before.get(path) != made}
        shutil.rmtree(folder)
    return written, behind


# Rates are tried for backbones and members, for members, and not at all; the others are made like these.
SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "name",
    ["sst2-gte", "clip-vit-b32", pytest.param("imagenet1k", marks=SLOW), pytest.param("sst2", marks=SLOW)],
)
def test_nothing_is_made_by_two_parts_that_may_run_at_once(name, untrained, tmp_path):
    setting = smallest_of(SETTINGS[name])
    kind = study.Study if name in CLASSIFIERS else clip.ClipStudy
    if kind is clip.ClipStudy:
        setting = replace(setting, load=load_clip)
    work = kind(setting, None, setting.start, tmp_path, "cpu")
    plan = work.plan(goals_of_all(work, setting))
    written, behind = written_alone(kind, setting, plan, tmp_path / "alone")

    assert len(plan) > 20 and {"result", "circuit"} <= {part.kind for part in plan}
    for first, second in combinations(plan, 2):
        both = written[first].keys() & written[second].keys()
        assert not both or first in behind[second] or second in behind[first], (str(first), str(second), both)


def test_rates_of_members_are_tried_on_a_backbone_that_is_there():
    setting = SETTINGS["sst2-gte"]
    rate = parts.rates(setting, "member")[0]
    order = parts.expanded([rate], lambda part: parts.needs_of(setting, part))
    assert order[0] == parts.Part("backbone", 0) and order[-1] == rate


def test_circuits_of_one_file_come_one_after_the_other(tmp_path):
    setting = SETTINGS["imagenet1k"]
    work = study.Study(setting, None, setting.start, tmp_path, "cpu")
    plan = work.plan(work.goals(["varied-heads", "circ-avg"], 1))
    assert parts.Part("circuit", 0, "avg", 48) in plan[parts.Part("circuit", 0, "avg", 100)]


def test_hydras_come_first_and_seeds_one_by_one(tmp_path):
    setting = SETTINGS["sst2-gte"]
    work = study.Study(setting, None, setting.start, tmp_path, "cpu")
    names = TABLES[2].rows(setting)
    goals = work.goals(names, 2)
    assert [part.seed for part in goals] == [0] * len(names) + [1] * len(names)
    assert {part.name for part in goals[:2]} == {"hydra-taylor", "hydra-circ"}
    assert [part.name for part in goals[2 : len(names)]] == [name for name in names if not name.startswith("hydra")]
    order = list(work.plan(goals))
    end_of_first_seed = max(order.index(part) for part in goals if part.seed == 0)
    assert not any(part.seed == 1 for part in order[:end_of_first_seed])


def test_what_oba_left_out_is_chosen_once(untrained, tmp_path, monkeypatch):
    setting = smallest_of(SETTINGS["imagenet1k"])
    work = study.Study(setting, None, setting.start, tmp_path, "cpu")
    for part in parts.rates(setting, "backbone"):
        work.make(part)
    first = work.pruned(parts.Part("pruning", 0, "oba"))
    monkeypatch.setattr(parts, "oba_prune", None)
    again = work.pruned(parts.Part("pruning", 0, "oba"))
    assert type(again) is type(first)
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in first.state_dict().items())
