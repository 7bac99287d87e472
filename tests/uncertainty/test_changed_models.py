"""A decision knows its model: once that is another one, nothing is decided, and one warning says to calibrate again."""

import copy
import dataclasses
import json
import math
import pickle

import peft
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForImageClassification, Trainer, TrainingArguments

from hydra_transformers.models import decision as decision_module
from hydra_transformers.models import weights_digest
from hydra_transformers.models.weights_digest import digest_of
from hydra_transformers.uncertainty import CalibratedClassifier, Detector, calibrate
from tests.uncertainty.test_calibration import backbone_of, hydra_of, rows_for


BATCH = rows_for("vit", seed=1, labelled=False)[0]


def calibrated_hydra(**options):
    hydra = hydra_of("vit")
    hydra.calibrate(rows_for("vit"), target={"coverage": 0.5}, **options)
    return hydra.eval()


def one_step(model, fused: bool) -> None:
    """Of AdamW, in the mode that the model is in."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
    model(**rows_for("vit")[0]).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def merge_adapter(model) -> None:
    settings = peft.LoraConfig(target_modules=["fc1"], r=2, init_lora_weights=False)
    peft.get_peft_model(model, settings).merge_and_unload()


def train_and_evaluate(model) -> None:
    model.train()
    one_step(model, fused=True)
    model.eval()


def train_by_states(hydra) -> None:
    """One step of a loss that does not pass the logits, which tell of gradients."""
    hydra.train()
    optimizer = torch.optim.SGD(hydra.parameters(), lr=0.1)
    hydra(**BATCH, output_hidden_states=True).hidden_states[-1].square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    hydra.eval()


def replace_a_weight(hydra) -> None:
    """As quantisers do."""
    linear = hydra.vit.layers[0].mlp.fc1
    linear.weight = torch.nn.Parameter(linear.weight.detach() * 2)


def reversed_classes(hydra) -> dict[int, str]:
    names = list(hydra.config.id2label.values())
    return dict(enumerate(names[::-1]))


HYDRA_CHANGES = {
    "trained": train_and_evaluate,
    "trained by a loss of its states": train_by_states,
    "a weight replaced": replace_a_weight,
    "trained in eval mode": lambda hydra: one_step(hydra, fused=False),
    "trained in eval mode by fused steps": lambda hydra: one_step(hydra, fused=True),
    "a merged adapter": merge_adapter,
    "an adapter merged into frozen weights": lambda hydra: merge_adapter(hydra.requires_grad_(False)),
    "other weights loaded": lambda hydra: hydra.load_state_dict(
        {name: tensor * 2 if tensor.is_floating_point() else tensor for name, tensor in hydra.state_dict().items()}
    ),
    "cast and back": lambda hydra: hydra.bfloat16().float(),
    "another epsilon": lambda hydra: setattr(hydra.config, "layer_norm_eps", 0.5),
    "classes in another order": lambda hydra: setattr(hydra.config, "id2label", reversed_classes(hydra)),
    "another aggregate": lambda hydra: setattr(hydra.config, "problem_type", "multi_label_classification"),
}


@pytest.mark.parametrize("change", HYDRA_CHANGES)
def test_a_changed_hydra_does_not_decide(change, warned, tmp_path):
    hydra = calibrated_hydra()
    with torch.no_grad():
        assert hydra(**BATCH).abstain is not None
    HYDRA_CHANGES[change](hydra)
    with torch.no_grad():
        out = hydra(**BATCH)
    assert out.abstain is None and out.prediction_set is None and not hydra.is_calibrated
    assert (
        warned.text.count("this is not the model that was calibrated") == 1 and "call calibrate() again" in warned.text
    )
    hydra.save_pretrained(tmp_path)
    assert not type(hydra).from_pretrained(tmp_path).is_calibrated
    hydra.config.problem_type = "single_label_classification"
    hydra.calibrate(rows_for("vit"))
    assert hydra.is_calibrated


def train_by_trainer(model) -> None:
    [batch] = rows_for("vit", count=8)
    rows = [{name: value[row] for name, value in batch.items()} for row in range(8)]
    quiet = {"report_to": "none", "use_cpu": True, "save_strategy": "no", "disable_tqdm": True}
    trainer = Trainer(model, TrainingArguments(max_steps=1, **quiet), train_dataset=rows, eval_dataset=rows)
    trainer.train()
    trainer.evaluate()  # leaves the model in eval mode


WRAPPED_CHANGES = {
    "trained": train_and_evaluate,
    "trained by Trainer": train_by_trainer,
    "trained in eval mode by fused steps": lambda model: one_step(model, fused=True),
    "a merged adapter": merge_adapter,
    "other heads": lambda model: setattr(model.config, "num_attention_heads", 1),
}


@pytest.mark.parametrize("change", WRAPPED_CHANGES)
def test_a_plain_model_that_changed_in_its_wrapper_does_not_decide(change, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where Trainer has its folder
    backbone = backbone_of("vit")
    calibrated = calibrate(backbone, rows_for("vit"), target={"coverage": 0.5}).model.eval()
    with torch.no_grad():
        assert calibrated(**BATCH).abstain is not None
        assert copy.deepcopy(backbone)(**BATCH).logits.equal(pickle.loads(pickle.dumps(backbone))(**BATCH).logits)
    WRAPPED_CHANGES[change](backbone)
    with torch.no_grad():
        assert not backbone.training and calibrated(**BATCH).abstain is None


def test_a_model_that_stays_as_it_is_decides_and_its_weights_are_read_once(monkeypatch):
    hydra = calibrated_hydra()
    hydra.train()
    hydra(**BATCH)
    hydra.eval()
    copied = copy.deepcopy(hydra)
    assert hydra(**BATCH).abstain is not None and copied(**BATCH).abstain is not None  # also with gradients
    monkeypatch.setattr(decision_module, "digest_of", None)
    assert hydra(**BATCH).abstain is not None
    assert hydra.member(0).decision is None and hydra.member(0).config.decision is None


def test_a_digest_does_not_depend_on_the_size_of_passes_which_devices_have_of_their_own(monkeypatch):
    values = [torch.randn(shape, generator=torch.Generator().manual_seed(0)) for shape in ((777, 1001), (5,), (0, 3))]
    digests = set()
    for words in (64, 1000, 2**16, 2**22):
        monkeypatch.setitem(weights_digest.WORDS_PER_PASS, "cpu", words)
        digests |= {(digest_of(values), digest_of(values, torch.bfloat16))}
    assert len(digests) == 1


def test_a_digest_sees_every_bit_and_every_place():
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
        first = torch.ones(7).to(dtype)
        second = torch.ones(7).to(dtype)
        second[3] = 0
        assert digest_of([first]) != digest_of([second])


@pytest.mark.parametrize("distance", [1, 2, 32_768, 65_536, 524_288, 1_048_576])
def test_rows_that_were_swapped_are_seen_where_weights_were_once_bfloat16(distance):
    values = torch.randn(2_100_000, generator=torch.Generator().manual_seed(0)).bfloat16().float()
    swapped = values.clone()
    swapped[:64], swapped[distance * 2 : distance * 2 + 64] = values[distance * 2 : distance * 2 + 64], values[:64]
    if distance < 32:
        swapped = values.clone()
        swapped[[0, distance]] = swapped[[distance, 0]]
    assert digest_of([values]) != digest_of([swapped])


@pytest.mark.parametrize(
    "option",
    [{"problem_type": "multi_label_classification"}, {"hidden_act": "relu"}, {"layer_norm_eps": 0.5}],
)
def test_a_model_that_is_loaded_with_other_settings_does_not_decide(option, tmp_path):
    calibrated_hydra().save_pretrained(tmp_path)
    loaded = AutoModelForImageClassification.from_pretrained(tmp_path, **option).eval()
    with torch.no_grad():
        assert not loaded.is_calibrated and loaded(**BATCH).abstain is None


def test_a_config_that_predicts_as_before_still_decides(tmp_path):
    hydra = calibrated_hydra()
    names = hydra.config.id2label
    hydra.config.id2label = {str(index): f"a {names[index]}" for index in sorted(names, key=str)[::-1]}
    assert hydra.is_calibrated, "names are not the classes' order"
    hydra.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"a_field_of_later": 3}))
    for option in ({}, {"attn_implementation": "eager"}, {"hidden_dropout_prob": 0.5}):
        assert AutoModelForImageClassification.from_pretrained(tmp_path, **option).eval().is_calibrated, option
    halved = AutoModelForImageClassification.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    assert halved.is_calibrated
    # A field that another version of Transformers does not know has not changed.
    settings = hydra.decision.settings
    hydra.decision.settings = dataclasses.replace(settings, inference=settings.inference | {"rope_theta": 1e4})
    assert hydra.is_calibrated


def test_a_model_that_was_calibrated_before_its_config_was_compared_decides(tmp_path, monkeypatch):
    calibrated_hydra().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["decision"].pop("inference")["layer_norm_eps"] == 1e-12
    del config["decision"]["digests"]["settings"]
    config["layer_norm_eps"] = 1e-6
    (tmp_path / "config.json").write_text(json.dumps(config))
    loaded = AutoModelForImageClassification.from_pretrained(tmp_path).eval()
    assert loaded.is_calibrated
    monkeypatch.setattr(decision_module, "digest_of", None)
    with torch.no_grad():
        assert loaded(**BATCH).abstain is not None, "its weights are read once"


@pytest.mark.slow
def test_a_model_is_compared_when_it_is_compiled():
    hydra = calibrated_hydra()
    with torch.no_grad():
        compiled = torch.compile(hydra, fullgraph=True, backend="eager")
        assert torch.equal(compiled(**BATCH).abstain, hydra(**BATCH).abstain)
        torch.compiler.reset()
        with torch.enable_grad():
            train_and_evaluate(hydra)
        assert torch.compile(hydra, fullgraph=True, backend="eager")(**BATCH).abstain is None
    torch.compiler.reset()


def test_a_replica_of_data_parallel_decides():
    """As `nn.DataParallel` makes them, which needs GPUs: their weights are plain tensors, and they have no parameters."""
    hydra = calibrated_hydra()
    replicas = {module: module._replicate_for_data_parallel() for module in hydra.modules()}
    for module, replica in replicas.items():
        replica._modules = {name: replicas[child] for name, child in module._modules.items() if child is not None}
        replica._former_parameters = {
            name: weight.detach().clone() for name, weight in module._parameters.items() if weight is not None
        }
        for name, weight in replica._former_parameters.items():
            setattr(replica, name, weight)
    replica = replicas[hydra]
    replica.decision.compare_again()
    assert not list(replica.parameters()) and replica.is_calibrated
    replicas[hydra.vit.layers[0].mlp.fc1].weight.mul_(2)
    assert not replica.decision.compare(replica)


def test_a_model_without_weights_does_not_decide_and_offloading_is_warned_of(warned):
    hydra = calibrated_hydra().to("meta")
    assert hydra(pixel_values=BATCH["pixel_values"].to("meta")).abstain is None
    hydra.hf_device_map = {"": "disk"}
    assert not hydra.is_calibrated
    assert "weights of this model are offloaded" in warned.text


@pytest.mark.parametrize(
    "change", [{"version": 1}, {"per_label": True}, {"sets": {"method": "aps", "threshold": 0.9}}]
)
def test_a_decision_of_an_earlier_version_asks_for_a_new_calibration(change, warned, tmp_path):
    hydra = calibrated_hydra(detector=Detector("knn", k=3))
    hydra.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["decision"] |= change
    (tmp_path / "config.json").write_text(json.dumps(config))
    loaded = AutoModelForImageClassification.from_pretrained(tmp_path)
    assert loaded.decision is None and "calibrated by another version" in warned.text
    with hydra.uncalibrated(), torch.no_grad():
        assert torch.equal(loaded(**BATCH).logits, hydra(**BATCH).logits)
    loaded.calibrate(rows_for("vit"), target={"coverage": 0.9})
    assert loaded.is_calibrated


@pytest.mark.parametrize(
    "path, value",
    [
        ("temperature", -1),
        ("temperature", math.nan),
        ("detector", {"name": "best"}),
        ("detector", {"name": "knn", "by": "row"}),
        ("state", {"bank": [1_000_000, 1_000_000]}),
        ("state", {"center": [2, 2]}),
        ("task", "several labels"),
        ("task", None),
        ("threshold", math.inf),
        ("threshold", "high"),
        ("threshold", True),
        ("alpha", 2),
        ("alpha", math.nan),
        ("sets", {"method": "lac"}),
        ("sets", [0.1]),
        ("detector", None),
        ("detector", {"name": "knn", "by": "member", "settings": 3}),
        ("state", {"bank": "large"}),
        ("config", ["problem_type"]),
        ("sentences", "none"),
        ("digests", {"weights": "abc", "state": "def"}),
        ("validation", 1),
    ],
)
def test_settings_that_calibrate_cannot_have_written_are_refused(path, value, tmp_path):
    hydra = calibrated_hydra(detector=Detector("knn", k=3))
    digests = {name: digest for name, digest in hydra.config.decision["digests"].items() if name != "settings"}
    settings = hydra.config.decision | {"digests": digests} | {path: value}
    config = copy.deepcopy(hydra.config)
    config.decision = settings
    with pytest.raises(ValueError, match=r"decision\."), torch.device("meta"):
        type(hydra)(config)
    save_file(
        dict(hydra.decision.named_buffers()), tmp_path / "decision.safetensors", {"decision": json.dumps(settings)}
    )
    with pytest.raises(ValueError, match=r"decision\."):
        CalibratedClassifier.load(backbone_of("vit"), tmp_path)


@pytest.mark.parametrize("name", ["threshold", "alpha", "temperature", "sentences", "detector", "validation"])
def test_settings_that_were_edited_are_refused(name, tmp_path):
    """Though they are such as `calibrate` may have written."""
    hydra = calibrated_hydra()
    hydra.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    edited = {"threshold": 0.999, "alpha": 0.05, "temperature": 2.0, "sentences": ["Never wrong."], "validation": {}}
    edited["detector"] = config["decision"]["detector"] | {"settings": {"k": 3}}
    assert config["decision"][name] != edited[name]
    config["decision"][name] = edited[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"decision has settings that were changed since calibrate\(\) wrote them"):
        AutoModelForImageClassification.from_pretrained(tmp_path)
    assert AutoModelForImageClassification.from_pretrained(tmp_path, decision=None).decision is None


@pytest.mark.parametrize("name", ["detector", "temperature"])
def test_settings_that_are_missing_are_named(name):
    config = copy.deepcopy(calibrated_hydra().config)
    del config.decision[name]
    with pytest.raises(ValueError, match=rf"decision\.{name} is missing: call calibrate\(\) again"):
        type(hydra_of("vit"))(config)


def test_settings_without_a_digest_of_their_own_load_as_before(tmp_path):
    """As models that were calibrated before version 0.4 have them."""
    hydra = calibrated_hydra()
    hydra.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["decision"]["digests"]["settings"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    loaded = AutoModelForImageClassification.from_pretrained(tmp_path)
    assert loaded.is_calibrated and loaded.decision.settings.threshold == hydra.decision.settings.threshold


def test_a_file_that_is_not_a_decision_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"has no decision\.safetensors: save a"):
        CalibratedClassifier.load(backbone_of("vit"), tmp_path)
    save_file({"bank": torch.zeros(2)}, tmp_path / "decision.safetensors")
    with pytest.raises(ValueError, match=r"is not a whole decision .*: calibrate and save it again"):
        CalibratedClassifier.load(backbone_of("vit"), tmp_path)
