import copy
import json
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

from hydra_transformers import AutoHydra
from hydra_transformers.data.fingerprints import fingerprint_of_weights
from hydra_transformers.data.prediction import collect_member_logits
from hydra_transformers.reports import fusion_report
from hydra_transformers.reports.fusion_report import FusionReport
from hydra_transformers.uncertainty import classification_metrics, diversity_metrics, ood_metrics, ood_score
from hydra_transformers.uncertainty.paired import Change
from tests.families import BERT, CLIP, RAGGED, VIT


PARTS = ("embeddings", "layernorm", "mlp")
SMALL = {
    "num_hidden_layers": 2,
    "num_labels": 3,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "initializer_range": 0.1,
}
PATTERNS = torch.randn(3, 3, 8, 8, generator=torch.Generator().manual_seed(9))


def pictures(rows, seed):
    """Noise on the pattern of the class."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(3, (rows,), generator=generator)
    pixel_values = torch.randn(rows, 3, 8, 8, generator=generator) + 0.5 * PATTERNS[labels]
    return {"pixel_values": pixel_values, "labels": labels}


def fresh(seed):
    """As Transformers initialises it: what `families` gives is too wild to be trained."""
    backbone = VIT.backbone(**SMALL)
    torch.manual_seed(seed)
    return type(backbone)(backbone.config)


def trained(model, seed, steps, rate):
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=rate)
    for step in range(steps):
        model(**pictures(64, 1000 * seed + step)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


class Trained:
    """A model, short fine-tunings of it, and networks trained apart; each does well alone."""

    def __init__(self):
        self.data = [pictures(100, 10**6 + batch) for batch in range(4)]
        self.pretrained = trained(fresh(0), 9, steps=60, rate=2e-3)
        self.fine_tunings = [trained(copy.deepcopy(self.pretrained), seed, 10, 2e-4) for seed in (1, 2, 3)]
        self.strangers = [trained(fresh(seed), seed, steps=60, rate=2e-3) for seed in (4, 5, 6)]


@pytest.fixture(scope="module")
def vit():
    return Trained()


@pytest.fixture(scope="module")
def report():
    """Of three models, with OOD data near and far; as if they were good, and sharing changed nothing but detection."""
    members = [VIT.backbone(seed) for seed in range(3)]
    ood = {"near": {"faint": [noise(150, 1)]}, "far": {"noise": [noise(120, 2)], "stripes": [noise(100, 3)]}}
    data = [pictures(100, 10**6 + batch) for batch in range(4)]
    data = [{**batch, "pixel_values": batch["pixel_values"].double()} for batch in data]
    found = fusion_report(members, data, ood, pretrained=VIT.backbone(3))
    same = Change(0.0, 0.0, 0.0)
    kept = {"nll": same, "accuracy": same, "member_accuracies": 3 * [same]}
    parts = [replace(part, **kept) for part in found.parts]
    return replace(found, beats_guessing=3 * [True], fused=replace(found.fused, **kept), parts=parts)


def noise(rows, seed):
    generator = torch.Generator().manual_seed(seed)
    return {"pixel_values": 3 * torch.randn(rows, 3, 8, 8, generator=generator, dtype=torch.float64)}


@pytest.mark.slow
def test_members_may_be_folders_without_a_processor(tmp_path):
    members, inputs = [VIT.backbone(seed) for seed in range(2)], VIT.inputs()
    folders = [tmp_path / f"seed-{place}" for place in range(2)]
    for member, folder in zip(members, folders, strict=True):
        member.save_pretrained(folder)
    data = [{**inputs, "labels": torch.tensor([0, 2, 1, 2])}]
    assert fusion_report([folders[0], str(folders[1])], data).to_dict() == fusion_report(members, data).to_dict()
    with pytest.raises(TypeError, match="members is a str: pass a list"):
        fusion_report(str(folders[0]), data)


# Figures


@pytest.mark.slow
@pytest.mark.parametrize(("family", "pruned"), [(VIT, False), (BERT, True)], ids=["whole", "ragged"])
def test_the_figures_are_those_of_the_models_themselves(family, pruned):
    members = family.members() if pruned else [family.backbone(seed) for seed in range(3)]
    inputs = family.inputs()
    labels = torch.tensor([0, 2, 1, 2])
    foreign = {name: tensor.flip(1) if tensor.is_floating_point() else tensor for name, tensor in inputs.items()}
    if not family.reads_images:
        foreign = {**inputs, "input_ids": (inputs["input_ids"] * 7) % 38}
    report = fusion_report(members, [{**inputs, "labels": labels}], {"other": [foreign]})

    def assert_is(judged, model, member=None):
        known, unknown = (collect_member_logits(model, [batch])[0] for batch in (inputs, foreign))
        if member is not None:
            known, unknown = known[:, member : member + 1], unknown[:, member : member + 1]
        with pytest.warns(UserWarning, match="fewer than the 15 calibration bins"):
            expected = classification_metrics(known, labels) | diversity_metrics(known)
        for name in ("accuracy", "nll", "ece", "mutual_information", "disagreement"):
            assert getattr(judged, name) == pytest.approx(expected[name], abs=1e-9), name
        auroc = ood_metrics(ood_score(known), ood_score(unknown))["auroc"]
        assert judged.auroc == {"OOD": {"other": pytest.approx(auroc)}}

    for alone, member in zip(report.alone, members, strict=True):
        assert_is(alone, member)
    assert_is(report.not_fused, AutoHydra.from_pruned_members(members, shared=()))
    for fused in (report.fused, *report.parts, *report.trunks):
        hydra = AutoHydra.from_pruned_members(members, shared=fused.shared, trunk_layers=fused.trunk_layers)
        assert_is(fused.ensemble, hydra)
        for index, inside in enumerate(fused.members):
            assert_is(inside, hydra, index)
    alone, but_one = [(part,) for part in PARTS], [("layernorm", "mlp"), ("embeddings", "mlp"), PARTS[:2]]
    assert report.fused.shared == PARTS and [fused.shared for fused in report.parts] == alone + but_one
    assert [fused.trunk_layers for fused in report.trunks] == ([] if pruned else [1, 2])
    assert (report.soup is None) == pruned and ("mlp" in report.diversity) != pruned
    assert report.diversity["not fused"]["disagreement"] == report.not_fused.disagreement
    assert report.diversity["attention"]["mutual_information"] == report.fused.ensemble.mutual_information
    assert report.fused.nll.difference == pytest.approx(report.fused.ensemble.nll - report.not_fused.nll)
    assert report.num_rows == 4 and report.num_ood_rows == {"OOD": {"other": 4}}
    assert report.guessing == {"accuracy": 0.5, "nll": pytest.approx(1.5 * np.log(2))}


@pytest.mark.slow
def test_on_the_way_to_the_mean_plain_models_give_the_same():
    members = [VIT.backbone(seed) for seed in range(3)]
    batch = {**VIT.inputs(), "labels": torch.tensor([0, 2, 1, 2])}
    report = fusion_report(members, [batch])
    assert [step.t for step in report.path] == [0, 0.25, 0.5, 0.75, 1]
    stays = re.compile(r"\.attention\.|^classifier")
    for step in report.path:
        moved = copy.deepcopy(members)
        for name, _ in moved[0].named_parameters():
            mean = sum(member.get_parameter(name).detach() for member in members) / 3
            for member in moved if not stays.search(name) else ():
                member.get_parameter(name).data.lerp_(mean, step.t)
        logits = [collect_member_logits(member, [batch])[0] for member in moved]
        nlls = [torch.nn.functional.cross_entropy(each[:, 0], batch["labels"]).item() for each in logits]
        assert step.nll == pytest.approx(sum(nlls) / 3)
    nlls = [step.nll for step in report.path]
    assert report.rise == pytest.approx(max(nlls) - nlls[0])
    line = [nlls[0] + t * (nlls[-1] - nlls[0]) for t in (0, 0.25, 0.5, 0.75, 1)]
    assert report.barrier == pytest.approx(max(nll - at for nll, at in zip(nlls, line, strict=True)))


def test_equal_members_lose_nothing():
    members = [VIT.backbone(0), VIT.backbone(0)]
    report = fusion_report(
        members, [{**VIT.inputs(), "labels": torch.tensor([0, 2, 1, 2])}], pretrained=VIT.backbone(1)
    )
    assert report.fused.nll.difference == pytest.approx(0, abs=1e-12) and report.rise == pytest.approx(0, abs=1e-12)
    assert report.soup.nll == pytest.approx(report.alone[0].nll)
    assert all(cosines == {"0-1": pytest.approx(1)} for cosines in report.weight_cosines.values())
    assert all(cosines == {"0-1": pytest.approx(1)} for cosines in report.difference_cosines.values())


# Verdicts


@pytest.mark.slow
def test_fine_tunings_of_one_model_may_be_fused(vit):
    report = fusion_report(vit.fine_tunings, vit.data)
    assert report.verdict == "fuse" and report.shared == PARTS, report.sentence
    assert all(report.beats_guessing)
    assert report.sentence.endswith("; but detection of foreign data was not measured (ood_data).")
    assert report.trunk_layers == 1 and [fused.trunk_layers for fused in report.trunks] == [1]  # of two layers
    before, merged = (100 * each.accuracy for each in (report.not_fused, report.trunks[0].ensemble))
    assert str(report) == (
        f"{report.sentence} Merging 1 of 2 layers keeps accuracy ({before:.1f}% → {merged:.1f}%): they run once for all members."
    )


@pytest.mark.slow
def test_networks_trained_apart_may_not(vit):
    report = fusion_report(vit.strangers, vit.data)
    assert min(alone.accuracy for alone in report.alone) > 0.75 > 0.4 > report.guessing["accuracy"]
    assert report.verdict == "do not fuse" and report.shared == (), report.sentence
    assert "the ensemble's NLL rises from" in report.sentence and "inside" in report.sentence
    assert report.rise > 0.1
    assert all(abs(cosine) < 0.3 for cosine in report.weight_cosines["mlp"].values())


@pytest.mark.slow
def test_a_part_that_cannot_be_shared_is_named(vit):
    """Two equal neurons whose outputs cancel out change nothing; averaged with other neurons they no longer cancel out."""
    members = copy.deepcopy(vit.fine_tunings)
    for place, member in enumerate(members):
        mlp, first, second = member.vit.layers[0].mlp, 2 * place, 2 * place + 1
        push = 30 * torch.randn(len(mlp.fc2.bias), generator=torch.Generator().manual_seed(place))
        with torch.no_grad():
            mlp.fc1.weight[second], mlp.fc1.bias[second] = mlp.fc1.weight[first], mlp.fc1.bias[first]
            mlp.fc2.weight[:, first] += push
            mlp.fc2.weight[:, second] = -push
    report = fusion_report(members, vit.data)
    assert report.verdict == "fuse without mlp" and report.shared == ("embeddings", "layernorm"), report.sentence
    assert report.sentence.startswith("Fuse without mlp: with all parts shared the ensemble's NLL rises")


@pytest.mark.slow
def test_a_few_rows_cannot_tell(vit):
    report = fusion_report(vit.strangers, [pictures(60, 10**6)])
    assert (report.verdict, report.shared) == ("cannot tell", ())
    assert str(report) == "Cannot tell: 60 rows are too few, pass 100 or more."


@pytest.mark.slow
def test_members_that_do_no_better_than_guessing_cannot_tell(vit):
    labels = torch.randint(3, (4, 100), generator=torch.Generator().manual_seed(0))
    data = [{**batch, "labels": other} for batch, other in zip(vit.data, labels, strict=True)]
    report = fusion_report(vit.fine_tunings, data)
    assert report.verdict == "cannot tell" and not any(report.beats_guessing), report.sentence
    assert "alone, member 0 is not surely better than guessing" in report.sentence


def with_fused(report, **changes):
    return replace(report, fused=replace(report.fused, **changes))


@pytest.mark.slow
def test_the_rule_of_the_nll(report):
    sound = {group: Change(0.0, -0.01, 0.01) for group in report.fused.auroc}
    tolerated = max(0.05 * report.not_fused.nll, 0.01)
    kept = with_fused(report, nll=Change(0.0, -0.1, tolerated), auroc=sound)
    assert kept.verdict == "fuse"
    unsure = with_fused(report, nll=Change(0.0, -0.1, 2 * tolerated), auroc=sound)
    assert unsure.verdict == "cannot tell" and unsure.shared == () and "rows would tell" in unsure.sentence
    lost = with_fused(report, nll=Change(1.0, 1.01 * tolerated, 2.0), auroc=sound)
    assert lost.verdict != "fuse" and "the ensemble's NLL rises from" in lost.sentence
    assert replace(lost, parts=[]).verdict == "do not fuse"


def test_the_deepest_trunk_without_a_loss_is_named(report):
    kept = {"nll": Change(0, 0, 0), "accuracy": Change(0, 0, 0), "member_accuracies": 3 * [Change(0, 0, 0)]}
    kept["auroc"] = {group: Change(0, 0, 0) for group in ("near", "far")}
    fused = with_fused(report, nll=kept["nll"], auroc=kept["auroc"])
    one, two = (replace(each, **kept) for each in report.trunks)
    both = replace(fused, trunks=[one, two])
    assert both.verdict == "fuse" and both.trunk_layers == 2
    assert both.trunk_sentence.startswith("Merging 2 of 3 layers keeps accuracy (") and "AUROC on far" in str(both)
    lost = replace(two, accuracy=Change(-0.1, -0.12, -0.021))
    assert replace(fused, trunks=[one, lost]).trunk_layers == 1
    none = replace(fused, trunks=[replace(one, nll=Change(9.0, 8.0, 10.0)), lost])
    assert none.trunk_layers == 0 and none.trunk_sentence.startswith(
        "Merge no layers whole: with 1 of 3 the ensemble's NLL"
    )
    unsure = replace(fused, trunks=[replace(one, nll=Change(0.0, -9.0, 9.0))])
    assert unsure.trunk_layers == 0 and "whole, these rows do not tell: with 1 of 3" in unsure.trunk_sentence
    stopped = with_fused(both, nll=Change(0.0, -9.0, 9.0))
    assert (stopped.verdict, stopped.trunk_layers, stopped.trunk_sentence) == ("cannot tell", 0, "")


@pytest.mark.slow
def test_rows_that_would_tell_shrink_the_interval_to_what_is_tolerated(report):
    sound = {group: Change(0.0, -0.01, 0.01) for group in report.fused.auroc}
    ensemble = replace(report.not_fused, nll=1.0)
    unsure = with_fused(replace(report, not_fused=ensemble), nll=Change(0.0, -0.1, 0.1), auroc=sound)
    assert "about 1,600 rows would tell" in unsure.sentence  # of 400, an interval twice the tolerance of 0.05
    even = with_fused(replace(report, not_fused=ensemble), nll=Change(0.05, -0.1, 0.2), auroc=sound)
    assert "no less than 40,000 rows would tell" in even.sentence


@pytest.mark.parametrize(
    ("lost", "clause"),
    [
        ({"accuracy": Change(-0.05, -0.07, -0.021)}, "its accuracy falls from"),
        ({"member_accuracies": [Change(-0.1, -0.2, -0.051)] + 2 * [Change(0, 0, 0)]}, "member 0 falls from"),
        ({"auroc": {"near": Change(0.1, 0, 0.2), "far": Change(-0.1, -0.2, -0.021)}}, "AUROC on far-OOD data falls"),
    ],
)
def test_each_sure_loss_is_enough(report, lost, clause):
    kept = {"nll": Change(0, 0, 0), "auroc": {group: Change(0, 0, 0) for group in ("near", "far")}}
    assert with_fused(report, **kept).verdict == "fuse"
    worse = replace(with_fused(report, **{**kept, **lost}), parts=[])
    assert worse.verdict == "do not fuse" and clause in worse.sentence
    [change] = [each for value in lost.values() for each in _changes(value) if each.difference < 0]
    unsure = replace(change, high=0.0)
    again = {name: _replaced(value, change, unsure) for name, value in lost.items()}
    assert with_fused(report, **{**kept, **again}).verdict == "fuse"


def _changes(value):
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else [value]


def _replaced(value, old, new):
    if isinstance(value, dict):
        return {name: new if each is old else each for name, each in value.items()}
    return [new if each is old else each for each in value] if isinstance(value, list) else new


def test_what_the_verdict_leaves_aside_is_told(report):
    kept = {"nll": Change(0, 0, 0), "auroc": {group: Change(0, 0, 0) for group in ("near", "far")}}
    by_set = {
        "near": {"faint": Change(0, 0, 0)},
        "far": {"noise": Change(-0.1, -0.2, -0.03), "stripes": Change(0.1, 0, 0.2)},
    }
    ensemble = replace(report.fused.ensemble, ece=report.not_fused.ece + 0.05)
    told = with_fused(report, **kept, auroc_by_set=by_set, ensemble=ensemble)
    assert told.verdict == "fuse"
    assert "; but the ECE rises from" in told.sentence and told.sentence.endswith(", and noise is detected worse.")
    few = replace(report, num_ood_rows={"near": {"faint": 150}, "far": {"noise": 99, "stripes": 100}})
    lost = {"auroc": {"near": Change(0, 0, 0), "far": Change(-0.1, -0.2, -0.05)}}
    unjudged = with_fused(few, nll=Change(0, 0, 0), **lost)
    assert unjudged.verdict == "fuse" and "detection of far-OOD data is not judged" in unjudged.sentence


def test_the_part_to_leave_out_is_that_of_the_lowest_nll_and_must_keep_everything(report):
    lost, kept = Change(9.0, 8.0, 10.0), Change(0.0, -0.001, 0.001)
    sound = {group: Change(0, 0, 0) for group in ("near", "far")}

    def repaired(nlls, changes):
        but_one = [
            replace(part, nll=change, auroc=sound, ensemble=replace(part.ensemble, nll=nll))
            for part, nll, change in zip(report.parts[3:], nlls, changes, strict=True)
        ]
        return replace(with_fused(report, nll=lost, auroc=sound), parts=[*report.parts[:3], *but_one])

    assert repaired((0.3, 0.2, 0.1), (kept, kept, kept)).verdict == "fuse without mlp"
    assert repaired((0.3, 0.2, 0.1), (kept, kept, lost)).verdict == "fuse without layernorm"
    assert repaired((0.3, 0.2, 0.1), (kept, Change(0, -1, 1), lost)).shared == ("layernorm", "mlp")
    assert repaired((0.3, 0.2, 0.1), (lost, lost, lost)).verdict == "do not fuse"


# The report


@pytest.mark.slow
def test_the_report_can_be_read_saved_and_drawn(report, tmp_path):
    text = report.to_markdown()
    assert text.startswith(f"# Fusing 3 members: {report.verdict}\n\n{report.sentence}\n")
    assert "| noise (far) | 120 |" in text and "soup" in text and "Learned since pre-training" in text
    assert f"| not fused | {100 * report.not_fused.accuracy:.2f} | {report.not_fused.nll:.3f} |" in text
    for table in re.findall(r"(?:^\|.*\n)+", text, flags=re.MULTILINE):
        assert len({line.count("|") for line in table.splitlines()}) == 1
    content = json.loads(json.dumps(report.to_dict()))
    assert content["verdict"] == report.verdict and content["shared"] == list(report.shared)
    assert content["fused"]["nll"]["high"] == report.fused.nll.high
    paths = report.plot(tmp_path)
    assert [path.name for path in paths] == ["way_to_the_mean.png", "cost_of_sharing.png"]
    for path in paths:
        assert (np.asarray(Image.open(path).convert("RGB")) < 250).any(axis=2).mean() > 0.02
    assert isinstance(report, FusionReport) and report.num_members == 3


def test_ood_sets_come_in_groups_by_name_or_alone(report):
    assert report.num_ood_rows == {"near": {"faint": 150}, "far": {"noise": 120, "stripes": 100}}
    assert set(report.fused.auroc) == {"near", "far"}
    far = report.fused.auroc_by_set["far"]
    assert report.fused.auroc["far"].difference == pytest.approx(sum(each.difference for each in far.values()) / 2)
    assert report.not_fused.mean_auroc("far") == pytest.approx(sum(report.not_fused.auroc["far"].values()) / 2)
    members, batch = [VIT.backbone(0), VIT.backbone(1)], {**VIT.inputs(), "labels": torch.tensor([0, 2, 1, 2])}
    alone = fusion_report(members, [batch], [{"pixel_values": batch["pixel_values"].flip(2)}])
    assert alone.num_ood_rows == {"OOD": {"ood_data": 4}}


@pytest.mark.slow
def test_members_are_left_as_they_were_and_data_may_come_in_rows():
    members = [VIT.backbone(0).train(), VIT.hydra.from_backbone(VIT.backbone(1), RAGGED[0])]
    before = [fingerprint_of_weights(member) for member in members]
    configs = [member.config.to_dict() for member in members]
    rows = [{"pixel_values": image, "label": i % 3} for i, image in enumerate(VIT.inputs()["pixel_values"])]
    by_rows = fusion_report(members, rows, batch_size=3)
    assert [fingerprint_of_weights(member) for member in members] == before
    assert [member.config.to_dict() for member in members] == configs
    assert members[0].training and all(
        parameter.grad is None for member in members for parameter in member.parameters()
    )
    by_loader = fusion_report(members, DataLoader(rows, batch_size=2))
    assert by_rows.fused.ensemble.nll == pytest.approx(by_loader.fused.ensemble.nll)


def test_a_hydra_among_the_members_is_taken_apart():
    hydra = AutoHydra.from_pruned_members(VIT.members()[:2], shared=())
    report = fusion_report([hydra], [{**VIT.inputs(), "labels": torch.tensor([0, 2, 1, 2])}])
    assert report.num_members == 2 and report.soup is None


BATCH = {**VIT.inputs(), "labels": torch.tensor([0, 2, 1, 2])}
TWO = [VIT.backbone(0), VIT.backbone(1)]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"members": [VIT.backbone(0)]}, ValueError, "members has one member: pass two or more"),
        ({"members": []}, ValueError, "members is empty"),
        ({"members": VIT.backbone(0)}, TypeError, "pass a list of members"),
        ({"members": [VIT.backbone(0), BERT.backbone(0)]}, ValueError, r"members\[1\] is a BertForSeq"),
        (
            {"members": [VIT.backbone(0), VIT.backbone(1, num_labels=4)]},
            ValueError,
            r"members\[1\] has other classes than members\[0\]",
        ),
        (
            {"members": [VIT.backbone(0), VIT.backbone(1, id2label=dict(enumerate("abcde")))]},
            ValueError,
            r"members\[1\] has other classes than members\[0\] \(number 0 is",
        ),
        ({"members": [CLIP.backbone(0), CLIP.backbone(1)]}, TypeError, "CLIPModel, which has no classifier"),
        ({"members": [VIT.backbone(0).vit, VIT.backbone(1).vit]}, TypeError, "ViTModel, which has no classifier"),
        (
            {"members": [VIT.backbone(s, num_labels=1) for s in (0, 1)], "pretrained": VIT.backbone(0)},
            ValueError,
            "pretrained is for models that choose one class",
        ),
        ({"data": [VIT.inputs()]}, ValueError, "data has no labels"),
        ({"data": []}, ValueError, "data is empty"),
        ({"data": iter([BATCH])}, TypeError, "data is an iterator"),
        ({"data": [{**BATCH, "labels": torch.tensor([0, 2, 1, 5])}]}, ValueError, "pass labels from 0 to 4"),
        ({"data": BATCH}, TypeError, "pass a DataLoader"),
        ({"ood_data": {"near": {"a": []}}}, ValueError, r"ood_data\['near'\]\['a'\] is empty"),
        ({"ood_data": {"near": {}}}, ValueError, "ood_data has no data sets"),
        ({"ood_data": {"near": {"a": [BATCH]}, "b": [BATCH]}}, TypeError, "data sets beside groups"),
        ({"pretrained": BERT.backbone(0)}, ValueError, "pretrained is not what these members were fine-tuned from"),
    ],
)
def test_unfit_arguments_are_refused_with_a_sentence(arguments, error, message):
    with pytest.raises(error, match=message):
        fusion_report(**{"members": TWO, "data": [BATCH], **arguments})


def test_data_that_changes_when_it_is_read_again_is_refused():
    rows = [{"pixel_values": image, "labels": i % 3} for i, image in enumerate(torch.randn(40, 3, 8, 8).double())]
    with pytest.raises(ValueError, match="data gives other rows, or another order of them"):
        fusion_report(TWO, DataLoader(rows, batch_size=20, shuffle=True))
    with pytest.raises(ValueError, match=r"ood_data\['a'\] gives other rows"):
        fusion_report(TWO, [BATCH], {"a": DataLoader(rows, batch_size=20, shuffle=True)})


def test_foreign_rows_that_are_known_are_told_of():
    with pytest.warns(UserWarning, match=r"4 of the 4 rows of ood_data\['a'\] are in data too"):
        fusion_report(TWO, [BATCH], {"a": [VIT.inputs()]})
