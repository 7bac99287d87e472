"""The command line from a backbone to a published Hydra: each step's output folder is the next step's input."""

import json
import os
import shutil
import signal

import pytest
import torch
from transformers import (
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
    AutoModelForZeroShotImageClassification,
    ViTForImageClassification,
    ViTImageProcessorPil,
)

from hydra_transformers import HydraViTForImageClassification
from hydra_transformers.cli import evaluate as evaluate_command
from hydra_transformers.cli import finetune, fuse, main, prune
from hydra_transformers.pruning import Circuit, draw_members
from hydra_transformers.reports import Report
from hydra_transformers.uncertainty import Detector
from tests.command_line import call, run
from tests.processes import exit_code, start
from tests.tiny_data import grey_rows, picture_rows, review_rows, save_bert, save_clip, save_vit


pytestmark = pytest.mark.slow  # whole commands one after the other; what they refuse is in test_refusals.py


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    """A backbone of each family, and data."""
    folder = tmp_path_factory.mktemp("workplace")
    save_vit(folder / "vit")
    save_bert(folder / "bert")
    save_clip(folder / "clip")
    picture_rows(24, names=["blue", "red", "green"]).save_to_disk(folder / "pictures")
    picture_rows(12, seed=1).save_to_disk(folder / "test-pictures")
    grey_rows(10).save_to_disk(folder / "grey")
    review_rows(16).save_to_disk(folder / "reviews")
    return folder


@pytest.fixture(scope="module")
def pruned(workplace):
    data = ["--data", workplace / "pictures", "--ood-data", workplace / "grey"]
    run("prune", workplace / "vit", *data, "--budget", 3, "--score", "energy", "--output", workplace / "pruned")
    return workplace / "pruned"


@pytest.fixture(scope="module")
def finetuned(workplace, pruned):
    steps = ["--recipe", "cifar100", "--max-steps", 3, "--batch-size", 8]
    run("finetune", pruned, *steps, "--data", workplace / "pictures", "--output", workplace / "members")
    return workplace / "members"


@pytest.fixture(scope="module")
def fused(workplace, finetuned):
    run("fuse", finetuned, "--output", workplace / "hydra")
    return workplace / "hydra"


@pytest.fixture(scope="module")
def evaluated(workplace, fused):
    folder = shutil.copytree(fused, workplace / "evaluated" / "my-hydra")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Report, "plot", lambda *_: {})
        run("evaluate", folder, "--data", workplace / "test-pictures")
    return folder


@pytest.fixture
def hydra(evaluated, tmp_path):
    """A copy of the fused folder with its evaluation, to write into."""
    return shutil.copytree(evaluated, tmp_path / "my-hydra")


# prune


def test_prune_makes_one_member_per_objective(pruned):
    members = [AutoModelForImageClassification.from_pretrained(pruned / f"member-{index}") for index in range(3)]
    assert [sum(len(layer[0]) for layer in member.config.kept_heads) for member in members] == [5, 5, 5]
    circuits = {path.stem: json.loads(path.read_text()) for path in (pruned / "circuits").glob("*.json")}
    assert {name: each["made_from"]["score"] for name, each in circuits.items()} == {
        "acc": None,
        "ood": "energy",
        "avg": "energy",
    }
    for member, objective in zip(members, ("acc", "ood", "avg"), strict=True):
        for layer, head in circuits[objective]["ranking"]:
            assert head not in member.config.kept_heads[layer][0]
    assert ViTImageProcessorPil.from_pretrained(pruned / "member-0").size.height == 8


def test_a_pruned_member_is_the_backbone_without_its_heads(workplace, pruned):
    backbone = ViTForImageClassification.from_pretrained(workplace / "vit").eval()
    member = AutoModelForImageClassification.from_pretrained(pruned / "member-0").eval()
    for layer, kept in enumerate(member.config.kept_heads):
        for head in set(range(4)) - set(kept[0]):
            backbone.vit.layers[layer].attention.o_proj.weight.data[:, 8 * head : 8 * head + 8] = 0
    images = torch.randn(4, 3, 8, 8)
    with torch.no_grad():
        assert torch.allclose(member(images).logits.softmax(-1), backbone(images).logits.softmax(-1), atol=1e-5)


def test_prune_goes_on_from_its_checkpoint_and_ends_the_same(workplace, pruned, tmp_path, monkeypatch, capsys):
    from hydra_transformers.pruning.extraction import GreedySearch

    removals, remove_one = [], GreedySearch.remove_one

    def interrupted(search):
        if len(removals) == 5:
            raise KeyboardInterrupt
        removals.append(search.circuit.objective)
        remove_one(search)

    command = ["prune", workplace / "vit", "--data", workplace / "pictures", "--ood-data", workplace / "grey"]
    command = [str(word) for word in [*command, "--budget", 3, "--score", "energy", "--output", tmp_path / "again"]]
    monkeypatch.setattr(GreedySearch, "remove_one", interrupted)
    assert main(command) == 1
    removals_before = list(removals)
    removals.clear()
    monkeypatch.setattr(GreedySearch, "remove_one", lambda search: (removals.append(1), remove_one(search))[1])
    assert main(command) == 0
    assert len(removals_before) + len(removals) == 9
    told = capsys.readouterr().out
    for name in ("acc", "ood", "avg"):
        again, once = (
            json.loads((folder / "circuits" / f"{name}.json").read_text()) for folder in (tmp_path / "again", pruned)
        )
        assert again == once
        circuit = Circuit.from_dict(once)
        scores = f"score {circuit.dense_score:.4f} with all heads, {circuit.scores[2]:.4f} without 3"
        assert f"circuit for {name}: {scores}, best without {circuit.best_budget}\n" in told
    assert not list((tmp_path / "again").rglob("*.tmp")) + list((tmp_path / "again").rglob("*.checkpoint"))


def test_prune_that_is_finished_does_nothing(workplace, pruned, capsys):
    data = ["--data", workplace / "pictures", "--ood-data", workplace / "grey"]
    before = (pruned / "member-0" / "model.safetensors").stat().st_mtime_ns
    run("prune", workplace / "vit", *data, "--budget", 3, "--score", "energy", "--output", pruned)
    assert "finished already" in capsys.readouterr().out
    assert (pruned / "member-0" / "model.safetensors").stat().st_mtime_ns == before


def test_without_other_data_members_are_sampled_from_one_circuit(workplace, tmp_path, capsys):
    data = ["--data", workplace / "pictures", "--limit", 12, "--members", 2]
    run("prune", workplace / "vit", *data, "--budget", 2, "--out-of", 6, "--output", tmp_path / "out")
    assert [path.name for path in (tmp_path / "out" / "circuits").iterdir()] == ["acc.json"]
    said = capsys.readouterr().out
    assert "Next: hydra-transformers finetune" in said and "fuse at once, if hydra-transformers evaluate" in said
    kept = [
        json.loads((tmp_path / "out" / f"member-{index}" / "config.json").read_text())["kept_heads"]
        for index in range(2)
    ]
    assert kept[0] != kept[1]
    assert not (tmp_path / "out" / "member-2").exists()


def test_taylor_keeps_the_same_number_of_heads_in_every_layer(workplace, tmp_path):
    data = ["--data", workplace / "pictures", "--method", "taylor", "--heads-per-layer", 3, "--allow-equal"]
    run("prune", workplace / "vit", *data, "--output", tmp_path / "out")
    for index in range(3):
        config = json.loads((tmp_path / "out" / f"member-{index}" / "config.json").read_text())
        assert [len(layer[0]) for layer in config["kept_heads"]] == [3, 3]


# What was cut off


def killed_at_the_second_member(words: list[str]) -> None:
    save = HydraViTForImageClassification.save_pretrained

    def deadly(model, folder, *words, **named):
        save(model, folder, *words, **named)
        if "member-1" in str(folder):
            os.kill(os.getpid(), signal.SIGKILL)

    HydraViTForImageClassification.save_pretrained = deadly
    main(words)


def test_members_of_a_prune_that_was_killed_are_no_ensemble(workplace, tmp_path, capsys):
    """`kill -9` while the second member is written."""
    out = tmp_path / "out"
    words = ["prune", workplace / "vit", "--data", workplace / "pictures", "--budget", 2, "--output", out]
    words = [str(word) for word in words]
    assert exit_code(start(tmp_path / "log", killed_at_the_second_member, words)) == -signal.SIGKILL
    assert [path.name for path in out.glob("member-*")] == ["member-0"]
    assert list(out.glob(".member-1.*.tmp"))
    data = ["--data", workplace / "pictures"]
    for command in (["fuse", out], ["finetune", out, "--recipe", "cifar100", *data]):
        assert call(*command, "--output", tmp_path / "next") == 2
        said = capsys.readouterr().err
        assert "lacks a member, it has member-0 of 3: run `hydra-transformers prune` again" in said
        assert not (tmp_path / "next").exists()
    run(*words)
    assert not list(out.rglob(".*"))
    run("fuse", out, "--output", tmp_path / "next")


# finetune


def test_finetune_trains_every_member_and_keeps_its_heads(pruned, finetuned):
    for index in range(3):
        before = AutoModelForImageClassification.from_pretrained(pruned / f"member-{index}")
        after = AutoModelForImageClassification.from_pretrained(finetuned / f"member-{index}")
        assert after.config.kept_heads == before.config.kept_heads
        assert not torch.equal(after.classifier.weight, before.classifier.weight)
        assert ViTImageProcessorPil.from_pretrained(finetuned / f"member-{index}").size.height == 8
    assert (finetuned / "circuits" / "acc.json").exists()


def test_finetune_skips_what_is_finished(workplace, pruned, finetuned, capsys):
    steps = ["--recipe", "cifar100", "--max-steps", 3, "--batch-size", 8]
    run("finetune", pruned, *steps, "--data", workplace / "pictures", "--output", finetuned)
    assert capsys.readouterr().out.count("already finished") == 3


@pytest.mark.parametrize("recipe", ["sst2", "cifar100"])
def test_the_recipe_says_which_rows_are_held_out(recipe, workplace, pruned, tmp_path, monkeypatch):
    given = {}

    def take(members, recipe, train, validation, output, **_):
        given.update(train=train.indices, validation=validation.indices)
        for index in range(len(members)):
            (output / f"member-{index}").mkdir()

    monkeypatch.setattr(finetune, "finetune_members", take)
    monkeypatch.setattr(finetune, "MOST_HELD_OUT_ROWS", 2)
    run("finetune", pruned, "--recipe", recipe, "--data", workplace / "pictures", "--output", tmp_path / "out")
    assert sorted([*given["train"], *given["validation"]]) == list(range(24))
    assert len(given["validation"]) == 2
    assert (list(given["validation"]) == [0, 1]) == (recipe == "sst2")


# fuse


@pytest.mark.parametrize("output", [".", "link", "empty"])
def test_fuse_writes_into_what_is_given(output, finetuned, tmp_path, monkeypatch):
    folder = tmp_path / "place"
    folder.mkdir()
    before = folder.stat().st_ino
    monkeypatch.chdir(folder)
    if output == "link":
        (tmp_path / "link").symlink_to(folder)
    run("fuse", finetuned, "--output", {".": ".", "link": tmp_path / "link", "empty": folder}[output])
    assert AutoModelForImageClassification.from_pretrained(folder).num_members == 3
    assert folder.stat().st_ino == before
    assert (tmp_path / "link").is_symlink() == (output == "link")
    assert not list(tmp_path.rglob("*.tmp"))


def test_a_folder_that_takes_no_files_is_refused_before_the_work(
    finetuned, workplace, fused, tmp_path, monkeypatch, capsys
):
    """A file in the place of a folder, because some test machines may write everywhere."""
    (tmp_path / "file").write_text("")
    for module in (finetune, fuse, prune, evaluate_command):
        monkeypatch.setattr(module, "load_model", lambda *_: pytest.fail("a model was loaded"))
    data = ["--data", workplace / "pictures"]
    for command in (
        ["fuse", finetuned],
        ["evaluate", fused, *data],
        ["prune", workplace / "vit", *data],
        ["finetune", finetuned, "--recipe", "cifar100", *data],
    ):
        assert call(*command, "--output", tmp_path / "file" / "out") == 2
        assert "file/out cannot be written into (Not a directory: " in capsys.readouterr().err


def test_fuse_makes_a_model_that_loads_with_its_processor(fused):
    model = AutoModelForImageClassification.from_pretrained(fused).eval()
    assert model.num_members == 3
    assert ViTImageProcessorPil.from_pretrained(fused).size.height == 8
    assert (fused / "modeling_hydra_vit.py").exists()


def test_members_that_share_nothing_are_fused_to_their_ensemble(finetuned, tmp_path):
    run("fuse", finetuned, "--shared", "--output", tmp_path / "independent")
    hydra = AutoModelForImageClassification.from_pretrained(tmp_path / "independent").eval()
    members = [AutoModelForImageClassification.from_pretrained(finetuned / f"member-{i}").eval() for i in range(3)]
    images = torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        mean = torch.stack([member(images).logits.softmax(-1) for member in members]).mean(0)
        assert torch.allclose(hydra(images).logits.softmax(-1), mean, atol=1e-5)


def test_members_of_equal_heads_and_weights_are_refused_unless_asked_for(workplace, tmp_path, capsys):
    # Sampling four of four heads can give but one member.
    data = ["--data", workplace / "pictures", "--objectives", "acc", "--budget", 4, "--out-of", 4]
    prune = [
        str(word) for word in ["prune", workplace / "vit", *data, "--members", 2, "--output", tmp_path / "pruned"]
    ]
    assert main(prune) == 2
    assert "there are only 1 ways to lose 4 of 4 heads, for 2 members" in capsys.readouterr().err
    assert not (tmp_path / "pruned" / "member-0").exists()
    run(*prune, "--allow-equal")
    fuse = ["fuse", str(tmp_path / "pruned"), "--output", str(tmp_path / "hydra")]
    assert main(fuse) == 2
    assert "members[0] and members[1] have the same heads and weights" in capsys.readouterr().err
    assert not (tmp_path / "hydra").exists()
    run(*fuse, "--allow-equal")
    assert AutoModelForImageClassification.from_pretrained(tmp_path / "hydra").num_members == 2


# evaluate


def test_evaluate_writes_tables_json_and_plots(workplace, hydra, tmp_path):
    sets = ["--data", workplace / "test-pictures", "--near", f"grey={workplace / 'grey'}"]
    sets += ["--far", f"same={workplace / 'pictures'}", "--compare", f"backbone={workplace / 'vit'}"]
    run("evaluate", hydra, *sets, "--score", "gen", "--output", tmp_path / "report")
    report = Report.from_json(tmp_path / "report" / "report.json")
    assert list(report.models) == ["my-hydra", "backbone"] and report.score == "gen"
    assert not (tmp_path / "report" / "detector.safetensors").exists(), "nothing to fit"
    assert report.num_members["my-hydra"] == 3
    assert report.data_sets("near") == ["grey (near)"]
    assert report.models["my-hydra"]["data"]["num_samples"] == 12
    assert "my-hydra" in (tmp_path / "report" / "report.md").read_text()
    assert (tmp_path / "report" / "plots" / "reliability_diagram.png").exists()
    assert 'alt="ROC curve, grey near"' in (tmp_path / "report" / "report.html").read_text(encoding="utf-8")


@pytest.mark.usefixtures("no_plots")
def test_evaluate_fits_the_scores_that_need_it(workplace, hydra, tmp_path):
    data = ["--data", workplace / "test-pictures", "--near", f"grey={workplace / 'grey'}"]
    data += ["--compare", f"backbone={workplace / 'vit'}", "--fit-data", workplace / "pictures"]
    run("evaluate", hydra, *data, "--score", "relative_mahalanobis", "--output", tmp_path / "report")
    report = Report.from_json(tmp_path / "report" / "report.json")
    assert report.score == "relative_mahalanobis" and set(report.models) == {"my-hydra", "backbone"}
    detector = Detector.load(tmp_path / "report")
    assert detector.fitted_on["members"] == 3 and detector.fitted_on["rows"] == 24


@pytest.mark.usefixtures("no_plots")
def test_clip_is_judged_by_the_features_of_its_images(workplace, tmp_path, capsys):
    picture_rows(24, seed=2).save_to_disk(tmp_path / "train")
    words = ["evaluate", workplace / "clip", "--data", workplace / "test-pictures", "--score", "mahalanobis"]
    words += ["--far", f"grey={workplace / 'grey'}", "--output", tmp_path / "report"]
    run(*words, "--fit-data", tmp_path / "train")
    assert Report.from_json(tmp_path / "report" / "report.json").score == "mahalanobis"
    assert Detector.load(tmp_path / "report").fitted_on["dim"] == 8
    # the classes of the prompts are those of the data, in its order
    assert call(*words, "--fit-data", workplace / "pictures") == 2
    assert "has other classes than" in capsys.readouterr().err


@pytest.mark.usefixtures("no_plots")
def test_every_compared_model_gets_its_own_processor(workplace, tmp_path):
    other = shutil.copytree(workplace / "vit", tmp_path / "other")
    processor = ViTImageProcessorPil(size={"height": 8, "width": 8}, image_mean=[0.1] * 3, image_std=[0.2] * 3)
    processor.save_pretrained(other)
    data = ["--data", workplace / "test-pictures", "--near", f"grey={workplace / 'grey'}"]
    run("evaluate", workplace / "vit", *data, "--compare", f"other={other}", "--output", tmp_path / "both")
    run("evaluate", other, *data, "--output", tmp_path / "alone")
    both = Report.from_json(tmp_path / "both" / "report.json").models
    alone = Report.from_json(tmp_path / "alone" / "report.json").models
    assert both["other"] == alone["other"]
    assert both["other"]["data"]["nll"] != both["vit"]["data"]["nll"]
    run(
        "evaluate", workplace / "vit", *data, "--compare", f"other={other}", "--processor", other, "--output", tmp_path
    )
    same = Report.from_json(tmp_path / "report.json").models
    assert same["other"] == same["vit"] == alone["other"]


@pytest.mark.usefixtures("no_plots")
def test_what_says_little_is_told(workplace, tmp_path, capsys):
    picture_rows(12).filter(lambda row: row["label"] == 0).save_to_disk(tmp_path / "red")
    (tmp_path / "out").mkdir()
    command = ["evaluate", workplace / "vit", "--output", tmp_path / "out", "--data", tmp_path / "red"]
    run(*command, "--far", f"same={tmp_path}/out/../red")
    said = capsys.readouterr().err
    assert "note: all 4 rows of" in said and "have the same label" in said
    assert "note: --far same is the data itself" in said
    run(*command, "--limit", 1)
    assert "gives 1 row" in capsys.readouterr().err


def test_plots_that_could_not_be_drawn_are_not_said_to_be_there(workplace, tmp_path, monkeypatch, capsys):
    def refuse(*_):
        raise ImportError("plots need matplotlib: pip install matplotlib")

    monkeypatch.setattr(Report, "plot", refuse)
    run("evaluate", workplace / "vit", "--data", workplace / "pictures", "--output", tmp_path)
    said = capsys.readouterr().out
    assert "no plots: plots need matplotlib" in said
    assert f"report.md and report.json are in {tmp_path}." in said


@pytest.mark.usefixtures("no_plots")
def test_evaluate_counts_right_answers_under_the_models_class_names(workplace, tmp_path):
    """The data lists its classes in another order than the model: accuracy must not care."""
    run("evaluate", workplace / "vit", "--data", workplace / "pictures", "--output", tmp_path)
    backbone = ViTForImageClassification.from_pretrained(workplace / "vit").eval()
    processor = ViTImageProcessorPil.from_pretrained(workplace / "vit")
    rows = picture_rows(24, names=["blue", "red", "green"])
    pixels = processor([row["image"].convert("RGB") for row in rows], return_tensors="pt")
    with torch.no_grad():
        answers = [backbone.config.id2label[index] for index in backbone(**pixels).logits.argmax(-1).tolist()]
    right = [answer == ["blue", "red", "green"][row["label"]] for answer, row in zip(answers, rows, strict=True)]
    report = Report.from_json(tmp_path / "report.json")
    assert report.models["vit"]["data"]["accuracy"] == pytest.approx(sum(right) / 24)


# info, benchmark


def test_info_draws_the_kept_heads(workplace, fused, capsys):
    run("info", fused)
    text = capsys.readouterr().out
    model = AutoModelForImageClassification.from_pretrained(fused)
    assert "member 2" in text
    assert "3 classes: red, green, blue" in text
    assert f"{sum(parameter.numel() for parameter in model.parameters()):,} parameters" in text
    backbone = sum(
        parameter.numel() for parameter in ViTForImageClassification.from_pretrained(workplace / "vit").parameters()
    )
    assert f"| Deep Ensemble of 3 | {3 * backbone:,} |" in text
    kept = model.config.kept_heads[0][0]
    assert "".join("■" if head in kept else "·" for head in range(4)) in text


def test_info_of_a_folder_of_members_describes_each(pruned, capsys):
    run("info", pruned)
    text = capsys.readouterr().out
    assert all(f"member-{index}\n" in text for index in range(3))


def test_benchmark_compares_with_one_model_and_a_deep_ensemble(fused, tmp_path, capsys):
    run("benchmark", fused, "--batch-sizes", 1, 2, "--seconds", 0, "--device", "cpu", "--output", tmp_path / "cost.md")
    table = (tmp_path / "cost.md").read_text()
    rows = [line.split("|")[1].strip() for line in table.splitlines()]
    assert rows == ["Model", "---", "Single", "Deep Ensemble of 3", "Pruned member", "Hydra"]
    assert "ms, batch 2" in table
    assert table.strip() in capsys.readouterr().out


# card, push


def test_a_report_of_several_models_does_not_lend_its_first_figures_to_the_card(hydra, tmp_path, capsys):
    report = Report.from_json(hydra / "evaluation" / "report.json")
    result = next(iter(report.models.values()))
    report.models.clear()
    report.models.update({"single": result, "hydra": result})
    report.to_json(tmp_path / "report.json")
    arguments = ["card", str(hydra), "--dataset", "colours", "--overwrite", "--report", str(tmp_path / "report.json")]
    assert main(arguments) == 2
    assert "has the models single, hydra: name this one with --report-model" in capsys.readouterr().err
    assert main([*arguments, "--report-model", "hydra"]) == 0


def test_card_tells_what_is_in_the_folder(hydra):
    run("card", hydra, "--repo", "me/my-hydra", "--dataset", "colours", "--license", "mit")
    text = (hydra / "README.md").read_text()
    assert "license: mit" in text
    assert "me/my-hydra" in text
    assert "member 2" in text


def test_the_card_names_the_circuit_of_each_member_whatever_their_order(workplace, tmp_path):
    """As `prune --objectives ood acc` leaves them."""
    circuits = {
        "ood": Circuit([(1, 3), (0, 2)], [0.5, 0.25], dense_score=0.75, objective="ood"),
        "acc": Circuit([(0, 0), (0, 1)], [0.9, 0.8], dense_score=1.0, objective="acc"),
    }
    backbone = ViTForImageClassification.from_pretrained(workplace / "vit")
    processor = ViTImageProcessorPil.from_pretrained(workplace / "vit")
    for index, member in enumerate(draw_members(backbone, circuits=list(circuits.values()), budget=2)):
        member.save_pretrained(tmp_path / "pruned" / f"member-{index}")
        processor.save_pretrained(tmp_path / "pruned" / f"member-{index}")
    for objective, circuit in circuits.items():
        circuit.save(tmp_path / "pruned" / "circuits" / f"{objective}.json")
    run("fuse", tmp_path / "pruned", "--output", tmp_path / "hydra")
    run("card", tmp_path / "hydra")
    text = (tmp_path / "hydra" / "README.md").read_text()
    first = "objective: out-of-distribution AUROC), score 0.7500 before and 0.2500 after"
    assert f"- Member 0: 2 heads removed along a circuit ({first}" in text
    assert "- Member 1: 2 heads removed along a circuit (objective: accuracy), score 1.0000 before and 0.8000" in text


def test_push_hands_over_model_processor_report_and_card(hydra, monkeypatch, capsys):
    import hydra_transformers.hub as hub

    pushed = {}

    def fake_push(model, repo_id, processor=None, report=None, **arguments):
        pushed.update(model=model, repo_id=repo_id, processor=processor, report=report, **arguments)
        return "https://huggingface.co/me/my-hydra/commit/1"

    monkeypatch.setattr(hub, "push_hydra_to_hub", fake_push)
    run("push", hydra, "me/my-hydra", "--dataset", "colours", "--private")
    assert pushed["repo_id"] == "me/my-hydra"
    assert pushed["model"].num_members == 3
    assert pushed["processor"].size.height == 8
    assert pushed["report"].models["my-hydra"].num_members == 3
    assert [circuit.objective for circuit in pushed["circuits"]] == ["acc", "ood", "avg"]
    assert pushed["private"] is True
    assert "published: https://" in capsys.readouterr().out

    run("card", hydra, "--dataset", "colours")
    pushed.clear()
    run("push", hydra, "me/my-hydra", "--dataset", "colours")
    assert "member 2" in pushed["card"].text
    assert "circuits" not in pushed
    assert "README.md is published as it is, and --dataset is ignored" in capsys.readouterr().err


# The other families


@pytest.mark.usefixtures("no_plots")
def test_bert_goes_the_same_way(workplace, tmp_path):
    reviews = ["--data", workplace / "reviews"]
    taylor = ["--method", "taylor", "--members", 2, "--allow-equal"]
    run("prune", workplace / "bert", *reviews, *taylor, "--output", tmp_path / "pruned")
    steps = ["--recipe", "sst2", "--max-steps", 2, "--learning-rates", "1e-4"]
    run("finetune", tmp_path / "pruned", *steps, *reviews, "--output", tmp_path / "members")
    # Of so few reviews and steps both members learn the same.
    run("fuse", tmp_path / "members", "--allow-equal", "--output", tmp_path / "hydra")
    run("evaluate", tmp_path / "hydra", *reviews, "--far", f"same={workplace / 'reviews'}")
    assert AutoModelForSequenceClassification.from_pretrained(tmp_path / "hydra").num_members == 2
    report = Report.from_json(tmp_path / "hydra" / "evaluation" / "report.json")
    assert report.models["hydra"]["same (far)"]["auroc"] == pytest.approx(0.5)


@pytest.mark.usefixtures("no_plots")
def test_clip_is_pruned_and_fused_without_training(workplace, tmp_path, capsys):
    pictures = ["--data", workplace / "pictures"]
    few = ["--limit", 9, "--budget", 4, "--members", 2]
    run("prune", workplace / "clip", *pictures, *few, "--output", tmp_path / "pruned")
    finetune = ["finetune", tmp_path / "pruned", "--recipe", "cifar100", *pictures, "--output", tmp_path / "members"]
    assert call(*finetune) == 2
    assert "continue with `fuse`" in capsys.readouterr().err
    run("fuse", tmp_path / "pruned", "--output", tmp_path / "hydra")
    run("evaluate", tmp_path / "hydra", *pictures, "--near", f"grey={workplace / 'grey'}")
    run("info", tmp_path / "hydra")
    assert "vision tower" in capsys.readouterr().out
    assert AutoModelForZeroShotImageClassification.from_pretrained(tmp_path / "hydra").num_members == 2
