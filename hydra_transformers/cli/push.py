"""`push`: publishes a model, its code, processor and card, and a page to try it on."""

import sys
from pathlib import Path

from .folders import check_is_hydra
from .options import argument, option, switch


def push(
    folder: argument(Path, "DIR", "a saved Hydra; a README.md in it is published as its card"),
    repo: argument(str, "REPO", "me/my-hydra; created if it does not exist"),
    dataset: option(str | None, "the data on the Hub that `evaluate` measured it on", "NAME") = None,
    base_model: option(str | None, "the pre-trained model on the Hub", "NAME") = None,
    license: option(str | None, 'for example "apache-2.0"', "ID") = None,
    private: switch("--private", "make a new repository private") = False,
    space: option(str | None, "me/my-page: publish the page of `app` as a Space, too", "NAME") = None,
) -> None:
    """Publish a model with its code, processor and card on the Hub."""
    import tempfile

    from huggingface_hub import ModelCard

    from ..data.processors import load_processor
    from ..hub import push_hydra_to_hub, push_space_to_hub, write_space
    from ..hub.card import check_names
    from ..hub.member_heads import load_circuits
    from ..reports import Report
    from ..serving.saved_models import load_config, load_model
    from ..uncertainty import CalibratedClassifier

    # Check everything before anything is sent.
    config = load_config(str(folder))
    check_is_hydra(config, str(folder))
    check_names(repo_id=repo, base_model=base_model, dataset=dataset)
    if space is not None:
        check_names(repo_id=space)
    results = None
    path = folder / "evaluation" / "report.json"
    if path.exists():
        results = Report.from_json(path)
        if dataset is None:
            raise ValueError(f"name the data set that {path} was made with: pass --dataset")
    if CalibratedClassifier.is_saved_in(folder):
        print(f"note: {folder} is published without its decision, made for one data set's classes", file=sys.stderr)

    # The card: the owner's, or one of what is known.
    arguments = {"dataset": dataset, "base_model": base_model, "license": license}
    arguments["circuits"] = load_circuits(folder, [config])
    if results is not None:
        arguments["report_model"] = next(iter(results.models))  # a model comes first in its own report
    card = folder / "README.md"
    if card.exists():  # its owner has read this card, and may have edited it
        arguments = {"card": ModelCard.load(card)}

    commit = push_hydra_to_hub(
        load_model(str(folder)),
        repo,
        load_processor(str(folder), config),
        results,
        private=private or None,
        **arguments,
    )
    print(f"published: {getattr(commit, 'commit_url', commit)}")
    if space is not None:
        with tempfile.TemporaryDirectory() as files:
            commit = push_space_to_hub(write_space(Path(files) / "space", repo), space, private=private or None)
        print(f"published the page: {getattr(commit, 'commit_url', commit)}")
