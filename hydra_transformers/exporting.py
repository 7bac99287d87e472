"""Exports Hydras to formats that run without this package and without Transformers.

These are ONNX, and torch.export's archive.
"""

import logging
import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from transformers import PreTrainedModel

from ._io.access import first_line
from ._io.files import written_whole
from ._io.progress import timed_step
from .data.batches import AUDIO_INPUTS
from .data.prediction import accepted_inputs
from .fusion.probe import example_inputs
from .models.configuration_hydra import OUTPUTS_OF_HYDRAS, saved_with
from .models.decision_settings import typed_settings
from .models.inputs import evaluation_mode


FILES = {"onnx": "model.onnx", "torch": "model.pt2"}
ONNX_PACKAGES = ("onnx", "onnxruntime", "onnxscript")
TALKATIVE = ("torch.onnx", "onnxscript", "onnx_ir")  # they log every operation that they leave as it is
# Batch, and share of the longest text: the graph is recorded with one, and checked with the other.
RECORDED = (2, 0.5)
CHECKED = (3, 0.75)
# How far an exported model's outputs may be off, relative to the largest number in each.
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 1e-1}


class ExportError(RuntimeError):
    """A format cannot hold the model, or its outputs differ from the model's."""


def export(
    model: PreTrainedModel, path: str | os.PathLike, to: str | Sequence[str] = "onnx", processor: Any = None
) -> Path:
    """Export a Hydra for batches of every size and texts of every length.

    The inputs have the names of the model's own; a Hydra that was calibrated by a column also has
    `group` (batch,), the place of each row's group in `decision.by_group.names` of config.json, -1
    for another, which is not answered. The outputs are `logits` (batch, classes) and
    `member_logits` (batch, members, classes), for two towers (images, texts) and (images, members,
    texts); for a calibrated Hydra also `detector_score`, `abstain`, `prediction_set` and
    `interval`, as far as it was calibrated for them. The exported model is compared with the model
    on a batch of another size; if their outputs differ, nothing is written.

    Args:
        model (`PreTrainedModel`): a Hydra with a head, or a Hydra of CLIP or SigLIP; it is left as
            it is.
        path (`str` or `os.PathLike`): a new folder. It gets `model.onnx` or `model.pt2`,
            config.json, and the processor's files.
        to (`str` or `list[str]`, defaults to `"onnx"`): "onnx", "torch" (for `torch.export.load`),
            or a list of both.
        processor (*optional*): the model's processor: written beside it, and asked for the names
            and sizes of its inputs.

    Returns:
        The folder.

    Example:

        export(hydra, "my-onnx", "onnx", processor)
    """
    formats = [to] if isinstance(to, str) else list(to)
    path = Path(path)
    _check(model, path, formats)

    # Recording a graph does not notice a calibration for other weights: leave it out.
    hydra: Any = model
    without_old_decision = nullcontext()
    if hydra.decision is not None and not hydra.decision.compare(hydra):
        without_old_decision = hydra.uncalibrated()
    with evaluation_mode(model), without_old_decision, torch.no_grad(), _quiet():
        exportable = Exportable(model, processor)
        with timed_step("graph recorded"):
            program = exportable.program()
        with written_whole(path) as folder:
            for name in formats:
                file = folder / FILES[name]
                with timed_step(f"{name} written"):
                    WRITERS[name](program, file, exportable)
                with timed_step(f"{name} checked"):
                    _check_outputs(exportable, RUNNERS[name](file), name)
            with saved_with(model.config, exportable.for_any_client):
                model.config.to_json_file(folder / "config.json", use_diff=False)  # with all names of classes
            if processor is not None:
                processor.save_pretrained(folder)
    return path


def _check(model: PreTrainedModel, path: Path, formats: list[str]) -> None:
    """Raise, before any work, for arguments that cannot lead to an export."""
    unknown = [name for name in formats if name not in FILES]
    if unknown or not formats:
        raise ValueError(f"to is {(unknown or formats)[:1]}: pass one or more of {', '.join(FILES)}")

    # By name: the class may have come with a repository.
    classes = getattr(getattr(model, "config", None), "auto_classes", {})
    heads = [name.rpartition(".")[2] for auto, name in classes.items() if auto not in ("AutoConfig", "AutoModel")]
    if type(model).__name__ not in heads:
        raise TypeError(f"model is a {type(model).__name__}: pass a Hydra that classifies, or one of CLIP or SigLIP")
    if "onnx" in formats and model.dtype == torch.bfloat16:
        raise ValueError("model is in bfloat16, which ONNX Runtime does not compute with on a CPU: pass model.float()")

    missing = [package for package in ONNX_PACKAGES if find_spec(package) is None]
    if "onnx" in formats and missing:
        raise ImportError(f"to={formats} needs {missing[0]}: pip install {' '.join(ONNX_PACKAGES)}")
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise FileExistsError(f"{path} exists already: pass another path, or remove it")


class Exportable(nn.Module):
    """A Hydra that takes tensors and returns a dict of tensors."""

    def __init__(self, model: PreTrainedModel, processor: Any = None):
        super().__init__()
        self.model = model
        self.processor = processor
        self.for_any_client: dict[str, Any] = {}
        decision: Any = model.decision
        if decision is not None:
            self.for_any_client = typed_settings(decision.settings).fields_for_any_client()
        self.names = list(self.example(*RECORDED))

    def forward(
        self,
        pixel_values: Tensor | None = None,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        input_values: Tensor | None = None,
        input_features: Tensor | None = None,
        group: Tensor | None = None,
    ) -> dict[str, Tensor]:
        inputs = {
            "pixel_values": pixel_values,
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "token_type_ids": token_type_ids,
            "input_values": input_values,
            "input_features": input_features,
            "group": group,
        }
        outputs = self.model(**{name: inputs[name] for name in self.names})
        if "logits" in outputs:
            logits = outputs["logits"]
        else:
            logits = outputs["logits_per_image"]
        return {"logits": logits} | {name: outputs[name] for name in OUTPUTS_OF_HYDRAS if name in outputs}

    def example(self, batch: int, length: float) -> dict[str, Tensor]:
        """Return inputs for `forward`; `length` is the share of the longest text."""
        inputs = inputs_of(self.model, self.processor, batch, length)
        decision: Any = self.model.decision
        if decision is not None and getattr(decision.settings, "by_group", None) is not None:
            # From an unknown one on, so that all that it does is recorded.
            places = torch.arange(batch, device=self.model.device)
            inputs["group"] = places % (len(decision.settings.by_group.names) + 1) - 1
        return inputs

    def program(self) -> ExportedProgram:
        """Record the graph, for any sizes along the axes that may have any."""
        inputs = self.example(*RECORDED)
        sizes = {}
        for name, tensor in inputs.items():
            sizes[name] = dict.fromkeys(free_axes(name, tensor.dim()), Dim.DYNAMIC)
        try:
            return torch.export.export(self, (), inputs, dynamic_shapes=sizes)
        except Exception as error:  # of any kind
            raise ExportError(f"torch.export fails on {type(self.model).__name__}: {first_line(error)}") from error


def inputs_of(model: PreTrainedModel, processor: Any, batch: int, length: float) -> dict[str, Tensor]:
    """Return random inputs with the names that the processor uses.

    Texts have `length` of the most tokens, and are padded.
    """
    generator = torch.Generator().manual_seed(0)
    inputs = {}
    for name, tensor in example_inputs(model.config, batch).items():
        if name == "input_values" and tensor.dim() == 2:
            inputs |= _raw_audio(tensor, processor, length, generator, model.dtype)
            continue

        # Images and spectrograms.
        if tensor.is_floating_point():
            shape = tensor.shape
            if name == "pixel_values":
                shape = _shape_of_images(processor, tensor)
            inputs[name] = torch.randn(shape, generator=generator).to(model.dtype)
            continue

        # Tokens; the first text is half as long as the others.
        text = getattr(model.config, "text_config", model.config)
        tokens = max(2, int(tensor.shape[1] * length))
        token_ids = torch.randint(1, text.vocab_size, (batch, tokens), generator=generator)
        token_ids[0, tokens // 2 :] = getattr(text, "pad_token_id", None) or 0
        mask = torch.ones_like(token_ids)
        mask[0, tokens // 2 :] = 0
        inputs[name] = token_ids
        inputs["attention_mask"] = mask
        tokenizer = getattr(processor, "tokenizer", processor)
        if "token_type_ids" in getattr(tokenizer, "model_input_names", ()):
            inputs["token_type_ids"] = torch.zeros_like(mask)
    return {name: tensor.to(model.device) for name, tensor in accepted_inputs(model, inputs).items()}


def _raw_audio(
    like: Tensor, processor: Any, length: float, generator: torch.Generator, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Return waveforms with `length` of the samples of `like`.

    Where the processor makes a mask, the first is half as long.
    """
    batch = like.shape[0]
    samples = int(like.shape[1] * length)
    waveforms = torch.randn(batch, samples, generator=generator).to(dtype)
    if not getattr(processor, "return_attention_mask", False):
        return {"input_values": waveforms}
    mask = torch.ones(batch, samples, dtype=torch.long)
    mask[0, samples // 2 :] = 0
    return {"input_values": waveforms * mask, "attention_mask": mask}


def _shape_of_images(processor: Any, expected: Tensor) -> torch.Size:
    """Return the shape of the processor's images.

    It may differ from the config's: DINOv2 was pre-trained with larger ones.
    """
    reader = getattr(processor, "image_processor", processor)
    if reader is None:
        return expected.shape
    batch, channels, height, width = expected.shape
    image = np.zeros((height, width, channels), dtype=np.uint8)
    pixel_values = reader(images=image, return_tensors="pt")["pixel_values"]
    return torch.Size([batch, *pixel_values.shape[1:]])


def free_axes(name: str, dims: int) -> tuple[int, ...]:
    """Return the axes of an input, which has `dims` of them, that may have any size."""
    # A spectrogram has as many frames as the model has positions.
    is_spectrogram = name in AUDIO_INPUTS and dims == 3
    if name in ("pixel_values", "group") or is_spectrogram:
        return (0,)
    return (0, 1)


# Formats: writing a program, and running the file


def _write_torch(program: ExportedProgram, path: Path, exportable: Exportable) -> None:
    """Write torch.export's archive."""
    torch.export.save(program, path)


def _run_torch(path: Path) -> Callable[[Mapping[str, Tensor]], dict[str, Tensor]]:
    """Load the archive; return a function from inputs to outputs."""
    module = torch.export.load(path).module()
    return lambda inputs: module(**inputs)


def _write_onnx(program: ExportedProgram, path: Path, exportable: Exportable) -> None:
    """Write an ONNX file whose outputs have the names of the model's."""
    outputs = list(exportable(**exportable.example(*RECORDED)))
    try:
        written: Any = torch.onnx.export(program, dynamo=True, verbose=False, output_names=outputs)
        written.save(path)
        _name_axes(path, {name: str(value) for name, value in exportable.for_any_client.items()})
    except OSError as error:
        reason = error.strerror or first_line(error)
        raise ExportError(f"{path.name} cannot be written ({reason}): pass a folder with room for it") from error
    except Exception as error:  # of any kind
        raise ExportError(f"ONNX cannot hold this model: {first_line(error)}") from error


def _name_axes(path: Path, metadata: dict[str, str]) -> None:
    """Rename an ONNX file's axes of any size, s18 or s41, to batch, tokens and samples.

    With two towers, `batch` counts the images, and `texts` the texts.

    metadata: written beside the graph, as metadata_props
    """
    import onnx

    model = onnx.load(path, load_external_data=False)
    has_images = any(value.name == "pixel_values" for value in model.graph.input)
    names: dict[str, str] = {}
    for value in model.graph.input:
        first = "texts" if has_images and value.name != "pixel_values" else "batch"
        second = "samples" if value.name in AUDIO_INPUTS else "tokens"
        for axis, dim in zip((first, second), value.type.tensor_type.shape.dim, strict=False):
            if dim.dim_param:
                names.setdefault(dim.dim_param, axis)
    for value in (*model.graph.input, *model.graph.output, *model.graph.value_info):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param:
                dim.dim_param = re.sub(r"\w+", lambda symbol: names.get(symbol[0], symbol[0]), dim.dim_param)
    for name, value in metadata.items():
        model.metadata_props.add(key=name, value=value)
    onnx.save(model, path)


def _run_onnx(path: Path) -> Callable[[Mapping[str, Tensor]], dict[str, Tensor]]:
    """Load the ONNX file; return a function from inputs to outputs."""
    import onnxruntime

    try:
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    except Exception as error:  # its own classes, of a module without a public name
        raise ExportError(f"ONNX Runtime cannot load it, try model.float(): {first_line(error)}") from error
    outputs = [output.name for output in session.get_outputs()]

    def run(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        arrays = {name: tensor.numpy(force=True) for name, tensor in inputs.items()}
        results = session.run(outputs, arrays)
        return {name: torch.as_tensor(result) for name, result in zip(outputs, results, strict=True)}

    return run


WRITERS = {"onnx": _write_onnx, "torch": _write_torch}
RUNNERS = {"onnx": _run_onnx, "torch": _run_torch}


def _check_outputs(exportable: Exportable, run: Callable, name: str) -> None:
    """Raise for an exported model whose numbers differ from the model's."""
    inputs = exportable.example(*CHECKED)
    results = run(inputs)
    expected = exportable(**inputs)
    for output, tensor in expected.items():
        if tensor.dtype == torch.bool:
            continue  # a yes or no may differ where a score is on the edge
        difference = (results[output].to(tensor) - tensor).abs().max().item()
        most = TOLERANCE[exportable.model.dtype] * max(1.0, tensor.abs().max().item())
        if not difference <= most:  # also where it is NaN
            raise ExportError(
                f"the model exported to {name} gives other outputs than the model ({output} differs by "
                f"{difference:.2g}): nothing was written"
            )


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the exporters' notes on every operation."""
    levels = {name: logging.getLogger(name).level for name in TALKATIVE}
    try:
        for name in TALKATIVE:
            logging.getLogger(name).setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
