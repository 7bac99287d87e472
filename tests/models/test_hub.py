"""Saved = loaded: in this process, in another one that does not have the package, through pipelines and the Hub."""

import ast
import itertools
import json
import os
import sys

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModel,
    AutoModelForZeroShotImageClassification,
    BertTokenizer,
    CLIPProcessor,
    CLIPTokenizer,
    pipeline,
)
from transformers.models.clip import CLIPImageProcessorPil

import hydra_transformers
from hydra_transformers.models import task
from hydra_transformers.models.task import TASKS
from tests.families import BERT, CLIP, DISTINCT, FAMILIES, VIT, bert_backbone, clip_backbone, each_of, randomise
from tests.fresh_process import run_without_package


PACKAGE = os.path.dirname(hydra_transformers.__file__)
# Loads folders with an Auto class where the package cannot be imported, writes logits, tensors, and saves them again.
SECOND_PROCESS = """
import sys, torch, transformers
from safetensors.torch import load_file, save_file
for folder, auto_class, out in zip(*[iter(sys.argv[1:])] * 3):
    model = getattr(transformers, auto_class).from_pretrained(folder, trust_remote_code=True)
    assert not type(model).__module__.startswith("hydra_transformers."), type(model).__module__
    with torch.no_grad():
        outputs = model(**load_file(f"{folder}/inputs.safetensors"))
    if "member_logits" in outputs:
        save_file({"member_logits": outputs.member_logits.contiguous()}, f"{out}/outputs.safetensors")
    save_file({name: tensor.contiguous() for name, tensor in model.state_dict().items()}, f"{out}/state.safetensors")
    model.save_pretrained(f"{out}/again")
    try:
        model.member(0)
    except ImportError as error:
        assert "pip install --upgrade hydra_transformers" in str(error), error
    else:
        raise AssertionError("built without the package")
"""


def auto_class_of(hydra) -> str:
    """The Auto class of the model with its head."""
    return next(name for name in hydra.config.auto_classes if name not in ("AutoConfig", "AutoModel"))


def run_second_process(*arguments) -> None:
    """arguments: (folder, auto_class, out) of each model, one after the other"""
    for out in arguments[2::3]:
        out.mkdir(parents=True)
    result = run_without_package(SECOND_PROCESS, *arguments, folder=arguments[2])
    assert result.returncode == 0, result.stderr


def assert_same_tensors(left: dict, right: dict) -> None:
    assert left.keys() == right.keys()
    for name in left:
        assert torch.equal(left[name], right[name]), name


def save(family, folder):
    """A ragged Hydra in float32 and its inputs, saved to `folder`."""
    hydra = family.fused(shared=("embeddings",)).float()
    inputs = family.inputs_in(torch.float32)
    hydra.save_pretrained(folder)
    save_file(inputs, folder / "inputs.safetensors")
    return hydra, inputs, folder


@pytest.mark.slow
@torch.no_grad()
def test_every_family_loads_where_the_package_is_not_importable_and_saves_again(tmp_path):
    models = {family.name: save(family, tmp_path / "first" / family.name) for family in DISTINCT}
    second = tmp_path / "second"
    of_models = [(folder, auto_class_of(hydra), second / name) for name, (hydra, _, folder) in models.items()]
    of_models.append((tmp_path / "first" / "vit", "AutoModel", second / "base"))
    run_second_process(*itertools.chain.from_iterable(of_models))
    for name, (hydra, inputs, folder) in models.items():
        out = tmp_path / "second" / name
        assert_same_tensors(load_file(out / "state.safetensors"), hydra.state_dict())
        logits = load_file(out / "outputs.safetensors")["member_logits"]
        torch.testing.assert_close(logits, hydra(**inputs).member_logits, atol=1e-6, rtol=1e-6)
        # What was saved there is what was loaded there, to the byte: it loads as often as one likes.
        (folder / "inputs.safetensors").unlink()
        first, again = ({path.name: path.read_bytes() for path in each.iterdir()} for each in (folder, out / "again"))
        first["config.json"] = first["config.json"].replace(b"float64", b"float32")  # of towers, as they were fused
        assert first == again
        assert json.loads(again["config.json"])["auto_map"] == hydra.config.auto_classes
    of_the_base = load_file(tmp_path / "second" / "base" / "state.safetensors")
    expected = models["vit"][0].vit.state_dict()
    assert_same_tensors({name: of_the_base[name] for name in expected}, expected)


@torch.no_grad()
def test_automodel_loads_the_encoder_of_a_saved_model_without_new_weights(family, tmp_path):
    hydra, _, folder = save(family, tmp_path)
    encoder, info = AutoModel.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"], info["missing_keys"]
    expected = hydra.state_dict()
    for name, weight in encoder.state_dict().items():
        known = expected.get(name, expected.get(f"{hydra.base_model_prefix}.{name}"))
        assert torch.equal(weight, known), name
    # What is loaded is fused with what was never saved.
    one = family.hydra.from_backbone(family.backbone(0).float())
    other = family.hydra.from_backbone(family.backbone(1).float())
    other.save_pretrained(folder)
    fused = family.hydra.from_pruned_members([one, family.hydra.from_pretrained(folder)], shared=())
    assert fused.num_members == 2


def imports_of(path) -> set[str]:
    """The modules that a file imports: "torch", "os", or ".modeling_hydra" for one beside it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            if node.module is not None:  # others are beside it where a model needs them
                found.add("." * node.level + (node.module if node.level else node.module.split(".")[0]))
        elif isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
    return found


def test_saving_writes_the_weights_and_the_code_that_the_config_names_and_nothing_else(family, tmp_path):
    hydra, _, folder = save(family, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    pipelines = [pipeline["impl"] for pipeline in config.get("custom_pipelines", {}).values()]
    needed = {f".{name.split('.')[0]}" for name in (*hydra.config.auto_classes.values(), *pipelines)}
    allowed = {"torch", "transformers", "huggingface_hub", *sys.stdlib_module_names}
    files = set()
    while needed:
        files.add(path := folder / f"{needed.pop().removeprefix('.')}.py")
        imports = imports_of(path)
        siblings = {name for name in imports if name.startswith(".")}
        assert imports - siblings <= allowed, path.name
        needed |= {name for name in siblings if folder / f"{name.removeprefix('.')}.py" not in files}
    others = {folder / name for name in ("config.json", "model.safetensors", "inputs.safetensors")}
    assert set(folder.iterdir()) == files | others


def test_what_a_vision_transformer_ships_can_be_read_in_one_sitting(tmp_path):
    VIT.hydra.from_backbone(VIT.backbone()).save_pretrained(tmp_path)
    # Counted in syntax nodes: 2,050 lines of eight, however much a line carries.
    nodes = {path.name: sum(1 for _ in ast.walk(ast.parse(path.read_text()))) for path in tmp_path.glob("*.py")}
    assert len(nodes) <= 10, nodes
    assert sum(nodes.values()) <= 16_400, nodes


def vit_with_a_trunk() -> torch.nn.Module:
    members = [VIT.backbone(seed, kept=True) for seed in range(3)]
    return VIT.hydra.from_pruned_members(members, trunk_layers=1, check=False)


@torch.no_grad()
@pytest.mark.parametrize(
    "make, most",
    [(lambda: VIT.fused("uniform"), 22), (lambda: VIT.fused("ragged"), 23), (vit_with_a_trunk, 21)],
    ids=["uniform", "ragged", "trunk"],
)
def test_a_forward_passes_through_few_functions_in_few_files(make, most):
    hydra = make().eval()
    inputs = VIT.inputs()
    hydra(**inputs)  # the first one may load code
    seen = set()

    def watch(frame, event, _):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE) and not code.co_name.startswith("<"):
            seen.add((code.co_filename, code.co_firstlineno, code.co_name))

    sys.setprofile(watch)
    try:
        hydra(**inputs)
    finally:
        sys.setprofile(None)
    assert len({path for path, *_ in seen}) <= 4, seen
    assert len(seen) <= most, seen


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("problem_type", ["multi_label_classification", "regression"])
def test_the_code_of_other_problems_ships_with_their_models_and_encoders_alone(tmp_path, problem_type):
    hydra = BERT.hydra.from_pruned_members(float_members(bert_backbone, problem_type=problem_type))
    hydra.save_pretrained(tmp_path / "same")
    save_file(BERT.inputs(), tmp_path / "same" / "inputs.safetensors")
    bert_tokenizer(tmp_path).save_pretrained(tmp_path / "same")
    hydra.bert.save_pretrained(tmp_path / "encoder")
    VIT.fused().save_pretrained(tmp_path / "classifier")
    file = f"{TASKS[problem_type].partition('.')[0]}.py"
    assert {path.parent.name for path in tmp_path.glob(f"*/{file}")} == {"same", "encoder"}
    out = tmp_path / "out"
    run_second_process(tmp_path / "same", "AutoModelForSequenceClassification", out)
    found = load_file(out / "outputs.safetensors")["member_logits"]
    torch.testing.assert_close(found, hydra(**BERT.inputs()).member_logits)
    assert (out / "again" / file).exists()
    code = "import sys, transformers\npredict = transformers.pipeline('hydra-text-classification', sys.argv[1], trust_remote_code=True)"
    result = run_without_package(f"{code}\nprint(predict('a good film')['score'])", tmp_path / "same", folder=out)
    assert result.returncode == 0, result.stderr
    score = hydra.predict(["a good film"], bert_tokenizer(tmp_path))[0]["score"]
    assert float(result.stdout) == pytest.approx(score, rel=1e-5)


def test_a_task_whose_code_was_not_shipped_gets_a_sentence(monkeypatch):
    monkeypatch.setattr(task, "LOADED", {})
    monkeypatch.setitem(sys.modules, "hydra_transformers.models.task_regression", None)
    with pytest.raises(ImportError, match=r"without task_regression\.py: pip install hydra_transformers"):
        task.load_task("regression")


def test_building_without_the_package_gets_a_sentence(monkeypatch):
    hydra = VIT.hydra.from_backbone(VIT.backbone())
    sentence = "needs the package hydra_transformers, .*: pip install --upgrade hydra_transformers"
    monkeypatch.setitem(sys.modules, "hydra_transformers.fusion", None)
    for build in (lambda: hydra.member(0), lambda: type(hydra).from_backbone(hydra)):
        with pytest.raises(ImportError, match=sentence):
            build()
    with pytest.raises(ImportError, match=sentence):
        type(hydra).from_pruned_members([hydra])


def test_what_else_is_missing_is_named(monkeypatch):
    hydra = VIT.hydra.from_backbone(VIT.backbone())

    def without_safetensors(name):
        raise ModuleNotFoundError("No module named 'safetensors'", name="safetensors")

    monkeypatch.setattr("importlib.import_module", without_safetensors)
    with pytest.raises(ModuleNotFoundError, match="safetensors"):
        hydra.member(0)


@each_of(FAMILIES)
@torch.no_grad()
def test_saved_is_loaded_without_trust_where_the_package_is_installed(family, tmp_path):
    hydra, inputs, folder = save(family, tmp_path)
    loaded, info = getattr(transformers, auto_class_of(hydra)).from_pretrained(folder, output_loading_info=True)
    assert type(loaded) is family.hydra and not any(info.values()), info
    assert_same_tensors(loaded.state_dict(), hydra.state_dict())
    assert torch.equal(loaded(**inputs).member_logits, hydra(**inputs).member_logits)
    assert type(AutoModel.from_pretrained(folder)).__name__ == hydra.config.auto_classes["AutoModel"].split(".")[1]


@each_of([VIT, CLIP])
def test_sharded_checkpoints_load(family, tmp_path):
    hydra = family.fused()
    hydra.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert_same_tensors(family.hydra.from_pretrained(tmp_path).state_dict(), hydra.state_dict())


# Pipelines


def random_image(size: int = 20):
    from PIL import Image  # a machine with a GPU may lack it: all other tests of this file run there

    return Image.fromarray(np.random.default_rng(0).integers(0, 255, (size, size, 3), dtype=np.uint8))


def float_members(make, count: int = 3, **fields):
    return [make(seed, **fields).float() for seed in range(count)]


def bert_tokenizer(folder) -> BertTokenizer:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "bad", "film", "a", "the"]
    (folder / "vocab.txt").write_text("\n".join(words))
    return BertTokenizer(str(folder / "vocab.txt"))


@pytest.mark.parametrize(
    "problem_type, probabilities",
    [
        ("single_label_classification", lambda logits: logits.softmax(-1)),
        ("multi_label_classification", lambda logits: logits.sigmoid()),
        ("regression", lambda logits: logits),
    ],
)
def test_the_text_classification_pipeline_returns_the_ensembles_answer(tmp_path, problem_type, probabilities):
    backbones = float_members(bert_backbone, problem_type=problem_type)
    BERT.hydra.from_pruned_members(backbones, shared=()).save_pretrained(tmp_path)
    tokenizer = bert_tokenizer(tmp_path)
    tokenizer.save_pretrained(tmp_path)

    answers = pipeline("text-classification", model=str(tmp_path), tokenizer=tokenizer)("a good film", top_k=None)

    tokens = tokenizer("a good film", return_tensors="pt")
    with torch.no_grad():
        expected = torch.stack([probabilities(backbone(**tokens).logits) for backbone in backbones]).mean(0)[0]
    scores = sorted(answer["score"] for answer in answers)
    assert scores == pytest.approx(sorted(expected.tolist()), abs=1e-5)


def clip_processor() -> CLIPProcessor:
    tokens = ["<|startoftext|>", "<|endoftext|>", *"abcdefghijklmnopqrstuvwxyz", *[f"{c}</w>" for c in "abcot.is"]]
    tokenizer = CLIPTokenizer(vocab={token: i for i, token in enumerate(tokens)}, merges=[])
    return CLIPProcessor(
        CLIPImageProcessorPil(size={"shortest_edge": 8}, crop_size={"height": 8, "width": 8}), tokenizer
    )


@pytest.mark.slow
def test_the_zero_shot_pipeline_returns_mean_probabilities(tmp_path):
    processor = clip_processor()
    eos = processor.tokenizer.eos_token_id
    backbones = []
    for seed in range(3):
        config = clip_backbone().config
        config.text_config.eos_token_id = eos
        config.text_config.max_position_embeddings = 77
        backbones.append(randomise(type(clip_backbone())(config), seed))
    CLIP.hydra.from_pruned_members(backbones, shared=()).save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    labels = ["cat", "dog", "boat"]

    classifier = pipeline(
        "zero-shot-image-classification",
        model=AutoModelForZeroShotImageClassification.from_pretrained(tmp_path),
        tokenizer=processor.tokenizer,
        image_processor=processor.image_processor,
    )
    answers = classifier(random_image(), candidate_labels=labels, hypothesis_template="{}")

    inputs = processor(text=labels, images=random_image(), return_tensors="pt", padding=True)
    with torch.no_grad():
        members = [backbone(**inputs).logits_per_image.softmax(-1) for backbone in backbones]
    expected = torch.stack(members).mean(0)[0]
    scores = {answer["label"]: answer["score"] for answer in answers}
    assert scores == pytest.approx(dict(zip(labels, expected.tolist(), strict=True)), abs=1e-4)
