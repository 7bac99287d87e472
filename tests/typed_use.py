"""Uses the public names as README.md does. Never run: `make quality` type-checks it, as the code of a user would be."""

from pathlib import Path

import torch
from PIL.Image import Image
from transformers import PreTrainedModel, ViTConfig, ViTForImageClassification, ViTImageProcessorPil

from hydra_transformers import (
    AutoHydra,
    HydraViTForImageClassification,
    calibrate,
    export,
    fusion_report,
    hydrate,
    load_data,
    predict_uncertainty,
    prune_heads,
)
from hydra_transformers.baselines import DeepEnsemble, average_members, soup
from hydra_transformers.hub import create_model_card, push_hydra_to_hub
from hydra_transformers.pruning import extract_circuit, head_scores
from hydra_transformers.serving import HydraPredictor, predict_data
from hydra_transformers.training import finetune_from_pretrained, hydra_from_pretrained, tune_jointly
from hydra_transformers.uncertainty import (
    Detector,
    TemperatureScaling,
    decompose,
    detector_by_name,
    evaluate_uncertainty,
)


Batches = list[dict[str, torch.Tensor]]


def fuse(backbone: ViTForImageClassification) -> float:
    members = [AutoHydra.from_backbone(backbone, {0: [head], 1: [head]}) for head in range(3)]
    hydra = AutoHydra.from_pruned_members(members, trunk_layers=0.75).eval()
    outputs = hydra(pixel_values=torch.randn(5, 3, 16, 16))
    count: int = hydra.num_members
    one: PreTrainedModel = hydra.member(count - 1)
    print(one.config, hydra.config.hidden_size, outputs.logits.shape)
    return decompose(outputs.member_logits).epistemic.max().item()


def fuse_folders(folders: list[str | Path]) -> PreTrainedModel:
    return AutoHydra.from_pruned_members(["my-vit-seed-0", *folders])


def say_i_do_not_know(images: list[Image], held_out: Batches, processor: ViTImageProcessorPil) -> list[str]:
    hydra = AutoHydra.from_pretrained("my-hydra")
    fitted = hydra.calibrate(held_out, target={"risk": 0.05}, confidence=0.95)
    print(fitted)
    with hydra.uncalibrated():
        print(hydra.is_calibrated)
    answers = hydra.predict(images, processor, batch_size=8)
    hydra.save_pretrained("my-hydra")
    return [answer["label"] for answer in answers if not answer["abstain"]]


def calibrate_any_classifier(model: ViTForImageClassification, held_out: Batches) -> str:
    return str(calibrate(model, held_out, target={"coverage": 0.9}, detector="msp"))


def evaluate_and_share(backbone: PreTrainedModel, hydra: PreTrainedModel, rows: Batches, far: Batches) -> None:
    report = evaluate_uncertainty({"single": backbone, "hydra": hydra}, rows, ood_data={"far": {"textures": far}})
    report.to_html("report.html")
    print(report.to_markdown(), fusion_report([backbone, "another"], rows))
    create_model_card(hydra, report, dataset="cifar100", report_model="hydra", license="apache-2.0").save("README.md")
    push_hydra_to_hub(hydra, "me/my-hydra", report=report, report_model="hydra", dataset="cifar100")


def train(rows: Batches) -> HydraViTForImageClassification:
    fine_tunings = finetune_from_pretrained("facebook/dinov2-small", 6, train_data=rows, output_dir="fine-tuned")
    hydra = AutoHydra.from_pruned_members(average_members(fine_tunings, into=3))
    tune_jointly(hydra, train_data=rows, teacher=DeepEnsemble(fine_tunings))
    hydra_from_pretrained(ViTForImageClassification(ViTConfig()), train_data=rows, trainings=6)
    chosen = hydrate(fine_tunings, data=rows, target={"cost": 1.3}, output_dir="my-hydra")
    print(chosen, soup(fine_tunings))
    return HydraViTForImageClassification.from_pretrained("my-hydra")


def prune(model: ViTForImageClassification, rows: Batches) -> PreTrainedModel:
    scores = head_scores(model, rows, "taylor")
    print(min(scores.values()), extract_circuit(model, rows, budget=4).ranking)
    return prune_heads(model, {0: [1]})


def detect(model: PreTrainedModel, rows: Batches, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    prepared = load_data("cifar100", model, part="test", limit=100)
    print(len(prepared), predict_uncertainty(model, rows), TemperatureScaling.fit(logits, labels).temperature)
    detector: Detector = detector_by_name("mahalanobis").fit(model, rows)
    print(detector.name)
    return decompose(logits).total


def use_elsewhere(model: PreTrainedModel) -> Path:
    predictor = HydraPredictor("my-hydra")
    print(predictor({"text": ["one", "two"]}), predict_data("my-hydra", "rows.csv", "answers.parquet"))
    return export(model, "exported", to=["onnx", "torch"])
