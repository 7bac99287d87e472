"""Runs the common model tests of Transformers against every Hydra class.

    git clone --depth 1 --branch v5.22.2 https://github.com/huggingface/transformers
    python scripts/hf_common_tests.py transformers                                # all classes, some minutes
    python scripts/hf_common_tests.py transformers --classes HydraViTModel --tests retain_grad

The tests are those of the checkout (`tests/test_modeling_common.py`); take the tag of the Transformers that is installed.
They need the package `parameterized`, and `onnxscript` and `onnxruntime` for the ONNX exports. The models are tiny: three
members that keep different numbers of heads, one member without heads in each layer.

Prints a table and what was not expected; what the tests log goes to stderr. Exit code 1 where a test fails that is not in
`BY_DESIGN`, or passes although it is; 2 where the tests cannot be run.
"""

import argparse
import importlib
import os
import sys
import unittest
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from types import ModuleType

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

import hydra_transformers as hydra


# What fails and is meant to: a pattern of classes, a pattern of tests, and why. Each of these tests fails in each of these
# classes, or the entry goes.
BY_DESIGN: tuple[tuple[str, str, str], ...] = (
    (
        "Hydra*Vi[Ts]*",  # ViT and Vision
        "test_model_get_set_embeddings",
        "images are embedded by a projection of patches, not by an nn.Embedding",
    ),
    ("HydraCLIPModel", "test_model_get_set_embeddings", "each tower has embeddings of its own"),
    ("HydraCLIPModel", "test_attention_outputs", "attentions stand in the outputs of the towers, tested there"),
    ("HydraCLIPModel", "test_hidden_states_output", "hidden states stand in the outputs of the towers, tested there"),
    (
        "HydraCLIPModel",
        "test_retain_grad_hidden_states_attentions",
        "hidden states and attentions stand in the outputs of the towers, tested there",
    ),
    (
        "HydraCLIPModel",
        "test_batching_equivalence",
        "logits are log probabilities over the texts or images of the call, so fewer of them give other numbers",
    ),
    (
        "HydraCLIPModel",
        "test_get_text_features_output_[02]",
        "last_hidden_state is (batch, members, tokens, hidden): the test wants no axis of members",
    ),
)

KEPT_HEADS = [[[0, 1, 3], [2], []], [[], [0, 1], [1, 2, 3]]]
LAYER = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 37}
IMAGE = {"image_size": 8, "patch_size": 2, "num_channels": 3}
TEXT = {"vocab_size": 99, "max_position_embeddings": 64}
DROPOUT = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
BATCH, TOKENS, PATCHES = 5, 7, 17


def images() -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.rand(BATCH, 3, 8, 8)}


def texts() -> dict[str, torch.Tensor]:
    """Texts of different lengths, padded on the right."""
    lengths = torch.randint(2, TOKENS + 1, (BATCH, 1))
    return {
        "input_ids": torch.randint(3, 90, (BATCH, TOKENS)),
        "attention_mask": (torch.arange(TOKENS) < lengths).long(),
    }


@dataclass(frozen=True)
class Subject:
    """A class to be tested, as what Transformers' tests take it for.

    auto_names: the table of `modeling_auto` in which the class would stand if it were part of Transformers
    seq_length: tokens of its states
    """

    model_class: type[PreTrainedModel]
    config: Callable[[], PreTrainedConfig]
    inputs: Callable[[], dict]
    auto_names: str = "MODEL_MAPPING_NAMES"
    seq_length: int = PATCHES
    is_composite: bool = False

    @property
    def name(self) -> str:
        return self.model_class.__name__


def vit_config() -> PreTrainedConfig:
    return hydra.HydraViTConfig(**LAYER, **IMAGE, **DROPOUT, kept_heads=KEPT_HEADS)


def bert_config() -> PreTrainedConfig:
    return hydra.HydraBertConfig(**LAYER, **TEXT, **DROPOUT, kept_heads=KEPT_HEADS)


def vision_config() -> PreTrainedConfig:
    return hydra.HydraCLIPVisionConfig(**LAYER, **IMAGE, attention_dropout=0.1, kept_heads=KEPT_HEADS)


def text_config() -> PreTrainedConfig:
    return hydra.HydraCLIPTextConfig(
        **LAYER, **TEXT, attention_dropout=0.1, kept_heads=KEPT_HEADS, bos_token_id=97, eos_token_id=98
    )


def clip_config() -> PreTrainedConfig:
    return hydra.HydraCLIPConfig(text_config=text_config(), vision_config=vision_config(), projection_dim=16)


SUBJECTS = (
    Subject(hydra.HydraViTModel, vit_config, images),
    Subject(hydra.HydraViTForImageClassification, vit_config, images, "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES"),
    Subject(hydra.HydraBertModel, bert_config, texts, seq_length=TOKENS),
    Subject(
        hydra.HydraBertForSequenceClassification,
        bert_config,
        texts,
        "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
        seq_length=TOKENS,
    ),
    Subject(hydra.HydraCLIPVisionModel, vision_config, images),
    Subject(hydra.HydraCLIPTextModel, text_config, texts, seq_length=TOKENS),
    Subject(
        hydra.HydraCLIPModel, clip_config, lambda: {**images(), **texts(), "return_loss": True}, "", is_composite=True
    ),
)


class ModelTester:
    """What Transformers' tests ask of a model's own tests: a config, inputs and their sizes."""

    is_training = True
    batch_size = BATCH
    hidden_size = LAYER["hidden_size"]
    num_hidden_layers = LAYER["num_hidden_layers"]
    num_attention_heads = sum(map(len, KEPT_HEADS[0]))  # those of all members, in the layer that is looked at
    image_size, patch_size = IMAGE["image_size"], IMAGE["patch_size"]

    def __init__(self, subject: Subject):
        self.subject = subject
        self.seq_length = subject.seq_length

    def get_config(self) -> PreTrainedConfig:
        return self.subject.config()

    def prepare_config_and_inputs_for_common(self) -> tuple[PreTrainedConfig, dict]:
        return self.get_config(), self.subject.inputs()


def import_common_tests(checkout: Path) -> ModuleType:
    """The checkout's `tests.test_modeling_common`; its `src` stays off the path: the installed Transformers is used."""
    if not (checkout / "tests" / "test_modeling_common.py").is_file():
        raise ValueError(
            f"{checkout} has no tests/test_modeling_common.py: pass a checkout of huggingface/transformers"
        )
    sys.path.insert(0, str(checkout.resolve()))
    try:
        return importlib.import_module("tests.test_modeling_common")
    except ImportError as error:
        raise ValueError(
            f"the tests of {checkout} cannot be imported ({error}): check out v{transformers.__version__}, which is "
            "installed, and pip install parameterized"
        ) from error


def test_case(subject: Subject, common_tests: ModuleType) -> type[unittest.TestCase]:
    """Transformers' tests for one class."""
    if subject.auto_names:
        getattr(modeling_auto, subject.auto_names)[subject.model_class.config_class.model_type] = subject.name
    return type(
        subject.name,
        (common_tests.ModelTesterMixin, unittest.TestCase),
        {
            "all_model_classes": (subject.model_class,),
            "test_resize_embeddings": subject.seq_length == TOKENS,
            "_is_composite": subject.is_composite,
            "additional_model_inputs": ["pixel_values"] if subject.is_composite else [],
            "setUp": lambda self: setattr(self, "model_tester", ModelTester(subject)),
        },
    )


class Outcomes(unittest.TestResult):
    """How each test ended: "passed", "skipped", or what went wrong."""

    def __init__(self):
        super().__init__()
        self.buffer = True  # what tests print is dropped
        self.of: dict[str, str] = {}

    def _failed(self, test: unittest.TestCase, error) -> None:
        kind, value, _ = error
        message = next(iter(str(value).strip().splitlines()), "")
        self.of[test._testMethodName] = f"{kind.__name__}: {message}"

    def addSuccess(self, test):
        self.of.setdefault(test._testMethodName, "passed")

    def addSkip(self, test, reason):
        self.of.setdefault(test._testMethodName, "skipped")

    def addError(self, test, error):
        self._failed(test, error)

    def addFailure(self, test, error):
        self._failed(test, error)

    def addSubTest(self, test, subtest, error):
        if error is not None:
            self._failed(test, error)


@dataclass
class Row:
    """What the table says of a class, and what is said below it."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0
    by_design: int = 0
    unexpected: list[str] = field(default_factory=list)


def judge(name: str, outcomes: dict[str, str], by_design: Iterable[tuple[str, str, str]]) -> Row:
    """Counts the outcomes of a class's tests and names those that are not as `by_design` has them."""
    row = Row()
    patterns = [tests for classes, tests, _ in by_design if fnmatchcase(name, classes)]
    for test, outcome in outcomes.items():
        is_listed = any(fnmatchcase(test, pattern) for pattern in patterns)
        if outcome == "skipped":
            row.skipped += 1
        elif outcome == "passed":
            row.passed += 1
            if is_listed:
                row.unexpected.append(f"{name}.{test} passes: take it out of BY_DESIGN")
        elif is_listed:
            row.by_design += 1
        else:
            row.failed += 1
            row.unexpected.append(f"{name}.{test} fails: {outcome}")
    return row


def run(subject: Subject, common_tests: ModuleType, keyword: str) -> dict[str, str]:
    case, outcomes = test_case(subject, common_tests), Outcomes()
    names = unittest.TestLoader().getTestCaseNames(case)
    unittest.TestSuite(case(name) for name in names if keyword in name).run(outcomes)
    return outcomes.of


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="a checkout of huggingface/transformers, at the installed version")
    parser.add_argument("--classes", nargs="+", choices=[s.name for s in SUBJECTS], help="these only")
    parser.add_argument("--tests", default="", help="tests whose name has this in it only")
    arguments = parser.parse_args()
    try:
        common_tests = import_common_tests(arguments.checkout)
    except ValueError as error:
        parser.error(str(error))
    subjects = [s for s in SUBJECTS if arguments.classes is None or s.name in arguments.classes]
    columns = "{:36}{:>8}{:>8}{:>9}{:>11}"
    print(columns.format("class", "passed", "failed", "skipped", "by design"), flush=True)
    unexpected = []
    for subject in subjects:
        row = judge(subject.name, run(subject, common_tests, arguments.tests), BY_DESIGN)
        print(columns.format(subject.name, row.passed, row.failed, row.skipped, row.by_design), flush=True)
        unexpected += row.unexpected
    print("\n".join(["", *unexpected]) if unexpected else "\nnothing unexpected")
    return 1 if unexpected else 0


if __name__ == "__main__":
    # The tests read these at import: slow ones are those of exports and compilation, which a tiny model can afford, and
    # a test that would start pytest on its own file runs here.
    os.environ.update({"RUN_SLOW": "1", "_INSIDE_SUB_PROCESS": "1"})
    sys.exit(main())
