"""Compares models by their outputs for a small random batch, and makes inputs of the sizes that
models take."""

import inspect
from collections.abc import Iterable
from contextlib import nullcontext
from itertools import combinations

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from ..models.inputs import evaluation_mode


# Below Transformers' own logger, so that `transformers.logging.set_verbosity_error()` counts here
# too.
logger = logging.get_logger(f"transformers.{__name__}")

TEXT_TOKENS = 128  # the length that texts are cut to, as in the paper
IMAGE_SIZE = 224  # for models that take any size and whose config names none
PROBE_TOKENS = 8
FRAMES = 50  # of audio: a second, where 320 samples are a frame
# Outputs of a model, and the outputs of its one-member Hydra that equal them, with an axis of
# members.
COMPARED = {
    "logits": "member_logits",
    "logits_per_image": "member_logits",
    "last_hidden_state": "member_last_hidden_state",
    "pooler_output": "member_pooler_output",
}
# How far two ways to compute the same may lie apart, as a share of the size of the output. Some
# backbones keep constants in float32 when they are cast to float64, such as Gemma's factor on
# embeddings.
TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 2e-1}
TOLERANCE_WITH_TF32 = 2e-2  # an accelerator may round the factors of float32 products

NEARLY_EQUAL = 1e-2


def check_same_outputs(hydra: PreTrainedModel, model: PreTrainedModel, name: str, index: int | None = None) -> None:
    """Raise where a one-member Hydra with all heads of `model` gives other outputs than `model` for
    a random batch.

    index: where `model` is a Hydra itself, its member that `hydra` is compared with
    """
    # The outputs of both.
    inputs = probe_inputs(hydra)  # not the model's: a subclass of a backbone may not name its arguments
    names = COMPARED
    if index is not None:
        names = {name: name for name in COMPARED.values()}
    try:
        expected = outputs_of(model, inputs, names)
    except Exception as error:  # of any kind: an attention backend that needs another device, for example
        logger.warning(f"{name} could not be compared with its Hydra, as it does not run as it is: {error}")
        return
    outputs = outputs_of(hydra, inputs, COMPARED.values())

    # How far they are apart.
    tolerance = TOLERANCE[model.dtype]
    if model.dtype == torch.float32 and model.device.type != "cpu":
        tolerance = TOLERANCE_WITH_TF32
    for key, output in expected.items():
        if names[key] not in outputs:
            continue
        if index is not None:
            output = output[:, min(index, output.shape[1] - 1)]  # of a text tower that all members share
        distance = relative_distance(outputs[names[key]], output)
        if distance > tolerance:
            raise ValueError(
                f"{name} ({type(model).__name__}) gives different outputs than its Hydra: for random inputs their "
                f"{key} differ by {distance:.2g} of their size. Something in it is not as its class and config say; "
                "pass it as Transformers makes it, or check=False if you know why"
            )


def warn_if_nearly_equal(hydra: PreTrainedModel, names: list[str]) -> None:
    """Warn of members whose outputs for a random batch are nearly equal, so that they would hardly
    ever disagree."""
    outputs = outputs_of(hydra, probe_inputs(hydra), ("member_logits", "member_last_hidden_state"))
    if not outputs:
        return
    by_member = next(iter(outputs.values())).unbind(1)
    for (first, mine), (second, theirs) in combinations(zip(names, by_member, strict=True), 2):
        distance = relative_distance(mine, theirs)
        if distance < NEARLY_EQUAL:
            logger.warning(
                f"{first} and {second} hardly differ: for random inputs their outputs are {distance:.2g} of their "
                "size apart, so that their disagreement says little; pass members that were trained or pruned more "
                "differently"
            )


def relative_distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return |found - expected| / |expected|; 0 where `expected` is not finite, so that there is
    nothing to compare with."""
    found = found.double().cpu().flatten()
    expected = expected.double().cpu().flatten()
    if not expected.isfinite().all():
        return 0.0
    distance = (found - expected).norm().nan_to_num(nan=torch.inf)
    return float(distance / expected.norm().clamp(min=1e-12))


@torch.no_grad()
def outputs_of(
    model: PreTrainedModel, inputs: dict[str, torch.Tensor], keys: Iterable[str]
) -> dict[str, torch.Tensor]:
    """Return a model's outputs of these names, as far as it has them, in eval mode and in its own
    dtype."""
    uncalibrated = getattr(model, "uncalibrated", nullcontext)  # a calibrated Hydra's logits have a temperature
    with evaluation_mode(model), uncalibrated(), torch.autocast(model.device.type, enabled=False):
        outputs = model.forward(**inputs, return_dict=True)  # not model(...), which would compile a compiled model
    return {key: outputs[key] for key in keys if outputs.get(key) is not None}


def probe_inputs(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return a random batch for `model`, always the same: one image, audio clip or short text, or
    two of each for two towers."""
    generator = torch.Generator().manual_seed(0)
    accepted = inspect.signature(type(model).forward).parameters
    has_two_towers = {"pixel_values", "input_ids"} <= accepted.keys()
    batch_size = 2 if has_two_towers else 1
    inputs = {}
    for key, tensor in example_inputs(model.config, batch_size).items():
        if key not in accepted:
            continue
        if key == "input_ids":
            text = getattr(model.config, "text_config", model.config)
            # RoBERTa counts positions from behind the padding token on, which takes some of them.
            tokens = max(1, min(PROBE_TOKENS, tensor.shape[1] - 2))
            shape = (len(tensor), tokens)
            inputs[key] = torch.randint(0, text.vocab_size, shape, generator=generator, device="cpu")
            end = getattr(text, "eos_token_id", None)
            if isinstance(end, int) and 0 <= end < text.vocab_size:
                inputs[key][:, -1] = end  # where CLIP reads
            if "attention_mask" in accepted:
                inputs["attention_mask"] = torch.ones_like(inputs[key])
        else:
            inputs[key] = torch.randn(tensor.shape, generator=generator, device="cpu").to(model.dtype)
    return {key: tensor.to(model.device) for key, tensor in inputs.items()}


def example_inputs(config: PreTrainedConfig, batch_size: int, device: str = "cpu") -> dict[str, torch.Tensor]:
    """Return inputs of the size that a model takes: images, spectrograms, audio of 50 frames, texts
    of at most 128 tokens, or for two towers images and texts."""
    inputs = {}
    vision = getattr(config, "vision_config", config)
    text = getattr(config, "text_config", config)

    # Images.
    size = getattr(vision, "image_size", None)
    if size is not None:
        height, width = size if isinstance(size, (list, tuple)) else (size, size)
        inputs["pixel_values"] = torch.zeros(batch_size, vision.num_channels, height, width, device=device)

    # Audio.
    if hasattr(config, "max_source_positions"):
        frames = 2 * config.max_source_positions  # Whisper's second convolution reads every other
        inputs["input_features"] = torch.zeros(batch_size, config.num_mel_bins, frames, device=device)
    elif hasattr(config, "num_mel_bins"):
        inputs["input_values"] = torch.zeros(batch_size, config.max_length, config.num_mel_bins, device=device)
    if hasattr(config, "inputs_to_logits_ratio"):
        inputs["input_values"] = torch.zeros(batch_size, FRAMES * config.inputs_to_logits_ratio, device=device)

    # Texts. The words of BEiT and of Wav2Vec2 are those of their pre-training, and Whisper's those
    # of its decoder.
    has_words = not hasattr(config, "image_size") and inputs.keys().isdisjoint(("input_values", "input_features"))
    if hasattr(text, "vocab_size") and (text is not config or has_words):
        most = getattr(text, "max_position_embeddings", 0)  # models with relative positions have none, or -1
        tokens = TEXT_TOKENS
        if most > 0:
            tokens = min(TEXT_TOKENS, most)
        inputs["input_ids"] = torch.ones(batch_size, tokens, dtype=torch.long, device=device)

    # Images of any size.
    if not inputs and hasattr(vision, "num_channels"):
        inputs["pixel_values"] = torch.zeros(batch_size, vision.num_channels, IMAGE_SIZE, IMAGE_SIZE, device=device)
    return inputs
