"""Table 3, and 24 to 28: a CLIP pruned in one tower or both, as a zero-shot classifier of several data sets (5.3, C.3, D.3)."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import AutoConfig, AutoTokenizer, CLIPModel, PreTrainedModel

from hydra_transformers import AutoHydra, evaluate_uncertainty
from hydra_transformers.baselines import BayesVLM, ViLU, collect_confidences, temperature_scaled
from hydra_transformers.cost import count_multiply_adds, count_parameters
from hydra_transformers.data.loading import load_data
from hydra_transformers.data.processors import load_processor
from hydra_transformers.data.rows import DataSource
from hydra_transformers.data.zero_shot import ZeroShotClassifier
from hydra_transformers.pruning import Circuit, extract_circuit, prune_heads, taylor_prune, taylor_scores
from hydra_transformers.training import Recipe, finetune_members, recipe
from hydra_transformers.uncertainty import ood_metrics
from hydra_transformers.uncertainty.metrics import adaptive_calibration_error, expected_calibration_error

from .. import smallest
from ..captions import prompts_for
from ..clip_training import SMALLEST_NAMES, SMALLEST_SCHEDULE, smallest_dinov2, trained_clip
from ..rows import TensorRows
from . import data
from .data import EVALUATION_BATCH, as_batches
from .judging import CLASSIFICATION, DETECTION
from .parts import OBJECTIVES, Part
from .study import Study


TOWERS = {"circuit": "both", "vision-circuit": "vision"}  # of a circuit, by the part's kind
LOADED = Part("backbone", 0)  # loaded from the Hub, or trained for a test
TEMPERATURE_ROWS = 5_000  # training rows of ImageNet-1K (C.3)


@dataclass(frozen=True)
class LabelSet:
    """Classes by their names, and labelled images.

    train: labelled images to train ViLU on; None where it is not judged
    ood: {group: {set: images}}; empty where detection is not judged
    """

    names: Sequence[str]
    test: Any
    train: Any = None
    ood: Mapping[str, Mapping[str, Any]] | None = None


@dataclass(frozen=True)
class ClipData:
    """
    label_sets: by name, those that are judged
    held_out: labelled rows of the first, for the temperature and for BayesVLM
    circuit_id, circuit_ood: of the first, for circuits and Taylor scores
    pairs: images with a text each, to fine-tune on
    """

    label_sets: Mapping[str, LabelSet]
    held_out: Any
    circuit_id: Any
    circuit_ood: Any
    pairs: Callable[[], Any]


@dataclass(frozen=True)
class ClipSetting:
    """As `Setting`.

    load: (start, folder that keeps it, device) -> the CLIP and its tokenizer
    heads_to_prune: how many both towers lose together; more_heads: how many in the second look
    heads_per_layer: how many Taylor pruning keeps in the vision tower
    vilu_views: how often ViLU sees its rows
    """

    name: str
    title: str
    start: str
    read: Callable[[Path | None, str], ClipData]
    load: Callable[[str, Path, str], tuple[PreTrainedModel, Any]]
    heads_to_prune: int
    more_heads: int
    heads_per_layer: int
    member_recipe: Recipe
    training_arguments: Mapping[str, Any]
    circuit_mode: str = "exact"
    paper: str = "clip-vit-b32"
    also_compared: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    about: str = ""
    task: str = "clip"


@dataclass(frozen=True)
class ClipMethod:
    """
    title: as the paper has it
    needs: (setting) -> circuits and trained members
    build: (study) -> the model of two towers; None where `judge` of the study knows better
    """

    title: str
    needs: Callable[[ClipSetting], list[Part]]
    build: Callable[["ClipStudy"], nn.Module] | None = None


def circuits(
    kind: str, more: bool = False, objectives: Sequence[str] = OBJECTIVES
) -> Callable[[ClipSetting], list[Part]]:
    def needs(setting: ClipSetting) -> list[Part]:
        heads = setting.more_heads if more else setting.heads_to_prune
        return [Part(kind, 0, objective, heads) for objective in objectives]

    return needs


def hydra(title: str, needs: Callable[[ClipSetting], list[Part]]) -> ClipMethod:
    """Members that are pruned by circuits, and not fine-tuned."""

    def build(study: "ClipStudy") -> nn.Module:
        members = [study.pruned(part) for part in needs(study.setting)]
        return AutoHydra.from_pruned_members(members, allow_equal=True)

    return ClipMethod(title, needs, build)


def tuned_members(setting: ClipSetting) -> list[Part]:
    return [Part("member", 0, objective, setting.heads_to_prune) for objective in OBJECTIVES]


def nothing(setting: ClipSetting) -> list[Part]:
    return []


average = circuits("circuit", objectives=("avg",))
CLIP_METHODS = {
    "single": ClipMethod("Single", nothing, lambda study: study.clip),
    "temperature": ClipMethod("Temp. Scaling", nothing),
    "bayesvlm": ClipMethod("BayesVLM", nothing),
    "vilu": ClipMethod("ViLU", nothing),
    "taylor": ClipMethod("Taylor", nothing, lambda study: study.taylor()),
    "circ-avg": ClipMethod("CircAvg", average, lambda study: study.pruned(*average(study.setting))),
    "hydra-circ": hydra("Hydra Ensembles (Circ)", circuits("circuit")),
    "hydra-circ-6-more": hydra("Hydra Ensembles (Circ), six more heads removed", circuits("circuit", more=True)),
    "hydra-circ-vision": hydra("Hydra Ensembles (Circ), vision tower", circuits("vision-circuit")),
    "hydra-circ-vision-tuned": ClipMethod(
        "Hydra Ensembles (Circ), vision tower, fine-tuned",
        tuned_members,
        lambda study: AutoHydra.from_pruned_members(
            [study.tuned(part) for part in tuned_members(study.setting)], allow_equal=True
        ),
    ),
}


class ClipStudy(Study):
    """Prunes a CLIP, and judges it with each label set."""

    setting: ClipSetting

    @cached_property
    def methods(self) -> dict[str, ClipMethod]:
        return CLIP_METHODS

    def needs(self, part: Part) -> list[Part]:
        if part == LOADED:
            return []
        needs = [LOADED]
        if part.kind == "result":
            needs += self.methods[part.name].needs(self.setting)
        elif part.kind == "member":
            needs.append(part._replace(kind="vision-circuit"))
        return needs

    def make(self, part: Part) -> None:
        if part == LOADED:
            self.loaded  # noqa: B018
        elif part.kind in TOWERS:
            self.circuit(part)
        elif part.kind == "member":
            self.tuned(part)
        elif part.kind == "study":
            self.write(part, self.tower_scores())
        else:
            self.write(part, self.judge(part.name))

    # Data and the model

    @cached_property
    def splits(self) -> ClipData:
        return self.setting.read(self.data, self.start)

    @cached_property
    def loaded(self) -> tuple[PreTrainedModel, Any]:
        return self.setting.load(self.start, self.folder / "clip", self.device)

    @property
    def clip(self) -> PreTrainedModel:
        return self.loaded[0]

    def prompts(self, label_set: str | None = None) -> dict[str, Tensor]:
        """Return the tokens of "A photo of a {label}." for each class."""
        names = self.splits.label_sets[label_set or self.first].names
        tokens = self.loaded[1](prompts_for(names), padding=True, return_tensors="pt")
        return {name: value.to(self.device) for name, value in tokens.items() if name != "token_type_ids"}

    @property
    def first(self) -> str:
        return next(iter(self.splits.label_sets))

    # Pruning

    def circuit(self, part: Part) -> Circuit:
        clip = prune_heads(self.clip)
        towers = TOWERS[part.kind]
        return extract_circuit(
            clip.to(torch.bfloat16) if self.device == "cuda" else clip,
            as_batches(self.splits.circuit_id),
            as_batches(self.splits.circuit_ood),
            part.name,
            budget=part.removed,
            class_prompts=self.prompts(),
            towers=None if towers == "both" else (towers,),
            mode=self.setting.circuit_mode,
            checkpoint=self.folder / f"circuit-{part.seed}-{towers}-{part.name}.json",
        )

    def pruned(self, part: Part) -> PreTrainedModel:
        return prune_heads(self.clip, self.circuit(part).heads_to_prune(part.removed))

    def taylor(self) -> PreTrainedModel:
        """Return the CLIP with its vision tower pruned: scores of both towers have no common scale (C.3)."""
        calibration = as_batches(self.splits.circuit_id)
        heads = self.setting.heads_per_layer
        pruning = taylor_prune(self.clip, calibration, heads_per_layer=heads, class_prompts=self.prompts())
        return prune_heads(self.clip, pruning.heads_to_prune)

    def tower_scores(self) -> dict[str, Any]:
        """Return {"towers": {tower: [[layer, head, score], ...]}} (figure 7), each tower scored by itself."""
        calibration = as_batches(self.splits.circuit_id)
        towers = {}
        for tower in ("vision", "text"):
            scores = taylor_scores(self.clip, calibration, class_prompts=self.prompts(), towers=(tower,))
            towers[tower] = [[layer, head, score] for (_, layer, head), score in scores.items()]
        return {"towers": towers}

    def tuned(self, part: Part) -> PreTrainedModel:
        """Return a member pruned in the vision tower, its text tower fine-tuned on pairs (D.3)."""
        member = self.pruned(part._replace(kind="vision-circuit"))
        pairs = self.splits.pairs()
        options: dict[str, Any] = {
            "data_collator": whole_batch_of_pairs if isinstance(pairs, TensorRows) else None,
            "remove_unused_columns": False,
            "dataloader_pin_memory": False,
            "report_to": "none",
            "logging_strategy": "no",
            "progress": False,
            "use_cpu": self.device == "cpu",
            "bf16": self.device == "cuda",
        }
        [tuned] = finetune_members(
            [member],
            self.setting.member_recipe,
            pairs,
            None,
            self.folder / str(part),
            seed=OBJECTIVES.index(part.name),
            **options | self.setting.training_arguments,
        )
        return tuned

    # Judging

    def judge(self, method: str) -> dict[str, Any]:
        """Return {"data": {label set: metrics}, "ood": {label set: {group: {set: metrics}}}} and the costs."""
        found: dict[str, Any] = {"data": {}, "ood": {}}
        build = self.methods[method].build
        model = None if build is None else build(self).to(self.device).eval()
        for name, label_set in self.splits.label_sets.items():
            if method == "vilu":
                if label_set.train is not None:
                    self.judge_vilu(name, label_set, found)
                continue
            classifier = self.classifier(method, model, name)
            found |= {"parameters": count_parameters(classifier), "multiply_adds": count_multiply_adds(classifier)}
            ood = label_set.ood or {}
            batches = {group: {each: as_batches(rows) for each, rows in sets.items()} for group, sets in ood.items()}
            report = evaluate_uncertainty(
                {name: classifier}, as_batches(label_set.test), batches, batch_size=EVALUATION_BATCH
            )
            metrics = report.models[name]
            found["members"] = report.num_members[name]
            found["data"][name] = {metric: metrics["data"][metric] for metric in CLASSIFICATION}
            for place in report.data_sets():
                group, ood_set, _ = report.groups[place]
                detected = {metric: metrics[place][metric] for metric in DETECTION}
                found["ood"].setdefault(name, {}).setdefault(group, {})[ood_set] = detected
        return found

    def classifier(self, method: str, model: nn.Module | None, label_set: str) -> nn.Module:
        prompts = self.prompts(label_set)
        if method == "temperature":
            return self.temperature.scaling.wrap(ZeroShotClassifier(self.clip, prompts))
        if method == "bayesvlm":
            return self.bayesvlm.zero_shot(prompts)
        return ZeroShotClassifier(model, prompts)

    @cached_property
    def temperature(self) -> Any:
        """The first label set's classifier with a temperature, which serves all."""
        classifier = ZeroShotClassifier(self.clip, self.prompts())
        return temperature_scaled(classifier, as_batches(self.splits.held_out))

    @cached_property
    def bayesvlm(self) -> BayesVLM:
        """With its authors' factors, of LAION, where these are in DIR/bayesvlm; else fitted on labelled images, each with its
        class's prompt."""
        factors = read_factors(self.data)
        if factors is not None:
            return BayesVLM(self.clip).load_factors(factors)
        prompts = self.prompts()

        def pairs() -> Iterator[dict[str, Tensor]]:
            for batch in as_batches(self.splits.held_out):
                labels = batch.pop("labels").to(self.device)
                yield batch | {name: value[labels] for name, value in prompts.items()}

        return BayesVLM(self.clip).fit(pairs())

    def judge_vilu(self, name: str, label_set: LabelSet, found: dict[str, Any]) -> None:
        """Add ViLU's calibration and detection: it does not change what the CLIP predicts."""
        prompts = self.prompts(name)
        model = ViLU(self.clip).fit(as_batches(label_set.train), prompts).zero_shot(prompts)

        def confidences(rows: Any) -> tuple[Tensor, Tensor | None]:
            return collect_confidences(model, as_batches(rows), EVALUATION_BATCH)

        confidence, is_right = confidences(label_set.test)
        found["data"][name] = {
            "ece": expected_calibration_error(confidence, is_right.double()),
            "aece": adaptive_calibration_error(confidence, is_right.double()),
        }
        for group, sets in (label_set.ood or {}).items():
            for ood_set, rows in sets.items():
                detected = ood_metrics(1 - confidence, 1 - confidences(rows)[0])
                found["ood"].setdefault(name, {}).setdefault(group, {})[ood_set] = detected


FACTORS = ("A_img", "B_img", "A_txt", "B_txt")


def read_factors(folder: Path | None) -> dict[str, Tensor] | None:
    """Return the factors that BayesVLM's authors publish: bayesvlm/A_img_analytic.pt and three more."""
    paths = {name: (folder or Path()) / "bayesvlm" / f"{name}_analytic.pt" for name in FACTORS}
    if folder is None or not all(path.is_file() for path in paths.values()):
        return None
    return {name: torch.load(path, map_location="cpu", weights_only=True) for name, path in paths.items()}


def whole_batch_of_pairs(batch: dict[str, Tensor]) -> dict[str, Any]:
    """Ask for the contrastive loss, as the collator of single pairs does."""
    return {**batch, "return_loss": True}


# The paper's


OTHER_SETS = {
    "cifar10": DataSource("uoft-cs/cifar10", "test"),
    "food101": DataSource("ethz/food101", "validation"),
    "sun397": DataSource("tanganke/sun397", "test"),
    "pets": DataSource("timm/oxford-iiit-pet", "test"),
    "dtd": DataSource("tanganke/dtd", "test"),
    "eurosat": DataSource("tanganke/eurosat", "test"),
    "caltech101": DataSource("dpdl-benchmark/caltech101", "test"),
}
# As OpenOOD has it, CIFAR-100's near sets are CIFAR-10 and Tiny ImageNet; no circuit of a CLIP is extracted with the latter.
CIFAR100_OOD = {
    "near": {**data.CIFAR100.ood["near"], "tinyimagenet": DataSource("zh-plus/tiny-imagenet", "valid")},
    "far": data.CIFAR100.ood["far"],
}


def read_paper_sets(folder: Path | None, start: str) -> ClipData:
    config = AutoConfig.from_pretrained(start)
    processor = load_processor(start, config)
    load = partial(data.prepared, folder=folder, config=config, processor=processor)

    # ImageNet-1K: training rows for the temperature and for circuits; and OpenOOD's sets.
    imagenet = data.IMAGENET1K
    train = load(imagenet.train, labelled=True)
    test = load(imagenet.test, labelled=True)
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(0)).tolist()
    held_out = data.part_of(train, order[:TEMPERATURE_ROWS])
    circuit_rows = order[TEMPERATURE_ROWS : TEMPERATURE_ROWS + data.CIRCUIT_ROWS]
    ood = {group: {name: load(source) for name, source in sets.items()} for group, sets in imagenet.ood.items()}
    label_sets = {"imagenet1k": LabelSet(spoken(test.class_names), test, held_out, ood)}

    # CIFAR-100 with its sets, and the others, which are judged on and nothing else.
    cifar_train = load(data.CIFAR100.train, labelled=True)
    cifar = load(data.CIFAR100.test, labelled=True)
    cifar_ood = {group: {name: load(source) for name, source in sets.items()} for group, sets in CIFAR100_OOD.items()}
    few = data.part_of(cifar_train, range(TEMPERATURE_ROWS))
    label_sets["cifar100"] = LabelSet(spoken(cifar.class_names), cifar, few, cifar_ood)
    for name, source in OTHER_SETS.items():
        rows = load(source, labelled=True)
        label_sets[name] = LabelSet(spoken(rows.class_names), rows)
    return ClipData(
        label_sets,
        held_out,
        data.part_of(train, circuit_rows),
        load(imagenet.circuit_ood),
        partial(laion_pairs, folder, start),
    )


def spoken(names: Sequence[str]) -> list[str]:
    """Return class names as words: "aquarium_fish" and the first of "tench, Tinca tinca"."""
    return [name.split(",")[0].strip().replace("_", " ") for name in names]


class Pairs(Dataset):
    """Images with their texts, made ready as they are read."""

    def __init__(self, images: Any, texts: Sequence[str], tokenizer: Any):
        self.images = images
        self.texts = texts
        self.tokenizer = tokenizer

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> dict[str, Any]:
        tokens = self.tokenizer(self.texts[index], truncation=True, max_length=self.tokenizer.model_max_length)
        return {**dict(tokens), "pixel_values": self.images[index]["pixel_values"]}


def laion_pairs(folder: Path | None, start: str) -> Pairs:
    """Read what img2dataset downloaded of LAION-400M: laion400m/*.tar with an image and a text for each pair."""
    from datasets import load_dataset

    shards = [] if folder is None else sorted((folder / "laion400m").glob("*.tar"))
    if not shards:
        raise FileNotFoundError(f"{folder} has no laion400m/*.tar: download pairs there by img2dataset")
    rows = load_dataset("webdataset", data_files=[str(shard) for shard in shards], split="train")
    config = AutoConfig.from_pretrained(start)
    images = load_data(rows, config, processor=load_processor(start, config), column="jpg", labelled=False)
    return Pairs(images, rows["txt"], AutoTokenizer.from_pretrained(start))


def load_clip(start: str, folder: Path, device: str) -> tuple[PreTrainedModel, Any]:
    return CLIPModel.from_pretrained(start).to(device).eval(), AutoTokenizer.from_pretrained(start)


CLIP_VIT_B32 = ClipSetting(
    name="clip-vit-b32",
    title="Nine data sets, OpenCLIP ViT-B/32",
    start="laion/CLIP-ViT-B-32-laion2B-s34B-b79K",
    read=read_paper_sets,
    load=load_clip,
    heads_to_prune=24,
    more_heads=30,
    heads_per_layer=10,
    member_recipe=recipe("clip-lit"),
    training_arguments={"per_device_train_batch_size": 1500, "gradient_accumulation_steps": 4},
    about="ImageNet-1K, CIFAR-100 and seven sets from the Hub, OpenOOD's folders, and for table 27's fine-tuned row "
    "laion400m/*.tar (60 million pairs; sixteen A100 for hours in the paper) in --data. BayesVLM takes its authors' factors "
    "of LAION from bayesvlm/*_analytic.pt there, or is fitted on ImageNet's rows; circuits of the vision tower on ImageNet-1K alone.",
)


# The smallest


def read_made_up(folder: Path | None, start: str) -> ClipData:
    splits = smallest.splits()
    names = [of_class[0] for of_class in SMALLEST_NAMES]
    label_sets = {
        "imagenet1k": LabelSet(names, splits.test, splits.validation, splits.ood),
        "cifar100": LabelSet(names, splits.validation, splits.circuit_id, splits.ood),
        "dtd": LabelSet(names, splits.test),
    }
    return ClipData(label_sets, splits.validation, splits.circuit_id, splits.circuit_ood, made_up_pairs)


def made_up_pairs() -> TensorRows:
    """Return images with tokens of a text each."""
    images = smallest.images(8, 9, labelled=False)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(4, 10, (8, 5), generator=generator)
    tokens[:, -1] = 11  # more than any other: the end, by which CLIP's text tower reads
    tensors = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    return TensorRows(images.tensors | tensors, images.prepare)


def load_smallest_clip(start: str, folder: Path, device: str) -> tuple[PreTrainedModel, Any]:
    splits = smallest.splits()
    return trained_clip(splits, SMALLEST_NAMES, smallest_dinov2(), 8, SMALLEST_SCHEDULE, 0, device, folder)


def smallest_clip(setting: ClipSetting) -> ClipSetting:
    few = {"heads_to_prune": 2, "more_heads": 3, "heads_per_layer": 1}
    short = replace(setting.member_recipe, learning_rates=()).with_arguments(
        max_steps=2, warmup_steps=1, per_device_train_batch_size=4
    )
    return replace(
        setting, read=read_made_up, load=load_smallest_clip, member_recipe=short, training_arguments={}, **few
    )
