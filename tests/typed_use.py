"""Uses the public names as README.md does. Never run: `make quality` type-checks it, as the code of a user would be."""

import torch
from PIL.Image import Image
from transformers import PreTrainedModel, ViTConfig, ViTForImageClassification, ViTImageProcessorPil

from hydra_transformers import (
    AutoHydra,
    HydraViTForImageClassification,
    calibrate,
    compare_fusions,
    evaluate_uncertainty,
    export,
    load_data,
    predict_uncertainty,
    prune_heads,
)
from hydra_transformers.hub import create_model_card, push_hydra_to_hub
from hydra_transformers.pruning import draw_members, extract_circuit, head_scores, lowest_heads, to_transformers
from hydra_transformers.training import HydraTrainer, HydraTrainingArguments, finetune, finetune_members, recipe
from hydra_transformers.uncertainty import Detector, classification_metrics, decompose


Batches = list[dict[str, torch.Tensor]]


def fuse(backbone: ViTForImageClassification) -> float:
    members = [AutoHydra.from_backbone(backbone, {0: [head], 1: [head]}) for head in range(3)]
    hydra = AutoHydra.from_pruned_members(members, trunk_layers=0.75).eval()
    outputs = hydra(pixel_values=torch.randn(5, 3, 16, 16))
    count: int = hydra.num_members
    one: PreTrainedModel = hydra.member(count - 1)
    print(one.config, hydra.config.hidden_size, outputs.logits.shape)
    return decompose(outputs.member_logits).epistemic.max().item()


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
    print(report.to_markdown(), compare_fusions([backbone, "another"], rows).best.build())
    create_model_card(hydra, report, dataset="cifar100", report_model="hydra", license="apache-2.0").save("README.md")
    push_hydra_to_hub(hydra, "me/my-hydra", report=report, report_model="hydra", dataset="cifar100")


def train(rows: Batches, images: list[Image]) -> HydraViTForImageClassification:
    hydra = AutoHydra.from_backbone("facebook/dinov2-small", num_members=3, class_names=["cat", "dog"])
    arguments = HydraTrainingArguments("run", learning_rate=2.5e-5, layer_decay=0.9, mixing=0.5)
    HydraTrainer(hydra, arguments, train_dataset=rows, eval_dataset=rows).train()
    hydra.calibrate(rows)
    fine_tunings = finetune_members([ViTForImageClassification(ViTConfig())], recipe("cifar100"), rows, rows, "tuned")
    again = AutoHydra.from_pruned_members(fine_tunings)
    finetune("facebook/dinov2-small", "cifar100", "hydra").model.calibrate(rows)
    print(again, hydra.predict(images))
    return HydraViTForImageClassification.from_pretrained("my-hydra")


def prune(model: ViTForImageClassification, rows: Batches) -> PreTrainedModel:
    scores = head_scores(model, rows, "taylor")
    circuit = extract_circuit(model, rows, budget=4)
    print(circuit.ranking, draw_members(model, circuit=circuit, budget=2))
    return to_transformers(prune_heads(model, lowest_heads(scores, budget=4)))


def detect(model: PreTrainedModel, rows: Batches, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    prepared = load_data("cifar100", model, part="test", limit=100)
    print(len(prepared), predict_uncertainty(model, rows), export(model, "exported", to=["onnx", "torch"]))
    evaluate_uncertainty(model, rows, score=Detector("mahalanobis").fit(model, rows))
    best: float = classification_metrics(logits, labels)["accuracy"]
    return decompose(logits).total * best
