"""Which score tells best what heads can go? All of `HEAD_SCORES` at equal budgets, on clean and on shifted data, with their time.

    python -m benchmarks.head_scores --output benchmarks/results/head_scores          # both real models, from the Hub
    python -m benchmarks.head_scores --data DIR --start sst2-gte=FOLDER --start tinyimagenet-dinov2=FOLDER
    python -m benchmarks.head_scores --smallest                                       # does it run? made-up data, seconds

The models and data are those of `experiments` (`pretrained.py`): DINOv2-S on 100 classes of Tiny ImageNet and gte-small on
SST-2, each fine-tuned once (in `--runs`, from where a second call takes it; or `--models` names one that is fine-tuned
already). Scores read the rows that are held out for circuits. The lowest heads of all layers together are cut out, without
training after it, and what is left answers the test set, as it is and shifted: Gaussian noise on the images, words dropped
from the texts. "random" is the mean of three seeds; "normalized" divides the scores of a layer by their norm. A circuit
ranks as many heads as the largest budget, for accuracy, with a short list.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoTokenizer, PreTrainedModel

from benchmarks.provenance import where_it_ran
from experiments import smallest
from experiments.local_files import tokenized
from experiments.methods import Comparison
from experiments.pretrained import IMAGENET_MEAN, IMAGENET_STD, read_strings_of
from experiments.setting import Setting
from experiments.settings import SETTINGS
from experiments.splits import Splits
from hydra_transformers._io.files import write_atomically
from hydra_transformers.data.prediction import evaluation_mode
from hydra_transformers.models.auto import load_trained
from hydra_transformers.pruning import HEAD_SCORES, head_scores, lowest_heads, prune_heads
from hydra_transformers.pruning.scores import normalized
from hydra_transformers.shift import corrupt


NAMES = ("tinyimagenet-dinov2", "sst2-gte")
BATCH = 250
SHARES = (12, 6, 3)  # of the heads, one in so many goes
SEVERITY = 3
RANDOM_SEEDS = (0, 1, 2)
NORMALIZED = ("michel", "taylor", "oba")

Batches = list[dict[str, Tensor]]


@dataclass(frozen=True)
class Task:
    """A fine-tuned model, the rows that scores read, and what the pruned models answer."""

    title: str
    model: PreTrainedModel
    calibration: Batches
    tests: dict[str, Batches]
    num_heads: int

    @property
    def budgets(self) -> list[int]:
        return [self.num_heads // share for share in SHARES]


@dataclass
class Row:
    """accuracy, nll: by test set and number of heads cut out; seconds: what the scores took, None where they are others'"""

    task: str
    method: str
    seconds: float | None
    accuracy: dict[str, dict[int, float]]
    nll: dict[str, dict[int, float]]


def noisy_images(splits: Splits, folder: Path | None, setting: Setting, batch: int) -> Batches:
    scale = {"mean": IMAGENET_MEAN, "std": IMAGENET_STD}
    return [
        {**each, "pixel_values": corrupt(each["pixel_values"], "gaussian_noise", SEVERITY, **scale)}
        for each in splits.test.batches(batch)
    ]


def texts_without_words(splits: Splits, folder: Path | None, setting: Setting, batch: int) -> Batches:
    texts, labels = read_strings_of(folder, "sst2_validation")
    tokenizer = AutoTokenizer.from_pretrained(setting.start)
    rows = tokenized(corrupt(texts, "word_drops", SEVERITY), labels, tokenizer, max_length=128).sorted_by_length()
    return rows.to(splits.test.tensors["labels"].device).batches(batch)


SHIFTED: dict[str, Callable[[Splits, Path | None, Setting, int], Batches]] = {
    "tinyimagenet-dinov2": noisy_images,
    "sst2-gte": texts_without_words,
}


def real_task(name: str, args: argparse.Namespace) -> Task:
    given = dict(each.split("=", 1) for each in args.start)
    setting = replace(SETTINGS[name], start=given.get(name, SETTINGS[name].start))
    splits = setting.read(args.data, setting.start).to(args.device)
    return task_of(setting, splits, SHIFTED[name](splits, args.data, setting, BATCH), args, BATCH)


def smallest_task(args: argparse.Namespace) -> Task:
    splits = smallest.splits().to(args.device)
    generator = torch.Generator().manual_seed(0)
    shifted = splits.test.batches(16)
    for each in shifted:
        noise = torch.randn(each["pixel_values"].shape, generator=generator)
        each["pixel_values"] = each["pixel_values"] + 0.5 * noise.to(args.device)
    return task_of(smallest.SMALLEST, splits, shifted, args, 16)


def task_of(setting: Setting, splits: Splits, shifted: Batches, args: argparse.Namespace, batch: int) -> Task:
    given = dict(each.split("=", 1) for each in args.models)
    if setting.name in given:
        model = load_trained(given[setting.name]).to(args.device).float()
    else:
        comparison = Comparison(setting, splits, args.runs / setting.name, args.device, seeds=1, backbones=1)
        model = comparison.backbone(0).to(args.device).float()
    config = model.config
    return Task(
        setting.title,
        model,
        splits.circuit_id.batches(batch),
        {"clean": splits.test.batches(batch), "shifted": shifted},
        config.num_hidden_layers * config.num_attention_heads,
    )


def synchronised(device: str) -> float:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def scored(task: Task, args: argparse.Namespace) -> Iterator[tuple[str, float | None, list[dict]]]:
    """(method, seconds, scores): one dict of scores, or several to take the mean of."""
    head_scores(task.model, task.calibration[:1], "michel")  # warm-up
    for method in args.methods:
        options: dict[str, Any] = {}
        if method == "circuit":
            on_gpu = torch.device(args.device).type == "cuda"
            dtype = {"dtype": torch.bfloat16} if on_gpu else {}
            options = {"budget": max(task.budgets), "mode": "shortlist", **dtype}
        start = synchronised(args.device)
        if method == "random":
            found = [head_scores(task.model, method="random", seed=seed) for seed in RANDOM_SEEDS]
        else:
            found = [head_scores(task.model, task.calibration, method, **options)]
        seconds = (synchronised(args.device) - start) / len(found)
        yield method, seconds, found
        if method in NORMALIZED:
            yield f"{method}, normalized", None, [normalized(found[0])]


@torch.inference_mode()
def judge(model: PreTrainedModel, batches: Batches) -> tuple[float, float]:
    """Accuracy, and the mean negative log-likelihood of the labels."""
    right = nll = rows = 0.0
    with evaluation_mode(model):
        for batch in batches:
            inputs = {name: value for name, value in batch.items() if name != "labels"}
            logits, labels = model(**inputs).logits.float(), batch["labels"]
            right += (logits.argmax(dim=-1) == labels).sum().item()
            nll += nn.functional.cross_entropy(logits, labels, reduction="sum").item()
            rows += len(labels)
    return right / rows, nll / rows


def measure(task: Task, args: argparse.Namespace) -> Iterator[Row]:
    dense = {name: judge(prune_heads(task.model), batches) for name, batches in task.tests.items()}
    accuracy, nll = ({name: {0: values[part]} for name, values in dense.items()} for part in (0, 1))
    yield Row(task.title, "all heads", None, accuracy, nll)
    for method, seconds, found in scored(task, args):
        accuracy, nll = ({name: {} for name in task.tests} for _ in range(2))
        for budget in task.budgets:
            pruned = [prune_heads(task.model, lowest_heads(scores, budget)) for scores in found]
            for name, batches in task.tests.items():
                judged = [judge(each, batches) for each in pruned]
                accuracy[name][budget] = statistics.fmean(right for right, _ in judged)
                nll[name][budget] = statistics.fmean(loss for _, loss in judged)
        yield Row(task.title, method, seconds, accuracy, nll)


def to_markdown(rows: list[Row], machine: dict) -> str:
    lines = [f"{key}: {value}  " for key, value in machine.items()]
    for task in dict.fromkeys(row.task for row in rows):
        dense, *others = [row for row in rows if row.task == task]
        budgets = list(next(iter(others[0].accuracy.values()))) if others else []
        columns = [(name, budget) for name in dense.accuracy for budget in budgets]
        lines += ["", f"**{task}**, accuracy (negative log-likelihood) in % without so many heads", ""]
        lines.append("| score | seconds | " + " | ".join(f"{name}, {budget}" for name, budget in columns) + " |")
        lines.append("|---|---|" + "---|" * len(columns))
        whole = [_cell(dense, name, 0) for name, _ in columns]
        lines.append(f"| {dense.method} | | " + " | ".join(whole) + " |")
        for row in others:
            seconds = "" if row.seconds is None else f"{row.seconds:.2f}"
            lines.append(
                f"| {row.method} | {seconds} | " + " | ".join(_cell(row, *column) for column in columns) + " |"
            )
    return "\n".join(lines) + "\n"


def _cell(row: Row, name: str, budget: int) -> str:
    return f"{100 * row.accuracy[name][budget]:.1f} ({row.nll[name][budget]:.2f})"


def write(rows: list[Row], machine: dict, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    report = {"machine": machine, "rows": [asdict(row) for row in rows]}
    write_atomically(path.with_suffix(".json"), json.dumps(report, indent=1))
    write_atomically(path.with_suffix(".md"), to_markdown(rows, machine))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--settings", nargs="+", default=list(NAMES), choices=NAMES)
    parser.add_argument("--methods", nargs="+", default=list(HEAD_SCORES), choices=list(HEAD_SCORES))
    parser.add_argument("--data", type=Path, help="folder of plain files (experiments/local_files.py); else the Hub")
    parser.add_argument("--start", action="append", default=[], metavar="SETTING=FOLDER", help="pre-trained weights")
    parser.add_argument(
        "--models",
        action="append",
        default=[],
        metavar="SETTING=FOLDER",
        help="a fine-tuned classifier, not trained here",
    )
    parser.add_argument("--runs", type=Path, help="folder for the fine-tuned models; a temporary one otherwise")
    parser.add_argument("--output", type=Path, help="path of the .md and .json to write, without the ending")
    parser.add_argument("--smallest", action="store_true", help="a tiny model on made-up data: shows that it runs")
    args = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = True
    machine, rows = where_it_ran(args.device), []
    with tempfile.TemporaryDirectory() as temporary:
        args.runs = args.runs or Path(temporary)
        for name in ["smallest"] if args.smallest else args.settings:
            task = smallest_task(args) if args.smallest else real_task(name, args)
            for row in measure(task, args):
                rows.append(row)
                took = "" if row.seconds is None else f", {row.seconds:.2f} s"
                print(f"{row.task}: {row.method}{took}", flush=True)
                if args.output:
                    write(rows, machine, args.output)
    print(to_markdown(rows, machine))


if __name__ == "__main__":
    main()
