"""`push`: publishes a model, its code, processor and card, and a page to try it on."""

import sys
from dataclasses import fields as fields_of
from pathlib import Path

from huggingface_hub import ModelCard
from transformers import PreTrainedConfig

from ..data.processors import load_processor
from ..uncertainty import CalibratedClassifier
from .card import CardOptions, load_to_publish
from .folders import check_is_hydra, is_baseline, load_config
from .options import argument, option, switch


SPACE, SPACE_FOLDER = "A page to try it on", "space"


def push(
    folder: argument(Path, "DIR", "the output of `fuse`, or a saved baseline"),
    repo: argument(str, "REPO", "me/my-hydra; created if it does not exist"),
    fields: CardOptions,
    private: switch("--private", "make a new repository private") = False,
    overwrite_card: switch("--overwrite-card", "replace the whole card on the Hub") = False,
    space: option(
        str | None,
        "me/my-page: publish the page of `hydra-transformers app` as a Space, too; its files are written to DIR/space first, "
        "or published as they are if they exist",
        "NAME",
        SPACE,
    ) = None,
    space_single: option(str | None, "a model on the Hub, whose answers stand beside", "MODEL", SPACE) = None,
    space_examples: option(Path | None, "to click on, as for `app --examples`", "PATH", SPACE) = None,
) -> None:
    """Publish model, code, processor and card."""
    from ..hub import push_hydra_to_hub, push_space_to_hub

    given = [flag for flag, value in (("--space-single", space_single), ("--space-examples", space_examples)) if value]
    if space is None and given:
        raise ValueError(f"{', '.join(given)} is about a page: name its Space with --space")
    config = load_config(str(folder))
    check_is_hydra(config, str(folder), or_baseline=True)
    report, arguments = fields.arguments(folder, repo, config)
    page = None if space is None else _space(folder, repo, config, space, space_single, space_examples, given)
    if CalibratedClassifier.is_saved_in(folder) and not is_baseline(str(folder)):
        print(
            f"note: {folder} is published without its decision, which is for one data set's classes", file=sys.stderr
        )
    card = folder / "README.md"
    if card.exists():
        # Its owner has read this card, and may have edited it.
        unused = [each.name for each in fields_of(fields) if each.name != "report" and getattr(fields, each.name)]
        if unused:
            flags = ", ".join(f"--{name.replace('_', '-')}" for name in unused)
            print(f"note: {card} is published as it is, and {flags} is ignored", file=sys.stderr)
        arguments = {"card": ModelCard.load(card)}
    commit = push_hydra_to_hub(
        load_to_publish(folder),
        repo,
        load_processor(str(folder), config),
        report,
        private=private or None,
        overwrite_card=overwrite_card,
        **arguments,
    )
    print(f"published: {getattr(commit, 'commit_url', commit)}")
    if page is not None:
        commit = push_space_to_hub(page, space, private=private or None)
        print(f"published the page: {getattr(commit, 'commit_url', commit)}")


def _space(
    folder: Path,
    repo: str,
    config: PreTrainedConfig,
    space: str,
    single: str | None,
    examples: Path | None,
    given: list[str],
) -> Path:
    """The folder of the page, written if there is none yet."""
    from ..hub import write_space
    from ..hub.card import check_names
    from ..serving.page_inputs import read_examples
    from ..serving.predictor import READS, kind_of

    check_names(repo_id=space)
    reads = READS[kind_of(config, str(folder))]
    place = folder / SPACE_FOLDER
    if place.exists():
        ignored = f", and {', '.join(given)} is ignored" if given else ""
        print(f"note: {place} is published as it is{ignored}; remove it to write it anew", file=sys.stderr)
        return place
    if examples is not None:
        read_examples(examples, reads)
    write_space(place, repo, single=single, examples=examples)
    print(f"The page's files are in {place}.", flush=True)
    return place
