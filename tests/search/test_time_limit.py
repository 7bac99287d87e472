"""A search that is out of time ends with the best so far, says what was cut off, and goes on when it is called again."""

import dataclasses
import json

import pytest
from transformers import AutoModelForImageClassification

from hydra_transformers import hydrate
from hydra_transformers.search import hydration, model_builder, results, strategy
from hydra_transformers.search.resuming import Deadline, OutOfTime, StepsFolder
from hydra_transformers.search.sources import Source
from hydra_transformers.search.strategy import Search
from hydra_transformers.training import finetune, recipe
from tests.search.tiny import FAST, TRAINING, fine_tunings, id_rows, ood_rows
from tests.training.tiny import QUIET, tiny_dataset


AT_ONCE = 1e-9  # minutes
DATA = {"data": id_rows("vit"), "ood_data": ood_rows("vit")}


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """No plots, and one budget of two heads."""
    monkeypatch.setattr(results.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(strategy, "budgets_of", lambda config, trunk_layers: [2])


@pytest.mark.slow
def test_out_of_time_the_best_so_far_is_chosen_and_the_same_call_goes_on(tmp_path, monkeypatch, capsys):
    two, settings = fine_tunings("vit", 2), {**DATA, "output_dir": tmp_path / "hydra", **FAST}
    first = hydrate(two, time_limit=AT_ONCE, **settings | {"progress": True})
    assert [each.name for each in first.table if each.is_hydra] == [first.chosen.name]
    assert first.chosen.name == "Hydra of 2, first layer common", "the deepest trunk comes first"
    assert first.notes[-1].startswith("The time limit of 1 s came at 'Hydra of 2'")
    said = capsys.readouterr().out
    assert "Time limit 1 s: cheap candidates come first, then the best so far is taken." in said
    assert said.index("Time limit 1 s") < said.index("1. one model") and first.notes[-1] in said
    assert AutoModelForImageClassification.from_pretrained(first.folder).num_members == 2

    # Again, until the limit comes between two heads of the first circuit.
    evaluated, extract, asked = Search._evaluated, model_builder.extract_circuit, []

    def evaluate_if_new(self, design, *rest):
        assert design.name not in ("one model", "Deep Ensemble of 2", "soup", first.chosen.name), "evaluated again"
        return evaluated(self, design, *rest)

    def extract_and_use_up_the_time(*arguments, budget, **rest):
        asked.append(budget)
        monkeypatch.setattr(Deadline, "spent", 1e9)
        return extract(*arguments, budget=budget, **rest)

    monkeypatch.setattr(Search, "_evaluated", evaluate_if_new)
    monkeypatch.setattr(model_builder, "extract_circuit", extract_and_use_up_the_time)
    second = hydrate(two, time_limit=60, **settings)
    assert asked == [1] and second.notes[-1].startswith("The time limit of 60 min came at 'Hydra of 2")
    assert not any(each.design.pruned_by for each in second.table)
    [folder] = (tmp_path / "hydra-steps" / "circuits").iterdir()
    assert [len(json.loads(path.read_text())["circuit"]["ranking"]) for path in folder.iterdir()] == [1]

    monkeypatch.setattr(model_builder, "extract_circuit", extract)
    last = hydrate(two, **settings)
    assert any(each.design.pruned_by == "circuits" for each in last.table)
    assert not any("time limit" in note.lower() for note in last.notes)


@pytest.mark.slow
def test_copies_of_one_model_are_pruned_by_taylor_scores_before_any_circuit(tmp_path, monkeypatch):
    [model] = fine_tunings("vit", 1)
    monkeypatch.setattr(model_builder, "extract_circuit", lambda *_, **__: pytest.fail("extracted"))
    found = hydrate(model, **DATA, time_limit=AT_ONCE, num_members=2, output_dir=tmp_path / "hydra", **FAST)
    assert found.chosen.design.pruned_by == "taylor" and "came at" in found.notes[-1]


def test_a_training_ends_after_the_step_in_which_the_limit_came():
    Deadline(None).on_step_end(None, None, None)
    with pytest.raises(OutOfTime):
        Deadline(AT_ONCE).on_step_end(None, None, None)


@pytest.mark.slow
def test_fine_tunings_are_shortened_to_half_of_the_limit_and_stay_so(tmp_path, monkeypatch, capsys):
    encoder = fine_tunings("vit", 1)[0].base_model
    given = {"train_data": tiny_dataset("vit", 40), "data": id_rows("vit"), "output_dir": tmp_path / "hydra"}
    given |= {"num_members": 2, "training_arguments": TRAINING | {"max_steps": 50}, **FAST}
    monkeypatch.setattr(hydration, "_seconds_of_a_step", lambda *_: 60.0)
    monkeypatch.setattr(Search, "run", stop)
    for limit in (12.0, None):  # and a search that goes on keeps its trainings
        with pytest.raises(StopSearch), pytest.MonkeyPatch.context() as patched:
            patched.setattr(Search, "plan", "", raising=False)
            hydrate(encoder, time_limit=limit, **given | {"progress": True})
        assert "each of the 2 fine-tunings takes 3 steps in place of 50" in capsys.readouterr().out
        monkeypatch.setattr(finetune._FineTuning, "_trained", lambda *_: pytest.fail("trained again"))
    runs = list((tmp_path / "hydra-steps" / "finetuned").glob("member-*/run.json"))
    assert [json.loads(path.read_text())["arguments"]["max_steps"] for path in runs] == [3, 3]


def test_batches_that_make_one_step_count_once_when_a_training_is_shortened(tmp_path, monkeypatch):
    """Each of the steps has four batches: five of them in an epoch of 40 rows."""
    source = Source(fine_tunings("vit", 1), "pretrained", 2)
    monkeypatch.setattr(hydration, "_seconds_of_a_step", lambda *_: 60.0)
    settings = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, **QUIET}
    for limit, steps in {48.0: 3, 240.0: None}.items():
        found, _ = hydration._shortened(
            source,
            dataclasses.replace(recipe("finetune-images"), epochs=1),
            tiny_dataset("vit", 40),
            settings,
            Deadline(limit),
            StepsFolder(tmp_path / f"{limit}", {}),
        )
        assert found.get("max_steps") == steps


class StopSearch(Exception):
    pass


def stop(search):
    raise StopSearch


def test_a_step_is_timed_without_a_trace():
    [model] = fine_tunings("vit", 1)
    before = [parameter.clone() for parameter in model.parameters()]
    assert 0 < hydration._seconds_of_a_step(model, tiny_dataset("vit", 5), 16) < 60
    assert all((old == new).all() and new.grad is None for old, new in zip(before, model.parameters(), strict=True))
