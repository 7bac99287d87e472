"""`AutoHydra` finds the class of every supported model, and a family is named where it is defined and nowhere else."""

import ast
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
import transformers
from huggingface_hub.errors import RepositoryNotFoundError
from transformers import AutoConfig, AutoModel, GPT2Config, GPT2ForSequenceClassification, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import hydra_transformers
from hydra_transformers import AutoHydra, load_data
from hydra_transformers.models import auto
from hydra_transformers.models.auto import (
    auto_class_of,
    class_with_head,
    classes_of,
    classes_with_head,
    config_of,
    hydra_classes,
    load_trained,
)
from hydra_transformers.models.families import FAMILIES as TABLE
from hydra_transformers.models.families import config_class
from tests.families import BERT, CLIP, FAMILIES, FEW, VIT, each_of
from tests.fresh_process import run_fresh


ROOT = Path(hydra_transformers.__file__).parent


@each_of(FEW)
@torch.no_grad()
def test_three_plain_checkpoints_become_one_model(family):
    backbones = [family.backbone(seed) for seed in range(3)]
    inputs = family.inputs()
    hydra = AutoHydra.from_pruned_members(backbones, shared=())
    assert type(hydra) is family.hydra and hydra.num_members == 3
    expected = torch.stack([family.logits(backbone, **inputs) for backbone in backbones], dim=1)
    torch.testing.assert_close(hydra(**inputs).member_logits, expected, atol=1e-12, rtol=1e-10)
    pruned = AutoHydra.from_backbone(backbones[0], family.heads_to_prune[0])
    assert type(pruned) is type(AutoHydra.from_backbone(pruned)) is family.hydra


@each_of([VIT, CLIP])
@torch.no_grad()
def test_folders_are_members_as_good_as_the_models_in_them(family, tmp_path):
    backbones = [family.backbone(seed) for seed in range(3)]
    members = [*backbones[:2], family.hydra.from_backbone(backbones[2], family.heads_to_prune[0])]
    for place, member in enumerate(members):
        member.save_pretrained(tmp_path / str(place))
    before = (tmp_path / "0" / "model.safetensors").read_bytes()
    hydra = AutoHydra.from_pruned_members([str(tmp_path / "0"), tmp_path / "1", tmp_path / "2"])
    expected = AutoHydra.from_pruned_members(members)
    assert type(hydra) is family.hydra
    for (name, theirs), ours in zip(expected.named_parameters(), hydra.parameters(), strict=True):
        assert torch.equal(theirs, ours), name
    assert (tmp_path / "0" / "model.safetensors").read_bytes() == before


@torch.no_grad()
@each_of([VIT, CLIP])
def test_a_saved_hydra_is_loaded_as_the_class_it_is(family, tmp_path):
    hydra = family.fused()
    inputs = family.inputs()
    hydra.save_pretrained(tmp_path / "whole")
    loaded = AutoHydra.from_pretrained(tmp_path / "whole", dtype=torch.float64)
    assert type(loaded) is family.hydra
    assert torch.equal(loaded(**inputs).member_logits, hydra(**inputs).member_logits)
    encoder = hydra.vision_model if family.has_towers else hydra.base_model
    encoder.save_pretrained(tmp_path / "encoder")
    assert type(AutoHydra.from_pretrained(tmp_path / "encoder")) is type(encoder)


def test_what_is_no_hydra_is_not_loaded_as_one(tmp_path):
    VIT.backbone().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"is a vit, which is not a Hydra: load it .* AutoHydra.from_backbone"):
        AutoHydra.from_pretrained(tmp_path)


def test_folders_that_are_no_members_get_a_sentence(tmp_path):
    VIT.backbone().save_pretrained(tmp_path / "vit")
    BERT.backbone().save_pretrained(tmp_path / "bert")
    VIT.backbone().base_model.save_pretrained(tmp_path / "bare")
    VIT.backbone(num_labels=3).save_pretrained(tmp_path / "three")
    GPT2Config(n_embd=8, n_layer=1, n_head=2).save_pretrained(tmp_path / "gpt2")

    def fuse(*names):
        return AutoHydra.from_pruned_members([tmp_path / name for name in names])

    with pytest.raises(FileNotFoundError, match=r"there is no folder .*nothing: pass a folder"):
        fuse("vit", "nothing")
    with pytest.raises(ValueError, match=r"bare has no classifier.bias: pass a model that is trained"):
        fuse("vit", "bare")
    with pytest.raises(ValueError, match=r"gpt2 is a gpt2: not supported; (\w+), (?!\1)(\w+), (?!\1|\2)\w+ are$"):
        fuse("gpt2", "vit")
    with pytest.raises(ValueError, match="gpt2 is a gpt2: not supported"):
        load_data([{"text": "a", "label": 0}], tmp_path / "gpt2")
    with pytest.raises(ValueError, match=r"members.1. has num_labels = 3, members.0. has 5: pass models fine"):
        fuse("vit", "three")
    with pytest.raises(ValueError, match=r"members\[1\] is a BertForSequenceClassification \(bert\)"):
        fuse("vit", "bert")
    with pytest.raises(TypeError, match="members is a str: pass a list"):
        AutoHydra.from_pruned_members(str(tmp_path / "vit"))


class NotFound:
    """What the errors of huggingface_hub read of a response."""

    status_code = 404
    headers, request = {}, None


@pytest.mark.parametrize(
    ("name", "problem", "error", "sentence"),
    [
        ("no-model", RepositoryNotFoundError("404", response=NotFound), FileNotFoundError, "no such model on the Hub"),
        ("no-model", OSError("Name or service not known"), ConnectionError, "the Hub could not be reached"),
        ("a/b/c", AssertionError("asked"), FileNotFoundError, "pass a folder that save_pretrained wrote"),
    ],
)
def test_a_model_that_does_not_exist_is_refused_at_once(name, problem, error, sentence, monkeypatch):
    """Loading is not tried: it asks for one file after the other, each several times."""
    api = SimpleNamespace(model_info=Mock(side_effect=problem))
    monkeypatch.setattr(auto, "HfApi", lambda: api)
    monkeypatch.setattr(auto, "is_offline_mode", lambda: False)
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", Mock(side_effect=AssertionError("loaded")))
    for load in (
        config_of,
        load_trained,
        AutoHydra.from_pretrained,
        lambda name: AutoHydra.from_pruned_members([name]),
    ):
        with pytest.raises(error, match=f"^there is no folder {name}(, and|:) .*{sentence}"):
            load(name)


def test_every_row_of_the_tests_table_is_supported_and_every_supported_classifier_has_a_row():
    with_heads = {each.__name__ for each in classes_with_head(TABLE) if not hasattr(each, "from_pruned_members")}
    of_texts = {name for name in with_heads if "ForToken" not in name}
    assert {type(family.backbone()).__name__ for family in FAMILIES} == of_texts
    assert {name.replace("ForToken", "ForSequence") for name in with_heads - of_texts} <= of_texts
    supported = AutoHydra.supported()
    assert with_heads <= set(supported) and len(supported) == len(hydra_classes())
    assert supported["DINOv3ViTModel"] == "HydraDINOv3ViTModel"


def test_what_is_not_supported_gets_a_sentence():
    sizes = {"n_embd": 8, "n_layer": 1, "n_head": 2, "vocab_size": 10, "n_positions": 8}
    model = GPT2ForSequenceClassification(GPT2Config(**sizes))
    sentence = "GPT2ForSequenceClassification: pass a Hydra or one of .*, such as "
    sentence += r"(\w+ForSequenceClassification(, |; )){3}docs/adding-a-model-family.md"
    with pytest.raises(TypeError, match=f"model is a {sentence}"):
        AutoHydra.from_backbone(model)
    with pytest.raises(TypeError, match=rf"members\[0\] is a {sentence}"):
        AutoHydra.from_pruned_members([model, model])
    with pytest.raises(ValueError, match=r"members\[1\] is a GPT2ForSequenceClassification \(gpt2\)"):
        AutoHydra.from_pruned_members([BERT.backbone(), model])
    with pytest.raises(ValueError, match="members is empty"):
        AutoHydra.from_pruned_members([])
    with pytest.raises(TypeError, match="members is a ViTForImageClassification: pass a list"):
        AutoHydra.from_pruned_members(VIT.backbone())
    for members in ([3], [VIT.backbone(), 3]):
        with pytest.raises(TypeError, match=rf"members\[{len(members) - 1}\] is a int"):
            AutoHydra.from_pruned_members(members)


def test_the_auto_classes_of_transformers_know_every_family(tmp_path):
    for hydra in {id(each): each for each in hydra_classes().values()}.values():
        assert AutoModel._model_mapping[hydra.config_class].config_class is hydra.config_class
    for config in (CLIP.backbone().config, CLIP.fused().config):
        assert auto_class_of(config) == "AutoModelForZeroShotImageClassification"
    assert all(issubclass(each, PreTrainedModel) for each in hydra_classes())
    assert CLIP.hydra is class_with_head(CLIP.hydra.config_class())


def test_no_other_file_names_a_family():
    """Its two files, the tables of families and their parameters, and what is about one model, the demo and two baselines of CLIP, may."""
    kinds = {name for model_type in TABLE for name in (model_type, model_type.removeprefix("hydra_"))}
    classes = {each.__name__ for each in hydra_classes()} | set(hydra_transformers.models.__all__) - {"AutoHydra"}
    names = re.compile(rf"\b({'|'.join(sorted(classes))})\b|[\"']({'|'.join(sorted(kinds))})[\"']")
    own = re.compile(
        r"models/(families|backbone_rules|(configuration|modeling)_hydra_\w+)\.py|demo/\w+\.py|baselines/(bayesvlm|prompt_classifier|vilu)\.py"
    )
    for path in ROOT.rglob("*.py"):
        name = path.relative_to(ROOT).as_posix()
        if not own.fullmatch(name):
            code = re.sub(r'"""(?:.|\n)*?"""|#.*', "", path.read_text())  # prose may give examples
            assert not names.search(code), f"{name}: {names.search(code)[0]}"


def test_the_table_says_of_every_family_what_its_classes_say():
    for model_type, family in TABLE.items():
        config = config_class(model_type)
        names = {path.rpartition(".")[2] for path in config.auto_classes.values()}
        assert config.model_type == model_type and {config.__name__, *family.names} == names
        backbones = {backbone for hydra in classes_of([model_type]) for backbone in hydra.backbone_classes}
        assert {backbone.config_class.model_type for backbone in backbones} == set(family.backbone_types)


def modules_after(code: str) -> set[str]:
    """The names of all modules that are imported after `code` ran in a new process."""
    process = [sys.executable, "-c", f"import sys; {code}; print(*sys.modules)"]
    return set(subprocess.run(process, capture_output=True, text=True, check=True).stdout.split())


def test_importing_the_package_imports_no_family_and_no_other_library():
    """It costs what the Auto classes and pipelines of Transformers cost."""
    of_transformers = modules_after("from transformers import AutoModel, PreTrainedModel, pipeline")
    more = modules_after("import hydra_transformers") - of_transformers
    assert "hydra_transformers.models.families" in more
    assert not [name for name in more if re.search(r"(modeling|configuration)_hydra_|^transformers\.models\.", name)]
    assert not {"pandas", "datasets", "peft"} & more


def test_auto_classes_and_pipelines_import_the_family_that_they_meet(tmp_path):
    VIT.fused().save_pretrained(tmp_path / "saved")
    code = """
import sys
import hydra_transformers
from transformers import AutoModelForImageClassification
print(AutoModelForImageClassification.from_pretrained(sys.argv[1]).num_members)
print(*(name.rpartition(".")[2] for name in sys.modules if "modeling_hydra_" in name))
from transformers.pipelines import check_task
print(check_task("hydra-image-classification")[1]["impl"]._load_image_processor)
import hydra_transformers.exporting
print(type(hydra_transformers.export).__name__, hydra_transformers.HydraBertConfig().model_type)
"""
    result = run_fresh(code, tmp_path / "saved", folder=tmp_path)
    assert result.stdout.splitlines() == ["3", "modeling_hydra_vit", "True", "function hydra_bert"], result.stderr


def test_every_family_is_in_the_tables_of_transformers():
    for model_type, family in TABLE.items():
        assert CONFIG_MAPPING[model_type] is getattr(hydra_transformers, family.config)
        assert AutoConfig.for_model(model_type).model_type == model_type
    assert len(set(CONFIG_MAPPING)) == len(list(CONFIG_MAPPING))


def test_type_checkers_see_the_names_that_are_imported_when_they_are_asked_for():
    tree = ast.parse(Path(hydra_transformers.__file__).read_text())
    [block] = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    seen = {alias.name: node.module for node in block.body for alias in node.names if alias.name != "*"}
    assert seen == hydra_transformers.NAMES
    for name in hydra_transformers.__all__:
        assert getattr(hydra_transformers, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = hydra_transformers.nothing
