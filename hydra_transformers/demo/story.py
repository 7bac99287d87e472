"""The story: three fine-tunings of one pre-trained ViT become one Hydra that says when it does not know."""

import contextlib
import io
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch import nn
from transformers import PreTrainedModel

from .._io.files import written_whole
from ..baselines import DeepEnsemble
from ..cost import Cost, compare_costs
from ..hub import create_model_card, kept_heads_map
from ..models import AutoHydra
from ..pruning import draw_members, extract_circuit
from ..reports import fusion_report
from ..reports.evaluation import evaluate_uncertainty
from ..reports.fusion_report import FusionReport
from ..reports.report import UncertaintyReport
from ..reports.table import Table
from ..training import Recipe, finetune_from_pretrained
from .answers import Answer, Example, answer_line, calibrate, draw, examples_of, judgement, reached, rule
from .digits import KNOWN_DIGITS, DemoData, Images, load_data
from .pretraining import accuracy, accuracy_on_turns, load_shipped_model, pretrain
from .table import comparison, comparison_table


MODEL_FOLDER, MARKER = "hydra-vit-digits", "demo.json"
BATCH_SIZE = 64
STEPS = 9

RECIPE = Recipe(
    name="demo",
    optimizer="adamw",
    learning_rate=2e-3,
    classifier_learning_rate=1e-2,
    weight_decay=0.05,
    max_grad_norm=1.0,
    warmup_steps=0.2,
    max_steps=88,
    trainable=("embeddings", "attention", "mlp", "layernorm", "classifier"),
    reset_classifier=True,  # three random ones would pull so small a model in three directions, too far apart to be fused
)


@dataclass(frozen=True)
class Pace:
    """How much work each step does.

    finetuning_steps: per fine-tuning
    choosing: known images, and unknown ones of each kind, that tell whether to fuse
    budget: heads that each pruned member loses, of 32
    rows: known and unknown images each that circuits are extracted with
    seconds: of timing
    """

    finetuning_steps: int = RECIPE.max_steps
    choosing: int = 250
    budget: int = 5
    rows: int = 120
    seconds: float = 3.0


FULL = Pace()
FAST = Pace(finetuning_steps=6, choosing=48, budget=1, rows=32, seconds=0.0)


class Narrator:
    """Numbered steps, each with a plain sentence, and how long the one before took."""

    def __init__(self):
        self.step, self.start = 0, time.perf_counter()

    def begin(self, title: str, sentence: str) -> None:
        self.step += 1
        print(f"\n[{self.step}/{STEPS}] {title}. {sentence}", flush=True)

    def say(self, sentence: str) -> None:
        print(f"      {sentence}", flush=True)

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.start


def tell(output: Path, pace: Pace = FULL, train: bool = False) -> None:
    """Runs everything and leaves the results in `output`; an earlier demo's results there are replaced."""
    check_output(output)
    narrator = Narrator()
    data = load_data()
    narrator.begin(
        "Data",
        "Digits 0 to 6 are what the model learns. Unknown: 7 and a photo to choose by, 8, 9 and another to judge.",
    )
    narrator.say(
        f"{len(data.train)} images to train, {len(data.validation)} to choose by, {len(data.calibration)} to learn when not to "
        f"answer, {len(data.test)} to judge."
    )

    narrator.begin(
        "Pre-trained model", "A small Vision Transformer that learned which way images are turned, and no digit."
    )
    pretrained = pretrain(data.train) if train else load_shipped_model()
    origin = "Pre-trained" if train else "Loaded, pre-trained beforehand (--train does it here)"
    narrator.say(
        f"{origin}: 4 layers of 8 attention heads, right on {accuracy_on_turns(pretrained, data.test):.1%} of turned images."
    )

    with written_whole(output) as folder:
        narrator.begin(
            "Fine-tuning",
            "It learns the digits three times, in another order each time: apart, the three are a Deep Ensemble.",
        )
        fine_tunings = finetuned(pretrained, data, pace, folder / "fine-tuning")
        right = ", ".join(f"{accuracy(each, data.validation):.1%}" for each in fine_tunings)
        narrator.say(f"Right on {right} of the images to choose by.")

        narrator.begin("Before fusing", "May they be fused? Asked on images to choose by.")
        narrator.say(str(may_be_fused(fine_tunings, data, pace)))

        narrator.begin(
            "Fusing", "Three fine-tunings in, one model out: own attention side by side, the mean of all else."
        )
        hydra = AutoHydra.from_pruned_members(fine_tunings)
        narrator.say("hydra = AutoHydra.from_pruned_members(fine_tunings)")
        apart, fused = sum(each.num_parameters() for each in fine_tunings), hydra.num_parameters()
        narrator.say(f"{fused:,} parameters instead of {apart:,}.")

        narrator.begin("Pruning", f"Or each first loses the {pace.budget} of its 32 heads that its own circuit names.")
        pruned = AutoHydra.from_pruned_members(pruned_members(fine_tunings, data, pace, folder / "circuits"))
        print(kept_heads_map(pruned.config))

        narrator.begin(
            "Judging", "Faster than three, better than one? On digits and photos that no step above has seen."
        )
        models = {
            "Single": fine_tunings[0],
            "Deep Ensemble": DeepEnsemble(fine_tunings),
            "Hydra": hydra,
            "Hydra, pruned": pruned,
        }
        report, costs = judge(models, data), compare_costs(models, (BATCH_SIZE,), pace.seconds)
        table = comparison_table(report, costs, BATCH_SIZE)
        print(table.text())
        for name, other in (("Hydra", "Deep Ensemble"), ("Hydra", "Single"), ("Hydra, pruned", "Deep Ensemble")):
            narrator.say(comparison(report, costs, name, other, BATCH_SIZE))

        narrator.begin(
            "Deciding", "When should it rather not answer? Fitted on digits of their own, a part of the model."
        )
        narrator.say(rule(calibrate(hydra, data, BATCH_SIZE)))
        decided = judge({"Hydra": hydra}, data)
        narrator.say(reached(decided.models["Hydra"]))
        examples = examples_of(data)
        write_results(folder, report, costs, table, examples)
        save_for_the_hub(folder / MODEL_FOLDER, decided, hydra, pace)

    narrator.begin(
        "Loading", "Another process loads the saved model as anyone would from the Hub, without this package."
    )
    answers = answers_of_second_process(
        output / MODEL_FOLDER, [output / "examples" / f"{each.name}.png" for each in examples]
    )
    for example, answer in zip(examples, answers, strict=True):
        narrator.say(answer_line(example, answer))
        narrator.say(judgement(example, answer))
    with contextlib.suppress(ImportError):
        draw(examples, answers, output / "decision.png")
    print(
        f"\nDone in {narrator.seconds:.0f} s. Results are in {output}: decision.png (what it says), report.html (all tables and "
        f"plots), {MODEL_FOLDER}/ (the model)"
    )


def check_output(output: Path) -> None:
    if output.exists() and not (output / MARKER).exists() and (not output.is_dir() or any(output.iterdir())):
        raise ValueError(f"{output} holds something else than a demo: pass another --output, or remove it")
    there = next(path for path in (output.absolute(), *output.absolute().parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise ValueError(f"{output} cannot be made, {there} takes no files: pass another --output")


def finetuned(
    pretrained: PreTrainedModel, data: DemoData, pace: Pace, folder: Path, num_members: int = 3
) -> list[PreTrainedModel]:
    """Fine-tunings, each with a new classifier and an order of the images of its own."""
    with contextlib.redirect_stdout(io.StringIO()):  # a line for each member; bars go to stderr
        trained = finetune_from_pretrained(
            pretrained,
            num_members,
            replace(RECIPE, max_steps=pace.finetuning_steps),
            data.train.rows(),
            data.validation.rows(),
            folder,
            class_names=[str(digit) for digit in KNOWN_DIGITS],
            seed=1,
            per_device_train_batch_size=BATCH_SIZE,
            per_device_eval_batch_size=BATCH_SIZE,
            eval_strategy="no",
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            dataloader_pin_memory=False,
        )
    shutil.rmtree(folder)
    return trained


def may_be_fused(fine_tunings: Sequence[PreTrainedModel], data: DemoData, pace: Pace) -> FusionReport:
    unknown = {
        group: {name: images.spread(pace.choosing) for name, images in sets.items()}
        for group, sets in data.choosing.items()
    }
    return fusion_report(fine_tunings, data.validation.spread(pace.choosing).batches(BATCH_SIZE), batches_of(unknown))


def pruned_members(
    fine_tunings: Sequence[PreTrainedModel], data: DemoData, pace: Pace, folder: Path
) -> list[PreTrainedModel]:
    """Each fine-tuning without the first heads of its own circuit; nothing is trained afterwards."""
    unknown = Images.together(images for group in data.choosing.values() for images in group.values())
    known, unknown = data.validation.spread(pace.rows), unknown.spread(pace.rows)
    circuits = [
        extract_circuit(each, known.batches(), unknown.batches(), "avg", budget=pace.budget, mode="shortlist")
        for each in fine_tunings
    ]
    for number, circuit in enumerate(circuits):
        circuit.save(folder / f"member-{number}.json")
    return draw_members(fine_tunings, circuits=circuits, budget=pace.budget)


def judge(models: Mapping[str, nn.Module], data: DemoData) -> UncertaintyReport:
    ood = batches_of({"near": data.near, "far": data.far})
    return evaluate_uncertainty(models, data.test.batches(BATCH_SIZE), ood)


def batches_of(groups: Mapping[str, Mapping[str, Images]]) -> dict[str, dict[str, list]]:
    return {
        group: {name: images.batches(BATCH_SIZE) for name, images in sets.items()} for group, sets in groups.items()
    }


def write_results(
    folder: Path, report: UncertaintyReport, costs: Mapping[str, Cost], table: Table, examples: Sequence[Example]
) -> None:
    from PIL import Image

    (folder / "table.md").write_text(table.markdown() + "\n")
    (folder / "report.md").write_text(report.to_markdown())
    report.to_json(folder / "report.json")
    with contextlib.suppress(ImportError):  # without matplotlib there are no plots, and all else
        report.to_html(folder / "report.html", costs, pictures=report.plot(folder / "plots", costs))
    (folder / "examples").mkdir()
    for example in examples:
        Image.fromarray(example.pixels).save(folder / "examples" / f"{example.name}.png")
    (folder / MARKER).write_text(json.dumps({"model": MODEL_FOLDER}) + "\n")


def save_for_the_hub(folder: Path, report: UncertaintyReport, hydra: PreTrainedModel, pace: Pace) -> None:
    """Weights, config, code, image processor and card: a folder that can be uploaded as it is."""
    from transformers import ViTImageProcessorPil

    hydra.save_pretrained(folder)
    size = hydra.config.image_size
    ViTImageProcessorPil(size={"height": size, "width": size}).save_pretrained(folder)
    card = create_model_card(
        hydra,
        report,
        repo_id=f"me/{MODEL_FOLDER}",
        dataset="sklearn-digits",
        fine_tuning=f"Each member by itself, from one model that learned which way digits are turned: {pace.finetuning_steps} "
        f"steps of AdamW at a peak learning rate of {RECIPE.learning_rate:g}, its new classifier at "
        f"{RECIPE.classifier_learning_rate:g}.",
        report_model="Hydra",
    )
    card.save(folder / "README.md")


def answers_of_second_process(model: Path, images: Sequence[Path]) -> list[Answer]:
    """What `second_process.py` says: a process of its own, which never imports this package."""
    script = Path(__file__).with_name("second_process.py")
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(script), str(model), *map(str, images)], env=environment, capture_output=True, text=True
    )
    if done.returncode != 0:
        raise RuntimeError(f"the second process could not load {model}: {done.stderr.strip().splitlines()[-1]}")
    return [Answer(**json.loads(line)) for line in done.stdout.splitlines()]
