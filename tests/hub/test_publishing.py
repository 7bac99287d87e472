"""Publishing, against a Hub that only takes notes."""

import importlib.util
import re

import pytest
import torch
from huggingface_hub import ModelCard, ModelCardData
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled
from transformers import ViTImageProcessorPil

from hydra_transformers.hub import publishing, push_hydra_to_hub
from tests.hub.fake_hub import FakeResponse, commits
from tests.pages import run_python_blocks


CARD = ModelCard(f"---\n{ModelCardData(license='mit').to_yaml()}\n---\n# Mine\n")


@pytest.mark.slow
def test_model_code_processor_card_and_results_go_in_one_commit_and_pushing_again_changes_nothing(hydra, report, hub):
    before = {name: tensor.clone() for name, tensor in hydra.state_dict().items()}
    for _ in range(2):
        processor = ViTImageProcessorPil(size={"height": 8, "width": 8})
        named = {"dataset": "d", "report_model": "Hydra"}
        result = push_hydra_to_hub(hydra, "me/tiny", processor, report, private=True, **named)
        assert result == "commit" and commits(hub)[-1]["commit_message"] == "Upload HydraViTForImageClassification"
    assert [commit["changed"] == [] for commit in commits(hub)] == [False, True]
    assert hub.calls[0] == ("create_repo", {"repo_id": "me/tiny", "private": True, "exist_ok": True})
    expected = {"model.safetensors", "config.json", "modeling_hydra_vit.py", "modeling_hydra.py"}
    expected |= {"preprocessor_config.json", "README.md", "handler.py"}
    expected |= {"evaluation/report.json", "evaluation/reliability_diagram.png"}
    assert expected <= set(hub.files)
    card = hub.files["README.md"].decode()
    assert "me/tiny" in card
    for path in re.findall(r"!\[.*?\]\((.*?)\)", card):
        assert path in hub.files
    assert all(torch.equal(before[name], tensor) for name, tensor in hydra.state_dict().items())


def test_without_matplotlib_the_report_goes_without_plots(hydra, report, hub, monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find_spec(name))
    push_hydra_to_hub(hydra, "me/tiny", report=report, dataset="d", report_model="Hydra")
    assert [name for name in hub.files if name.startswith("evaluation/")] == ["evaluation/report.json"]
    assert b"![" not in hub.files["README.md"]


def test_a_card_on_the_hub_stays_unless_it_shall_be_overwritten(hydra, hub, caplog):
    hub.files["README.md"] = b"# My own card\n"
    publishing.logger.addHandler(caplog.handler)
    try:
        push_hydra_to_hub(hydra, "me/tiny")
    finally:
        publishing.logger.removeHandler(caplog.handler)
    assert hub.files["README.md"] == b"# My own card\n" and "config.json" in hub.files
    assert "me/tiny has a card, which stays: pass overwrite_card=True" in caplog.text
    push_hydra_to_hub(hydra, "me/tiny", overwrite_card=True)
    assert hub.files["README.md"].startswith(b"---\n")


def test_a_card_of_ones_own_is_published_as_it_is_and_replaces_no_other(hydra, hub):
    push_hydra_to_hub(hydra, "me/tiny", card=CARD)
    assert hub.files["README.md"].decode() == str(CARD)
    push_hydra_to_hub(hydra, "me/tiny", card=CARD)
    assert commits(hub)[-1]["changed"] == []
    with pytest.raises(ValueError, match="card is given, so license would have no effect"):
        push_hydra_to_hub(hydra, "me/tiny", card=CARD, license="mit")
    hub.files["README.md"] = b"# Another\n"
    with pytest.raises(ValueError, match="me/tiny has another card: pass overwrite_card=True to replace it"):
        push_hydra_to_hub(hydra, "me/tiny", card=CARD)
    assert hub.files["README.md"] == b"# Another\n" and len(commits(hub)) == 2


def test_weights_of_an_earlier_push_are_removed_and_other_files_stay(hydra, hub, monkeypatch):
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json"]
    others = ["notes.md", "adapter/model-00001-of-00002.safetensors"]
    hub.files = dict.fromkeys(shards + others, b"")
    push_hydra_to_hub(hydra, "me/tiny", card=CARD)
    assert len(commits(hub)) == 1
    assert not set(shards) & set(hub.files) and set(others) < set(hub.files)
    # Transformers would load a whole file in place of new shards.
    save = type(hydra).save_pretrained
    in_shards = lambda model, folder, **arguments: save(model, folder, max_shard_size="20KB", **arguments)  # noqa: E731
    monkeypatch.setattr(type(hydra), "save_pretrained", in_shards)
    push_hydra_to_hub(hydra, "me/tiny", card=CARD)
    assert "model.safetensors" not in hub.files
    assert {*others, "model.safetensors.index.json"} < set(hub.files)


REFUSALS = [
    (OfflineModeIsEnabled("off"), r"me/tiny was not published \(OfflineModeIsEnabled\): off"),
    (ConnectionError("no route"), r"me/tiny was not published \(ConnectionError\): no route"),
    (HfHubHTTPError("x", response=FakeResponse(401)), "does not accept the token"),
    (HfHubHTTPError("x", response=FakeResponse(403)), "the token may not write to me/tiny"),
    (HfHubHTTPError("x", response=FakeResponse(404)), "has no repository me/tiny"),
    (HfHubHTTPError("large", response=FakeResponse(413)), r"me/tiny was not published \(413\): large"),
]


def test_what_the_hub_refuses_is_said_in_one_sentence(hydra, hub, monkeypatch):
    for hub.fails_with, sentence in REFUSALS:
        with pytest.raises(publishing.HubError, match=sentence) as raised:
            push_hydra_to_hub(hydra, "me/tiny", card=CARD)
        assert "\n" not in str(raised.value)
    hub.fails_with = ZeroDivisionError("a bug")  # which is not hidden
    with pytest.raises(ZeroDivisionError):
        push_hydra_to_hub(hydra, "me/tiny", card=CARD)
    hub.fails_with = None
    monkeypatch.setattr(publishing, "get_token", lambda: None)
    with pytest.raises(
        publishing.HubError, match=r"no token for the Hub: run `hf auth login`, set HF_TOKEN, or pass token="
    ):
        push_hydra_to_hub(hydra, "me/tiny")
    assert not hub.calls
    push_hydra_to_hub(hydra, "me/tiny", card=CARD, token="mine")
    assert hub.token == "mine"


@pytest.mark.slow
def test_the_page_on_publishing_runs(hub, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_python_blocks("docs/publishing.md", at_least=2)
    assert len(commits(hub)) >= 1
