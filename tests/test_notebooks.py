"""The notebooks run from top to bottom, offline, and are kept as they ran.

Here each makes its own data and model, and then goes on with other, smaller ones: all of its cells run, in seconds. `make
notebooks` runs them as they are."""

import ast
import importlib.util
import re
import sys
from pathlib import Path

import nbformat
import pytest


pytestmark = pytest.mark.slow


ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
CHECKPOINTS = {
    "dont_know": "google/vit-base-patch16-224",
    "paper": "google/vit-base-patch16-224",
    "texts": "sentence-transformers/all-MiniLM-L6-v2",
    "zero_shot": "laion/CLIP-ViT-B-32-laion2B-s34B-b79K",
}
DATA_AND_MODEL = "## Data and model"  # the code cell below it is the only one that knows of the data
# Another size of images, other numbers of classes, layers, heads and data sets, and a model that has learned nothing.
OTHER_DATA = """
import torch
from transformers import CLIPConfig, CLIPModel, ViTConfig, ViTModel

torch.manual_seed(0)
class_names = names = ["ant", "bee", "cat", "dog", "elk"]


def rows(count, are_known=True):
    labels = torch.arange(count) % 5
    images = torch.randn(count, 3, 12, 12) + labels[:, None, None, None] * are_known
    rows = [{"pixel_values": image, "labels": int(label)} for image, label in zip(images, labels)]
    return rows if are_known else [{"pixel_values": row["pixel_values"]} for row in rows]
"""
OTHER_SIZES = "hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=32"
OTHER = {
    "dont_know": f"""
train, validation, test = (rows(count) for count in (60, 60, 50))
ood = {{"far": {{"noise": rows(40, False)}}}}
pretrained, target = ViTModel(ViTConfig(image_size=12, patch_size=4, {OTHER_SIZES})), {{"coverage": 0.8}}
settings = {{"max_steps": 3}}
""",
    "paper": f"""
from transformers import ViTForImageClassification

train, validation, test = (rows(count) for count in (60, 30, 50))
to_choose, ood = rows(20, False), {{"near": {{"noise": rows(40, False)}}, "far": {{"more": rows(30, False)}}}}
vit = ViTForImageClassification(ViTConfig(image_size=12, patch_size=4, num_labels=5, initializer_range=0.3, {OTHER_SIZES}))
settings, budget, tuning = {{"max_steps": 3}}, 3, recipe("imagenet1k").with_arguments(max_steps=3, warmup_steps=1)
""",
    "texts": """
from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast
from tokenizers import Tokenizer, models, pre_tokenizers

words = ["[PAD]", "[UNK]", *class_names, *"is it the where".split()]
backend = Tokenizer(models.WordLevel({word: place for place, word in enumerate(words)}, unk_token="[UNK]"))
backend.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="[PAD]", unk_token="[UNK]", model_max_length=8)
sizes = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=32, max_position_embeddings=8)
config = BertConfig(vocab_size=len(words), id2label=dict(enumerate(class_names)), **sizes)
hydra = AutoHydra.from_backbone(BertForSequenceClassification(config), num_members=3, class_names=class_names)


def texts(count, are_known=True):
    rows = [{"text": f"it is the {names[i % 5] if are_known else 'it'}", "label": names[i % 5]} for i in range(count)]
    return load_data(rows, hydra, processor=tokenizer, column="text", labelled=are_known)


train, validation, test = (texts(count) for count in (60, 60, 50))
out_of_scope, questions = texts(40, False), ["where is it", "the bee is"]
settings, target = {"max_steps": 3}, {"coverage": 0.8}
""",
    "zero_shot": f"""
vision, text = dict(image_size=12, patch_size=4, {OTHER_SIZES}), dict(vocab_size=9, max_position_embeddings=6, {OTHER_SIZES})
backbone = CLIPModel(CLIPConfig(vision_config=vision, text_config=text, projection_dim=8)).eval()
prompts = {{"input_ids": torch.randint(3, 9, (5, 6)), "attention_mask": torch.ones(5, 6, dtype=torch.long)}}
extraction, test, to_choose, ood, budget = rows(30), rows(40), rows(30, False), {{"far": {{"noise": rows(40, False)}}}}, 2
""",
}

spec = importlib.util.spec_from_file_location("build_notebooks", ROOT / "scripts" / "build_notebooks.py")
build_notebooks = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = build_notebooks
spec.loader.exec_module(build_notebooks)


def pictures(notebook) -> list:
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return [output for output in outputs if "image/png" in output.get("data", {})]


@pytest.fixture(scope="module")
def kernel():
    """One for all notebooks: what they import is imported once."""
    with build_notebooks.started_kernel() as kernel:
        yield kernel


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_each_notebook_loads_its_data_offline_and_with_other_data_the_rest_stays_as_it_is(path, kernel, tmp_path):
    notebook = nbformat.read(path, as_version=4)
    place = place_of_data(notebook)
    forget = f"del {', '.join(defined_in([notebook.cells[place].source]))}\n"
    notebook.cells.insert(place + 1, nbformat.v4.new_code_cell(forget + OTHER_DATA + OTHER[path.stem]))
    (tmp_path / path.name).write_text(nbformat.writes(notebook))
    assert pictures(build_notebooks.execute(tmp_path / path.name, kernel))


def place_of_data(notebook) -> int:
    """Of the one cell that knows of the data."""
    titles = [cell.source.splitlines()[0] for cell in notebook.cells]
    return next(
        place
        for place in range(titles.index(DATA_AND_MODEL), len(titles))
        if notebook.cells[place].cell_type == "code"
    )


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_notebook_is_kept_executed_and_small(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert not [output for cell in code for output in cell.outputs if output.output_type == "error"]
    assert pictures(notebook)
    assert path.stat().st_size < 300_000


def test_the_kept_stories_are_those_that_are_told():
    printed = {path.stem: "".join(printed_in(nbformat.read(path, as_version=4))) for path in NOTEBOOKS}
    assert "decides as before: True" in printed["dont_know"]
    assert "decides as before: True" in printed["texts"]
    assert "predicts as before: True" in printed["paper"]
    assert beats_the_one_models(printed["paper"])
    assert "what is the meaning of life\n    I don't know: " in printed["texts"]


def beats_the_one_models(text: str) -> bool:
    """Whether the paper's Hydra is more accurate, and detects near inputs better, than the one model, also if that is tuned on."""
    found = re.findall(r"^(Single.*|Hydra.*): accuracy ([\d.]+)%.*AUROC near ([\d.]+)%", text, re.MULTILINE)
    numbers = {title: [float(number) for number in of_model] for title, *of_model in found}
    hydra = numbers.pop("Hydra (Circ)")
    assert list(numbers) == ["Single", "Single, longer"]
    return all(ours > theirs for single in numbers.values() for ours, theirs in zip(hydra, single, strict=True))


def printed_in(notebook) -> list[str]:
    return [output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", [])]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_ends_with_the_lines_for_a_real_checkpoint_which_define_what_the_cells_that_stay_use(path):
    notebook = nbformat.read(path, as_version=4)
    code = "\n".join(code_blocks(notebook.cells[-1]))
    ast.parse(code)
    assert CHECKPOINTS[path.stem] in code and "push_hydra_to_hub" in code
    place = place_of_data(notebook)
    stay = [cell.source for at, cell in enumerate(notebook.cells) if cell.cell_type == "code" and at != place]
    needed = defined_in([notebook.cells[place].source]) & read_in(stay) - defined_in(stay)
    assert len(needed) >= 3
    assert needed <= defined_in(code_blocks(notebook.cells[-1])[:1])


def code_blocks(cell) -> list[str]:
    return [part.split("```")[0] for part in cell.source.split("```python\n")[1:]]


def read_in(sources) -> set[str]:
    nodes = [node for tree in map(parsed, sources) for node in ast.walk(tree)]
    return {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}


def defined_in(sources) -> set[str]:
    """Names that the lines themselves give a value, not what comprehensions and functions have inside."""
    lines = [line for tree in map(parsed, sources) for line in tree.body]
    targets = [target for line in lines if isinstance(line, ast.Assign) for target in line.targets]
    functions = {line.name for line in lines if isinstance(line, ast.FunctionDef)}
    return functions | {node.id for target in targets for node in ast.walk(target) if hasattr(node, "id")}


def parsed(source: str) -> ast.Module:
    return ast.parse("\n".join(line for line in source.splitlines() if not line.startswith("%")))
