"""Runs the common model tests of Transformers against every Hydra class.

    git clone --depth 1 --branch v5.22.2 https://github.com/huggingface/transformers
    python scripts/hf_common_tests.py transformers                                # all classes, some minutes
    python scripts/hf_common_tests.py transformers --classes HydraViTModel --tests retain_grad

The tests are those of the checkout (`tests/test_modeling_common.py`); take the tag of the Transformers that is installed.
They need the package `parameterized`, and `onnxscript` and `onnxruntime` for the ONNX exports. The models are tiny, those of
tests/families.py: three members that keep different numbers of heads, in some layers none.

Prints a table and what was not expected; what the tests log goes to stderr. Exit code 1 where a test fails that is not in
`BY_DESIGN`, or passes although it is; 2 where the tests cannot be run.
"""

import argparse
import importlib
import importlib.util
import os
import sys
import unittest
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from types import ModuleType

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

import hydra_transformers as hydra
from hydra_transformers.fusion.structure import config_in_backbone, hydra_config, number_of_layers, tower_configs


# What fails and is meant to: a pattern of classes, a pattern of tests, and why. Each of these tests fails in each of these
# classes, or the entry goes.
BY_DESIGN: tuple[tuple[str, str, str], ...] = (
    *(
        (
            classes,
            "test_model_get_set_embeddings",
            "images and sounds are embedded by projections or convolutions, not by an nn.Embedding",
        )
        for classes in (
            "HydraViT*",
            "HydraDeiT*",
            "HydraDinov2*",
            "HydraDINOv3*",
            "HydraBeit*",
            "HydraAST*",
            "HydraWav2Vec2*",
            "HydraHubert*",
            "HydraWavLM*",
            "HydraWhisper*",
            "HydraCLIPVision*",
            "HydraCLIPFor*",
            "HydraSiglipVision*",
            "HydraSiglipFor*",
        )
    ),
    (
        "HydraDinov2*ForImageClassification",
        "test_training_gradient_checkpointing*",
        "the mask token of the pre-training is part of the embeddings and gets no gradient, as in DINOv2 itself",
    ),
    (
        "HydraCLIPForImageClassification",
        "test_training_gradient_checkpointing*",
        "the norm of the [CLS] token, which this head does not read, gets no gradient, as in CLIP itself",
    ),
    *(
        (
            classes,
            "test_training_gradient_checkpointing*",
            "norms and maps of heads get no gradient from a member without heads in a layer",
        )
        for classes in ("HydraQwen3For*", "HydraGemma3TextFor*", "HydraWavLMFor*")
    ),
    (
        "HydraHubertFor*",
        "test_training_gradient_checkpointing*",
        "a head that reads all layers does not read the norm behind them, as in HuBERT itself",
    ),
    (
        "HydraRobertaModel",
        "test_inputs_embeds_matches_input_ids",
        "positions count the tokens that are no padding, which embeddings do not tell, as in RoBERTa itself",
    ),
    *(
        (
            classes,
            "test_can_load_ignoring_mismatched_shapes",
            "the test knows the layers of a nested head by nn.Linear, and these are grouped",
        )
        for classes in (
            "HydraRobertaForSequenceClassification",
            "HydraElectraForSequenceClassification",
            "HydraMPNetForSequenceClassification",
        )
    ),
    *(
        (classes, "test_problem_types", "one class of one has no loss, and is refused")
        for classes in ("Hydra*ForSequenceClassification", "Hydra*ForImageClassification")
    ),
    (
        "HydraModernBertModel",
        "test_model_rope_scaling_from_config_1_dynamic",
        "new weights are small, and texts so short that scaled positions change less than the test tells apart",
    ),
    *(
        (classes, test, reason)
        for classes in ("HydraCLIPModel", "HydraSiglipModel")
        for test, reason in (
            ("test_model_get_set_embeddings", "each tower has embeddings of its own"),
            ("test_attention_outputs", "attentions stand in the outputs of the towers, tested there"),
            ("test_hidden_states_output", "hidden states stand in the outputs of the towers, tested there"),
            (
                "test_retain_grad_hidden_states_attentions",
                "hidden states and attentions stand in the outputs of the towers, tested there",
            ),
        )
    ),
    (
        "HydraCLIPModel",
        "test_batching_equivalence",
        "logits are log probabilities over the texts or images of the call, so fewer of them give other numbers",
    ),
)

KEPT_HEADS = [[[0, 1, 3], [2], []], [[], [0, 1], [1, 2, 3]]]
BATCH = 5


@dataclass(frozen=True)
class Subject:
    """A class to be tested, as what Transformers' tests take it for.

    auto_names: the table of `modeling_auto` in which the class would stand if it were part of Transformers
    """

    model_class: type[PreTrainedModel]
    config: Callable[[], PreTrainedConfig]
    inputs: Callable[[], dict]
    auto_names: str
    seq_length: int
    is_composite: bool = False

    @property
    def name(self) -> str:
        return self.model_class.__name__

    @property
    def reads_texts(self) -> bool:
        return not self.is_composite and "input_ids" in self.inputs()


def table_of_families() -> list:
    """The project's own table, by its path: the checkout has a package called tests too."""
    spec = importlib.util.spec_from_file_location("families", Path(__file__).parents[1] / "tests" / "families.py")
    families = sys.modules["families"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(families)
    return families.FAMILIES + families.ENCODERS


def subjects() -> list[Subject]:
    """The encoder and the head of every family, and the towers of those that have two."""
    found = {}
    for family in table_of_families():
        for subject in subjects_of(family):
            found.setdefault(subject.name, subject)
    return list(found.values())


def subjects_of(family) -> Iterator[Subject]:
    def whole_config() -> PreTrainedConfig:
        layers = {"num_hidden_layers": len(KEPT_HEADS)}
        backbone = family.backbone(**({} if family.has_towers else layers | family.dropout))
        config = config_in_backbone(family.hydra, backbone.config)
        for tower in tower_configs(config).values():
            tower.num_hidden_layers = len(KEPT_HEADS)
            if hasattr(tower, "num_hidden_groups"):
                tower.num_hidden_groups = 1  # one layer, which runs twice
        towers = tower_configs(config).items()
        kept = {tower: {"kept_heads": KEPT_HEADS[: number_of_layers(each)]} for tower, each in towers}
        fields = hydra_config(family.hydra.config_class, config, kept).to_dict()
        return family.hydra.config_class.from_dict(fields)  # without the backbone's choice of attention

    def inputs() -> dict[str, torch.Tensor]:
        """A batch of images, texts of different lengths, or both."""
        read = {name: tensor[torch.arange(BATCH) % len(tensor)] for name, tensor in family.inputs().items()}
        return {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in read.items()}

    for auto_class, name in family.hydra.config_class.auto_classes.items():
        if auto_class == "AutoConfig" or (auto_class == "AutoModel" and family.has_towers):
            continue
        table = "" if family.has_towers else TABLES[auto_class]
        model_class = getattr(hydra, name.partition(".")[2])
        everything = (lambda: inputs() | {"return_loss": True}) if family.has_towers else inputs
        yield Subject(model_class, whole_config, everything, table, family.tokens, family.has_towers)
    if not family.has_towers:
        return
    for tower, names in {"vision": ("pixel_values",), "text": ("input_ids", "attention_mask")}.items():
        config = getattr(whole_config(), f"{tower}_config")
        yield Subject(
            getattr(hydra, config.auto_classes["AutoModel"].partition(".")[2]),
            lambda tower=tower: getattr(whole_config(), f"{tower}_config"),
            lambda names=names: {name: inputs()[name] for name in names},
            TABLES["AutoModel"],
            inputs()["input_ids"].shape[1] if tower == "text" else family.tokens,
        )


TABLES = {
    "AutoModel": "MODEL_MAPPING_NAMES",
    "AutoModelForAudioClassification": "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES",
    "AutoModelForImageClassification": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "AutoModelForSequenceClassification": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    "AutoModelForTokenClassification": "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",
}


class ModelTester:
    """What Transformers' tests ask of a model's own tests: a config, inputs and their sizes."""

    is_training = True
    batch_size = BATCH
    num_attention_heads = sum(map(len, KEPT_HEADS[0]))  # those of all members, in the layer that is looked at

    def __init__(self, subject: Subject):
        self.subject = subject
        self.seq_length = subject.seq_length
        config = next(iter(tower_configs(subject.config()).values()))
        self.hidden_size, self.num_hidden_layers = config.hidden_size, config.num_hidden_layers
        self.image_size, self.patch_size = (getattr(config, name, None) for name in ("image_size", "patch_size"))

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
            "test_resize_embeddings": subject.reads_texts,
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
    everything = subjects()
    parser.add_argument("--classes", nargs="+", choices=[s.name for s in everything], help="these only")
    parser.add_argument("--tests", default="", help="tests whose name has this in it only")
    arguments = parser.parse_args()
    try:
        common_tests = import_common_tests(arguments.checkout)
    except ValueError as error:
        parser.error(str(error))
    chosen = [s for s in everything if arguments.classes is None or s.name in arguments.classes]
    columns = "{:46}{:>8}{:>8}{:>9}{:>11}"
    print(columns.format("class", "passed", "failed", "skipped", "by design"), flush=True)
    unexpected = []
    for subject in chosen:
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
