"""The life of an ensemble on a device, step by step: what `scripts/gpu_check.py` runs for each model family.

    python scripts/device_checks.py vit compiled default cuda

Arguments: a family of tests/families.py; eager or compiled (every model is compiled in place); "on", or "default" for a
device that is torch's default one; the device. On a CPU the default device is "meta", where nothing can be computed: what
makes a tensor without saying where then fails there too. Prints a line of JSON for each step.
"""

import importlib.util
import json
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel


sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from hydra_transformers.pruning import extract_circuit
from tests.families import FAMILIES, Family


MARK = "CHECK "  # before the JSON: there may be other output
STEPS = ("fuse", "fine-tune", "save", "load", "circuit")


class NeedsPackage(Exception):
    """What is checked cannot be done without a package: (name, what was done instead)."""


class NotMade(Exception):
    """An earlier step failed to make what this one needs."""


@dataclass
class Checks:
    """The life of an ensemble on a device: each step prints its line, and is held against the same step on the CPU.

    The reference is computed before the device becomes the default one.
    """

    family: Family
    mode: str
    device: str
    is_default: bool
    made: dict[str, Any] = field(default_factory=dict)

    def run(self) -> None:
        reference = Checks(self.family, "eager", "cpu", False)
        self.expected = {}
        for step in ("fuse", "gradients", "circuit"):
            self.expected[step] = getattr(reference, f"_{step}")()
        if self.is_default:
            torch.set_default_device(self._default())
        try:
            for step in STEPS:
                self._report(step)
        finally:
            torch.set_default_device(None)

    def _report(self, step: str) -> None:
        placement = f"default device {self._default()}" if self.is_default else f"on {self.device}"
        name = f"{self.family.name}, {self.mode}, {placement}: {step}"
        line = {"status": "ok", "name": name, "remark": "", "error": ""}
        start = time.perf_counter()
        try:
            getattr(self, step.replace("-", "_"))()
        except NeedsPackage as missing:
            line |= {"status": f"needs {missing.args[0]}", "remark": missing.args[1]}
        except NotMade as error:
            line |= {"status": "failed", "error": str(error)}
        except Exception:
            line |= {"status": "failed", "error": traceback.format_exc()}
        line["seconds"] = time.perf_counter() - start
        print(f"{MARK}{json.dumps(line)}", flush=True)

    # Steps

    def fuse(self) -> None:
        self._assert_close(self._fuse(), self.expected["fuse"])

    def fine_tune(self) -> None:
        """Gradients as on the CPU; then a few steps, which lower the loss."""
        gradients = self._gradients()
        assert gradients.keys() == self.expected["gradients"].keys()
        for name, gradient in gradients.items():
            self._assert_close(gradient, self.expected["gradients"][name], self.family.gradient_tolerance)
        hydra, batch = self._made("hydra"), self._training_batch()
        before = hydra(**batch).loss.item()
        optimizer = torch.optim.SGD(hydra.parameters(), lr=1e-2)
        hydra.train()
        for _ in range(5):
            optimizer.zero_grad()
            hydra(**batch).loss.backward()
            optimizer.step()
        after = hydra.eval()(**batch).loss.item()
        assert after < before, f"the loss was {before} before training and is {after}"

    def save(self) -> None:
        hydra, folder = self._made("hydra"), tempfile.TemporaryDirectory()
        hydra.save_pretrained(folder.name)
        self.made["folder"] = folder

    def load(self) -> None:
        """What was loaded answers as what was saved."""
        hydra, folder = self._made("hydra"), self._made("folder").name
        # Transformers loads onto a default device only with accelerate, and never onto "meta".
        is_loaded_there = self.is_default and self._default() != "meta"
        lacks_accelerate = is_loaded_there and importlib.util.find_spec("accelerate") is None
        is_moved = lacks_accelerate or not is_loaded_there
        default = torch.get_default_device()
        torch.set_default_device(None if is_moved else default)
        try:
            loaded = type(hydra).from_pretrained(folder)
        finally:
            torch.set_default_device(default if self.is_default else None)
        loaded = self._prepared((loaded.to(self.device) if is_moved else loaded).eval())
        self._assert_on_device(loaded)
        self._assert_close(self._logits(loaded), self._logits(hydra))
        if lacks_accelerate:
            raise NeedsPackage("accelerate", "loaded without a default device and moved instead, ok")

    def circuit(self) -> None:
        ranking, scores = self._circuit()
        expected_ranking, expected_scores = self.expected["circuit"]
        assert ranking == expected_ranking, f"the ranking is {ranking}, on the CPU {expected_ranking}"
        self._assert_close(scores, expected_scores)

    # What steps are made of

    def _fuse(self) -> Tensor:
        """The logits of a Hydra of three prunings of one backbone."""
        backbone = self._backbone()
        members = [self.family.hydra.from_backbone(backbone, heads) for heads in self.family.heads_to_prune]
        hydra = self._prepared(self.family.hydra.from_pruned_members(members).eval())
        self._assert_on_device(hydra)
        self.made["hydra"] = hydra
        return self._logits(hydra)

    def _gradients(self) -> dict[str, Tensor]:
        hydra = self._made("hydra")
        hydra.zero_grad()
        hydra(**self._training_batch()).loss.backward()
        gradients = {name: parameter.grad for name, parameter in hydra.named_parameters()}
        return {name: gradient.clone() for name, gradient in gradients.items() if gradient is not None}

    def _circuit(self) -> tuple[list[list], Tensor]:
        rows, others, prompts = self._circuit_data()
        options = {"class_prompts": prompts} if prompts else {}
        backbone = self._backbone()
        circuit = extract_circuit(backbone, rows, others, "avg", budget=4, **options)
        return [list(head) for head in circuit.ranking], self._tensor(circuit.scores)

    def _backbone(self) -> PreTrainedModel:
        with torch.device("cpu"):  # its weights are drawn there
            backbone = self.family.backbone(0)
        return self._prepared(backbone.to(self.device).eval())

    def _default(self) -> str:
        return "meta" if self.device == "cpu" else self.device

    def _prepared(self, model: PreTrainedModel) -> PreTrainedModel:
        if self.mode == "compiled":
            # On a CPU the compiler of C++ would take minutes; all that comes before it runs.
            model.compile(backend="aot_eager" if self.device == "cpu" else "inductor")
        return model

    def _inputs(self) -> dict[str, Tensor]:
        with torch.device("cpu"):
            inputs = self.family.inputs()
        return {name: tensor.to(self.device) for name, tensor in inputs.items()}

    def _logits(self, model: PreTrainedModel) -> Tensor:
        with torch.no_grad():
            return self.family.ensemble_logits(model(**self._inputs()))

    def _training_batch(self) -> dict[str, Any]:
        """The inputs, with labels where the model takes them; a model of pairs is its own teacher."""
        inputs = self._inputs()
        if self._is_of_pairs():
            fewest = min(len(tensor) for tensor in inputs.values())
            return {name: tensor[:fewest] for name, tensor in inputs.items()} | {"return_loss": True}
        batch = len(next(iter(inputs.values())))
        return inputs | {"labels": torch.arange(batch, device=self.device) % self._made("hydra").config.num_labels}

    def _circuit_data(self) -> tuple[list[dict], list[dict], dict]:
        """Batches in and out of distribution, as a loader would give them, and for pairs the prompts of the classes."""
        with torch.device("cpu"), torch.no_grad():
            given, backbone, prompts = self.family.inputs(), self.family.backbone(0), {}
            if self._is_of_pairs():
                prompts = {name: given.pop(name) for name in list(given) if name != "pixel_values"}
            generator = torch.Generator().manual_seed(0)
            rows, others = ([more_rows(given, generator) for _ in range(2)] for _ in range(2))
            for batch in rows:
                logits = self.family.logits(backbone, **batch, **prompts)
                is_wrong = torch.rand(len(logits), generator=generator) < 0.2
                batch["labels"] = (logits.argmax(-1) + is_wrong) % logits.shape[-1]
        return rows, others, prompts

    def _is_of_pairs(self) -> bool:
        """Whether the model takes images and texts."""
        return {"pixel_values", "input_ids"} <= self._inputs().keys()

    def _made(self, name: str) -> Any:
        if name not in self.made:
            raise NotMade(f"an earlier step made no {name}")
        return self.made[name]

    def _tensor(self, numbers: list[float]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.float64, device=self.device)

    def _assert_on_device(self, model: PreTrainedModel) -> None:
        wanted = torch.device(self.device).type
        elsewhere = [name for name, tensor in model.state_dict().items() if tensor.device.type != wanted]
        assert not elsewhere, f"{len(elsewhere)} tensors are not on {wanted}, {elsewhere[0]} for one"

    def _assert_close(self, found: Tensor, expected: Tensor, tolerance: float = 0.0) -> None:
        """tolerance: of families whose backbones round to float32 on the way"""
        assert found.device.type == torch.device(self.device).type, f"the result is on {found.device}"
        torch.testing.assert_close(
            found.cpu(), expected.cpu(), atol=max(1e-8, tolerance), rtol=1e-6, check_dtype=False
        )


def more_rows(given: dict[str, Tensor], generator: torch.Generator, count: int = 16) -> dict[str, Tensor]:
    """Random rows of the kind of those given."""
    chosen, rows = torch.randint(len(next(iter(given.values()))), (count,), generator=generator), {}
    for name, tensor in given.items():
        if tensor.is_floating_point():
            rows[name] = torch.randn(count, *tensor.shape[1:], generator=generator, dtype=tensor.dtype)
        elif name == "input_ids":
            known = tensor.unique()
            rows[name] = known[torch.randint(len(known), (count, tensor.shape[1]), generator=generator)]
        else:
            rows[name] = tensor[chosen]
    return rows


def main() -> None:
    name, mode, placement, device = sys.argv[1:]
    family = next(family for family in FAMILIES if family.name == name)
    Checks(family, mode, device, is_default=placement == "default").run()


if __name__ == "__main__":
    main()
