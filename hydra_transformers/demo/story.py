"""The story: one trained ViT becomes three pruned members, and these one Hydra that says when it does not know."""

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
from transformers import PreTrainedModel, ViTForImageClassification

from ..baselines import DeepEnsemble
from ..cost import compare_costs
from ..files import written_whole
from ..hub import create_model_card, kept_heads_map
from ..models import AutoHydra
from ..pruning import Circuit, draw_members, extract_circuit
from ..training import Recipe, finetune_members
from ..uncertainty import UncertaintyReport, evaluate_uncertainty
from .backbone import SETTINGS, accuracy, load_shipped_backbone, train_backbone
from .deciding import Answer, Example, calibrate, draw, examples_of, judgement, reached, told
from .digits import DemoData, load_data
from .table import comparison_table, verdict


OBJECTIVES = {"acc": "accuracy", "ood": "separation of the unknown", "avg": "the mean of both"}
MODEL_FOLDER, MARKER = "hydra-vit-digits", "demo.json"
BATCH_SIZE = 64
STEPS = 9

RECIPE = Recipe(
    name="demo",
    optimizer="adamw",
    learning_rate=5e-4,
    weight_decay=0.05,
    max_grad_norm=1.0,
    warmup_steps=0.1,
    max_steps=60,
    trainable=("attention", "mlp", "layernorm", "classifier"),
)


@dataclass(frozen=True)
class Pace:
    """How much work each step does.

    epochs: of the two further backbones of the Deep Ensemble
    budget: heads that each member loses, of 32
    rows: known and unknown images each that circuits are extracted with
    finetuning_steps: per member
    seconds: of timing
    """

    epochs: int = SETTINGS.epochs
    budget: int = 11
    rows: int = 200
    finetuning_steps: int = RECIPE.max_steps
    seconds: float = 5.0


FULL = Pace()
FAST = Pace(epochs=2, budget=4, rows=32, finetuning_steps=4, seconds=0.0)


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
        "Digits 0 to 6 are what the model learns. Unknown: 7 and a photo to choose heads by, 8, 9 and another to judge.",
    )
    narrator.say(
        f"{len(data.train)} images to train, {len(data.validation)} to choose by, {len(data.calibration)} to learn when not to "
        f"answer, {len(data.test)} to judge."
    )

    narrator.begin("Backbone", "A small Vision Transformer: 4 layers of 8 attention heads.")
    backbone = train_backbone(data.train) if train else load_shipped_backbone()
    origin = "Trained" if train else "Loaded, trained beforehand (--train does it here)"
    narrator.say(f"{origin}: right on {accuracy(backbone, data.test):.1%} of the digits.")

    narrator.begin("Deep Ensemble", "The usual way to know what a model does not know: train it three times.")
    ensemble = deep_ensemble(backbone, data, pace)

    with written_whole(output) as folder:
        narrator.begin("Circuits", f"Which {pace.budget} of 32 heads can go? Three answers, by three goals.")
        circuits = extract_circuits(backbone, data, pace, folder / "circuits")
        for circuit in circuits:
            goal = OBJECTIVES[circuit.objective]
            narrator.say(
                f"{circuit.objective}: {goal} {circuit.dense_score:.3f} before, {circuit.scores[-1]:.3f} after."
            )

        narrator.begin("Fine-tuning", "Each pruned member trains a little to get over its loss.")
        # Two goals may choose the same heads of so small a model; each member's own training makes them differ.
        pruned = draw_members(backbone, circuits=circuits, budget=pace.budget, allow_equal=True)
        members = finetuned(pruned, data, pace, folder / "fine-tuning")
        for circuit, before, after in zip(circuits, pruned, members, strict=True):
            right = [f"{accuracy(member, data.validation):.1%}" for member in (before, after)]
            narrator.say(
                f"member for {circuit.objective}: right on {right[0]} after pruning, {right[1]} after training."
            )
        narrator.say("(On the images that chose the heads, which flatters the members before training.)")

        narrator.begin("Fusing", "The three members become one network: own heads side by side, all else shared.")
        hydra = AutoHydra.from_pruned_members(members)
        print(kept_heads_map(hydra.config))

        narrator.begin("Judging", "On digits and photos that no step above has seen.")
        models = {"Single": backbone, "Deep Ensemble": ensemble, "Pruned member": members[0], "Hydra": hydra}
        report, costs = judge(models, data), compare_costs(models, (BATCH_SIZE,), pace.seconds)
        table = comparison_table(report, costs, BATCH_SIZE)
        print(table)
        narrator.say(verdict(report, costs))

        narrator.begin(
            "Deciding", "When should it rather not answer? Fitted on digits of their own, a part of the model."
        )
        for sentence in calibrate(hydra, data, BATCH_SIZE).sentences:
            narrator.say(sentence)
        decided = judge({"Hydra": hydra}, data)
        narrator.say(reached(decided.models["Hydra"]))
        examples = examples_of(data)
        write_results(folder, report, table, examples)
        save_for_the_hub(folder / MODEL_FOLDER, decided, hydra, circuits)

    narrator.begin(
        "Loading", "Another process loads the saved model as anyone would from the Hub, without this package."
    )
    answers = answers_of_second_process(
        output / MODEL_FOLDER, [output / "examples" / f"{each.name}.png" for each in examples]
    )
    for example, answer in zip(examples, answers, strict=True):
        narrator.say(told(example, answer))
    for example, answer in zip(examples, answers, strict=True):
        narrator.say(judgement(example, answer))
    with contextlib.suppress(ImportError):
        draw(examples, answers, output / "decision.png")
    print(
        f"\nDone in {narrator.seconds:.0f} s. Results are in {output}: table.md, report.md, plots/, decision.png, "
        f"{MODEL_FOLDER}/"
    )


def check_output(output: Path) -> None:
    if output.exists() and not (output / MARKER).exists() and (not output.is_dir() or any(output.iterdir())):
        raise ValueError(f"{output} holds something else than a demo: pass another --output, or remove it")


def deep_ensemble(backbone: ViTForImageClassification, data: DemoData, pace: Pace) -> DeepEnsemble:
    """The backbone and two more, each from its own random start."""
    others = [
        train_backbone(data.train, replace(SETTINGS, seed=seed, epochs=pace.epochs), f"model {seed + 1} of 3")
        for seed in (1, 2)
    ]
    return DeepEnsemble([backbone, *others])


def extract_circuits(backbone: ViTForImageClassification, data: DemoData, pace: Pace, folder: Path) -> list[Circuit]:
    known, unknown = data.validation.spread(pace.rows), data.extraction.spread(pace.rows)
    circuits = []
    for objective in OBJECTIVES:
        circuit = extract_circuit(backbone, known.batches(), unknown.batches(), objective, budget=pace.budget)
        circuit.save(folder / f"{objective}.json")
        circuits.append(circuit)
    return circuits


def finetuned(members: list[PreTrainedModel], data: DemoData, pace: Pace, folder: Path) -> list[PreTrainedModel]:
    with contextlib.redirect_stdout(io.StringIO()):  # Trainer's own words; its progress bars go to stderr
        trained = finetune_members(
            members,
            replace(RECIPE, max_steps=pace.finetuning_steps),
            data.train.rows(),
            data.validation.rows(),
            folder,
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


def judge(models: Mapping[str, nn.Module], data: DemoData) -> UncertaintyReport:
    ood = {
        group: {name: images.batches(BATCH_SIZE) for name, images in data_sets.items()}
        for group, data_sets in (("near", data.near), ("far", data.far))
    }
    return evaluate_uncertainty(models, data.test.batches(BATCH_SIZE), ood)


def write_results(folder: Path, report: UncertaintyReport, table: str, examples: Sequence[Example]) -> None:
    from PIL import Image

    (folder / "table.md").write_text(table + "\n")
    (folder / "report.md").write_text(report.to_markdown())
    report.to_json(folder / "report.json")
    with contextlib.suppress(ImportError):  # without matplotlib there are no plots, and all else
        report.plot(folder / "plots")
    (folder / "examples").mkdir()
    for example in examples:
        Image.fromarray(example.pixels).save(folder / "examples" / f"{example.name}.png")
    (folder / MARKER).write_text(json.dumps({"model": MODEL_FOLDER}) + "\n")


def save_for_the_hub(folder: Path, report: UncertaintyReport, hydra: PreTrainedModel, circuits: list[Circuit]) -> None:
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
        circuits=circuits,
        fine_tuning=f"Each member by itself, {RECIPE.max_steps} steps of AdamW at a peak learning rate of "
        f"{RECIPE.learning_rate:g}.",
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
