"""From models and data to a finished folder: the three kinds of input, and what goes wrong."""

import json
import shutil
import signal

import pytest
import torch
from transformers import AutoModelForImageClassification, AutoModelForSequenceClassification, ViTImageProcessorPil

import hydra_transformers
from hydra_transformers import AutoHydra, hydrate
from hydra_transformers.baselines import average_members, soup
from hydra_transformers.reports.evaluation import evaluate_uncertainty
from hydra_transformers.reports.report import UncertaintyReport
from hydra_transformers.search import hydration, model_builder, results, strategy
from hydra_transformers.search.costs import Costs, peak_bytes
from hydra_transformers.search.resuming import StepsFolder
from hydra_transformers.search.sources import held_out
from hydra_transformers.search.strategy import Search
from hydra_transformers.training import finetune
from hydra_transformers.uncertainty import calibrate
from tests.families import clip_backbone
from tests.pages import run_python_blocks
from tests.processes import exit_code, start
from tests.search import child
from tests.search.tiny import FAST, TRAINING, everything, fine_tunings, id_rows, near_and_far, ood_rows
from tests.training.test_finetune_members import assert_same_weights
from tests.training.tiny import tiny_dataset, tiny_model


@pytest.fixture(scope="module", autouse=True)
def small():
    """No plots, which take a second each and are drawn by one test; one candidate is tuned, however bad it is."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(results.importlib.util, "find_spec", lambda name: None)
        patched.setattr(strategy, "NEAR", 100)
        patched.setattr(strategy, "MOST_TUNED", 1)
        yield


@pytest.fixture(scope="module")
def two():
    return fine_tunings("vit", 2)


@pytest.fixture(scope="module")
def finished(two, tmp_path_factory):
    """Two fine-tunings of a ViT, with OOD data and training data: everything is tried."""
    folder = tmp_path_factory.mktemp("hydrated") / "hydra"
    return hydrate(two, output_dir=folder, **everything(), processor=ViTImageProcessorPil())


@pytest.mark.slow
def test_several_fine_tunings_are_fused_pruned_and_tuned_and_compared_with_what_they_are_made_of(finished, two):
    assert {each.name for each in finished.table} >= {"one model", "Deep Ensemble of 2", "soup", "Hydra of 2"}
    designs = [each.design for each in finished.table]
    assert {each.trunk_layers for each in designs if not each.budget} == {0, 1}
    assert {(each.trunk_layers, each.budget) for each in designs if each.budget} >= {(1, 1)}
    assert sorted(bool(each.pruned_by) for each in designs if each.tuned) == [False, True], (
        "as a whole, and after pruning"
    )
    single, soup = (next(each for each in finished.table if each.name == name) for name in ("one model", "soup"))
    assert single.time == single.memory == single.parameters == 1
    assert soup.parameters == pytest.approx(1) and finished.chosen.is_hydra
    assert finished.choice == str(finished) and finished.chosen.name in finished.choice
    assert set(finished.gains) == {each.name for each in finished.table if each != finished.chosen}
    for each in finished.table:
        if each != finished.chosen:
            difference = finished.gains[each.name].change.difference
            assert difference == pytest.approx(each.quality - finished.chosen.quality, abs=1e-6)
    assert finished.chosen not in finished.alternatives and len(finished.alternatives) > 0
    for each in finished.table:
        assert set(each.auroc) == {"near", "far"} and 0 <= each.quality <= 1 and each.memory > 0.5 and each.time > 0


@pytest.mark.slow
def test_the_folder_holds_the_calibrated_hydra_and_all_that_is_known_of_it(finished):
    folder = finished.folder
    hydra = AutoModelForImageClassification.from_pretrained(folder).eval()
    assert hydra.num_members == 2 and hydra.config.decision["sets"] is not None
    inputs = torch.stack([row["pixel_values"] for row in id_rows("vit", 6)])
    assert torch.equal(hydra(pixel_values=inputs).logits, finished.hydra(pixel_values=inputs).logits)
    assert hydra(pixel_values=inputs).prediction_set is not None
    assert ViTImageProcessorPil.from_pretrained(folder).size is not None
    report = UncertaintyReport.from_json(folder / "evaluation" / "report.json")
    assert next(iter(report.models)) == "hydra"
    assert set(report.models) == {"hydra", "one model", "Deep Ensemble of 2", "soup"}
    assert report.models["hydra"].id["accuracy"] == finished.chosen.accuracy
    assert report.models["hydra"].id["num_samples"] == 30
    card = (folder / "README.md").read_text()
    assert "me/tiny" in card and "2 fine-tunings of [me/vit]" in card
    text = (folder / "candidates.md").read_text()
    assert text == finished.to_markdown() and finished.choice in text and "rows of data are for the search" in text
    record = json.loads((folder / "candidates.json").read_text())
    assert record["chosen"] == finished.chosen.name and len(record["candidates"]) == len(finished.table)


@pytest.mark.slow
def test_what_is_chosen_answers_as_its_row_of_the_table_says(finished, two):
    """Whole and with everything shared, made by hand: the same numbers as the search found."""
    [row] = [each for each in finished.table if each.name == "Hydra of 2, first layer common"]
    data = held_out(id_rows("vit"), near_and_far("vit"), 3, 16, 0)
    hydra = calibrate(AutoHydra.from_pruned_members(two, trunk_layers=1), data.calibration, batch_size=16).model
    [result] = evaluate_uncertainty(hydra, data.evaluation, data.ood).models.values()
    assert (row.accuracy, row.nll) == (result.id["accuracy"], pytest.approx(result.id["nll"]))
    assert row.auroc == {group: pytest.approx(result.ood_average(group)["auroc"]) for group in ("near", "far")}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vit", "bert"])
def test_copies_of_one_model(name, tmp_path):
    """By circuits with OOD data, by Taylor scores without."""
    [model] = fine_tunings(name, 1)
    before = [parameter.clone() for parameter in model.parameters()]
    ood = {"ood_data": ood_rows(name)} if name == "vit" else {}
    found = hydrate(model, data=id_rows(name), **ood, output_dir=tmp_path / "hydra", num_members=2, **FAST)
    assert all(map(torch.equal, before, model.parameters()))
    assert {each.design.kind for each in found.table} == {"one model", "Hydra"}
    ways = {each.design.pruned_by for each in found.table if each.is_hydra}
    assert found.hydra.num_members == 2 and ways == {"samples"} if ood else ways and ways <= {"taylor", "samples"}
    assert (found.chosen.detection is None) == (not ood)
    assert any("detection is not measured" in note for note in found.notes) == (not ood)
    assert "copies of one backbone" in (found.folder / "README.md").read_text()


@pytest.mark.slow
def test_a_pre_trained_model_is_fine_tuned_first_and_its_data_divided(tmp_path, capsys, monkeypatch):
    found_builder = None
    search_of = Search.__post_init__

    def keep_builder(self):
        nonlocal found_builder
        found_builder = self.builder
        search_of(self)

    monkeypatch.setattr(Search, "__post_init__", keep_builder)
    monkeypatch.setattr(Search, "try_tuned", lambda self: None)  # after pruning, which takes its time
    monkeypatch.setattr(strategy, "budgets_of", lambda config, trunk_layers: [1])
    encoder = fine_tunings("bert", 1)[0].base_model
    settings = {"num_members": 2, "class_names": ["a", "b", "c"], "training_arguments": TRAINING, **FAST}
    settings["trainings"] = 4
    found = hydrate(encoder, tiny_dataset("bert", 300), output_dir=tmp_path / "hydra", **settings | {"progress": True})
    said = capsys.readouterr().out
    assert "There was no data beside train_data: 60 of its rows were held out" in said
    assert "20 rows of data are for the search" in said and "There are only 20 rows for evaluation" in said
    assert "Tried in turn: the 4 models averaged into 2 members and fused; the 2 models fused, with 1, 0 of 2" in said
    assert "1. one model: 1.00 times one model's time" in said and found.choice in said
    hydra = AutoModelForSequenceClassification.from_pretrained(found.folder)
    assert hydra.config.id2label == {0: "a", 1: "b", 2: "c"} and hydra.num_members == 2
    assert "Deep Ensemble of 2" in {each.name for each in found.table}
    folders = [tmp_path / "hydra-steps" / "finetuned" / f"member-{index}" for index in range(4)]
    four = [AutoModelForSequenceClassification.from_pretrained(folder) for folder in folders]
    # The rows of the table are what their names say: means of two, merged, and tuned with the same unmerged as teacher.
    rows = {each.name: each.design for each in found.table}
    averaged = "Hydra of 2, each the mean of 2 fine-tunings"
    assert set(rows) >= {averaged, f"{averaged}, first layer common", "Hydra of 2", "Hydra of 2, first layer common"}
    members = average_members(four, into=2)
    made = found_builder.model_of(rows[f"{averaged}, first layer common"])
    assert_same_weights(made, AutoHydra.from_pruned_members(members, trunk_layers=1))
    [tuned] = [design for name, design in rows.items() if name.endswith("tuned as a whole")]
    taught = []
    monkeypatch.setattr(
        model_builder, "tune_jointly", lambda *models, teacher, **_: taught.extend([*models[:1], teacher])
    )
    found_builder.model_of(tuned)
    models = members if tuned.averaged == 2 else four[:2]
    for model, depth in zip(taught, (1, 0), strict=True):
        assert_same_weights(model, AutoHydra.from_pruned_members(models, trunk_layers=depth))


def test_the_budget_of_trainings_reaches_the_fine_tuning_and_fits_the_time_limit(tmp_path, monkeypatch, two):
    asked = {}

    def take(*_, **arguments):
        asked.update(arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(hydration, "finetune_from_pretrained", take)
    monkeypatch.setattr(hydration, "_seconds_of_a_step", lambda *_: 1.0)
    encoder = fine_tunings("bert", 1)[0].base_model
    settings = {
        "class_names": ["a", "b", "c"],
        "training_arguments": TRAINING | {"max_steps": 90},
        **FAST,
        "time_limit": 0.2,
    }
    with pytest.raises(KeyboardInterrupt):
        hydrate(encoder, tiny_dataset("bert", 300), output_dir=tmp_path / "hydra", trainings=1.5, **settings)
    assert asked["trainings"] == 1.5 and asked["max_steps"] == 4, "half of 12 seconds for 1.5 trainings"
    with pytest.raises(ValueError, match=r"trainings is 4: pass more than 0.5 and less than 3"):
        hydrate(encoder, tiny_dataset("bert", 300), output_dir=tmp_path / "other", trainings=4, **settings)
    with pytest.raises(ValueError, match="nothing is fine-tuned here: leave it out"):
        hydrate(two, output_dir=tmp_path / "other", **everything() | {"trainings": 1.5})


def test_texts_to_validate_with_end_with_the_padding_that_a_plain_decoder_goes_by(tmp_path, monkeypatch):
    """It would read its answer at the padding otherwise."""
    asked = []

    def take(*arguments, **_):
        asked.extend(arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(hydration, "finetune_from_pretrained", take)
    pretrained = tiny_model("llama", "backbone", pad_token_id=2).base_model
    rows = [{"input_ids": [5] * (3 + row % 4), "labels": row % 3} for row in range(300)]
    with pytest.raises(KeyboardInterrupt):
        hydrate(pretrained, rows, output_dir=tmp_path / "hydra", class_names=["a", "b", "c"], **FAST)
    validation = asked[4]
    assert {len(row["input_ids"]) for row in validation} == {6}
    for row in validation:
        assert torch.equal(row["input_ids"] == 2, row["attention_mask"] == 0)


@pytest.mark.slow
def test_plots_and_names_of_folders(finished, two, tmp_path):
    [path] = finished.plot(tmp_path / "plots")
    assert path.name == "quality_against_cost.png" and path.stat().st_size > 10_000
    assert hydra_transformers.Hydrated is type(finished)


# Going on


@pytest.mark.slow
def test_nothing_is_done_twice_and_another_target_chooses_among_the_candidates(finished, two, tmp_path, monkeypatch):
    folder = copied(finished, tmp_path)
    monkeypatch.setattr(Search, "_evaluated", lambda *_: pytest.fail("evaluated again"))
    monkeypatch.setattr(finetune._FineTuning, "_trained", lambda *_: pytest.fail("trained again"))
    monkeypatch.setattr(model_builder, "extract_circuit", known_circuits(model_builder.extract_circuit))
    again = hydrate(two, output_dir=folder, **everything())
    assert again.table == finished.table and again.choice == finished.choice
    other = hydrate(two, output_dir=folder, **everything() | {"target": {"accuracy_within": 0}})
    assert other.table == finished.table and other.chosen.accuracy == max(
        each.accuracy for each in other.table if each.is_hydra
    )
    assert json.loads((folder / "candidates.json").read_text())["target"] == "accuracy_within 0"


def known_circuits(extract):
    """Extraction that must find its checkpoint finished."""

    def run(*arguments, checkpoint, budget, **settings):
        paths = checkpoint.glob("*.json")
        assert all(len(json.loads(path.read_text())["circuit"]["ranking"]) >= budget for path in paths)
        return extract(*arguments, checkpoint=checkpoint, budget=budget, **settings)

    return run


def copied(finished, tmp_path):
    for folder in (finished.folder, finished.folder.with_name("hydra-steps")):
        shutil.copytree(folder, tmp_path / folder.name)
    return tmp_path / "hydra"


STEPS = {
    "evaluate_uncertainty": strategy,
    "fusion_report": strategy,
    "extract_circuit": model_builder,
    "tune_jointly": model_builder,
    "finetune_members": model_builder,
    "write_results": hydration,
}


@pytest.mark.slow
def test_a_hydration_that_was_stopped_at_every_step_ends_as_if_it_had_not_been(finished, two, tmp_path):
    folder, steps = copied(finished, tmp_path), tmp_path / "hydra-steps"
    # Of every kind of step one is undone; the others are found.
    shutil.rmtree(folder)
    (steps / "candidates" / "soup.report.json").unlink()
    (steps / "fusion.json").unlink()
    shutil.rmtree(steps / "circuits" / "trunk-1")
    next((steps / "candidates").glob("hydra_trunk-1*circuits-1.json")).unlink()
    tuned = {"circuits" in folder.name: folder for folder in (steps / "tuned").iterdir()}
    shutil.rmtree(tuned[True] / "member-1")
    shutil.rmtree(tuned[False] / "member-0")  # of a joint tuning there is no other
    for path in (steps / "candidates").glob("*tuned.json"):
        path.unlink()
    for step, place in STEPS.items():
        with pytest.MonkeyPatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(place, step, stopped_at(getattr(place, step)))
            hydrate(two, output_dir=folder, **everything())
        assert not folder.exists()
    assert (steps / "circuits" / "trunk-1" / "circuit-0.json").exists(), "the first of two was finished"
    found = hydrate(two, output_dir=folder, **everything())
    quality = {each.name: (each.accuracy, each.nll, each.auroc) for each in finished.table}
    assert {each.name: (each.accuracy, each.nll, each.auroc) for each in found.table} == quality
    assert AutoModelForImageClassification.from_pretrained(folder).num_members == 2


def stopped_at(work):
    """Work that is stopped: circuits after the first of them, everything else at once."""

    def run(*arguments, **settings):
        if work.__name__ == "extract_circuit":
            work(*arguments, **settings)
        raise KeyboardInterrupt

    return run


@pytest.mark.slow
def test_a_process_that_was_killed_in_an_extraction_leaves_what_it_had_removed(finished, two, tmp_path):
    folder = copied(finished, tmp_path)
    shutil.rmtree(folder)
    steps = tmp_path / "hydra-steps"
    shutil.rmtree(steps / "circuits")
    for path in (steps / "candidates").glob("*circuits*"):
        path.unlink()
    for place, model in enumerate(two):
        model.save_pretrained(tmp_path / f"model-{place}")
    killed = start(tmp_path / "log", child.main, *map(str, (folder, tmp_path / "model-0", tmp_path / "model-1")))
    assert exit_code(killed) == -signal.SIGKILL, (tmp_path / "log").read_text()
    left = steps / "circuits" / "trunk-0" / "circuit-0.json"
    assert len(json.loads(left.read_text())["circuit"]["ranking"]) == 1 and not folder.exists()
    found = hydrate(two, output_dir=folder, **everything())
    quality = {each.name: each.quality for each in finished.table}
    assert all(each.quality == quality[each.name] for each in found.table if not each.design.tuned)
    assert len(found.table) >= len(finished.table) - 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"data": id_rows("vit", 91)}, r"another hydration \(other data\)"),
        ({"ood_data": {"near": {"one": ood_rows("vit")}}}, r"other data\)"),
        ({"train_data": tiny_dataset("vit", 17, seed=70)}, r"other train_data\)"),
        ({"seed": 1}, r"other seed\)"),
        ({"batch_size": 8}, "other training_arguments, batch_size"),
    ],
)
def test_steps_of_other_data_or_settings_are_not_taken(change, sentence, finished, two, tmp_path):
    folder = copied(finished, tmp_path)
    with pytest.raises(ValueError, match=sentence):
        hydrate(two, output_dir=folder, **everything() | change)


@pytest.mark.slow
def test_other_models_and_foreign_folders_are_refused(finished, two, tmp_path):
    folder = copied(finished, tmp_path)
    with torch.no_grad():
        changed = fine_tunings("vit", 2)
        changed[1].classifier.bias += 1
    with pytest.raises(ValueError, match=r"other models\)"):
        hydrate(changed, output_dir=folder, **everything())
    shutil.rmtree(folder)
    folder.mkdir()
    (folder / "thesis.txt").write_text("mine")
    with pytest.raises(ValueError, match="holds something else already"):
        hydrate(two, output_dir=folder, **everything())
    (tmp_path / "other-steps").mkdir()
    (tmp_path / "other-steps" / "thesis.txt").write_text("mine")
    with pytest.raises(ValueError, match="something else than a hydration"):
        hydrate(two, output_dir=tmp_path / "other", **everything())


def test_a_broken_record_of_steps_is_named(tmp_path):
    StepsFolder(tmp_path, {"seed": 0})
    assert not StepsFolder(tmp_path, {"seed": 0}).has_made(tmp_path / "hydration.json")
    for content in ("[", "[]"):
        (tmp_path / "hydration.json").write_text(content)
        with pytest.raises(ValueError, match=r"hydration\.json is broken, so nobody knows"):
            StepsFolder(tmp_path, {"seed": 0})


@pytest.mark.slow
def test_times_of_another_machine_are_measured_again(finished, two, tmp_path, monkeypatch):
    folder = copied(finished, tmp_path)
    monkeypatch.setattr(strategy, "machine_of", lambda model: "elsewhere")
    names = ("memory", "multiply_adds", "parameters", "milliseconds", "megabytes")
    monkeypatch.setattr(Costs, "of", lambda self, model: {"time": 1.5} | dict.fromkeys(names, 1.0))
    found = hydrate(two, output_dir=folder, **everything())
    assert {each.time for each in found.table} == {1.5}
    assert sorted(each.nll for each in found.table) == sorted(each.nll for each in finished.table)


# What can still win


@pytest.mark.slow
def test_a_cost_target_extracts_no_circuits_for_what_would_be_too_slow(finished, two, tmp_path, monkeypatch):
    folder = copied(finished, tmp_path)
    shutil.rmtree(folder)
    shutil.rmtree(tmp_path / "hydra-steps" / "circuits")
    monkeypatch.setattr(model_builder, "extract_circuit", lambda *_, **__: pytest.fail("extracted"))
    with pytest.raises(
        ValueError, match=r"no Hydra takes at most 0.001 times one model's time: the fastest, Hydra of 2"
    ):
        hydrate(two, output_dir=folder, **everything() | {"target": {"cost": 0.001}})
    assert not folder.exists()


@pytest.mark.slow
def test_copies_that_taylor_scores_make_equal_are_sampled_from_a_circuit(tmp_path, monkeypatch):
    [model] = fine_tunings("vit", 1)
    evaluate = Search.evaluate

    def refuse_taylor(self, design):
        if design.pruned_by == "taylor":
            raise model_builder.SameMembersError("two members would lose the same heads")
        return evaluate(self, design)

    monkeypatch.setattr(Search, "evaluate", refuse_taylor)
    monkeypatch.setattr(strategy, "budgets_of", lambda config, trunk_layers: [1])
    found = hydrate(model, data=id_rows("vit"), output_dir=tmp_path / "hydra", num_members=2, **FAST)
    assert found.chosen.design.pruned_by == "samples" and (found.folder / "circuits" / "acc.json").exists()
    assert sum("two members would lose the same heads" in note for note in found.notes) == 1


@pytest.mark.slow
def test_without_a_trunk_nothing_is_pruned_where_a_trunk_loses_nothing(finished, two, tmp_path, monkeypatch):
    folder = copied(finished, tmp_path)
    shutil.rmtree(tmp_path / "hydra-steps" / "circuits" / "trunk-0")
    monkeypatch.setattr(strategy, "NEAR", -100)
    monkeypatch.setattr(strategy, "POINTS", 100)
    found = hydrate(two, output_dir=folder, **everything() | {"target": {"cost": 100}})
    assert {each.design.trunk_layers for each in found.table if each.design.budget} == {1}
    assert any("without common layers, which are no more than 100 points better" in note for note in found.notes)


@pytest.mark.slow
def test_only_what_is_near_the_front_is_tuned(finished, two, tmp_path, monkeypatch):
    folder = copied(finished, tmp_path)
    monkeypatch.setattr(strategy, "NEAR", -100)
    found = hydrate(two, output_dir=folder, **everything())
    assert not any(each.design.tuned for each in found.table)
    assert any("Nothing was tuned" in note for note in found.notes)


def test_memory_is_weights_and_what_lives_in_a_forward():
    class Doubling(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(100))

        def forward(self, values):
            for _ in range(5):
                values = values * 2  # the old values are gone when the next are there
            return values + self.weight.sum()

    row = 1000 * 4
    # The input is the caller's; at most two tensors as large are alive at once.
    assert 400 + 2 * row <= peak_bytes(Doubling(), {"values": torch.zeros(1000)}) <= 400 + 2 * row + 100
    [model] = fine_tunings("vit", 1)
    small, large = (peak_bytes(model, {"pixel_values": torch.zeros(rows, 3, 8, 8)}) for rows in (1, 9))
    weights = sum(parameter.nbytes for parameter in model.parameters())
    assert weights < small and large - weights == pytest.approx(9 * (small - weights), rel=0.2)
    assert Costs(model, 4, 0.0).of(soup(fine_tunings("vit", 2)))["memory"] == pytest.approx(1, rel=0.3)


# Wrong inputs


@pytest.mark.parametrize(
    ("models", "settings", "sentence"),
    [
        ("one", {"target": "fast"}, "target is 'fast'"),
        ("one", {"target": "quality"}, "without ood_data that is not measured"),
        ("one", {"data": None}, "data is missing: pass labelled rows that the models were not trained on"),
        ("one", {"num_members": 1}, "num_members is 1: pass at least 2"),
        ("one", {"class_names": ["a", "b"]}, "class_names are for a pre-trained model"),
        ("one", {"train_data": {"rows": 1}}, "train_data is a dict: pass a Dataset"),
        ("one", {"train_data": []}, "train_data has no rows"),
        ("encoder", {}, "pre-trained model without a trained classifier, and there is no train_data"),
        (
            "encoder",
            {"data": None, "train_data": tiny_dataset("vit", 30)},
            "a fifth of the 30 rows of train_data are too few",
        ),
        ("encoder", {"finetune": False}, "is a ViTModel, which has no classifier"),
        ("one", {"batch_size": 0}, "batch_size is 0: pass at least 1"),
        ("one", {"seconds": -1}, "seconds is -1: pass 0 or more"),
        ("one", {"time_limit": 0}, "time_limit is 0: pass minutes, more than 0"),
        ("one", {"training_arguments": {"learning_rate": 1}}, "training_arguments has learning_rate"),
        ("one", {"processor": "name"}, "processor is a str: pass an image processor or a tokenizer"),
        ("one", {"card": {"author": "me"}}, "card has 'author': pass some of repo_id, base_model, dataset"),
        ("one", {"card": {"dataset": "not a name!"}}, "dataset is 'not a name!'"),
        ("twins", {}, r"model_or_models\[0\] and model_or_models\[1\] have the same heads and weights"),
        ("two", {"finetune": True}, "finetune is for one pre-trained model, and there are 2"),
        ("none", {}, "model_or_models is an empty list"),
        ("hydra", {}, "is a Hydra already"),
        ("clip", {}, "is a pre-trained model without a trained classifier, and there is no train_data"),
        ("text tower", {}, "is a clip_text_model: pass a classifier"),
        ("number", {}, "model_or_models is a int"),
        ("nowhere", {}, "there is no folder ./nowhere"),
    ],
)
def test_what_cannot_be_hydrated_is_refused_before_any_work(models, settings, sentence, two, tmp_path, monkeypatch):
    given = {
        "one": lambda: two[0],
        "two": lambda: two,
        "twins": lambda: [two[0], two[0]],
        "none": list,
        "encoder": lambda: two[0].base_model,
        "hydra": lambda: AutoHydra.from_backbone(two[0]),
        "clip": clip_backbone,
        "text tower": lambda: clip_backbone().text_model,
        "number": lambda: 3,
        "nowhere": lambda: "./nowhere",
    }[models]()
    monkeypatch.setattr(hydration, "Search", lambda *_, **__: pytest.fail("work began"))
    with pytest.raises((ValueError, TypeError, FileNotFoundError), match=sentence):
        hydrate(given, **{"data": id_rows("vit"), "output_dir": tmp_path / "hydra", **FAST} | settings)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_python_blocks_of_the_page_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = run_python_blocks("docs/choose-for-me.md", at_least=2)["found"]
    assert found.hydra.num_members == found.chosen.design.members and (tmp_path / "my-hydra" / "config.json").exists()
