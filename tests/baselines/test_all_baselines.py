"""Every baseline is judged and counted like any other model."""

import copy

import pytest
import torch
from peft import get_peft_model

from hydra_transformers.baselines import DeepEnsemble, LoRAEnsemble, MCDropout, temperature_scaled
from hydra_transformers.cost import compare_costs
from hydra_transformers.reports import cost_table
from hydra_transformers.reports.evaluation import evaluate_uncertainty
from hydra_transformers.training import lora_config
from hydra_transformers.uncertainty import predict_uncertainty
from tests.families import BERT, VIT


# Four samples are few for a temperature and for calibration bins.
pytestmark = [pytest.mark.filterwarnings(f"ignore:.*{words}") for words in ("edge of the search", "calibration bins")]


def lora_ensemble(backbone) -> LoRAEnsemble:
    """Two untrained adapters: two members that answer like the backbone."""
    model = get_peft_model(copy.deepcopy(backbone), lora_config(backbone), adapter_name="first")
    model.add_adapter("second", lora_config(backbone))
    return LoRAEnsemble(model)


@pytest.mark.slow
@pytest.mark.parametrize("family", [VIT, BERT], ids=lambda family: family.name)
def test_each_is_evaluated_with_its_members_and_its_cost(family):
    backbone = family.backbone().float()
    inputs = {name: value.float() if value.is_floating_point() else value for name, value in family.inputs().items()}
    data = [inputs | {"labels": torch.tensor([0, 1, 2, 0])}]
    models = {
        "Single": backbone,
        "Deep Ensemble": DeepEnsemble([backbone, family.backbone(1).float()]),
        "MC Dropout": MCDropout(backbone, num_samples=3, p=0.2, seed=0),
        "LoRA Ensemble": lora_ensemble(backbone),
        "Temperature": temperature_scaled(backbone, data),
        "Temperature of an ensemble": temperature_scaled(DeepEnsemble([backbone, family.backbone(1).float()]), data),
    }
    report = evaluate_uncertainty(models, data, ood_data={"far": {"same": data}})
    assert [result.num_members for result in report.models.values()] == [1, 2, 3, 2, 1, 2]
    single, lora = report.models["Single"].id, report.models["LoRA Ensemble"].id
    assert lora["nll"] == pytest.approx(single["nll"], rel=1e-5)
    assert lora["mutual_information"] == pytest.approx(0, abs=1e-6)
    assert report.models["Temperature"].id["nll"] <= single["nll"] + 1e-6
    for name in ("Deep Ensemble", "MC Dropout"):
        assert report.models[name].id["mutual_information"] > 1e-3
    for model in models.values():
        assert predict_uncertainty(model, data).total.shape == (4,)
    costs = compare_costs(models, batch_sizes=[2], seconds=0)
    single = costs["Single"].multiply_adds
    ratios = {name: cost.multiply_adds / single for name, cost in costs.items()}
    assert (ratios["Deep Ensemble"], ratios["MC Dropout"], ratios["Temperature"]) == (2, 3, 1)
    assert 2 < ratios["LoRA Ensemble"] < 3  # untrained adapters of rank 8 weigh something in a model this small
    assert costs["Temperature"].parameters == costs["MC Dropout"].parameters == costs["Single"].parameters
    assert all(cost.milliseconds[2] > 0 for cost in costs.values())
    assert len(cost_table(costs).markdown().splitlines()) == 2 + len(models)
    for name, model in models.items():
        assert compare_costs({name: model})[name].multiply_adds > 0
