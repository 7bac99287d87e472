"""What a model card says."""

import doctest
import re
import sys
from dataclasses import replace

import pytest
import torch
from huggingface_hub import ModelCard
from huggingface_hub.repocard_data import eval_results_to_model_index, model_index_to_eval_results

from hydra_transformers.hub import create_model_card, kept_heads_map
from hydra_transformers.hub.card import TO_FILL_IN, card_cost_table
from hydra_transformers.models.auto import load_trained
from hydra_transformers.pruning import Circuit, draw_members
from tests.families import BERT, CLIP, VIT
from tests.hub.fake_hub import hydra_of
from tests.serving.tiny import save_clip_hydra, save_image_models, save_text_hydra
from tests.tiny_data import pictures


# The map of kept heads


def test_the_map_shows_each_kept_head_of_each_member_and_layer(hydra):
    lines = kept_heads_map(hydra.config).splitlines()
    assert lines[0].split() == ["member", "0", "member", "1", "member", "2"]
    # what RAGGED leaves of 4 heads in 3 layers
    assert lines[1].split() == ["layer", "0", "■·■■", "3", "■■■■", "4", "·■··", "1"]
    assert lines[2].split() == ["layer", "1", "····", "0", "····", "0", "····", "0"]
    assert lines[4].split() == ["kept", "of", "12", "5", "8", "1"]
    vision, text = kept_heads_map(hydra_of(CLIP).config).split("\n\n")
    assert vision.startswith("vision tower\n") and text.startswith("text tower\n")
    assert "layer 2     ■■■■  4   ····  0   ■■■■  4" in text
    results = doctest.testmod(sys.modules[kept_heads_map.__module__])
    assert results.attempted == 4 and results.failed == 0


# Cost


def test_the_cost_table_counts_what_the_models_really_have(hydra):
    backbone = VIT.backbone()
    table = card_cost_table(hydra)
    assert f"| This model | {sum(p.numel() for p in hydra.parameters()):,} |" in table
    single = sum(p.numel() for p in backbone.parameters())
    assert f"| One unpruned model | {single:,} |" in table
    assert f"| 3 unpruned models (Deep Ensemble) | {3 * single:,} |" in table
    # A one-layer BERT of hidden size 32, 4 heads of 8, MLP 40, 16 tokens; the last layer only computes [CLS].
    hydra = BERT.hydra.from_backbone(BERT.backbone(num_hidden_layers=1).float())
    tokens = 16
    hidden = 32
    mlp = 40
    classes = 3
    keys_and_values = 2 * tokens * hidden * hidden
    one_token = 2 * hidden * hidden + 2 * hidden * mlp
    attention = 2 * tokens * hidden
    by_hand = keys_and_values + one_token + attention + hidden * hidden + hidden * classes
    assert f"| {by_hand:,} |" in card_cost_table(hydra).splitlines()[2]


# The card


def test_the_metadata_is_what_the_hub_understands_and_the_text_shows_the_report_the_heads_and_the_cost(hydra, report):
    known = {"base_model": "google/vit-base-patch16-224", "license": "apache-2.0", "fine_tuning": "Not at all."}
    card = create_model_card(hydra, report, repo_id="me/tiny", dataset="cifar100", report_model="Hydra", **known)
    data = ModelCard(str(card)).data
    assert (data.base_model, data.license, data.datasets) == (known["base_model"], "apache-2.0", ["cifar100"])
    assert (data.pipeline_tag, data.library_name) == ("image-classification", "transformers")
    name, results = model_index_to_eval_results(data.to_dict()["model-index"])
    assert name == "tiny"
    found = {(result.metric_type, result.metric_name): result.metric_value for result in results}
    assert found["accuracy", "Accuracy"] == pytest.approx(report.models["Hydra"]["data"]["accuracy"], abs=1e-6)
    expected = report.average("Hydra")["auroc"]
    assert found["auroc", "AUROC (OOD average)"] == pytest.approx(expected, abs=1e-6)
    assert {result.dataset_type for result in results} == {"cifar100"}
    assert eval_results_to_model_index(name, results) == data.to_dict()["model-index"]

    assert kept_heads_map(hydra.config) in card.text and card_cost_table(hydra) in card.text
    for line in report.to_markdown().splitlines():
        shown = f"#{line}" if line.startswith("##") else line
        assert f"\n{shown}\n" in card.text
    assert "Not at all." in card.text and card.text.count(TO_FILL_IN) == 1
    assert create_model_card(hydra).text.count(TO_FILL_IN) == 3  # what is not known
    with pytest.raises(TypeError, match=r"model is a ViTForImageClassification: a card describes a Hydra with a head"):
        create_model_card(VIT.backbone())


ACC = Circuit([(0, 0), (1, 0), (0, 1), (1, 1)], [0.9, 0.8, 0.7, 0.6], dense_score=0.95, objective="acc")
OOD = Circuit([(2, 3), (1, 0), (2, 1), (0, 2)], [0.5, 0.4, 0.3, 0.2], dense_score=0.55, objective="ood")


def test_the_card_tells_how_circuits_chose_the_heads():
    circuits = [replace(each, made_from={"data": {"samples": 12}}) for each in (ACC, OOD)]
    hydra = VIT.hydra.from_pruned_members(draw_members(VIT.backbone().float(), circuits=circuits, budget=3))
    text = create_model_card(hydra, circuits=circuits).text
    objective = "objective: out-of-distribution AUROC, 12 samples"
    line = f"- Member 1: 3 heads removed along a circuit ({objective}), score 0.5500 before and 0.3000 after"
    assert line in text
    assert "sampled from the first part of the ranking of 4" in create_model_card(hydra, circuits=circuits[:1]).text
    with pytest.raises(ValueError, match=r"3 circuits and 2 members"):
        create_model_card(hydra, circuits=[*circuits, circuits[0]])
    with pytest.raises(ValueError, match=r"circuits\[0\] \(objective 'ood'\) is not the one by which member 0 lost"):
        create_model_card(hydra, circuits=circuits[::-1])


def test_the_card_tells_of_heads_that_no_circuit_chose():
    sentence = "Taylor scores on 400 rows: each layer keeps three of four heads."
    text = create_model_card(hydra_of(VIT), pruning=sentence).text
    assert f"### How the heads were chosen\n\n{sentence}\n" in text
    circuits = [replace(each, made_from={}) for each in (ACC, OOD)]
    with pytest.raises(ValueError, match="pruning and circuits are given: leave one of them out"):
        create_model_card(hydra_of(VIT), circuits=circuits, pruning=sentence)


def summary_of(card: ModelCard) -> str:
    return " ".join(card.text.split())


def test_the_card_says_which_auto_class_predicts():
    vit, clip = (create_model_card(hydra_of(family)).text for family in (VIT, CLIP))
    assert (
        "`AutoModelForImageClassification` loads the model that predicts. `AutoModel` loads its encoder alone" in vit
    )
    assert (
        "`AutoModelForZeroShotImageClassification` loads the model that predicts. `AutoModel` loads the same" in clip
    )


def test_the_card_of_several_fine_tuned_models_says_so():
    backbones = [VIT.backbone(seed).float() for seed in range(2)]
    circuits = [replace(each, made_from={"weights": each.objective}) for each in (OOD, ACC)]
    hydra = VIT.hydra.from_pruned_members(draw_members(backbones, circuits=circuits, budget=2))
    text = summary_of(create_model_card(hydra, circuits=circuits, base_model="me/base"))
    link = "[me/base](https://huggingface.co/me/base)"
    assert f"A Hydra Ensemble: 2 fine-tuned versions of {link}, each pruned by its own circuit, in a single" in text
    assert "- Member 1: 2 heads removed along a circuit (objective: accuracy)" in text
    # Without the circuits nothing tells whether they were fine-tuned apart.
    assert "2 members of one backbone, each with other attention heads cut out" in summary_of(create_model_card(hydra))

    whole = create_model_card(VIT.hydra.from_pruned_members(backbones))
    assert "2 fine-tuned versions of one pre-trained model with all their attention heads" in summary_of(whole)
    assert "None was cut out" in whole.text


def test_the_card_of_a_calibrated_model_tells_what_it_decides(hydra):
    calibrated = hydra_of(VIT).eval()
    rows = [{"pixel_values": torch.randn(40, 3, 8, 8), "labels": torch.arange(40) % 5}]
    sentences = calibrated.calibrate(rows, target={"coverage": 0.5}).sentences
    plain = create_model_card(hydra)
    card = create_model_card(calibrated)
    assert "### Decision" not in plain.text
    assert "### Decision\n" in card.text and len(sentences) == 4
    assert "\n".join(f"- {sentence}" for sentence in sentences) in card.text
    with torch.no_grad():
        calibrated.classifier.weight.mul_(2)
    assert sentences[0] not in create_model_card(calibrated).text  # nothing of it holds any more


def test_the_card_tells_of_a_trunk():
    backbone = VIT.backbone().float()
    members = [VIT.hydra.from_backbone(backbone, {2: [head]}) for head in (0, 1)]
    text = create_model_card(VIT.hydra.from_pruned_members(members)).text
    own = "- Own to each member: attention (query, key, value, output), classifier"
    assert f"{own}\n- Trunk: the first 2 layers run once for all members, their attention included\n" in text
    assert "kept of 12  11        11\nthe first 2 layers run once for all members\n```" in text
    assert "Of this model the first 2 layers run once for all members." in text
    none = create_model_card(VIT.hydra.from_pruned_members(members, trunk_layers=0)).text
    assert f"{own}\n\n" in none and "run once" not in none
    towers = [CLIP.hydra.from_backbone(CLIP.backbone().float(), CLIP.in_every_tower({1: [head]})) for head in (0, 1)]
    text = create_model_card(CLIP.hydra.from_pruned_members(towers)).text
    once = "the first layer runs once for all members"
    assert f"- Trunk: in the vision tower {once}; in the text tower {once}" in text


def test_heads_that_a_circuit_did_not_remove_are_not_counted_as_removed_by_it():
    (member,) = draw_members(VIT.backbone().float(), circuits=[ACC], budget=2)
    further = replace(
        OOD, ranking=[(2, 3), (1, 1)], scores=[0.5, 0.4], made_from={"kept_heads": member.config.kept_heads}
    )
    text = create_model_card(*draw_members(member, circuits=[further], budget=1), circuits=[further]).text
    objective = "objective: out-of-distribution AUROC"
    assert f"Member 0: 1 heads removed along a circuit ({objective}), score 0.5500 before and 0.5000 after" in text

    (member,) = draw_members(VIT.backbone().float(), circuit=ACC, budget=1, out_of=4, num_members=1, seed=1)
    assert member.config.kept_heads[0][0] == [0, 1, 2, 3]  # so another head than the first of the circuit went
    assert "sampled from the first part of the ranking of 4" in create_model_card(member, circuits=[ACC]).text


HOSTILE = "<img src=x onerror=alert(1)> [a](javascript:b) | `c` <!-- end -->\n# d\n---\nlicense: e: '\""


def test_names_are_not_markup_in_the_text_nor_in_the_metadata(report):
    results = report.models["Hydra"]
    groups = {"data": ("id", "data", ""), HOSTILE: (HOSTILE, HOSTILE, "")}
    models = {HOSTILE: {"data": results["data"], HOSTILE: results["noise (near)"]}}
    named = replace(report, models=models, groups=groups, num_members={}, curves={}, rows={})
    calibrated = hydra_of(VIT).eval()
    rows = [{"pixel_values": torch.randn(40, 3, 8, 8), "labels": torch.arange(40) % 5}]
    calibrated.calibrate(rows, target={"coverage": 0.5})
    calibrated.decision.settings = replace(calibrated.decision.settings, sentences=(HOSTILE,))
    circuit = replace(ACC, objective="mine", made_from={"metric": HOSTILE})
    license = HOSTILE.partition("\n")[0]
    card = create_model_card(calibrated, named, dataset="d", license=license, circuits=[circuit])
    for markup in ("<img", "[a](", " `c`", "\n# d"):
        assert markup not in card.text, markup
    assert card.text.count("&lt;img src=x") >= 4
    data = ModelCard(str(card)).data
    assert (data.license, data.datasets) == (license, ["d"])
    assert any(HOSTILE in each.metric_name for each in data.eval_results)


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        ({"report": True}, r"dataset is missing: name the report's in-distribution data"),
        ({"report": True, "dataset": "d"}, r"report_model is missing: the report has the models Single, Hydra: name"),
        ({"report": True, "dataset": "d", "report_model": "Deep"}, r"Single, Hydra: name one of them, not 'Deep'"),
        ({"base_model": "./runs/my backbone"}, r"base_model is './runs/my backbone': pass an id of the Hub"),
        ({"dataset": "./data/my reviews"}, r"dataset is './data/my reviews': pass an id of the Hub such as 'uoft-cs/"),
        ({"dataset": "glue:sst2"}, r"dataset is 'glue:sst2': pass an id of the Hub"),
    ],
)
def test_bad_input_gets_one_sentence(hydra, report, arguments, sentence):
    arguments = {**arguments, "report": report if arguments.get("report") else None}
    with pytest.raises(ValueError, match=sentence):
        create_model_card(hydra, **arguments)


# The card's code


@pytest.mark.parametrize("save", [lambda folder: save_image_models(folder)[0], save_text_hydra, save_clip_hydra])
def test_the_code_in_the_card_runs(save, tmp_path, monkeypatch, capsys):
    folder = save(tmp_path)
    hydra = load_trained(folder)
    pictures([0])[0].save(tmp_path / "photo.jpg")
    card = create_model_card(hydra, repo_id="me/tiny")
    (code,) = re.findall(r"```python\n(.*?)```", card.text, flags=re.DOTALL)
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    exec(code.replace('"me/tiny"', repr(str(folder))), names)
    assert torch.allclose(names["total"], names["aleatoric"] + names["epistemic"])
    printed = capsys.readouterr().out
    assert "'epistemic': " in printed and " nats" in printed
    assert ("'prediction_set': None" in printed) == (hydra.decision is None)
