"""What `finetune` and `build` are told of trainings and texts reaches them: lengths, reports, pairs, `--budget best`."""

import shlex
import shutil

import datasets
import pytest
import torch
from transformers import (
    BertConfig,
    BertModel,
    BertTokenizer,
    RobertaConfig,
    ViTForImageClassification,
    ViTImageProcessorPil,
)

from hydra_transformers import AutoHydra, load_data
from hydra_transformers.cli import finetune, main
from hydra_transformers.cli.build import BuildOptions, steps_of
from hydra_transformers.data.batches import batches
from hydra_transformers.pruning import Circuit
from hydra_transformers.training import RECIPES, default_recipe
from hydra_transformers.training.recipes import epochs_for, recipe_for
from tests.command_line import call, options_of
from tests.tiny_data import grey_rows, picture_rows, review_rows, save_bert, save_vit


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("workplace")
    save_bert(folder / "bert")
    save_vit(folder / "vit")
    pretrained = shutil.copytree(folder / "bert", folder / "pretrained")
    BertModel.from_pretrained(folder / "bert").save_pretrained(pretrained)
    pairs(24).save_to_disk(folder / "pairs")
    picture_rows(40).save_to_disk(folder / "pictures")
    grey_rows(10).save_to_disk(folder / "grey")
    return folder


def pairs(count: int) -> datasets.Dataset:
    features = datasets.Features(
        {name: datasets.Value("string") for name in ("premise", "hypothesis")} | {"label": datasets.ClassLabel(2)}
    )
    texts = [["a film of joy", "a good film"], ["a bad film", "of joy"]]
    rows = {
        "premise": [texts[row % 2][0] for row in range(count)],
        "hypothesis": [texts[row % 2][1] for row in range(count)],
    }
    return datasets.Dataset.from_dict(rows | {"label": [row % 2 for row in range(count)]}, features=features)


def words(*parts) -> list[str]:
    return [str(part) for part in parts]


def trained_with(workplace, monkeypatch, tmp_path, *more) -> dict:
    """What `finetune` passes on for three fine-tunings of a BERT on pairs."""
    given = {}

    def record(name, members, recipe, train, validation, output, **settings):
        given.update(settings, recipe=recipe, train=train, validation=validation)

    monkeypatch.setattr(finetune, "finetune_from_pretrained", record)
    data = ["--data", workplace / "pairs", "--text-column", "premise,hypothesis"]
    assert call("finetune", workplace / "pretrained", *data, "--output", tmp_path / "out", *more) == 0
    return given


def test_without_a_recipe_the_rows_decide_and_nothing_is_reported(workplace, monkeypatch, tmp_path):
    given = trained_with(workplace, monkeypatch, tmp_path)
    assert given["recipe"].name == "default finetune-texts" and given["recipe"].keep_best
    assert given["recipe"].epochs == epochs_for(22, 2) and given["report_to"] == "none"
    assert (len(given["train"]), len(given["validation"])) == (22, 2)


def test_epochs_reports_and_the_length_of_texts_are_passed_on(workplace, monkeypatch, tmp_path):
    monkeypatch.setattr("transformers.integrations.get_available_reporting_integrations", lambda: ["wandb"])
    more = ["--epochs", 4, "--report-to", "wandb", "--max-length", 6, "--trunk-layers", 1]
    given = trained_with(workplace, monkeypatch, tmp_path, *more)
    assert given["recipe"].epochs == 4 and given["recipe"].trunk_layers == 1 and given["report_to"] == "wandb"
    assert len(given["train"][0]["input_ids"]) == 6
    # Every later command, and predict, cuts texts as the training did.
    assert BertTokenizer.from_pretrained(tmp_path / "out" / "member-0").model_max_length == 6


def test_a_joint_tuning_is_as_long_as_in_python(workplace, monkeypatch, tmp_path):
    backbone, hydra = ViTForImageClassification.from_pretrained(workplace / "vit"), tmp_path / "hydra"
    AutoHydra.from_pruned_members([AutoHydra.from_backbone(backbone, {0: [m]}) for m in range(2)]).save_pretrained(
        hydra
    )
    ViTImageProcessorPil.from_pretrained(workplace / "vit").save_pretrained(hydra)
    given = []
    monkeypatch.setattr(finetune, "tune_jointly", lambda *arguments, **_: given.extend(arguments))
    data = ["--data", workplace / "pictures", "--output", tmp_path / "out"]
    assert call("finetune", hydra, "--teacher", hydra, *data) == 0
    model, recipe, train = given[:3]
    assert recipe == default_recipe(model.config, train) and recipe.epochs == epochs_for(36, 3)


@pytest.mark.parametrize(
    ("length", "expected"),
    [({}, (10_000, None, 500)), ({"epochs": 3}, (None, 3, 0.05)), ({"max_steps": 40}, (40, None, 0.05))],
)
def test_another_length_of_a_named_recipe_keeps_the_share_of_the_warm_up(length, expected):
    found = recipe_for("cifar100", BertConfig(), [], True, **length)
    assert (found.max_steps, found.epochs, found.warmup_steps) == expected
    assert found.learning_rate == RECIPES["cifar100"].learning_rate


def test_pairs_are_read_as_the_tokenizer_reads_them(workplace):
    tokenizer = BertTokenizer.from_pretrained(workplace / "bert")
    config = BertConfig(max_position_embeddings=16, num_labels=2)

    def read(config=config, text="premise, hypothesis", **settings):
        return load_data(workplace / "pairs", config, processor=tokenizer, text=text, **settings)

    data, rows = read(max_length=8), pairs(24)
    columns = [list(rows["premise"]), list(rows["hypothesis"])]
    expected = tokenizer(*columns, truncation=True, max_length=8, padding=True, return_tensors="pt")
    [batch] = batches(data)
    assert all(torch.equal(batch[name], expected[name]) for name in expected)
    assert batch["token_type_ids"].any() and batch["input_ids"].shape == (24, 8)
    assert "texts: pairs of the columns 'premise' and 'hypothesis', at most 8 tokens" in data.notes
    with pytest.raises(ValueError, match=r"max_length \(--max-length\) is 17: the model reads at most 16 tokens"):
        read(max_length=17)
    # RoBERTa counts positions from the one behind the padding token's number on
    roberta = RobertaConfig(max_position_embeddings=16, pad_token_id=1, num_labels=2)
    with pytest.raises(ValueError, match="is 16: the model reads at most 14 tokens"):
        read(roberta, max_length=16)
    assert read(roberta).max_length == 14
    with pytest.raises(ValueError, match="name one column, or two of pairs"):
        read(text="premise,hypothesis,label")
    with pytest.raises(ValueError, match=r"name it as text= \(--text-column\), or two of pairs as FIRST,SECOND"):
        read(text=None)


def test_ood_texts_beside_pairs_must_be_pairs(workplace, tmp_path):
    tokenizer, config = BertTokenizer.from_pretrained(workplace / "bert"), BertConfig(num_labels=2)
    settings = {"processor": tokenizer, "text": "premise,hypothesis", "labelled": False}
    assert any(load_data(pairs(4), config, **settings)[0]["token_type_ids"])
    with pytest.raises(
        ValueError, match="data has no columns 'premise' and 'hypothesis', and is to be compared with pairs"
    ):
        load_data(review_rows(4), config, **settings)


def test_build_hands_every_option_to_the_steps_that_know_it():
    command = (
        "build bert --data pairs --text-column premise,hypothesis --max-length 64 --epochs 4 --report-to tensorboard --objective acc "
        "--budget best --tune --output my-hydra"
    )
    steps = {tuple(step[:2]): step for step in steps_of("bert", options_of(BuildOptions, shlex.split(command)))}
    first, prune, tuned, _, evaluate = (shlex.join(step) for step in steps.values())
    assert "--epochs 4" in first and "--report-to tensorboard" in first and "--report-to tensorboard" in tuned
    assert "--epochs" not in tuned and "--budget best" in prune
    assert all("--text-column premise,hypothesis --max-length 64" in step for step in (first, prune, tuned, evaluate))


# --budget best


def prune_words(workplace, output, *more):
    return words("prune", workplace / "vit", "--data", workplace / "pictures", "--output", output, *more)


def test_each_member_loses_as_many_heads_as_its_circuit_scores_best_without(workplace, tmp_path, capsys):
    more = ["--budget", "best", "--objectives", "acc", "avg", "--ood-data", workplace / "grey", "--allow-equal"]
    assert main(prune_words(workplace, tmp_path / "out", *more)) == 0
    circuits = [Circuit.load(tmp_path / "out" / "circuits" / f"{name}.json") for name in ("acc", "avg")]
    assert all(len(each.ranking) == 2 for each in circuits), "a third of the 8 heads"
    kept = ", ".join(str(8 - each.best_budget) for each in circuits)
    assert f"2 members with {kept} of 8 heads" in capsys.readouterr().out
