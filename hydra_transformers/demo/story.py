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
from dataclasses import dataclass
from pathlib import Path

from torch import nn
from transformers import PreTrainedModel

from .._io.files import check_takes_files, written_whole
from ..baselines import DeepEnsemble
from ..cost import compare_costs
from ..hub import create_model_card, kept_heads_map
from ..models import AutoHydra
from ..pruning import draw_members, extract_circuit
from ..reports import FusionComparison, Report, compare_fusions, evaluate_uncertainty
from ..reports.table import Table, markdown_table, text_table
from ..training import Recipe, finetune_members
from ..uncertainty import Calibration
from .digits import KNOWN_DIGITS, DemoData, Images, load_data
from .pretraining import accuracy, accuracy_on_turns, load_shipped_model, pretrain
from .wording import Answer, Example, answer_line, comparison, comparison_table, decision_sentence, judgement, picture


MODEL_FOLDER, MARKER = "hydra-vit-digits", "demo.json"
BATCH_SIZE = 64
STEPS = 9
# On the images to choose by it refuses 82 % of the unknown and 6 % of the known; no other is clearly better in both.
DETECTOR, TARGET = "gen", {"coverage": 0.95}

RECIPE = Recipe(
    "demo",
    {
        "learning_rate": 2e-3,
        "classifier_learning_rate": 1e-2,
        "weight_decay": 0.05,
        "max_grad_norm": 1.0,
        "warmup_steps": 0.2,
        "lr_scheduler_type": "cosine",
        "max_steps": 88,
    },
    trainable=("embeddings", "attention", "mlp", "layernorm", "classifier"),
    reset_classifier=True,  # random ones would pull so small a model in three directions, too far apart to be fused
)


@dataclass(frozen=True)
class Pace:
    """How much work each step does.

    choosing: known images, and unknown ones of each kind, for the question whether to fuse
    budget: heads that each pruned member loses, of 32
    rows: known and unknown images each to extract circuits with
    seconds: of timing
    """

    finetuning_steps: int = RECIPE.arguments["max_steps"]
    choosing: int = 250
    budget: int = 5
    rows: int = 120
    seconds: float = 3.0


FULL = Pace()
FAST = Pace(finetuning_steps=6, choosing=48, budget=1, rows=32, seconds=0.0)


class Narrator:
    """Prints numbered steps, and sentences below them."""

    def __init__(self) -> None:
        self.step, self.start = 0, time.perf_counter()

    def begin(self, title: str, sentence: str) -> None:
        self.step += 1
        print(f"\n[{self.step}/{STEPS}] {title}. {sentence}", flush=True)

    def say(self, sentence: str) -> None:
        print(f"      {sentence}", flush=True)


def tell(output: Path, pace: Pace = FULL, train: bool = False) -> None:
    """Runs everything and leaves the results in `output`; those of an earlier demo there are replaced."""
    check_output(output)
    narrator = Narrator()
    begin, say = narrator.begin, narrator.say
    data = load_data()
    begin(
        "Data",
        "The model learns the digits 0 to 6. Unknown: 7 and a photo to choose by, 8, 9 and another photo to test.",
    )
    counts = [len(images) for images in (data.train, data.validation, data.calibration, data.test)]
    say("{} images to train, {} to choose by, {} to learn when not to answer, {} to test.".format(*counts))

    begin("Pre-trained model", "A small Vision Transformer that learned which way images are turned, and no digit.")
    pretrained = pretrain(data.train) if train else load_shipped_model()
    origin = "Pre-trained" if train else "Loaded, pre-trained beforehand (--train does it here)"
    right = accuracy_on_turns(pretrained, data.test)
    say(f"{origin}: 4 layers of 8 attention heads, right on {right:.1%} of turned images.")

    with written_whole(output) as folder:
        begin(
            "Fine-tuning", "It learns the digits three times, each in another order: apart, they are a Deep Ensemble."
        )
        fine_tunings = finetuned(pretrained, data, pace, folder / "fine-tuning")
        known = (data.validation.pixel_values, data.validation.labels)
        say(
            f"Right on {', '.join(f'{accuracy(each, *known):.1%}' for each in fine_tunings)} of the images to choose by."
        )

        begin("Before fusing", "May they be fused, and how many layers merged? Asked on images to choose by.")
        say(may_be_fused(fine_tunings, data, pace).sentence)

        begin("Fusing", "Three fine-tunings in, one model out: own attention side by side, the mean of all else.")
        merged = AutoHydra.from_pruned_members(fine_tunings, trunk_layers=0.75)
        hydra = AutoHydra.from_pruned_members(fine_tunings)
        apart = sum(each.num_parameters() for each in fine_tunings)
        say(
            "merged = AutoHydra.from_pruned_members(fine_tunings, trunk_layers=0.75)  # three quarters of the layers run once"
        )
        say(f"{merged.num_parameters():,} parameters instead of {apart:,}.")
        say("hydra = AutoHydra.from_pruned_members(fine_tunings)  # careful: no layer merged whole")
        say(
            f"{hydra.num_parameters():,} parameters. So small a model has few layers to spare: the careful one will decide."
        )

        begin("Pruning", f"Or each first loses {pace.budget} of its 32 heads, by its own circuit.")
        pruned = AutoHydra.from_pruned_members(pruned_members(fine_tunings, data, pace, folder / "circuits"))
        print(kept_heads_map(pruned.config))

        begin("Testing", "Faster than three, better than one? On digits and photos that no step above has seen.")
        ensemble = DeepEnsemble(fine_tunings)
        models = {"Single": fine_tunings[0], "Deep Ensemble": ensemble, "Hydra, merged": merged}
        models |= {"Hydra": hydra, "Hydra, pruned": pruned}
        report, costs = evaluate(models, data), compare_costs(models, (BATCH_SIZE,), pace.seconds)
        table = comparison_table(report, costs, BATCH_SIZE)
        print(text_table(*table))
        pairs = [("Hydra, merged", "Single"), ("Hydra", "Deep Ensemble"), ("Hydra", "Single")]
        for name, other in (*pairs, ("Hydra, pruned", "Deep Ensemble")):
            say(comparison(report, costs, name, other, BATCH_SIZE))

        begin("Deciding", "When should it rather not answer? Fitted on separate digits, and saved in the model.")
        threshold = calibrate(hydra, data, BATCH_SIZE).abstention.threshold
        say(
            f'It says "I don\'t know" where {DETECTOR.upper()}, which is high where probability is spread over several classes, '
            f"is above {threshold:.2f}: {1 - TARGET['coverage']:.0%} of the digits that this was fitted on."
        )
        decided = evaluate({"Hydra": hydra}, data)
        say(decision_sentence(decided))
        examples = examples_of(data)
        write_results(folder, report, table, examples)
        save_for_the_hub(folder / MODEL_FOLDER, decided, hydra, pace)

    begin("Loading", "Another process loads the saved model as anyone would from the Hub, without this package.")
    images = [output / "examples" / f"{each.name}.png" for each in examples]
    answers = answers_of_second_process(output / MODEL_FOLDER, images)
    for example, answer in zip(examples, answers, strict=True):
        say(answer_line(example, answer))
        say(judgement(example, answer))
    with contextlib.suppress(ImportError):
        picture(examples, answers).savefig(output / "decision.png", metadata={"Software": None})
    print(
        f"\nDone in {time.perf_counter() - narrator.start:.0f} s. Results are in {output}: decision.png (what it says), "
        f"report.html (all tables and plots), {MODEL_FOLDER}/ (the model)"
    )


def check_output(output: Path) -> None:
    if output.exists() and not (output / MARKER).exists() and (not output.is_dir() or any(output.iterdir())):
        raise ValueError(f"{output} holds something other than a demo: pass another --output, or remove it")
    check_takes_files(output)


def finetuned(
    pretrained: PreTrainedModel, data: DemoData, pace: Pace, folder: Path, num_members: int = 3
) -> list[PreTrainedModel]:
    """Fine-tunings, each with a new classifier and its own order of the images."""
    names = [str(digit) for digit in KNOWN_DIGITS]
    starts = [AutoHydra.from_backbone(pretrained, class_names=names, seed=1 + index) for index in range(num_members)]
    with contextlib.redirect_stdout(io.StringIO()):  # what Trainer logs; bars go to stderr
        trained = finetune_members(
            starts,
            RECIPE,
            data.train.rows(),
            data.validation.rows(),
            folder,
            seed=1,
            max_steps=pace.finetuning_steps,
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


def may_be_fused(fine_tunings: Sequence[PreTrainedModel], data: DemoData, pace: Pace) -> FusionComparison:
    unknown = {
        group: {name: images.spread(pace.choosing) for name, images in sets.items()}
        for group, sets in data.choosing.items()
    }
    return compare_fusions(
        fine_tunings, data.validation.spread(pace.choosing).batches(BATCH_SIZE), batches_of(unknown)
    )


def pruned_members(
    fine_tunings: Sequence[PreTrainedModel], data: DemoData, pace: Pace, folder: Path
) -> list[PreTrainedModel]:
    """Each fine-tuning without the first heads of its own circuit; they are not trained afterwards."""
    unknown = Images.together(images for group in data.choosing.values() for images in group.values())
    known, unknown = data.validation.spread(pace.rows).batches(), unknown.spread(pace.rows).batches()
    circuits = [
        extract_circuit(each, known, unknown, "avg", budget=pace.budget, mode="shortlist") for each in fine_tunings
    ]
    for number, circuit in enumerate(circuits):
        circuit.save(folder / f"member-{number}.json")
    return draw_members(fine_tunings, circuits=circuits, budget=pace.budget)


def evaluate(models: Mapping[str, nn.Module], data: DemoData) -> Report:
    ood = batches_of({"near": data.near, "far": data.far})
    return evaluate_uncertainty(models, data.test.batches(BATCH_SIZE), ood)


def batches_of(groups: Mapping[str, Mapping[str, Images]]) -> dict[str, dict[str, list]]:
    return {
        group: {name: images.batches(BATCH_SIZE) for name, images in sets.items()} for group, sets in groups.items()
    }


def calibrate(hydra: PreTrainedModel, data: DemoData, batch_size: int) -> Calibration:
    return hydra.calibrate(data.calibration.batches(batch_size), target=TARGET, detector=DETECTOR)


def examples_of(data: DemoData) -> list[Example]:
    """The first digit and the middle photo patch of the test images: chosen before any model sees them."""
    digit, photo = str(int(data.test.labels[0])), data.far["photo patches"].pixels
    return [
        Example(f"digit-{digit}", data.test.pixels[0], digit),
        Example("photo-patch", photo[len(photo) // 2], None),
    ]


def write_results(folder: Path, report: Report, table: Table, examples: Sequence[Example]) -> None:
    from PIL import Image

    (folder / "table.md").write_text(markdown_table(*table) + "\n")
    (folder / "report.md").write_text(report.to_markdown())
    report.to_json(folder / "report.json")
    with contextlib.suppress(ImportError):  # only plots need matplotlib
        report.to_html(folder / "report.html", pictures=report.plot(folder / "plots"))
    (folder / "examples").mkdir()
    for example in examples:
        Image.fromarray(example.pixels).save(folder / "examples" / f"{example.name}.png")
    (folder / MARKER).write_text(json.dumps({"model": MODEL_FOLDER}) + "\n")


def save_for_the_hub(folder: Path, report: Report, hydra: PreTrainedModel, pace: Pace) -> None:
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
        f"steps of AdamW at a peak learning rate of {RECIPE.arguments['learning_rate']:g}, its new classifier at "
        f"{RECIPE.arguments['classifier_learning_rate']:g}.",
        report_model="Hydra",
    )
    card.save(folder / "README.md")


def answers_of_second_process(model: Path, images: Sequence[Path]) -> list[Answer]:
    """Runs `second_process.py`, which never imports this package."""
    script = Path(__file__).with_name("second_process.py")
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(script), str(model), *map(str, images)], env=environment, capture_output=True, text=True
    )
    if done.returncode != 0:
        raise RuntimeError(f"the second process could not load {model}: {done.stderr.strip().splitlines()[-1]}")
    return [Answer(**json.loads(line)) for line in done.stdout.splitlines()]
