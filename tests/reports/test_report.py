import json
import math
import re
import subprocess
import sys

import pytest
import torch
from huggingface_hub import ModelCardData
from sklearn.metrics import roc_auc_score
from torch.utils.data import DataLoader

from hydra_transformers.data.prediction import SavedLogits, predict
from hydra_transformers.models.modeling_hydra import HydraClassifierOutput
from hydra_transformers.reports.evaluation import evaluate_uncertainty
from hydra_transformers.reports.report import ModelResult, UncertaintyReport
from hydra_transformers.uncertainty import (
    Abstention,
    ConformalSets,
    TemperatureScaling,
    classification_metrics,
    diversity_metrics,
    ood_metrics,
    ood_score,
)
from tests.families import CLIP, VIT, images, padded_texts
from tests.uncertainty.answers import saved


def batch(samples, strength, seed):
    [found] = saved(samples, strength, seed)
    return found


ID = [batch(40, 2.5, seed=0), batch(25, 2.5, seed=1)]
OOD = {"near": {"A": [batch(30, 1, seed=2)]}, "far": {"B": [batch(20, 0, seed=3)], "C": [batch(35, 0.5, seed=4)]}}
CORRUPTIONS = {
    "blur": {severity: [batch(30, 4 - severity / 2, seed=10 + severity)] for severity in (1, 2, 3)},
    "noise": {severity: [batch(30, 3 - severity / 2, seed=20 + severity)] for severity in (1, 2, 3)},
}
LOGITS, LABELS = (torch.cat([part[name] for part in ID]) for name in ("member_logits", "labels"))


class FirstMembers(torch.nn.Module):
    """The saved logits of the first members only."""

    def __init__(self, members):
        super().__init__()
        self.members = members

    def forward(self, member_logits):
        return HydraClassifierOutput(member_logits=member_logits[:, : self.members])


def compare_two():
    models = {"Single": FirstMembers(1), "Hydra": FirstMembers(3)}
    return evaluate_uncertainty(models, ID, OOD, corruptions=CORRUPTIONS)


def test_the_report_holds_what_the_functions_give():
    result = evaluate_uncertainty(SavedLogits(), ID, OOD, score="entropy").models["SavedLogits"]
    expected = classification_metrics(LOGITS, LABELS) | diversity_metrics(LOGITS)
    assert {name: result.id[name] for name in expected} == expected
    assert result.num_members == 3
    assert result.id["num_samples"] == 65
    far = OOD["far"]["B"][0]["member_logits"]
    detection = ood_metrics(ood_score(LOGITS, "entropy"), ood_score(far, "entropy"))
    assert {name: result.ood["far"]["B"][name] for name in detection} == detection
    truth = [0] * 65 + [1] * 20
    scores = torch.cat([ood_score(LOGITS, "entropy"), ood_score(far, "entropy")])
    assert result.ood["far"]["B"]["auroc"] == pytest.approx(roc_auc_score(truth, scores))


def test_everyone_is_judged_by_the_energy_too():
    report = compare_two()
    far = OOD["far"]["B"][0]["member_logits"]
    for name, members in (("Single", 1), ("Hydra", 3)):
        known, foreign = (ood_score(logits[:, :members], "energy") for logits in (LOGITS, far))
        expected = ood_metrics(known, foreign)["auroc"]
        assert report.models[name].ood["far"]["B"]["energy_auroc"] == pytest.approx(expected)
    texts = [f"{100 * result.ood_average()['energy_auroc']:.2f}" for result in report.models.values()]
    assert [each.strip("*<u>/") for each in cells(report.to_markdown(), "OOD avg AUROC by energy ↑")] == texts
    assert "average AUROC by energy" in str(report)
    same = evaluate_uncertainty(SavedLogits(), ID, OOD, score="energy")  # the report's own score: once is enough
    assert "AUROC by energy" not in str(same) and "energy_auroc" not in same.models["SavedLogits"].ood_average()
    older = UncertaintyReport(
        "msp",
        {"One": ModelResult(1, report.models["Single"].id, {"OOD": {"B": {"auroc": 0.5, "fpr95": 1.0, "aupr": 0.5}}})},
    )
    assert "AUROC by energy" not in older.to_markdown()


def test_the_ood_average_counts_every_data_set_the_same():
    result = compare_two().models["Hydra"]
    near, (b, c) = result.ood["near"]["A"]["auroc"], (result.ood["far"][name]["auroc"] for name in "BC")
    assert result.ood_average("near")["auroc"] == near
    assert result.ood_average("far")["auroc"] == pytest.approx((b + c) / 2)
    assert result.ood_average()["auroc"] == pytest.approx((near + b + c) / 3)


def test_the_averages_are_the_papers():
    # The single ViT on CIFAR-100: CIFAR-10; MNIST, SVHN, Textures, Places365. The paper's averages: 84.41 far, 85.46 all.
    far = {"MNIST": 59.49, "SVHN": 92.61, "Textures": 95.79, "Places365": 89.78}
    ood = {"near": {"CIFAR-10": {"auroc": 89.63}}, "far": {name: {"auroc": value} for name, value in far.items()}}
    result = ModelResult(num_members=1, id={}, ood=ood)
    assert result.ood_average("far")["auroc"] == pytest.approx(84.41, abs=0.01)
    assert result.ood_average()["auroc"] == pytest.approx(85.46, abs=0.01)


def test_severities_are_averaged_over_corruptions():
    result = compare_two().models["Hydra"]
    averages = result.severity_averages()
    assert list(averages) == ["1", "2", "3"]
    both = [result.corruptions[name]["2"]["brier"] for name in ("blur", "noise")]
    assert averages["2"]["brier"] == pytest.approx(sum(both) / 2)
    alone = CORRUPTIONS["blur"][2][0]
    assert both[0] == classification_metrics(alone["member_logits"], alone["labels"])["brier"]


def cells(markdown, heading):
    """The cells of every column called `heading`, row by row, from the first table that has it."""
    tables = [part for part in markdown.split("\n\n") if part.startswith("| Model")]
    for table in tables:
        rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
        if heading in rows[0]:
            return [row[rows[0].index(heading)] for row in rows[2:]]
    raise AssertionError(f"no column {heading} in {markdown}")


def test_markdown_marks_best_and_second_best_in_the_right_direction():
    report = compare_two()
    markdown = report.to_markdown()
    single, hydra = (report.models[name].id for name in ("Single", "Hydra"))
    assert hydra["accuracy"] > single["accuracy"] and hydra["brier"] < single["brier"]
    assert cells(markdown, "Acc ↑") == [f"<u>{100 * single['accuracy']:.2f}</u>", f"**{100 * hydra['accuracy']:.2f}**"]
    assert cells(markdown, "Brier ↓") == [f"<u>{single['brier']:.3f}</u>", f"**{hydra['brier']:.3f}**"]
    assert cells(markdown, "Members") == ["1", "3"]
    assert cells(markdown, "ID MI ↑")[0] == "-"  # a single model has no diversity


def test_markdown_marks_what_looks_equal_equally_and_leaves_a_third_unmarked():
    values = {"accuracy": 0.8, "brier": 0.2, "nll": 0.5, "ece": 0.01, "aece": 0.01, "aurc": 0.02}
    accuracies = [0.90001, 0.85, 0.90002, 0.5]
    models = {f"m{i}": ModelResult(1, {**values, "accuracy": accuracy}) for i, accuracy in enumerate(accuracies)}
    markdown = UncertaintyReport("msp", models).to_markdown()
    assert cells(markdown, "Acc ↑") == ["**90.00**", "<u>85.00</u>", "**90.00**", "50.00"]
    assert cells(markdown, "Brier ↓") == ["**0.200**"] * 4


def test_one_model_is_shown_without_marks():
    markdown = evaluate_uncertainty(SavedLogits(), ID, OOD, corruptions=CORRUPTIONS).to_markdown()
    assert "**" not in markdown and "<u>" not in markdown


def test_markdown_has_the_papers_tables():
    markdown = compare_two().to_markdown()
    for heading in (
        *("Acc ↑", "Brier ↓", "NLL ↓", "ECE ↓", "aECE ↓", "OOD avg AUROC ↑", "OOD avg FPR95 ↓", "OOD avg AUPR ↑"),
        *("near-OOD avg AUROC ↑", "far-OOD avg FPR95 ↓", "A AUROC ↑", "B FPR95 ↓", "C AUPR ↑"),
        *("ID MI ↑", "ID DI ↑", "OOD avg MI ↑", "OOD avg DI ↑"),
        *("sev1 Acc ↑", "sev3 Acc ↑", "average Acc ↑", "sev2 Brier ↓", "average Brier ↓"),
    ):
        assert len(cells(markdown, heading)) == 2, heading
    widths = {len(re.findall(r"(?<!\\)\|", line)) for line in markdown.split("\n\n")[1].splitlines()}
    assert len(widths) == 1


def test_json_gives_the_same_report_back(tmp_path):
    report = compare_two()
    text = report.to_json(tmp_path / "results" / "report.json")
    assert json.loads(text)["models"]["Hydra"]["num_members"] == 3
    loaded = UncertaintyReport.from_json(tmp_path / "results" / "report.json")
    assert loaded == report
    assert loaded.to_markdown() == report.to_markdown()
    assert [file.name for file in (tmp_path / "results").iterdir()] == ["report.json"]


def test_an_infinite_nll_survives_json_that_any_reader_takes(tmp_path):
    logits = torch.zeros(20, 1, 2)
    logits[:, :, 1] = -torch.inf
    data = [{"member_logits": logits, "labels": torch.ones(20, dtype=torch.long)}]
    with pytest.warns(UserWarning, match="nll is infinite"):
        report = evaluate_uncertainty(SavedLogits(), data)
    text = report.to_json(tmp_path / "report.json")
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert UncertaintyReport.from_json(tmp_path / "report.json").models["SavedLogits"].id["nll"] == math.inf


def test_a_file_that_is_no_report_is_named(tmp_path):
    for content in (b'{"models": 3}', b"\x80\xff\x00", b"[" * 100_000):
        (tmp_path / "other.json").write_bytes(content)
        with pytest.raises(ValueError, match=r"other\.json is not an uncertainty report"):
            UncertaintyReport.from_json(tmp_path / "other.json")


def test_eval_results_make_valid_card_metadata():
    report = compare_two()
    results = report.to_eval_results("CIFAR-100", dataset_type="cifar100", model="Hydra", dataset_split="test")
    card = ModelCardData(model_name="hydra", eval_results=results)
    entry = card.to_dict()["model-index"][0]["results"][0]
    assert entry["dataset"] == {"name": "CIFAR-100", "type": "cifar100", "split": "test"}
    values = {metric["name"]: metric["value"] for metric in entry["metrics"]}
    assert values["Accuracy"] == pytest.approx(report.models["Hydra"].id["accuracy"], abs=1e-6)
    assert values["AUROC (OOD average)"] == pytest.approx(report.models["Hydra"].ood_average()["auroc"], abs=1e-6)
    assert "auroc" in card.to_yaml()
    with pytest.raises(ValueError, match="the report has 2 models: pass model= one of Single, Hydra"):
        report.to_eval_results("CIFAR-100")
    with pytest.raises(ValueError, match="no model 'Deep'"):
        report.to_eval_results("CIFAR-100", model="Deep")


def test_a_temperature_is_applied_to_the_models_it_is_given_for():
    models = {"plain": SavedLogits(), "scaled": SavedLogits()}
    report = evaluate_uncertainty(models, ID, temperature={"scaled": TemperatureScaling(3.0)})
    assert report.models["plain"].id["nll"] == classification_metrics(LOGITS, LABELS)["nll"]
    assert report.models["scaled"].id["nll"] == classification_metrics(LOGITS / 3, LABELS)["nll"]
    with pytest.raises(ValueError, match="temperature names 'other'"):
        evaluate_uncertainty(models, ID, temperature={"other": TemperatureScaling(3.0)})


HARD = [batch(45, 1, seed=30), batch(20, 1, seed=31)]  # with errors to be cut
HARD_LOGITS, HARD_LABELS = (torch.cat([part[name] for part in HARD]) for name in ("member_logits", "labels"))


def are_right(member_logits, labels):
    return member_logits.double().softmax(-1).mean(1).argmax(1) == labels


def test_the_report_tells_what_abstaining_buys_without_anything_fitted():
    report = evaluate_uncertainty({"Single": FirstMembers(1), "Hydra": FirstMembers(3)}, HARD)
    confidence = HARD_LOGITS.double().softmax(-1).mean(1).amax(1)
    errors = (~are_right(HARD_LOGITS, HARD_LABELS))[confidence.argsort(descending=True)].tolist()
    told = report.models["Hydra"].abstaining
    assert (
        told
        == pytest.approx(
            {
                "risk_at_100": sum(errors) / 65,
                "risk_at_95": sum(errors[:62]) / 62,  # 61.75 rows: at least 95 % are answered
                "risk_at_90": sum(errors[:59]) / 59,
            }
        )
    )
    assert report.models["Hydra"].sets == {}
    markdown = report.to_markdown()
    assert cells(markdown, "risk at 90 % ↓")[1].strip("*<u>/") == f"{100 * told['risk_at_90']:.2f}"
    before, after = 100 * told["risk_at_100"], 100 * told["risk_at_90"]
    assert before > after
    assert f"Hydra: answering 90 % cuts errors from {before:.3g} % to {after:.3g} %." in markdown
    assert "threshold" not in markdown and "Prediction sets" not in markdown
    assert (
        "SavedLogits: answering 90 %, no error is there to be cut."
        in evaluate_uncertainty(SavedLogits(), ID).to_markdown()
    )


def test_a_fitted_threshold_is_judged_on_other_rows():
    other = batch(300, 1, seed=40)
    logits, labels = other["member_logits"], other["labels"]
    rule = Abstention.fit(ood_score(logits, "entropy"), are_right(logits, labels), coverage=0.7, score="entropy")
    models = {"with": SavedLogits(), "without": SavedLogits()}
    report = evaluate_uncertainty(models, HARD, OOD, score="entropy", abstention={"with": rule})
    told = report.models["with"].abstaining
    measured = rule.measure(ood_score(HARD_LOGITS, "entropy"), are_right(HARD_LOGITS, HARD_LABELS))
    assert 0 < measured["coverage"] < 1
    assert {name: told[name] for name in ("coverage", "risk")} == {
        name: measured[name] for name in ("coverage", "risk")
    }
    assert told["threshold"] == rule.threshold
    far = ood_score(OOD["far"]["B"][0]["member_logits"], "entropy")
    assert report.models["with"].ood["far"]["B"]["refused"] == float((far > rule.threshold).double().mean())
    assert "threshold" not in report.models["without"].abstaining
    markdown = report.to_markdown()
    assert cells(markdown, "threshold: coverage") == [f"{100 * told['coverage']:.2f}", "-"]
    assert cells(markdown, "threshold: OOD avg refused")[1] == "-"
    assert f"with: at the threshold, answering {100 * told['coverage']:.3g} % cuts errors" in markdown
    with pytest.raises(ValueError, match="abstention was fitted on the score 'entropy', the report's is 'msp'"):
        evaluate_uncertainty(models, HARD, abstention=rule)


def test_prediction_sets_are_judged_on_other_rows_after_the_temperature(tmp_path):
    other = batch(300, 2.5, seed=41)
    scaling = TemperatureScaling(2.0)
    sets = ConformalSets.fit(
        scaling(other["member_logits"]), other["labels"], alpha=0.2, method="aps", randomised=True
    )
    report = evaluate_uncertainty(SavedLogits(), ID, temperature=scaling, conformal=sets)
    told = report.models["SavedLogits"].sets
    assert told == {"alpha": 0.2} | sets.coverage_and_size(scaling(LOGITS), LABELS)
    markdown = report.to_markdown()
    assert cells(markdown, "mean size ↓") == [f"{told['mean_size']:.2f}"]
    assert cells(markdown, "single-class sets ↑") == [f"{100 * told['single_class']:.2f}"]
    report.to_json(tmp_path / "report.json")
    assert UncertaintyReport.from_json(tmp_path / "report.json") == report
    few = ConformalSets.fit(torch.zeros(20, 1, 3), [0, 1] * 10)
    with pytest.raises(ValueError, match="member_logits has 4 classes, the sets were fitted for 3"):
        evaluate_uncertainty(SavedLogits(), ID, conformal=few)


@pytest.mark.slow
def test_a_threshold_that_answers_nothing_or_everything_is_told_and_kept(tmp_path):
    nothing = Abstention.fit([-2.0, -1.0], coverage=0.9)
    everything = Abstention.fit([0.0, math.inf], coverage=0.9)
    models = {"nothing": SavedLogits(), "everything": SavedLogits()}
    report = evaluate_uncertainty(models, ID, abstention={"nothing": nothing, "everything": everything})
    assert report.models["nothing"].abstaining["risk"] is None
    assert "nothing: at the threshold, nothing is answered." in report.to_markdown()
    assert "everything: at the threshold, everything is answered, and" in report.to_markdown()
    report.to_json(tmp_path / "report.json")
    loaded = UncertaintyReport.from_json(tmp_path / "report.json")
    assert loaded == report and loaded.models["everything"].abstaining["threshold"] == math.inf
    assert all(path.stat().st_size for path in loaded.plot(tmp_path / "plots"))


def test_a_hydra_and_its_backbone_are_judged_side_by_side():
    hydra = VIT.fused().train()
    rows = [{"pixel_values": image, "label": i % 5} for i, image in enumerate(images(17))]
    report = evaluate_uncertainty(
        {"backbone": VIT.backbone(), "hydra": hydra},
        DataLoader(rows, batch_size=4),
        {"far": {"noise": [{"pixel_values": 9 * images(6)}]}},
    )
    assert hydra.training
    expected = classification_metrics(predict(hydra, {"pixel_values": images(17)}), [i % 5 for i in range(17)])
    for name, value in expected.items():
        assert report.models["hydra"].id[name] == pytest.approx(value, abs=1e-9), name
    assert [result.num_members for result in report.models.values()] == [1, 3]


@pytest.mark.filterwarnings("ignore:6 samples are fewer")
def test_clip_is_judged_zero_shot_with_class_prompts():
    hydra = CLIP.fused()
    prompts = padded_texts(batch=3)
    data = [{"pixel_values": images(6), "labels": torch.arange(6) % 3}]
    result = evaluate_uncertainty(hydra, data, class_prompts=prompts).models["HydraCLIPModel"]
    with torch.no_grad():
        member_logits = hydra(pixel_values=images(6), **prompts).member_logits
    assert result.id["nll"] == pytest.approx(classification_metrics(member_logits, torch.arange(6) % 3)["nll"])
    assert result.num_members == 3


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"data": []}, ValueError, "data is empty: pass at least one sample"),
        ({"data": [{"member_logits": LOGITS}]}, ValueError, "data has no labels: add a column labels"),
        ({"ood_data": {"near": {"A": []}}}, ValueError, r"ood_data\['near'\]\['A'\] is empty"),
        ({"ood_data": {"near": {}}}, ValueError, r"ood_data has no data sets \(near\): pass at least one, or leave"),
        ({"ood_data": {"near": {"A": ID}, "B": ID}}, TypeError, "ood_data has data sets beside groups of them"),
        ({"corruptions": {"blur": {}}}, ValueError, r"corruptions\['blur'\] is empty"),
        ({"corruptions": {"blur": ID}}, TypeError, "corruptions must be a dict of dicts"),
        ({"score": "odin"}, ValueError, "unknown OOD score"),
        ({"models": {}}, ValueError, "models is empty"),
        ({"models": [SavedLogits()]}, TypeError, "list is no model: pass one model, or several as {name: model}"),
        ({"temperature": 2.0}, TypeError, "temperature is 2.0: pass a TemperatureScaling"),
        ({"abstention": 0.5}, TypeError, "abstention is 0.5: pass an Abstention, or {name: Abstention}"),
        ({"conformal": 0.1}, TypeError, "conformal is 0.1: pass a ConformalSets"),
        ({"temperature": {"SavedLogits": 2.0}}, TypeError, "temperature is .*2.0.*: pass a TemperatureScaling"),
        (
            {"models": {"a": SavedLogits(), "b": SavedLogits()}, "data": iter(ID)},
            TypeError,
            "data is an iterator",
        ),
    ],
)
def test_unfit_arguments_are_refused_with_a_sentence(arguments, error, message):
    with pytest.raises(error, match=message):
        evaluate_uncertainty(**{"models": SavedLogits(), "data": ID, **arguments})


def test_foreign_data_need_no_groups():
    assert evaluate_uncertainty(SavedLogits(), ID, {}) == evaluate_uncertainty(SavedLogits(), ID)
    foreign = saved(30, 0, 3)
    grouped = evaluate_uncertainty(SavedLogits(), ID, {"far": {"B": foreign}})
    for ood_data, name in (({"B": foreign}, "B"), (foreign, "ood_data")):
        report = evaluate_uncertainty(SavedLogits(), ID, ood_data)
        assert report.models["SavedLogits"].ood["OOD"][name] == grouped.models["SavedLogits"].ood["far"]["B"]
        assert f"{name} AUROC ↑" in report.to_markdown() and f"{name} ↑" in str(report)
        assert "OOD-OOD" not in report.to_markdown() and "(OOD)" not in str(report)


def test_data_that_makes_a_report_say_nothing_is_told_of():
    one_class = [{"member_logits": LOGITS, "labels": torch.full_like(LABELS, 2)}]
    with pytest.warns(UserWarning, match="all 65 labels of data are class 2: the metrics say nothing of the others"):
        evaluate_uncertainty(SavedLogits(), one_class)
    again = [{"member_logits": LOGITS.flip(0), "labels": LABELS}]
    with pytest.warns(
        UserWarning, match=r"answers ood_data\['far'\]\['B'\] exactly as it answers data: are they the same"
    ):
        evaluate_uncertainty(SavedLogits(), ID, {"far": {"B": again}})


def test_usual_data_is_judged_without_a_warning(recwarn):
    compare_two()
    assert not recwarn.list


@pytest.mark.slow
def test_importing_needs_only_torch_and_transformers():
    heavy = ("matplotlib", "evaluate", "datasets", "sklearn", "scipy", "torchmetrics", "peft")
    blocked = f"import sys; sys.modules.update(dict.fromkeys({heavy!r}))"  # None makes an import fail
    code = f"{blocked}\nfrom hydra_transformers import uncertainty\nprint(uncertainty.OOD_SCORES[0])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.stdout.strip() == "msp", run.stderr
