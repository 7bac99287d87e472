"""Runs the common model tests of Transformers against every Hydra class.

    git clone --depth 1 --branch v5.22.2 https://github.com/huggingface/transformers
    python scripts/hf_common_tests.py transformers                                # all classes, some minutes
    python scripts/hf_common_tests.py transformers --classes HydraViTModel --tests retain_grad

The tests are those of the checkout (`tests/test_modeling_common.py`); take the tag of the Transformers that is installed.
They need the package `parameterized`, and `onnxscript` and `onnxruntime` for the ONNX exports. The models are tiny, those of
tests/families.py: three members that keep different numbers of heads, in some layers none.

Prints a table and what was not expected; what the tests log goes to stderr. Exit code 1 where a test fails that is not in
`BY_DESIGN`, or passes although it is, or where the tests cannot be run.
"""

import argparse
import importlib
import importlib.util
import os
import sys
import unittest
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from types import ModuleType

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

import hydra_transformers as hydra
from hydra_transformers.fusion.structure import config_in_backbone, hydra_config, number_of_layers, tower_configs


# What fails and is meant to: patterns of classes, patterns of tests, and why. Each of these tests fails in each of these classes, or the
# entry goes.
EMBEDDINGS = "test_model_get_set_embeddings"
GRADIENTS = "test_training_gradient_checkpointing*"
BY_DESIGN: tuple[tuple[str, str, str], ...] = (
    (
        "HydraViT* HydraDeiT* HydraDinov2* HydraDINOv3* HydraBeit* HydraAST* HydraWav2Vec2* HydraHubert* HydraWavLM* HydraWhisper* "
        "HydraCLIPVision* HydraCLIPFor* HydraSiglipVision* HydraSiglipFor*",
        EMBEDDINGS,
        "images and audio are embedded by projections or convolutions, not by an nn.Embedding",
    ),
    (
        "HydraDinov2*ForImageClassification",
        GRADIENTS,
        "the mask token of the pre-training is part of the embeddings and gets no gradient, as in DINOv2 itself",
    ),
    (
        "HydraCLIPForImageClassification",
        GRADIENTS,
        "the norm of the [CLS] token, which this head does not read, gets no gradient, as in CLIP itself",
    ),
    (
        "HydraQwen3For* HydraGemma3TextFor* HydraWavLMFor*",
        GRADIENTS,
        "norms and maps of heads get no gradient from a member without heads in a layer",
    ),
    (
        "HydraHubertFor*",
        GRADIENTS,
        "a head that reads all layers does not read the norm behind them, as in HuBERT itself",
    ),
    (
        "HydraRobertaModel",
        "test_inputs_embeds_matches_input_ids",
        "positions count the tokens that are not padding, which embeddings do not tell, as in RoBERTa itself",
    ),
    (
        "HydraRobertaForSequenceClassification HydraElectraForSequenceClassification HydraMPNetForSequenceClassification",
        "test_can_load_ignoring_mismatched_shapes",
        "the test knows the layers of a nested head by nn.Linear, and these are grouped",
    ),
    (
        "Hydra*ForSequenceClassification Hydra*ForImageClassification",
        "test_problem_types",
        "one class of one has no loss, and is refused",
    ),
    (
        "HydraModernBertModel",
        "test_model_rope_scaling_from_config_1_dynamic",
        "new weights are small, and texts so short that scaled positions change less than the test tells apart",
    ),
    ("HydraCLIPModel HydraSiglipModel", EMBEDDINGS, "each tower has embeddings of its own"),
    (
        "HydraCLIPModel HydraSiglipModel",
        "test_attention_outputs test_hidden_states_output test_retain_grad_hidden_states_attentions",
        "hidden states and attentions stand in the outputs of the towers, tested there",
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
        self.hidden_size = config.hidden_size
        self.num_hidden_layers = config.num_hidden_layers
        self.image_size, self.patch_size = (getattr(config, name, None) for name in ("image_size", "patch_size"))

    def get_config(self) -> PreTrainedConfig:
        return self.subject.config()

    def prepare_config_and_inputs_for_common(self) -> tuple[PreTrainedConfig, dict]:
        return self.get_config(), self.subject.inputs()


def import_common_tests(checkout: Path) -> ModuleType:
    """The checkout's `tests.test_modeling_common`; its `src` stays off the path: the installed Transformers is used."""
    sys.path.insert(0, str(checkout.resolve()))
    try:
        return importlib.import_module("tests.test_modeling_common")
    except ImportError as error:
        sys.exit(
            f"the tests of {checkout} cannot be imported ({error}): pass a checkout of huggingface/transformers at "
            f"v{transformers.__version__}, which is installed, and pip install parameterized"
        )


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


def matches(name: str, patterns: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns.split())


def judge(name: str, outcomes: dict[str, str], by_design: Iterable[tuple[str, str, str]]) -> tuple[Counter, list[str]]:
    """How many tests of a class "passed", "failed", were "skipped" or failed "by design"; and those that are not as `by_design` has
    them."""
    counts = Counter()
    unexpected = []
    patterns = [tests for classes, tests, _ in by_design if matches(name, classes)]
    for test, outcome in outcomes.items():
        is_listed = any(matches(test, pattern) for pattern in patterns)
        if outcome in ("passed", "skipped"):
            counts[outcome] += 1
            if is_listed and outcome == "passed":
                unexpected.append(f"{name}.{test} passes: take it out of BY_DESIGN")
        else:
            counts["by design" if is_listed else "failed"] += 1
            if not is_listed:
                unexpected.append(f"{name}.{test} fails: {outcome}")
    return counts, unexpected


def run(subject: Subject, common_tests: ModuleType, keyword: str) -> dict[str, str]:
    case = test_case(subject, common_tests)
    outcomes = Outcomes()
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
    common_tests = import_common_tests(arguments.checkout)
    chosen = [s for s in everything if arguments.classes is None or s.name in arguments.classes]
    names = ("passed", "failed", "skipped", "by design")
    unexpected = []
    print(f"{'class':46}" + "".join(f"{name:>11}" for name in names), flush=True)
    for subject in chosen:
        counts, others = judge(subject.name, run(subject, common_tests, arguments.tests), BY_DESIGN)
        print(f"{subject.name:46}" + "".join(f"{counts[name]:11}" for name in names), flush=True)
        unexpected += others
    print("\n".join(["", *unexpected]) if unexpected else "\nnothing unexpected")
    return 1 if unexpected else 0


if __name__ == "__main__":
    # The tests read these at import: slow ones are those of exports and compilation, which a tiny model can afford, and
    # a test that would start pytest on its own file runs here.
    os.environ.update({"RUN_SLOW": "1", "_INSIDE_SUB_PROCESS": "1"})
    sys.exit(main())
