"""A decision is part of the model: fitted once, saved, loaded and applied with it, and stale once the weights change."""

import copy
import gc
import json
import logging
import math
import os
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import peft
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForImageClassification
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.utils import logging as transformers_logging

from hydra_transformers import AutoHydra
from hydra_transformers.baselines import DeepEnsemble
from hydra_transformers.models import decision as decision_module
from hydra_transformers.models.decision import digest_of, prediction_sets
from hydra_transformers.reports import evaluate_uncertainty
from hydra_transformers.uncertainty import (
    CalibratedClassifier,
    ConformalSets,
    TemperatureScaling,
    calibrate,
    collect_answers,
    decompose,
    detector_by_name,
)
from tests.families import FAMILIES


# One for each kind of head: on a token, on a pooler, of two maps in one module or two, on tokens and their mean.
CLASSIFIERS = [family for family in FAMILIES if family.name in ("vit", "bert", "roberta", "distilbert", "dinov2")]
BY_NAME = {family.name: family for family in FAMILIES}
ROWS = 48


@cache
def _built(name: str) -> tuple[torch.nn.Module, torch.nn.Module]:
    family = BY_NAME[name]
    backbone = family.backbone().float().eval()
    members = [AutoHydra.from_backbone(backbone, heads) for heads in family.heads_to_prune]
    return backbone, AutoHydra.from_pruned_members(members).eval()


def backbone_of(name: str) -> torch.nn.Module:
    return copy.deepcopy(_built(name)[0])


def hydra_of(name: str) -> torch.nn.Module:
    return copy.deepcopy(_built(name)[1])


def rows_for(name: str, seed: int = 0, labelled: bool = True, count: int = ROWS) -> list[dict]:
    generator = torch.Generator().manual_seed(seed)
    family, batch = BY_NAME[name], {}
    for key, value in family.inputs().items():
        if key == "pixel_values":
            batch[key] = torch.randn(count, *value.shape[1:], generator=generator)
        elif key == "input_ids":
            batch[key] = torch.randint(5, 30, (count, value.shape[1]), generator=generator)
    labels = torch.randint(0, _built(name)[0].config.num_labels, (count,), generator=generator)
    return [batch | ({"labels": labels} if labelled else {})]


@pytest.fixture
def warned(caplog):
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    transformers_logging.get_logger("transformers").warning_once.cache_clear()
    yield caplog
    logger.removeHandler(caplog.handler)


def test_rows_that_are_all_answered_rightly_fit_no_temperature():
    """The smallest temperature would be best, at which every answer is sure: no score could tell answers apart."""
    hydra = hydra_of("vit")
    [batch] = rows_for("vit")
    with torch.no_grad():
        batch["labels"] = hydra(batch["pixel_values"]).logits.argmax(dim=1)
    with pytest.warns(UserWarning, match="all answers to the 24 rows .* are right, which fits none"):
        calibration = hydra.calibrate([batch], target={"coverage": 0.75})
    assert calibration.temperature == 1.0
    with torch.no_grad():
        assert len(hydra(batch["pixel_values"]).detector_score.unique()) > ROWS / 2


def test_everything_is_fitted_on_rows_of_its_own():
    hydra = hydra_of("vit")
    data = rows_for("vit")
    logits, _, labels = collect_answers(hydra, data)
    calibration = hydra.calibrate(data, target={"coverage": 0.75}, alpha=0.2, seed=3)
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(3))
    first, second = order[: ROWS // 2], order[ROWS // 2 :]
    scaling = TemperatureScaling.fit(logits[first], labels[first])
    assert calibration.temperature == pytest.approx(scaling.temperature[0])
    sets = ConformalSets.fit(scaling(logits[second]), labels[second], 0.2)
    assert calibration.sets.thresholds == pytest.approx(sets.thresholds)
    assert calibration.abstention.rows == ROWS // 2 and calibration.abstention.coverage >= 0.75
    assert hydra.config.decision["threshold"] == calibration.abstention.threshold
    assert "Of 48 rows, a random half (24) fitted these, and the other half (24) what follows" in str(calibration)
    assert (
        "The ensemble's answer has the temperature" in str(calibration)
        and hydra.config.decision["sentences"] == calibration.sentences
    )


def test_it_is_applied_to_answers_and_can_be_left_out():
    hydra = hydra_of("vit")
    [batch] = rows_for("vit", seed=1, labelled=False)
    with torch.no_grad():
        raw = hydra(**batch)
    calibration = hydra.calibrate(rows_for("vit"), target={"coverage": 0.5})
    with torch.no_grad():
        out = hydra(**batch)
    # The ensemble's answer has the temperature, and it still is the mean of the members.
    answer = (raw.logits / calibration.temperature).softmax(dim=-1)
    torch.testing.assert_close(out.logits.exp(), answer)
    torch.testing.assert_close(out.member_logits.softmax(dim=-1).mean(dim=1), answer)
    parts = decompose(out.member_logits)
    torch.testing.assert_close(parts.total, torch.special.entr(answer.double()).sum(dim=-1), check_dtype=False)
    confidence = out.logits.softmax(dim=-1).amax(dim=-1)
    torch.testing.assert_close(out.detector_score, 1 - confidence)
    assert torch.equal(out.abstain, out.detector_score > calibration.abstention.threshold)
    assert torch.equal(out.prediction_set, calibration.sets.sets(out.member_logits))
    assert 0 < out.abstain.sum() < len(out.abstain)
    with torch.no_grad(), hydra.uncalibrated():
        before = hydra(**batch)
    assert torch.equal(before.member_logits, raw.member_logits) and before.abstain is None
    assert hydra.train()(**batch).abstain is None  # training is about the model


def test_a_decision_from_before_members_were_pooled_means_what_it_meant(tmp_path):
    hydra = hydra_of("vit")
    [batch] = rows_for("vit", seed=1, labelled=False)
    with torch.no_grad():
        raw = hydra(**batch)
    temperature = hydra.calibrate(rows_for("vit"), target={"coverage": 0.5}).temperature
    hydra.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["decision"].pop("pooled") is True
    (tmp_path / "config.json").write_text(json.dumps(config))
    old = type(hydra).from_pretrained(tmp_path).eval()
    with torch.no_grad():
        out = old(**batch)
    assert torch.equal(out.member_logits, raw.member_logits / temperature)
    torch.testing.assert_close(out.logits.exp(), (raw.member_logits / temperature).softmax(dim=-1).mean(dim=1))
    old.save_pretrained(tmp_path / "again")
    assert "pooled" not in json.loads((tmp_path / "again" / "config.json").read_text())["decision"]


@pytest.mark.parametrize("family", CLASSIFIERS, ids=lambda family: family.name)
def test_saved_is_loaded_with_features_of_every_head(family, tmp_path):
    hydra = hydra_of(family.name)
    hydra.calibrate(rows_for(family.name), target={"coverage": 0.5}, detector="mahalanobis")
    [batch] = rows_for(family.name, seed=1, labelled=False)
    hydra.save_pretrained(tmp_path)
    loaded = type(hydra).from_pretrained(tmp_path).eval()
    with torch.no_grad():
        ours, theirs = hydra(**batch), loaded(**batch)
    for name in ("logits", "member_logits", "detector_score", "abstain", "prediction_set"):
        assert torch.equal(ours[name], theirs[name]), name
    # the features are those that a detector by itself reads
    detector = detector_by_name("mahalanobis")
    with hydra.uncalibrated():
        logits, features, _ = collect_answers(hydra, [batch])
    state = {name: getattr(hydra.decision, name) for name in hydra.config.decision["state"]}
    detector.state, detector.fitted_on = state, {}
    torch.testing.assert_close(ours.detector_score.double(), detector(logits, features), rtol=1e-4, atol=1e-4)


def test_half_precision_keeps_what_was_fitted(tmp_path, warned):
    hydra = hydra_of("vit")
    hydra.calibrate(rows_for("vit"), target={"coverage": 0.5}, detector="relative_mahalanobis")
    hydra.save_pretrained(tmp_path)
    loaded = type(hydra).from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    for cast in (loaded, copy.deepcopy(hydra).to(torch.bfloat16)):
        assert cast.dtype == torch.bfloat16 and cast.decision.center.dtype == torch.float32
        assert torch.equal(cast.decision.center, hydra.decision.center) and cast.is_calibrated
    assert "calibrated in float32 and runs in bfloat16" in warned.text
    assert not cast.float().is_calibrated  # its weights are not what they were


def test_a_model_of_float64_is_loaded_with_its_decision(tmp_path):
    hydra = hydra_of("vit").double()
    hydra.calibrate(rows_for("vit"), target={"coverage": 0.5}, detector="mahalanobis")
    hydra.save_pretrained(tmp_path)
    loaded = type(hydra).from_pretrained(tmp_path, dtype=torch.float64).eval()
    assert loaded.dtype == torch.float64 and loaded.is_calibrated
    assert torch.equal(loaded.decision.center, hydra.decision.center)


def test_what_is_refused_of_equal_scores_is_refused_by_the_model_too():
    """Scores are float32, in which a threshold just below one of them must not be that score."""
    hydra = hydra_of("vit")
    foreign = rows_for("vit", seed=1, labelled=False)
    calibration = hydra.calibrate(rows_for("vit"), foreign, target={"tpr": 0.5}, detector="disagreement")
    with torch.no_grad():
        refused = hydra(**foreign[0]).abstain
    assert refused.double().mean().item() == calibration.abstention.tpr >= 0.5


def test_other_weights_decide_nothing(tmp_path, caplog):
    hydra = hydra_of("vit")
    hydra.calibrate(rows_for("vit"), target={"coverage": 0.5})
    [batch] = rows_for("vit", seed=1, labelled=False)
    assert hydra.is_calibrated
    with torch.no_grad():
        next(hydra.vit.layers[0].mlp.parameters()).add_(0.1)
    assert not hydra.is_calibrated and hydra(**batch).abstain is None
    hydra.save_pretrained(tmp_path)
    assert not type(hydra).from_pretrained(tmp_path).eval().is_calibrated  # known in another process too
    hydra.calibrate(rows_for("vit"))
    assert hydra.is_calibrated
    # another model of it is another model
    assert hydra.member(0).decision is None and hydra.member(0).config.decision is None
    assert AutoHydra.from_pruned_members([hydra.member(0), hydra.member(1)]).config.decision is None


def test_threads_that_share_a_classifier_get_their_own_answers():
    """Features are read while a model predicts, and those of another thread are of other rows."""
    members = DeepEnsemble([backbone_of("vit") for _ in range(2)])
    fitted = calibrate(members, rows_for("vit"), target={"coverage": 0.5}, detector="mahalanobis").model.eval()
    asked = [rows_for("vit", seed=seed, labelled=False, count=4)[0] for seed in range(6)]
    expected = [fitted(**batch).detector_score for batch in asked]
    with ThreadPoolExecutor(6) as threads:
        for scores, found in zip(expected, threads.map(lambda batch: fitted(**batch), asked), strict=True):
            assert torch.equal(scores, found.detector_score)
    fitted.to("meta")
    assert all(buffer.is_meta for buffer in fitted.reader[0].model.buffers())  # goes where the model goes


@pytest.mark.parametrize(
    "written",
    ["by an operation", "as another parameter", "as another module", "by load_state_dict", "by a merged adapter"],
)
def test_weight_changes_in_a_running_process_are_noticed(written):
    hydra = hydra_of("vit")
    hydra.calibrate(rows_for("vit"), target={"coverage": 0.5})
    assert hydra.is_calibrated
    fc1 = hydra.vit.layers[0].mlp.fc1
    if written == "by an operation":
        with torch.no_grad():
            fc1.weight.mul_(2)
    elif written == "as another parameter":
        fc1.weight = torch.nn.Parameter(fc1.weight.detach() * 2)
    elif written == "as another module":
        hydra.vit.layers[0] = hydra.vit.layers[1]
    elif written == "by load_state_dict":
        hydra.load_state_dict(hydra.state_dict() | {"vit.layers.0.mlp.fc1.weight": fc1.weight.detach() * 2})
    else:
        settings = peft.LoraConfig(target_modules=["fc1"], r=2, init_lora_weights=False)
        hydra = peft.get_peft_model(hydra, settings).merge_and_unload()
    assert not hydra.is_calibrated


def test_a_calibrated_model_is_freed_with_its_last_name():
    hydra = hydra_of("vit")
    hydra.calibrate(rows_for("vit"), target={"coverage": 0.5})
    gc.collect()
    assert hydra.is_calibrated
    layer = weakref.ref(hydra.vit.layers[0])
    gc.disable()
    try:
        del hydra
        assert layer() is None
    finally:
        gc.enable()


def test_weight_changes_in_a_copy_are_noticed():
    """The versions of its weights start anew, and may reach those of the original again."""
    hydra = hydra_of("vit")
    with torch.no_grad():
        hydra.vit.layers[0].mlp.fc1.weight.mul_(2)
        hydra.calibrate(rows_for("vit"), target={"coverage": 0.5})
        assert hydra.is_calibrated
        other = copy.deepcopy(hydra)
        other.vit.layers[0].mlp.fc1.weight.mul_(2)
    assert not other.is_calibrated and hydra.is_calibrated


@pytest.mark.parametrize("look", ["eval", "save", "cast"])
def test_weights_that_were_written_through_data_show_at_the_next_comparison(look, tmp_path):
    hydra = hydra_of("vit")
    hydra.calibrate(rows_for("vit"), target={"coverage": 0.5})
    assert hydra.is_calibrated
    hydra.vit.layers[0].mlp.fc1.weight.data[0, 0] += 1
    assert hydra.is_calibrated  # what the docs say is not noticed
    if look == "eval":
        hydra.train().eval()
    elif look == "save":
        hydra.save_pretrained(tmp_path)
        assert not type(hydra).from_pretrained(tmp_path).is_calibrated
    else:
        hydra.bfloat16()
    assert not hydra.is_calibrated


def test_training_of_the_word_embeddings_alone_is_noticed(tmp_path):
    """Few of their values change: those of the words that the training data has."""
    hydra = hydra_of("bert")
    hydra.calibrate(rows_for("bert"), target={"coverage": 0.5})
    for parameter in hydra.parameters():
        parameter.requires_grad_(False)
    words = hydra.bert.embeddings.word_embeddings.weight.requires_grad_(True)
    before = words.detach().clone()
    optimizer = torch.optim.SGD([words], lr=0.1)
    batch = {"input_ids": torch.full((4, 8), 7), "labels": torch.zeros(4).long()}
    hydra.train()
    for _ in range(30):
        hydra(**batch).loss.backward()
        optimizer.step()
    hydra.eval()
    changed = (words != before).any(dim=1)
    assert changed[7] and changed.sum() == 1
    assert not hydra.is_calibrated
    hydra.save_pretrained(tmp_path)
    assert not type(hydra).from_pretrained(tmp_path).is_calibrated


def test_answers_look_at_no_weights(monkeypatch):
    hydra = hydra_of("vit")
    hydra.calibrate(rows_for("vit"), target={"coverage": 0.5})
    [batch] = rows_for("vit", seed=1, labelled=False)
    hydra(**batch)
    monkeypatch.setattr(decision_module, "_checksum", None)
    assert hydra(**batch).abstain is not None


def test_a_digest_is_that_of_every_bit_and_every_place():
    values = torch.randn(2_500_000, generator=torch.Generator().manual_seed(0))
    digest = digest_of([values])
    assert digest == digest_of([values.clone()]) and digest == digest_of([values.double()], torch.float32)
    assert digest_of([values], torch.bfloat16) == digest_of([values.bfloat16()]) != digest
    other = values.clone()
    other[-1] = torch.nextafter(other[-1], other[-1] + 1)
    swapped = values.clone()
    swapped[[0, 2_499_999]] = swapped[[2_499_999, 0]]
    assert len({digest, digest_of([other]), digest_of([swapped]), digest_of([values.view(4, -1)])}) == 4
    for dtype in (torch.float64, torch.int8, torch.bool, torch.complex64):
        first, second = torch.ones(7).to(dtype), torch.ones(7).to(dtype)
        second[3] = 0
        assert digest_of([first]) != digest_of([second])


@pytest.mark.slow
def test_a_model_is_looked_at_when_it_is_compiled():
    hydra = hydra_of("vit")
    hydra.calibrate(rows_for("vit"), target={"coverage": 0.5})
    [batch] = rows_for("vit", seed=1, labelled=False)
    with torch.no_grad():
        compiled = torch.compile(hydra, fullgraph=True, backend="eager")
        assert torch.equal(compiled(**batch).abstain, hydra(**batch).abstain)
        torch.compiler.reset()
        next(hydra.vit.layers[0].mlp.parameters()).add_(0.1)
        assert torch.compile(hydra, fullgraph=True, backend="eager")(**batch).abstain is None
    torch.compiler.reset()


def test_a_replica_of_data_parallel_decides():
    """As `nn.DataParallel` makes them, which needs GPUs: their weights are plain tensors, and they have no parameters."""
    hydra = hydra_of("vit")
    hydra.calibrate(rows_for("vit"), target={"coverage": 0.5})
    replicas = {module: module._replicate_for_data_parallel() for module in hydra.modules()}
    for module, replica in replicas.items():
        replica._modules = {name: replicas[child] for name, child in module._modules.items() if child is not None}
        replica._former_parameters = {
            name: weight.detach().clone() for name, weight in module._parameters.items() if weight is not None
        }
        for name, weight in replica._former_parameters.items():
            setattr(replica, name, weight)
    assert not list(replicas[hydra].parameters()) and replicas[hydra].is_calibrated
    replicas[hydra].decision.seen = None
    assert replicas[hydra].is_calibrated
    replicas[hydra.vit.layers[0].mlp.fc1].weight.mul_(2)
    assert not replicas[hydra].is_calibrated


def test_a_model_without_weights_decides_nothing_and_offloading_is_warned_of(tmp_path, caplog):
    hydra = hydra_of("vit")
    hydra.calibrate(rows_for("vit"), target={"coverage": 0.5})
    [batch] = rows_for("vit", seed=1, labelled=False)
    hydra.to("meta")
    assert hydra(pixel_values=batch["pixel_values"].to("meta")).abstain is None
    hydra.hf_device_map = {"": "disk"}
    with caplog.at_level("WARNING"):
        logging.getLogger("transformers").addHandler(caplog.handler)
        try:
            assert not hydra.is_calibrated
        finally:
            logging.getLogger("transformers").removeHandler(caplog.handler)
    assert "weights of this model are offloaded" in caplog.text


@pytest.mark.parametrize("saved", ["nothing", "another calibration"])
def test_settings_beside_the_state_of_another_calibration_are_refused(saved, tmp_path):
    """As a save leaves them that was stopped after config.json."""
    hydra = hydra_of("vit")
    if saved == "another calibration":
        hydra.calibrate(rows_for("vit", seed=1), target={"coverage": 0.5}, detector="mahalanobis")
    hydra.save_pretrained(tmp_path)
    hydra.calibrate(rows_for("vit"), target={"coverage": 0.5}, detector="mahalanobis")
    config = json.loads((tmp_path / "config.json").read_text()) | {"decision": hydra.config.decision}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"decision\.state is not what was saved with these settings"):
        type(hydra).from_pretrained(tmp_path)


def changed(settings: dict, path: str, value) -> dict:
    """Settings with another value at `path`, such as "sets.method"."""
    *outer, last = path.split(".")
    settings = copy.deepcopy(settings)
    place = settings
    for name in outer:
        place = place[name]
    place[last] = value
    return settings


@pytest.fixture(scope="module")
def knn_hydra():
    hydra = hydra_of("vit")
    hydra.calibrate(rows_for("vit"), target={"coverage": 0.5}, detector=detector_by_name("knn", k=3), sets="aps")
    return hydra


@pytest.mark.parametrize(
    "field, value",
    [
        *[("temperature", value) for value in (-1, 0, math.nan, math.inf, "1", True, None)],
        *[("threshold", value) for value in ("nan", -5, True, math.nan, [1.0])],
        ("alpha", 2),
        ("dtype", "float99"),
        ("dtype", "int8"),
        ("detector.settings", [3]),
        ("detector", "knn"),
        ("detector.name", "best"),
        ("detector.name", "vim"),
        ("detector.by", "row"),
        ("detector.multi_label", True),
        ("detector.settings", {"k": 0}),
        ("detector.settings", {"k": 3, "gamma": 1.0}),
        ("detector.settings", {}),
        ("sets.method", "best"),
        ("sets.k_reg", 1),
        *[("sets.thresholds", value) for value in ([], [-5], ["nan"], [True], [0.5, 0.5], 0.5)],
        ("pooled", 1),
        ("sets.by_class", 1),
        ("sets.allow_empty", None),
        ("sets.more", 1),
        ("state.bank", [1_000_000, 1_000_000]),
        ("state.bank", [2, -1]),
        ("state.center", [2, 2]),
        ("state", {}),
        ("digests", {}),
        ("digests.weights", "all"),
        ("sentences", "all is well"),
        ("classes", [1]),
        ("more", 1),
    ],
)
def test_a_saved_decision_is_checked_and_refused_by_the_name_of_the_field(field, value, knn_hydra, tmp_path):
    settings = changed(knn_hydra.config.decision, field, value)
    message = rf"decision\.{field.split('.')[0]}"
    config = copy.deepcopy(knn_hydra.config)
    config.decision = settings
    with pytest.raises(ValueError, match=message), torch.device("meta"):
        type(knn_hydra)(config)
    backbone = backbone_of("vit")
    tensors = dict(knn_hydra.decision.named_buffers())
    save_file(tensors, tmp_path / "decision.safetensors", {"decision": json.dumps(settings)})
    with pytest.raises(ValueError, match=message):
        CalibratedClassifier.load(backbone, tmp_path)


def test_a_hydra_with_a_decision_of_another_version_says_how_to_load_it_without(knn_hydra, tmp_path):
    knn_hydra.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["decision"]["of_later"] = 1
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"decision.of_later is unknown: calibrate .* pass decision=None"):
        AutoModelForImageClassification.from_pretrained(tmp_path)
    loaded = AutoModelForImageClassification.from_pretrained(tmp_path, decision=None)
    assert not loaded.is_calibrated
    loaded.calibrate(rows_for("vit"), target={"risk": 0.9})
    assert loaded.is_calibrated


def test_a_file_of_an_earlier_version_or_of_anything_else_is_no_decision(knn_hydra, tmp_path):
    backbone = backbone_of("vit")
    assert not CalibratedClassifier.is_saved_in(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"has no decision\.safetensors: save a"):
        CalibratedClassifier.load(backbone, tmp_path)
    save_file({"bank": torch.zeros(2)}, tmp_path / "decision.safetensors")
    with pytest.raises(ValueError, match=r"is no whole decision .*: calibrate and save it again"):
        CalibratedClassifier.load(backbone, tmp_path)


def test_a_decision_that_was_saved_halfway_is_the_one_before(tmp_path, monkeypatch):
    """Settings and tensors are one file, which is replaced as a whole."""
    backbone = backbone_of("vit")
    first, second = (
        calibrate(backbone, rows_for("vit", seed=seed), target={"coverage": 0.5}, detector="mahalanobis").model.eval()
        for seed in (0, 1)
    )
    first.save(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["decision.safetensors"]
    monkeypatch.setattr(os, "replace", stopped)
    with pytest.raises(KeyboardInterrupt):
        second.save(tmp_path)
    loaded = CalibratedClassifier.load(backbone, tmp_path)
    assert loaded.decision.settings == first.decision.settings
    for name, tensor in first.decision.named_buffers():
        assert torch.equal(tensor, loaded.decision.get_buffer(name))


def stopped(*arguments, **options):
    raise KeyboardInterrupt


@pytest.mark.parametrize("detector", ["msp", "disagreement", "energy", "mahalanobis", "kl_matching"])
@pytest.mark.parametrize("sets", ["lac", "aps"])
def test_answers_that_are_no_numbers_abstain_and_may_be_any_class(detector, sets):
    hydra = hydra_of("vit")
    hydra.calibrate(rows_for("vit"), target={"coverage": 0.9}, detector=detector, alpha=0.7, sets=sets)
    [batch] = rows_for("vit", seed=1, labelled=False, count=3)
    batch["pixel_values"][1] = math.nan
    with torch.no_grad():
        out = hydra(**batch)
    assert out.abstain[1] and not out.abstain[[0, 2]].all()
    assert out.prediction_set[1].all() and not out.prediction_set[[0, 2]].all()


def test_answers_that_are_no_numbers_abstain_without_a_threshold_too():
    hydra = hydra_of("vit")
    hydra.calibrate(rows_for("vit"), alpha=0.2)
    [batch] = rows_for("vit", seed=1, labelled=False, count=3)
    batch["pixel_values"][1] = math.nan
    with torch.no_grad():
        out = hydra(**batch)
    assert out.abstain.tolist() == [False, True, False] and out.prediction_set[1].all()


def test_the_code_that_ships_with_a_model_decides_alike(tmp_path, remote_code):
    hydra = hydra_of("vit")
    hydra.calibrate(rows_for("vit"), target={"coverage": 0.5}, detector="mahalanobis")
    hydra.save_pretrained(tmp_path / "hydra")
    shipped = get_class_from_dynamic_module(f"modeling_hydra_vit.{type(hydra).__name__}", tmp_path / "hydra")
    assert shipped is not type(hydra)
    [batch] = rows_for("vit", seed=1, labelled=False)
    with torch.no_grad():
        ours, theirs = hydra(**batch), shipped.from_pretrained(tmp_path / "hydra").eval()(**batch)
    for name in ("detector_score", "abstain", "prediction_set"):
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-4, atol=1e-4)

    config = json.loads((tmp_path / "hydra" / "config.json").read_text())
    config["decision"]["temperature"] = -1
    (tmp_path / "hydra" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"decision\.temperature"):  # by the shipped code, without the package
        shipped.from_pretrained(tmp_path / "hydra")


@pytest.mark.parametrize("detector", ["msp", "energy", "gen", "knn", "kl_matching"])
def test_any_classifier_can_decide(detector, tmp_path):
    torch.manual_seed(0)
    backbone = backbone_of("vit")
    others = DeepEnsemble([backbone, backbone_of("vit")])
    settings = detector_by_name("knn", k=3) if detector == "knn" else detector
    for model in (backbone, others):
        calibration = calibrate(model, rows_for("vit"), target={"coverage": 0.5}, detector=settings, sets="aps")
        deciding = calibration.model.eval()
        [batch] = rows_for("vit", seed=1, labelled=False)
        with torch.no_grad():
            out = deciding(**batch)
        assert out.abstain.dtype == torch.bool and out.prediction_set.any(dim=-1).all()
        deciding.save(tmp_path)
        with torch.no_grad():
            again = CalibratedClassifier.load(model, tmp_path).eval()(**batch)
        assert torch.equal(out.detector_score, again.detector_score) and torch.equal(
            out.prediction_set, again.prediction_set
        )


@pytest.mark.parametrize("method", ["lac", "aps", "raps"])
@pytest.mark.parametrize("by_class", [False, True])
@pytest.mark.parametrize("allow_empty", [False, True])
def test_sets_are_those_of_the_package(method, by_class, allow_empty):
    torch.manual_seed(0)
    logits, labels = 2 * torch.randn(200, 3, 4, dtype=torch.float64), torch.arange(200) % 4
    options = {"k_reg": 1, "penalty": 0.05} if method == "raps" else {}
    fitted = ConformalSets.fit(logits, labels, 0.3, method, by_class, allow_empty=allow_empty, **options)
    kept = {
        name: fitted.to_dict()[name]
        for name in ("method", "thresholds", "by_class", "k_reg", "penalty", "allow_empty")
    }
    others = 2 * torch.randn(100, 3, 4, dtype=torch.float64)
    ours, theirs = prediction_sets(others.softmax(-1).mean(1), **kept), fitted.sets(others)
    is_near = (fitted._scores(others) - torch.tensor(fitted.thresholds, dtype=torch.float64)).abs() < 1e-5
    assert torch.equal(ours[~is_near], theirs[~is_near]) and (ours >= theirs).all() and not is_near.all()


@pytest.mark.parametrize(
    "data, options, message",
    [
        (rows_for("vit", labelled=False), {}, "data has no labels: calibrate on rows whose right answer is known"),
        (
            [rows_for("vit")[0] | {"labels": torch.zeros(47).long()}],
            {},
            "has 48 rows and 47 labels: give each row one",
        ),
        (rows_for("vit", count=8), {}, "data has 8 rows: pass at least 20"),
        (rows_for("vit"), {"target": {"tpr": 0.9}, "ood_data": []}, "ood_data has no batches"),
    ],
)
def test_data_that_cannot_calibrate_is_refused(data, options, message):
    with pytest.raises(ValueError, match=message):
        calibrate(hydra_of("vit"), data, **options)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"target": {"recall": 0.9}}, r"target is \{'recall': 0.9\}: pass a dict with one of risk, coverage, tpr"),
        ({"target": "risk"}, "target is 'risk': pass a dict"),
        ({"target": {"risk": 0.1, "coverage": 0.9}}, "got risk, coverage: pass exactly one"),
        ({"target": {}}, "got none: pass exactly one"),
        ({"target": {"risk": 5}}, "risk is 5: pass a share between 0 and 1"),
        ({"target": {"coverage": True}}, "coverage is True: pass a share"),
        ({"target": {"tpr": 0.9}}, "ood_data is missing: a tpr is the share of rows from elsewhere"),
        ({"target": {"risk": 0.1}, "confidence": 1.0}, "confidence is 1.0: pass a share"),
        ({"confidence": 0.9}, "confidence has no effect without a target: pass one"),
        ({"ood_data": [{}]}, "ood_data has no effect without a target: pass one"),
        ({"alpha": 1.5}, "alpha is 1.5: pass a share"),
        ({"sets": "best"}, "unknown method 'best': choose one of lac, aps, raps"),
        ({"sets": "raps"}, "k_reg is 5, there are 5 classes"),
        ({"detector": "vim"}, "calibrate by another detector"),
        ({"detector": "best"}, "unknown detector 'best'"),
        ({"detector": detector_by_name("msp", multi_label=True)}, "detector is made for multi-label models"),
        ({"train_data": [{}]}, "train_data is for detectors that learn, msp does not"),
        ({"detector": "knn", "train_data": torch.zeros(3)}, "train_data is a Tensor: pass a DataLoader"),
        ({"target": {"tpr": 0.9}, "ood_data": torch.zeros(3)}, "ood_data is a Tensor: pass a DataLoader"),
        ({"data": None}, "data is a NoneType: pass a DataLoader"),
    ],
)
def test_arguments_are_checked_before_anything_is_predicted(options, message, monkeypatch):
    hydra = _built("vit")[1]
    monkeypatch.setattr(type(hydra), "forward", unreachable)
    with pytest.raises((ValueError, TypeError), match=message):
        hydra.calibrate(**{"data": rows_for("vit"), **options})


def unreachable(self, pixel_values):
    raise AssertionError("it was asked to predict")


def test_a_promise_that_cannot_be_made_says_that_half_of_the_rows_were_used():
    with pytest.raises(
        ValueError, match=r"confidence on these 24 rows.*\(these 24 rows are half of data: the other half"
    ):
        hydra_of("vit").calibrate(rows_for("vit"), target={"risk": 0.001}, confidence=0.999)


def test_clip_is_calibrated_with_its_prompts_alone(monkeypatch):
    hydra = hydra_of("clip")
    monkeypatch.setattr(type(hydra), "forward", unreachable)
    with pytest.raises(
        ValueError, match="has no classes but those of each call's prompts: calibrate a ZeroShotClassif"
    ):
        hydra.calibrate([{"pixel_values": torch.zeros(20, 3, 8, 8)}])


def stops_midway(rows: list[dict], error: BaseException):
    yield from rows
    raise error


@pytest.mark.parametrize(
    "data, options, error",
    [
        (lambda: stops_midway(rows_for("vit"), OSError("the disk is gone")), {}, OSError),
        (lambda: stops_midway(rows_for("vit"), KeyboardInterrupt()), {}, KeyboardInterrupt),
        (lambda: rows_for("vit"), {"target": {"recall": 0.9}}, ValueError),
        (lambda: rows_for("vit"), {"target": {"risk": 0.001}, "confidence": 0.999}, ValueError),  # fails at the end
        (
            lambda: rows_for("vit"),
            {"target": {"tpr": 0.5}, "ood_data": stops_midway(rows_for("vit", 2), OSError("the disk is gone"))},
            OSError,
        ),
    ],
    ids=["data", "interrupted", "target", "out of reach", "ood"],
)
def test_a_calibration_that_fails_leaves_the_earlier_one(data, options, error):
    hydra = hydra_of("vit")
    hydra.calibrate(rows_for("vit"), target={"coverage": 0.5})
    decision, settings = hydra.decision, hydra.config.decision
    [batch] = rows_for("vit", seed=1, labelled=False)
    with torch.no_grad():
        before = hydra(**batch)
    with pytest.raises(error):
        hydra.calibrate(data(), **options)
    assert hydra.decision is decision and hydra.config.decision is settings and hydra.is_calibrated
    with torch.no_grad():
        after = hydra(**batch)
    assert torch.equal(before.logits, after.logits) and torch.equal(before.abstain, after.abstain)


@pytest.mark.parametrize("detector", ["mahalanobis", "kl_matching"])
def test_calibrating_again_is_as_calibrating_at_first(detector):
    """What is fitted is fitted on the answers without the earlier temperature, the training data's, too."""
    first, again = hydra_of("vit"), hydra_of("vit")
    again.load_state_dict(first.state_dict())
    again.calibrate(rows_for("vit", seed=5), target={"coverage": 0.9})
    data = {"data": rows_for("vit"), "train_data": rows_for("vit", 2), "ood_data": rows_for("vit", 3, labelled=False)}
    for hydra in (first, again):
        hydra.calibrate(**data, target={"tpr": 0.5}, detector=detector)
    assert first.config.decision == again.config.decision
    for name, tensor in first.decision.state_dict().items():
        assert torch.equal(tensor, again.decision.get_buffer(name)), name


@pytest.mark.parametrize("name", ["mahalanobis", "kl_matching"])
def test_training_data_is_read_in_one_pass_and_batch_by_batch(name):
    hydra, data, training = hydra_of("vit"), rows_for("vit"), rows_for("vit", seed=2)
    seen = []

    def batches():
        for start in range(0, ROWS, 12):
            seen.append(start)
            yield {key: value[start : start + 12] for key, value in training[0].items()}

    calibration = hydra.calibrate(data, target={"coverage": 0.5}, detector=name, train_data=batches())
    assert seen == [0, 12, 24, 36]
    with hydra.uncalibrated():
        logits, features, labels = collect_answers(hydra, training)
    expected = detector_by_name(name)
    expected.fit_answers(TemperatureScaling(calibration.temperature)(logits), features, labels)
    for key, tensor in expected.state.items():
        torch.testing.assert_close(hydra.decision.get_buffer(key), tensor, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("detector", "kind", "score"),
    [
        ("msp", "hydra", "knn"),
        ("mahalanobis", "hydra", "entropy"),
        ("msp", "wrapped", "entropy"),
        ("mahalanobis", "wrapped", "knn"),
    ],
)
def test_a_report_tells_what_a_calibrated_model_decides(detector, kind, score):
    model = hydra_of("vit") if kind == "hydra" else backbone_of("vit")
    fitted = calibrate(model, rows_for("vit"), target={"coverage": 0.6}, detector=detector, alpha=0.3).model.eval()
    test, far = rows_for("vit", seed=1), rows_for("vit", seed=2, labelled=False)
    far[0]["pixel_values"] *= 3
    reported_score = score
    if score == "knn":  # reads features, which a decided answer is not the map of
        reported_score = detector_by_name("knn", k=3).fit(fitted, rows_for("vit"))
    report = evaluate_uncertainty({"it": fitted}, test, {"far": {"loud": far}}, score=reported_score)
    told, labels = report.models["it"], test[0]["labels"]
    with torch.no_grad():
        here, there = fitted(pixel_values=test[0]["pixel_values"]), fitted(**far[0])
    answered = ~here.abstain
    assert 0 < answered.sum() < ROWS and there.abstain.sum() > 0
    assert told["data"]["answered"] == pytest.approx(answered.float().mean().item())
    wrong = (here.logits.argmax(-1) != labels)[answered]
    assert told["data"]["answered_risk"] == pytest.approx(wrong.float().mean().item())
    assert told["data"]["threshold"] == fitted.decision.settings["threshold"]
    assert told["loud (far)"]["answered"] == pytest.approx(1 - there.abstain.float().mean().item())
    holds = here.prediction_set[torch.arange(ROWS), labels].float().mean().item()
    sizes = here.prediction_set.sum(-1).float().mean().item()
    assert told["data"]["set_coverage"] == pytest.approx(holds)
    assert told["data"]["set_size"] == pytest.approx(sizes)
    assert "| Answered (%) |" in report.to_markdown()


def test_a_config_with_a_decision_goes_through_auto_classes(tmp_path):
    hydra = hydra_of("vit")
    hydra.calibrate(rows_for("vit"), target={"risk": 0.9})
    hydra.save_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).decision == hydra.config.decision
    assert AutoModelForImageClassification.from_pretrained(tmp_path).eval().is_calibrated
