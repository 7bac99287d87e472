"""`card` and `push`: a Hydra on the Hub."""

import argparse
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import ModelCard
from torch import nn
from transformers import PreTrainedConfig

from .._io.files import write_atomically
from ..baselines import Baseline
from ..reports.report import UncertaintyReport
from ..serving.page_answers import read_by
from ..serving.page_examples import read_examples
from ..uncertainty import CalibratedClassifier
from .folders import are_fine_tunings, circuits_of, is_baseline, load_config, load_model, load_processor
from .judging import check_can_be_published
from .problems import CommandError


SPACE_FOLDER = "space"
CARD_FLAGS = ("dataset", "base_model", "license", "fine_tuning", "report_model")


def card(arguments: argparse.Namespace) -> None:
    from ..hub import create_model_card

    path = arguments.folder / "README.md"
    if path.exists() and not arguments.overwrite:
        raise CommandError(f"{path} exists already: pass --overwrite to replace it")
    config = load_config(str(arguments.folder))
    check_can_be_published(config, str(arguments.folder))
    report, fields = _card_fields(arguments, config)
    model = _with_decision(arguments.folder)
    repo = arguments.repo or "me/" + re.sub(r"[^\w.-]+", "-", arguments.folder.resolve().name).strip("-.")
    write_atomically(path, str(create_model_card(model, report, repo_id=repo, **fields)))
    print(f"the card is in {path}. Next: hydra-transformers push {arguments.folder} {arguments.repo or 'me/my-hydra'}")


def _with_decision(folder: Path) -> nn.Module:
    """The model in a folder; a baseline with its decision, which lies beside it."""
    model = load_model(str(folder))
    is_decided = isinstance(model, Baseline) and CalibratedClassifier.is_saved_in(folder)
    return CalibratedClassifier.load(model, folder) if is_decided else model


def _card_fields(arguments: argparse.Namespace, config: PreTrainedConfig) -> tuple[UncertaintyReport | None, dict]:
    """The report, if there is one, and the arguments of `create_model_card`."""
    from ..hub.card import check_names

    check_names(repo_id=arguments.repo, base_model=arguments.base_model, dataset=arguments.dataset)
    path = arguments.report or arguments.folder / "evaluation" / "report.json"
    if arguments.report is not None and not path.exists():
        raise CommandError(f"there is no report {path}: pass the report.json of `hydra-transformers evaluate`")
    report = UncertaintyReport.from_json(path) if path.exists() else None
    if report is not None and arguments.dataset is None:
        raise CommandError(f"name the data set that {path} was made with: pass --dataset")
    fields = {
        "dataset": arguments.dataset,
        "base_model": arguments.base_model,
        "license": arguments.license,
        "fine_tuning": arguments.fine_tuning,
        "circuits": circuits_of(arguments.folder, [config]),
        "fine_tunings": are_fine_tunings(arguments.folder) or None,
    }
    if report is not None:
        fields["report_model"] = arguments.report_model or _own_name(report, path, arguments.report is None)
        if fields["report_model"] not in report.models:
            raise CommandError(f"{path} has no model {arguments.report_model}: it has {', '.join(report.models)}")
    elif arguments.report_model is not None:
        raise CommandError("--report-model is a name in a report, and there is none: pass --report")
    return report, fields


def _own_name(report: UncertaintyReport, path: Path, is_own: bool) -> str:
    """The name of the model in a report; in that of its own evaluation it comes first."""
    names = list(report.models)
    if len(names) > 1 and not is_own:
        raise CommandError(f"{path} has the models {', '.join(names)}: say with --report-model which of them this is")
    return names[0]


# How the function behind `push` calls what are flags here.
FLAGS = {
    "set HF_TOKEN, or pass token=": "or set HF_TOKEN",
    "pass another token=": "set another HF_TOKEN",
    "overwrite_card=True": "--overwrite-card",
}


def push(arguments: argparse.Namespace) -> None:
    from ..hub import push_hydra_to_hub, push_space_to_hub

    config = load_config(str(arguments.folder))
    check_can_be_published(config, str(arguments.folder))
    report, fields = _card_fields(arguments, config)
    space = _space(arguments, config)
    is_decided, of_baseline = CalibratedClassifier.is_saved_in(arguments.folder), is_baseline(str(arguments.folder))
    if is_decided and not of_baseline:
        print(
            f"note: {arguments.folder} is published without its decision, which is about the classes of one data set",
            file=sys.stderr,
        )
    card = arguments.folder / "README.md"
    if card.exists():
        # The card in the folder is the one its owner has read and may have edited.
        given = [name for name in CARD_FLAGS if getattr(arguments, name) is not None]
        if given:
            flags = ", ".join(f"--{name.replace('_', '-')}" for name in given)
            print(f"note: {card} is published as it is, without a look at {flags}", file=sys.stderr)
        fields = {"card": ModelCard.load(card)}
    model = _with_decision(arguments.folder)
    with _flags_for_arguments():
        commit = push_hydra_to_hub(
            model,
            arguments.repo,
            load_processor(str(arguments.folder), config),
            report,
            private=arguments.private,
            overwrite_card=arguments.overwrite_card,
            **fields,
        )
    print(f"published: {getattr(commit, 'commit_url', commit)}")
    if space is not None:
        with _flags_for_arguments():
            commit = push_space_to_hub(space, arguments.space, private=arguments.private)
        print(f"published the page: {getattr(commit, 'commit_url', commit)}")


@contextmanager
def _flags_for_arguments() -> Iterator[None]:
    from ..hub import HubError
    from ..hub.card_sections import EditedCardError

    try:
        yield
    except (HubError, EditedCardError) as error:
        sentence = str(error)
        for word, flag in FLAGS.items():
            sentence = sentence.replace(word, flag)
        raise CommandError(sentence) from error


def _space(arguments: argparse.Namespace, config: PreTrainedConfig) -> Path | None:
    """The folder of the page, written where there is none yet; None where no page is asked for."""
    from ..hub import write_space
    from ..hub.card import check_names

    given = [name for name in ("space_single", "space_examples") if getattr(arguments, name) is not None]
    flags = ", ".join(f"--{name.replace('_', '-')}" for name in given)
    if arguments.space is None:
        if given:
            raise CommandError(f"{flags} is about a page: name its Space with --space")
        return None
    check_names(repo_id=arguments.space)
    reads = read_by(config, str(arguments.folder))
    folder = arguments.folder / SPACE_FOLDER
    if folder.exists():
        without = f", without a look at {flags}" if given else ""
        print(f"note: {folder} is published as it is{without}; remove it to have it made anew", file=sys.stderr)
        return folder
    if arguments.space_examples is not None:
        read_examples(arguments.space_examples, reads)
    write_space(folder, arguments.repo, single=arguments.space_single, examples=arguments.space_examples)
    print(f"The page's files are in {folder}.", flush=True)
    return folder
