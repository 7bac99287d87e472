"""Reads audio of data sets and files as waveforms, and as the inputs of a model."""

import io
import os
import wave
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor
from transformers import SequenceFeatureExtractor
from transformers.pipelines.audio_utils import ffmpeg_read

from ..models.pipeline_hydra_audio import check_is_whole


def prepared_audio(audio: Any, extractor: SequenceFeatureExtractor) -> dict[str, Tensor]:
    """Return audio as the model's input.

    For AST `{"input_values": (frames, mel bins)}`, for models of raw audio `{"input_values":
    (samples,)}`, and where the extractor makes one an `attention_mask` (samples,).
    """
    rate = extractor.sampling_rate
    samples = waveform(audio, rate)
    prepared = extractor(samples, sampling_rate=rate, return_tensors="pt")
    return {name: tensor[0] for name, tensor in prepared.items()}


def waveform(audio: Any, sampling_rate: int) -> np.ndarray:
    """Return audio as float32 numbers (samples,) at this rate, the mean of its channels.

    audio: numbers at this rate; `{"array": ..., "sampling_rate": ...}`; a file's path or content,
        or `{"path": ..., "bytes": ...}`. All files but 16-bit WAV files at this rate need ffmpeg
    """
    if isinstance(audio, Mapping):
        audio = _inside_of(audio, sampling_rate)
    if isinstance(audio, (str, os.PathLike)):
        audio = Path(audio).read_bytes()
    if isinstance(audio, bytes):
        return _decoded(audio, sampling_rate)

    array = np.asarray(audio)
    samples = array.astype(np.float32)
    has_type = hasattr(audio, "dtype")
    if has_type and array.dtype.kind != "f" and np.abs(samples).max(initial=0) > 1:
        raise ValueError(f"audio holds whole numbers ({array.dtype}): divide them by the largest, 32768 of 16 bits")
    if samples.ndim == 2 and samples.shape[0] <= samples.shape[1]:  # (channels, samples)
        samples = samples.mean(axis=0)
    if samples.ndim != 1 or not len(samples):
        raise ValueError(f"audio has the shape {samples.shape}: pass (samples,), or (channels, samples)")
    return samples


def _inside_of(audio: Mapping[str, Any], sampling_rate: int) -> Any:
    """Return the numbers, the content or the path that `datasets` has for audio."""
    if audio.get("array") is None:
        return audio.get("bytes") or audio.get("path")
    rate = audio.get("sampling_rate")
    if rate != sampling_rate:
        raise ValueError(
            f"audio has {rate} samples per second, the model reads {sampling_rate}: resample it, of a data set with "
            f"cast_column(name, datasets.Audio(sampling_rate={sampling_rate}))"
        )
    return audio["array"]


def _decoded(content: bytes, sampling_rate: int) -> np.ndarray:
    """Return the samples of a file."""
    check_is_whole(content)
    samples = _plain_wav(content, sampling_rate)
    if samples is None:
        return ffmpeg_read(content, sampling_rate)
    return samples


def _plain_wav(content: bytes, sampling_rate: int) -> np.ndarray | None:
    """Return the samples of a 16-bit WAV file at this rate; None for anything else."""
    try:
        with wave.open(io.BytesIO(content)) as file:
            if (file.getsampwidth(), file.getframerate()) != (2, sampling_rate):
                return None
            samples = np.frombuffer(file.readframes(file.getnframes()), dtype="<i2")
            channels = file.getnchannels()
    except (wave.Error, EOFError):
        return None
    if not len(samples):
        return None
    mean = samples.reshape(-1, channels).mean(axis=1, dtype=np.float32)
    return mean / 2**15


def undecoded(rows: Any) -> Any:
    """Return a `datasets` Dataset with audio as files; other rows as they are.

    Decoding by `datasets` needs torchcodec.
    """
    features = getattr(rows, "features", None) or {}
    for name, feature in features.items():
        if type(feature).__name__ == "Audio" and feature.decode:
            rows = rows.cast_column(name, type(feature)(decode=False))
    return rows


def is_audio(value: Any) -> bool:
    """Whether an entry of a row is audio as `datasets` holds it."""
    return isinstance(value, Mapping) and ("array" in value or {"bytes", "path"} <= value.keys())
