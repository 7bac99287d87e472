"""The life of an ensemble on a device, step by step, held against the CPU: what `scripts/gpu_check.py` runs for each model family.

    python scripts/device_checks.py vit eager cuda

Arguments: a family of tests/families.py; eager or compiled (every model is compiled in place); the device. Prints a line of JSON for
each step.
"""

import json
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel


sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from hydra_transformers.pruning import extract_circuit
from tests.families import FAMILIES, Family


MARK = "CHECK "  # before the JSON: there may be other output


class Life:
    """One Hydra of three prunings of one backbone."""

    def __init__(self, family: Family, mode: str, device: str):
        self.family = family
        self.mode = mode
        self.device = device

    def fuse(self) -> Tensor:
        """The logits."""
        backbone = self.backbone()
        members = [self.family.hydra.from_backbone(backbone, heads) for heads in self.family.heads_to_prune]
        self.hydra = self.prepared(self.family.hydra.from_pruned_members(members).eval())
        return self.logits(self.hydra)

    def gradients(self) -> dict[str, Tensor]:
        self.hydra.zero_grad()
        self.hydra(**self.training_batch()).loss.backward()
        gradients = {name: parameter.grad for name, parameter in self.hydra.named_parameters()}
        return {name: gradient.clone() for name, gradient in gradients.items() if gradient is not None}

    def circuit(self) -> tuple[list, Tensor]:
        rows, others, prompts = self.circuit_data()
        options = {"class_prompts": prompts} if prompts else {}
        circuit = extract_circuit(self.backbone(), rows, others, "avg", budget=4, **options)
        return circuit.ranking, torch.tensor(circuit.scores, dtype=torch.float64)

    def backbone(self) -> PreTrainedModel:
        return self.prepared(self.family.backbone(0).to(self.device).eval())

    def prepared(self, model: PreTrainedModel) -> PreTrainedModel:
        if self.mode == "compiled":
            # On a CPU the compiler of C++ would take minutes; all that comes before it runs.
            model.compile(backend="aot_eager" if self.device == "cpu" else "inductor")
        return model

    def inputs(self) -> dict[str, Tensor]:
        return {name: tensor.to(self.device) for name, tensor in self.family.inputs().items()}

    def logits(self, model: PreTrainedModel) -> Tensor:
        with torch.no_grad():
            return self.family.ensemble_logits(model(**self.inputs()))

    def training_batch(self) -> dict[str, Any]:
        """The inputs, with labels where the model takes them; a model of pairs is its own teacher."""
        inputs = self.inputs()
        if self.reads_pairs():
            fewest = min(len(tensor) for tensor in inputs.values())
            return {name: tensor[:fewest] for name, tensor in inputs.items()} | {"return_loss": True}
        rows = len(next(iter(inputs.values())))
        return inputs | {"labels": torch.arange(rows, device=self.device) % self.hydra.config.num_labels}

    def circuit_data(self) -> tuple[list[dict], list[dict], dict]:
        """Batches in and out of distribution on the CPU, and for pairs the prompts of the classes."""
        inputs = self.family.inputs()
        backbone = self.family.backbone(0)
        prompts = {}
        if self.reads_pairs():
            prompts = {name: inputs.pop(name) for name in list(inputs) if name != "pixel_values"}
        generator = torch.Generator().manual_seed(0)
        rows, others = ([more_rows(inputs, generator) for _ in range(2)] for _ in range(2))
        for batch in rows:
            with torch.no_grad():
                logits = self.family.logits(backbone, **batch, **prompts)
            is_wrong = torch.rand(len(logits), generator=generator) < 0.2
            batch["labels"] = (logits.argmax(-1) + is_wrong) % logits.shape[-1]
        return rows, others, prompts

    def reads_pairs(self) -> bool:
        """Whether the model takes images and texts."""
        return {"pixel_values", "input_ids"} <= self.family.inputs().keys()


def more_rows(inputs: dict[str, Tensor], generator: torch.Generator, count: int = 16) -> dict[str, Tensor]:
    """Random rows like those of `inputs`."""
    chosen = torch.randint(len(next(iter(inputs.values()))), (count,), generator=generator)
    rows = {}
    for name, tensor in inputs.items():
        if tensor.is_floating_point():
            rows[name] = torch.randn(count, *tensor.shape[1:], generator=generator, dtype=tensor.dtype)
        elif name == "input_ids":
            known = tensor.unique()
            rows[name] = known[torch.randint(len(known), (count, tensor.shape[1]), generator=generator)]
        else:
            rows[name] = tensor[chosen]
    return rows


class Checks:
    """The steps on a device; a step that needs what an earlier one failed to make fails, too."""

    def __init__(self, family: Family, mode: str, device: str):
        self.life = Life(family, mode, device)
        self.reference = Life(family, "eager", "cpu")

    def fuse(self) -> None:
        self.close(self.life.fuse(), self.reference.fuse())
        elsewhere = [name for name, tensor in self.life.hydra.state_dict().items() if not self.is_there(tensor)]
        assert not elsewhere, f"{len(elsewhere)} tensors are not on {self.life.device}, {elsewhere[0]} for one"

    def finetune(self) -> None:
        """Gradients as on the CPU; then a few steps, which lower the loss."""
        found = self.life.gradients()
        expected = self.reference.gradients()
        assert found.keys() == expected.keys()
        for name, gradient in found.items():
            # of families whose backbones round to float32 on the way
            self.close(gradient, expected[name], self.life.family.gradient_tolerance)
        hydra = self.life.hydra
        batch = self.life.training_batch()
        before = hydra(**batch).loss.item()
        optimizer = torch.optim.SGD(hydra.parameters(), lr=1e-2)
        hydra.train()
        for _ in range(5):
            optimizer.zero_grad()
            hydra(**batch).loss.backward()
            optimizer.step()
        after = hydra.eval()(**batch).loss.item()
        assert after < before, f"the loss was {before} before training and is {after}"

    def save_and_load(self) -> None:
        """What was loaded answers as what was saved."""
        with tempfile.TemporaryDirectory() as folder:
            self.life.hydra.save_pretrained(folder)
            loaded = type(self.life.hydra).from_pretrained(folder).to(self.life.device).eval()
        self.close(self.life.logits(self.life.prepared(loaded)), self.life.logits(self.life.hydra))

    def circuit(self) -> None:
        (ranking, scores), (expected, expected_scores) = self.life.circuit(), self.reference.circuit()
        assert ranking == expected, f"the ranking is {ranking}, on the CPU {expected}"
        torch.testing.assert_close(scores, expected_scores, atol=1e-8, rtol=1e-6)

    def is_there(self, tensor: Tensor) -> bool:
        return tensor.device.type == torch.device(self.life.device).type

    def close(self, found: Tensor, expected: Tensor, tolerance: float = 0.0) -> None:
        assert self.is_there(found), f"the result is on {found.device}"
        limits = {"atol": max(1e-8, tolerance), "rtol": 1e-6}
        torch.testing.assert_close(found.cpu(), expected.cpu(), **limits, check_dtype=False)

    def run(self) -> None:
        for step in (self.fuse, self.finetune, self.save_and_load, self.circuit):
            start = time.perf_counter()
            error = ""
            try:
                step()
            except Exception:
                error = traceback.format_exc()
            name = f"{self.life.family.name}, {self.life.mode}: {step.__name__.replace('_', ' ')}"
            line = {"status": "failed" if error else "ok", "name": name, "error": error}
            print(f"{MARK}{json.dumps(line | {'seconds': time.perf_counter() - start})}", flush=True)


if __name__ == "__main__":
    chosen, mode, device = sys.argv[1:]
    Checks(next(family for family in FAMILIES if family.name == chosen), mode, device).run()
