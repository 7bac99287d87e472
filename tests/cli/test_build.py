"""The command line from a pre-trained model to a Hydra of several fine-tunings, each pruned by its own circuit."""

import json
import re
import shutil
from itertools import chain, pairwise

import datasets
import pytest
import torch
from transformers import (
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
    BertModel,
    BertTokenizer,
    ViTForImageClassification,
    ViTImageProcessorPil,
    ViTModel,
)

from hydra_transformers import AutoHydra
from hydra_transformers.baselines import average_members
from hydra_transformers.cli import build as build_command
from hydra_transformers.cli import finetune as finetune_command
from hydra_transformers.cli import main
from hydra_transformers.data.image_changes import RandomCropAndFlip, random_changes
from hydra_transformers.data.loading import classes_in
from hydra_transformers.data.rows import DataSource, load_rows
from hydra_transformers.models.auto import load_trained
from hydra_transformers.pruning import Circuit
from hydra_transformers.pruning.extraction import GreedySearch
from hydra_transformers.reports.report import UncertaintyReport
from hydra_transformers.training import recipe
from tests.command_line import options_of, run
from tests.tiny_data import CLASSES, WORDS, grey_rows, picture_rows, pictures, review_rows, save_bert, save_vit


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    """A pre-trained encoder of each kind, and data."""
    folder = tmp_path_factory.mktemp("workplace")
    save_vit(folder / "vit")
    save_bert(folder / "bert")
    for name, encoder in (("vit", ViTModel), ("bert", BertModel)):
        pretrained = shutil.copytree(folder / name, folder / f"pretrained-{name}")
        encoder.from_pretrained(folder / name).save_pretrained(pretrained)
    picture_rows(40, names=["blue", "red", "green"]).save_to_disk(folder / "pictures")
    grey_rows(10).save_to_disk(folder / "grey")
    review_rows(24).save_to_disk(folder / "reviews")
    return folder


pytestmark = pytest.mark.usefixtures("no_plots")


def words(*parts) -> list[str]:
    return [str(part) for part in parts]


def finetune_words(workplace, output, *more):
    data = ["--data", workplace / "pictures", "--part", "training", "--max-steps", 2, "--batch-size", 8]
    return words("finetune", workplace / "pretrained-vit", *data, "--output", output, *more)


def prune_words(workplace, models, output, *more):
    data = ["--data", workplace / "pictures", "--part", "validation", "--ood-data", workplace / "grey"]
    return words("prune", *models, *data, "--budget", 2, "--score", "energy", "--output", output, *more)


@pytest.fixture(scope="module")
def finetuned(workplace):
    run(*finetune_words(workplace, workplace / "finetuned"))
    return workplace / "finetuned"


@pytest.fixture(scope="module")
def pruned(workplace, finetuned):
    run(*prune_words(workplace, [finetuned], workplace / "pruned"))
    return workplace / "pruned"


# finetune


@pytest.mark.slow
def test_a_pre_trained_model_becomes_several_fine_tunings(workplace, finetuned):
    members = [AutoModelForImageClassification.from_pretrained(finetuned / f"member-{index}") for index in range(3)]
    assert all(type(member) is ViTForImageClassification for member in members)
    assert all(list(member.config.id2label.values()) == ["blue", "red", "green"] for member in members)
    assert not torch.equal(members[0].classifier.weight, members[1].classifier.weight)
    assert ViTImageProcessorPil.from_pretrained(finetuned / "member-2").size.height == 8
    start = ViTModel.from_pretrained(workplace / "pretrained-vit")
    assert not torch.equal(start.embeddings.cls_token, members[0].vit.embeddings.cls_token), "everything trains"


@pytest.mark.slow
def test_a_fine_tuning_that_was_cut_off_goes_on(workplace, finetuned, tmp_path, monkeypatch, capsys):
    from hydra_transformers.training import finetune

    train = finetune._FineTuning._trained

    def stopped(job, member, folder, *rest):
        if folder.parent.name == "member-1":
            raise KeyboardInterrupt
        return train(job, member, folder, *rest)

    command = finetune_words(workplace, tmp_path / "out")
    monkeypatch.setattr(finetune._FineTuning, "_trained", stopped)
    assert main(command) == 1
    capsys.readouterr()
    fuse = words("fuse", tmp_path / "out", "--output", tmp_path / "hydra")
    assert main(fuse) == 2
    assert "lacks a member, it has member-0 of 3: run `hydra-transformers finetune` again" in capsys.readouterr().err
    (tmp_path / "out" / "finetune.json").unlink()  # as finetune_members alone leaves it
    assert main(fuse) == 2
    assert "member-1 is not finished" in capsys.readouterr().err
    monkeypatch.setattr(finetune._FineTuning, "_trained", train)
    run(*command)
    for index in range(3):
        one, other = (
            AutoModelForImageClassification.from_pretrained(folder / f"member-{index}")
            for folder in (finetuned, tmp_path / "out")
        )
        assert all(map(torch.equal, one.parameters(), other.parameters()))


# The parts of a data set


def test_the_parts_of_a_data_set_are_apart_and_whole_whatever_the_limit(workplace, tmp_path):
    picture_rows(2).save_to_disk(tmp_path)

    def rows(part, **settings):
        source = DataSource(str(workplace / "pictures"), part=part, **settings)
        return [image.tobytes() for image in load_rows(source)[0]["image"]]

    parts = {part: rows(part) for part in ("training", "validation", "test")}
    assert {part: len(found) for part, found in parts.items()} == {"training": 32, "validation": 4, "test": 4}
    assert sorted(chain(*parts.values())) == sorted(rows(None))
    assert set(rows("training", limit=5)) <= set(parts["training"])
    assert len(rows("validation", limit=3)) == 3 and set(rows("validation", limit=3)) <= set(parts["validation"])
    with pytest.raises(ValueError, match="too few for a part each"):
        load_rows(DataSource(str(tmp_path), part="test"))


def test_the_classes_of_a_data_set_have_names(tmp_path):
    picture_rows(6).save_to_disk(tmp_path / "named")
    datasets.Dataset.from_dict({"text": ["a", "b", "c"], "label": [0, 2, 0]}).save_to_disk(tmp_path / "numbers")
    datasets.Dataset.from_dict({"text": ["a", "b"], "label": ["good", "bad"]}).save_to_disk(tmp_path / "texts")
    found = {name: classes_in(DataSource(str(tmp_path / name)))[0] for name in ("named", "numbers", "texts")}
    assert found["named"] == ["red", "green", "blue"]
    assert found["numbers"] == ["LABEL_0", "LABEL_1", "LABEL_2"]
    assert found["texts"] == ["bad", "good"]


def test_training_images_are_cropped_and_mirrored_as_the_recipe_says():
    change, unknown = random_changes(recipe("finetune-images").train_transforms)
    assert change == RandomCropAndFlip((0.7, 1.0), 0.5) and unknown == []
    [image] = pictures([0])
    image = image.resize((100, 80))
    torch.manual_seed(0)
    sizes = [change(image).size for _ in range(50)]
    shares = [width * height / 8000 for width, height in sizes]
    assert min(shares) > 0.68 and max(shares) <= 1 and max(shares) - min(shares) > 0.15
    assert len(set(sizes)) > 20
    mirror = RandomCropAndFlip(flip=1.0)
    assert mirror(mirror(image)).tobytes() == image.tobytes() != mirror(image).tobytes()
    change, unknown = random_changes(recipe("imagenet1k").train_transforms)
    assert change == RandomCropAndFlip((0.08, 1.0), 0.5) and unknown == ["RandAugment"]
    assert random_changes(recipe("sst2").train_transforms) == (None, [])


def test_only_images_that_are_trained_on_are_changed(workplace, tmp_path, monkeypatch):
    given = {}

    def take(pretrained, members, settings, train, validation, output, **_):
        given.update(train=train, validation=validation)
        for index in range(members):
            (output / f"member-{index}").mkdir()

    monkeypatch.setattr(finetune_command, "finetune_from_pretrained", take)
    for part in ([], ["--part", "training"]):
        data = ["--data", workplace / "pictures", *part, "--output", tmp_path / f"out{len(part)}"]
        run("finetune", workplace / "pretrained-vit", *data)
        for name, is_changed in (("train", True), ("validation", False)):
            torch.manual_seed(0)
            reads = [given[name][0]["pixel_values"] for _ in range(8)]
            assert any(not torch.equal(reads[0], read) for read in reads) == is_changed


# prune


@pytest.mark.slow
def test_each_fine_tuning_is_pruned_by_its_own_circuit(finetuned, pruned):
    weights = set()
    for index in range(3):
        member = AutoModelForImageClassification.from_pretrained(pruned / f"member-{index}").eval()
        circuit = Circuit.load(pruned / "circuits" / f"member-{index}.json")
        assert circuit.objective == "avg" and circuit.made_from["score"] == "energy"
        assert circuit.made_from["data"]["samples"] == 4
        weights.add(circuit.made_from["weights"])
        backbone = AutoModelForImageClassification.from_pretrained(finetuned / f"member-{index}").eval()
        expected = AutoHydra.from_backbone(backbone, circuit.heads_to_prune(2))
        assert member.config.kept_heads == expected.config.kept_heads
        assert all(map(torch.equal, member.parameters(), expected.parameters()))
    assert len(weights) == 3
    assert not list(pruned.rglob("*.checkpoint"))


@pytest.mark.slow
def test_a_pruning_of_several_that_was_cut_off_goes_on(workplace, finetuned, pruned, tmp_path, monkeypatch, capsys):
    removals, remove_one = [], GreedySearch.remove_one

    def stopped(search):
        if len(removals) == 3:
            raise KeyboardInterrupt
        removals.append(1)
        remove_one(search)

    members = [finetuned / f"member-{index}" for index in range(3)]  # the same as their folder
    monkeypatch.setattr(GreedySearch, "remove_one", stopped)
    assert main(prune_words(workplace, members, tmp_path / "out")) == 1
    removals.clear()
    monkeypatch.setattr(GreedySearch, "remove_one", lambda search: (removals.append(1), remove_one(search))[1])
    run(*prune_words(workplace, members, tmp_path / "out"))
    assert len(removals) == 3
    for index in range(3):
        name = f"member-{index}.json"
        assert (tmp_path / "out" / "circuits" / name).read_text() == (pruned / "circuits" / name).read_text()
    assert "circuit of member 2 for avg: score" in capsys.readouterr().out
    before = (tmp_path / "out" / "member-0" / "model.safetensors").stat().st_mtime_ns
    run(*prune_words(workplace, members, tmp_path / "out"))
    assert (tmp_path / "out" / "member-0" / "model.safetensors").stat().st_mtime_ns == before


@pytest.mark.slow
def test_without_other_data_several_models_are_pruned_for_accuracy(workplace, finetuned, tmp_path):
    data = ["--data", workplace / "pictures", "--limit", 6]
    run("prune", finetuned, *data, "--output", tmp_path / "out", "--allow-equal")
    circuits = [Circuit.load(tmp_path / "out" / "circuits" / f"member-{index}.json") for index in range(3)]
    assert [(circuit.objective, len(circuit.ranking)) for circuit in circuits] == [("acc", 1)] * 3, "a sixth of eight"


@pytest.mark.slow
def test_several_models_are_pruned_by_taylor_scores(workplace, finetuned, tmp_path):
    data = ["--data", workplace / "pictures", "--method", "taylor", "--heads-per-layer", 3]
    run("prune", finetuned, *data, "--output", tmp_path / "out")
    run("fuse", tmp_path / "out", "--output", tmp_path / "hydra")
    run("card", tmp_path / "hydra")
    assert "3 fine-tunings of one pre-trained model, each with attention heads of its own cut out" in " ".join(
        (tmp_path / "hydra" / "README.md").read_text().split()
    )


# fuse


@pytest.mark.slow
@torch.no_grad()
def test_plain_checkpoints_are_fused_as_they_are(finetuned, tmp_path):
    names = [finetuned / f"member-{index}" for index in range(3)]
    run("fuse", *names, "--output", tmp_path / "hydra")
    hydra = AutoModelForImageClassification.from_pretrained(tmp_path / "hydra").eval()
    expected = AutoHydra.from_pruned_members(names)
    inputs = torch.randn(4, 3, 8, 8)
    torch.testing.assert_close(hydra(inputs).member_logits, expected(inputs).member_logits)
    assert ViTImageProcessorPil.from_pretrained(tmp_path / "hydra").size.height == 8
    run("card", tmp_path / "hydra", "--base-model", "me/pretrained")
    card = " ".join((tmp_path / "hydra" / "README.md").read_text().split())
    assert "3 fine-tunings of [me/pretrained](https://huggingface.co/me/pretrained) with all their attention" in card
    assert "None was cut out: the members are fine-tunings of their own." in card


@pytest.mark.slow
def test_pruned_members_are_fused_one_by_one_too(pruned, tmp_path):
    run("fuse", pruned / "member-0", pruned / "member-2", "--output", tmp_path / "hydra")
    hydra = AutoModelForImageClassification.from_pretrained(tmp_path / "hydra")
    for place, index in enumerate((0, 2)):
        kept = json.loads((pruned / f"member-{index}" / "config.json").read_text())["kept_heads"]
        assert [layer[place] for layer in hydra.config.kept_heads] == [layer[0] for layer in kept]
    record = (tmp_path / "hydra" / "fuse.json").read_text()
    assert json.loads(record)["fine_tunings"] is True and str(tmp_path) not in record


@pytest.mark.slow
def test_layers_are_merged_whole(finetuned, pruned, fails, tmp_path):
    run("fuse", finetuned, "--trunk-layers", 2, "--output", tmp_path / "hydra")
    hydra = AutoModelForImageClassification.from_pretrained(tmp_path / "hydra")
    expected = AutoHydra.from_pruned_members([finetuned / f"member-{index}" for index in range(3)], trunk_layers=2)
    assert hydra.config.trunk_layers == 2
    assert all(torch.equal(tensor, expected.state_dict()[name]) for name, tensor in hydra.state_dict().items())
    sentence = fails("fuse", pruned, "--trunk-layers", 2, "--output", tmp_path / "other")
    assert re.search(r"in layer \d members\[\d\] keeps the heads .*, members\[0\] keeps", sentence)


@pytest.mark.slow
def test_the_card_knows_the_circuit_of_each_fine_tuning(workplace, pruned, tmp_path):
    data = ["--data", workplace / "pictures", "--part", "training", "--max-steps", 1]
    run("finetune", pruned, *data, "--output", tmp_path / "tuned")
    run("fuse", tmp_path / "tuned", "--output", tmp_path / "hydra")
    run("card", tmp_path / "hydra")
    card = " ".join((tmp_path / "hydra" / "README.md").read_text().split())
    assert "3 fine-tunings of one pre-trained model, each pruned by its own circuit, fused into a single" in card
    assert "Circuits, each of the member's own fine-tuning:" in card
    for index in range(3):
        circuit = Circuit.load(pruned / "circuits" / f"member-{index}.json")
        assert f"- Member {index}: 2 heads removed along a circuit (objective: mean of accuracy and OOD AUROC" in card
        assert f"score {circuit.dense_score:.4f} before and {circuit.scores[1]:.4f} after" in card


@pytest.mark.slow
def test_circuits_of_other_fine_tunings_are_refused_by_fuse(pruned, fails, tmp_path):
    folder = shutil.copytree(pruned, tmp_path / "pruned")
    (folder / "circuits" / "member-2.json").unlink()
    assert "are not those by which these members lost" in fails("fuse", folder, "--output", tmp_path / "hydra")
    circuit = Circuit.load(pruned / "circuits" / "member-2.json")
    kept = [(layer, head) for layer in range(2) for head in range(4) if (layer, head) not in circuit.ranking]
    circuit.ranking = kept[: len(circuit.ranking)]
    circuit.save(folder / "circuits" / "member-2.json")
    assert "are not those by which these members lost" in fails("fuse", folder, "--output", tmp_path / "hydra")


def test_texts_that_are_read_by_other_vocabularies_are_not_fused(workplace, fails, tmp_path):
    other = shutil.copytree(workplace / "bert", tmp_path / "other")
    model = AutoModelForSequenceClassification.from_pretrained(other)
    model.classifier.bias.data += 1
    model.save_pretrained(other)
    command = ["fuse", workplace / "bert", other, "--output", tmp_path / "out"]
    vocabulary = {word: index for index, word in enumerate([*WORDS[:5], *WORDS[:4:-1]])}
    BertTokenizer(vocab=vocabulary).save_pretrained(other)
    assert "other prepares its inputs differently from" in fails(*command)
    run(*command, "--processor", workplace / "bert")
    assert AutoModelForSequenceClassification.from_pretrained(tmp_path / "out").num_members == 2


# build


def build_words(workplace, output, *more, pretrained="pretrained-vit", data="pictures"):
    data = ["--data", workplace / data, "--max-steps", 2, "--batch-size", 8]
    return words("build", workplace / pretrained, *data, "--output", output, *more)


@pytest.mark.slow
def test_build_goes_all_the_way(workplace, tmp_path, capsys):
    ood = ["--ood-data", workplace / "grey", "--budget", 2, "--tune", "--near", f"grey={workplace / 'grey'}"]
    command = build_words(workplace, tmp_path / "hydra", *ood)
    run(*command)
    said = capsys.readouterr().out
    told = re.findall(r"^  hydra-transformers (\w+) (\S+)", said, flags=re.MULTILINE)
    steps = tmp_path / "hydra-steps"
    assert told == [
        ("finetune", str(workplace / "pretrained-vit")),
        ("prune", str(steps / "finetuned")),
        ("finetune", str(steps / "pruned")),
        ("fuse", str(steps / "tuned")),
        ("evaluate", str(tmp_path / "hydra")),
    ]
    hydra = AutoModelForImageClassification.from_pretrained(tmp_path / "hydra")
    assert hydra.num_members == 3
    assert [sum(len(layer[member]) for layer in hydra.config.kept_heads) for member in range(3)] == [6, 6, 6]
    report = UncertaintyReport.from_json(tmp_path / "hydra" / "evaluation" / "report.json")
    assert list(report.models) == ["hydra", "single"] and "grey" in report.models["hydra"].ood["near"]
    run("card", tmp_path / "hydra", "--dataset", "colours")
    assert "each pruned by its own circuit" in (tmp_path / "hydra" / "README.md").read_text()
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.safetensors")}
    run(*command)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.safetensors")} == before
    assert main([*command, "--seed", "1"]) == 2
    assert "was made with seed 0, which now is 1" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("freeze", [False, True], ids=["merged", "frozen"])
def test_build_with_a_trunk(freeze, workplace, tmp_path, capsys):
    """Frozen, its layers are equal before they are fused; merged, they are not."""
    trunk = ["--trunk-layers", 0.75, *(["--freeze-trunk"] if freeze else [])]
    run(*build_words(workplace, tmp_path / "hydra", "--members", 2, "--objective", "acc", "--budget", 1, *trunk))
    hydra = AutoModelForImageClassification.from_pretrained(tmp_path / "hydra")
    assert hydra.config.trunk_layers == 1 and hydra.config.kept_heads[0] == [[0, 1, 2, 3]] * 2
    assert (
        "one model in" in (said := capsys.readouterr().out) and "; the first layer runs once for all members." in said
    )
    members = [tmp_path / "hydra-steps" / "pruned" / f"member-{index}" for index in range(2)]
    assert AutoHydra.from_pruned_members(members).config.trunk_layers == (1 if freeze else 0)
    merged = AutoHydra.from_pruned_members(members, trunk_layers=1).state_dict()
    assert all(torch.equal(tensor, merged[name]) for name, tensor in hydra.state_dict().items())
    run("info", tmp_path / "hydra")
    assert "the first layer runs once for all members" in capsys.readouterr().out


@pytest.mark.slow
def test_a_build_that_was_cut_off_anywhere_continues(workplace, tmp_path, monkeypatch, capsys):
    command = build_words(workplace, tmp_path / "hydra", "--members", 2, "--objective", "acc", "--budget", 1)
    run_step, ran, last = build_command.run_step, [], None

    def stopped(parts):
        ran.append(parts[0])
        if parts[0] == last:
            raise KeyboardInterrupt
        run_step(parts)

    monkeypatch.setattr(build_command, "run_step", stopped)
    everything = ["finetune", "prune", "fuse", "evaluate"]
    for place in range(len(everything)):
        last = everything[place]
        ran.clear()
        assert main(command) == 1 and ran == everything[: place + 1]
        assert "the same command continues" in capsys.readouterr().err
    ran.clear()
    last = None
    run(*command)
    assert ran == ["evaluate"]
    assert AutoModelForImageClassification.from_pretrained(tmp_path / "hydra").num_members == 2
    assert (tmp_path / "hydra" / "evaluation" / "report.json").exists()


@pytest.mark.slow
def test_what_was_made_of_models_that_are_gone_is_not_taken_for_made_of_new_ones(
    workplace, tmp_path, monkeypatch, fails
):
    """As after a change of the data, for which `finetune` says to remove its folder."""
    command = build_words(workplace, tmp_path / "hydra", "--members", 2, "--tune-jointly")
    run_step = build_command.run_step

    def stopped(parts):
        if "--teacher" in parts:
            raise KeyboardInterrupt
        run_step(parts)

    monkeypatch.setattr(build_command, "run_step", stopped)
    assert main(command) == 1
    steps = tmp_path / "hydra-steps"
    shutil.rmtree(steps / "finetuned" / "member-1")
    assert f"fused was made of models that are no longer in {steps / 'finetuned'}: remove it" in fails(*command)
    for folder in ("fused", "teacher"):
        shutil.rmtree(steps / folder)
    monkeypatch.undo()
    run(*command)


@pytest.mark.slow
def test_a_hydra_of_other_members_is_not_taken_for_that_of_a_build(workplace, finetuned, tmp_path, fails):
    command = build_words(workplace, tmp_path / "hydra", "--members", 2)
    run("fuse", finetuned / "member-0", finetuned / "member-1", "--output", tmp_path / "hydra")
    assert "hydra exists already: pass another --output" in fails(*command)


@pytest.mark.slow
def test_without_other_data_nothing_is_pruned(workplace, tmp_path):
    run(*build_words(workplace, tmp_path / "hydra", pretrained="pretrained-bert", data="reviews"), "--members", 2)
    hydra = AutoModelForSequenceClassification.from_pretrained(tmp_path / "hydra")
    assert hydra.config.kept_heads == [[[0, 1, 2, 3]] * 2] * 2
    assert hydra.config.id2label == {0: "negative", 1: "positive"}
    assert not (tmp_path / "hydra-steps" / "pruned").exists()


@pytest.mark.slow
def test_build_uses_the_splits_of_an_image_folder_and_says_that_few_rows_judge(workplace, tmp_path, capsys):
    for split, count in (("train", 12), ("validation", 3), ("test", 4)):
        for label, name in enumerate(CLASSES):
            (tmp_path / "photos" / split / name).mkdir(parents=True)
            for place, image in enumerate(pictures([label] * count)):
                image.save(tmp_path / "photos" / split / name / f"{place}.png")
    arguments = build_words(workplace, tmp_path / "hydra", "--members", 2)
    arguments[arguments.index("--data") + 1] = str(tmp_path / "photos")
    run(*arguments)
    printed = capsys.readouterr().out
    for sentence in ("36 rows of the split train\n", "36 rows to train, 9 held out", "12 rows of the split test\n"):
        assert sentence in printed
    assert "only 12 rows to evaluate on" in printed


def test_build_tests_on_rows_that_nothing_was_trained_or_chosen_by(workplace, tmp_path):
    splits = {"train": picture_rows(20), "test": picture_rows(6, seed=3)}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "splits")

    def parts_of(*more):
        arguments = build_words(workplace, tmp_path / "hydra", "--objective", "acc", *more)
        options = options_of(build_command.BuildOptions, arguments)
        return {parts[0]: dict(pairwise(parts)) for parts in build_command.steps_of(arguments[1], options)}

    steps = parts_of()
    assert [steps[name].get("--part") for name in ("finetune", "prune", "evaluate")] == [
        "training",
        "validation",
        "test",
    ]
    steps = parts_of("--test-split", "test", "--data", tmp_path / "splits")
    assert "--part" not in steps["evaluate"] and steps["evaluate"]["--split"] == "test"


# Better members, fewer trainings, a teacher


@pytest.mark.slow
def test_build_averages_merges_and_tunes_jointly_and_continues_after_every_step(
    workplace, tmp_path, monkeypatch, capsys
):
    """The best of docs/fine-tuning.md in one command; half of two layers merged by default."""
    more = ["--members", 2, "--fine-tunings", 4, "--tune-jointly"]
    command = build_words(workplace, tmp_path / "hydra", *more)
    everything = ["finetune", "fuse", "fuse", "finetune", "fuse", "evaluate"]
    run_step, ran, most = build_command.run_step, [], 1

    def stopped(parts):
        if len(ran) == most:
            raise KeyboardInterrupt
        ran.append(parts[0])
        run_step(parts)

    monkeypatch.setattr(build_command, "run_step", stopped)
    for expected in (["finetune"], ["finetune", "fuse"], ["finetune", "fuse", "finetune"]):
        ran.clear()
        assert main(command) == 1 and ran == expected
        most += 1
    capsys.readouterr()
    ran.clear()
    run(*command)
    assert ran == ["finetune", "finetune", "fuse", "evaluate"], "fused and teacher are there, trainings are loaded"
    said = capsys.readouterr().out
    assert "75% of the layers will be merged: for none, pass --trunk-layers 0." in said
    assert re.findall(r"^  hydra-transformers (\w+) ", said, flags=re.MULTILINE) == everything

    steps = tmp_path / "hydra-steps"
    models = average_members([load_trained(steps / "finetuned" / f"member-{index}") for index in range(4)], into=2)
    for name, depth in (("fused", 1), ("teacher", 0)):
        expected = AutoHydra.from_pruned_members(models, trunk_layers=depth).state_dict()
        made = load_trained(steps / name)
        assert made.config.trunk_layers == depth
        assert all(torch.equal(tensor, expected[key]) for key, tensor in made.state_dict().items())
    hydra, tuned = (load_trained(path) for path in (tmp_path / "hydra", steps / "tuned-jointly" / "member-0"))
    assert hydra.num_members == 2 and hydra.config.trunk_layers == 1
    assert all(torch.equal(tensor, tuned.state_dict()[name]) for name, tensor in hydra.state_dict().items())
    assert not torch.equal(hydra.classifier.weight, load_trained(steps / "fused").classifier.weight)
    report = UncertaintyReport.from_json(tmp_path / "hydra" / "evaluation" / "report.json")
    assert list(report.models) == ["hydra", "single"]
    ran.clear()
    run(*command)
    assert ran == [], "finds it finished"
    run("card", tmp_path / "hydra", "--dataset", "colours")
    card = " ".join((tmp_path / "hydra" / "README.md").read_text().split())
    assert "Each member is the mean of 2 fine-tunings. Fused, they were tuned together" in card


def test_what_build_cannot_average_or_tune_jointly_is_refused_at_once(workplace, tmp_path, fails):
    scores = datasets.Dataset.from_dict({"text": ["a", "b"] * 20, "label": [0.5, 1.25] * 20})
    scores.save_to_disk(tmp_path / "scores")
    texts = {"pretrained": "pretrained-bert", "data": tmp_path / "scores"}
    sentence = "is for one class per row, and"
    assert sentence in fails(*build_words(workplace, tmp_path / "other", "--tune-jointly", **texts))
    datasets.Dataset.from_dict({"text": ["a", "b"] * 20, "label": [1, 2] * 20}).save_to_disk(tmp_path / "ratings")
    texts["data"] = tmp_path / "ratings"
    assert sentence in fails(*build_words(workplace, tmp_path / "other", "--tune-jointly", "--regression", **texts))
    for more, sentence in (
        (["--tune-jointly", "--trunk-layers", 0], "--tune-jointly is for a Hydra with merged layers"),
        (["--tune-jointly", "--objective", "acc"], "--tune-jointly is for a Hydra with merged layers"),
        (["--tune-jointly", "--trunk-layers", 1, "--freeze-trunk"], "nothing for --tune-jointly to mend"),
        (["--tune-jointly", "--target", "balance"], "--tune-jointly is not for --target"),
        (["--fine-tunings", 4], "--fine-tunings is 4, and --members is 3"),
        (["--fine-tunings", 6, "--objective", "acc"], "pruned ones keep different heads"),
        (["--fine-tunings", 6, "--trainings", 1.5], "pass one of them"),
        (["--trainings", 3], "--trainings is 3.0: pass more than 0.5 and less than 3"),
    ):
        assert sentence in fails(*build_words(workplace, tmp_path / "other", *more))
    assert not (tmp_path / "other-steps").exists()


@pytest.mark.slow
def test_one_run_and_a_joint_tuning_on_the_command_line(workplace, tmp_path, fails, capsys):
    data = ["--data", workplace / "pictures", "--part", "training", "--max-steps", 12, "--batch-size", 8]
    run("finetune", workplace / "pretrained-vit", *data, "--trainings", 1.5, "--output", tmp_path / "run")
    assert "one run of 1.5 trainings" in capsys.readouterr().out
    for depth in (0, 1):
        run("fuse", tmp_path / "run", "--trunk-layers", depth, "--output", tmp_path / f"trunk-{depth}")
    command = ["finetune", tmp_path / "trunk-1", *data, "--teacher", tmp_path / "trunk-0"]
    run(*command, "--output", tmp_path / "tuned")
    assert f"Next: hydra-transformers evaluate {tmp_path / 'tuned' / 'member-0'}" in capsys.readouterr().out
    fused, tuned = (load_trained(path) for path in (tmp_path / "trunk-1", tmp_path / "tuned" / "member-0"))
    assert tuned.num_members == 3 and tuned.config.trunk_layers == 1
    assert not torch.equal(fused.classifier.weight, tuned.classifier.weight)
    assert ViTImageProcessorPil.from_pretrained(tmp_path / "tuned" / "member-0").size.height == 8
    other = ["--output", tmp_path / "other"]
    assert "--members is for a pre-trained model" in fails(*command, "--members", 2, *other)
    assert "--teacher is for a Hydra" in fails("finetune", tmp_path / "run", *command[2:], *other)
    assert "is a plain vit" in fails("finetune", workplace / "pretrained-vit", *command[2:], *other)
    assert not (tmp_path / "other").exists()
