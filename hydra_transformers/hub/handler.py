"""Answers requests in an Inference Endpoint of the Hub. Made by hydra_transformers.

It needs torch, transformers, Pillow for images, and the files of the Hydra beside it; not the
package hydra_transformers, whose serving/answerer.py is equal to what both need.

    handler = EndpointHandler("folder")
    request = {"inputs": "a text, or an image or a WAV file in base64", "parameters": {"top_k": 3}}
    handler(request)
"""

import base64
import copy
import io
import json
import math
import re
import threading
import wave
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers


# What a request may hold, by the Auto class of the model, and the Auto class of its processor.
KINDS = {
    "AutoModelForAudioClassification": "audio",
    "AutoModelForImageClassification": "image",
    "AutoModelForSequenceClassification": "text",
    "AutoModelForTokenClassification": "tokens",
    "AutoModelForZeroShotImageClassification": "zero-shot",
}
PROCESSORS = {"audio": "AutoFeatureExtractor", "image": "AutoImageProcessor", "zero-shot": "AutoProcessor"}
PARAMETERS = {"zero-shot": ("top_k", "candidate_labels", "hypothesis_template"), "tokens": ()}  # else top_k
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "WEBP")  # only these decoders read untrusted bytes
MOST_PIXELS = 25_000_000  # in one request: a small file may decode to more than fits into memory
# Long side by short side: processors scale up the short one, and with it the long one.
MAX_ASPECT_RATIO = 100
MOST_SAMPLES = 5_000_000  # of the audio of one request, about five minutes
MOST_CHARACTERS = 1_000_000  # in one request: all texts are tokenized before they are truncated
MOST_INPUTS = 32
MOST_LABELS = 1_000
MOST_OF_A_LABEL = 1_000  # characters, also of a template
DEFAULT_TEMPLATE = "This is a photo of {}."  # as in Transformers' pipeline


class RequestError(ValueError):
    """A request that cannot be answered; the message is one sentence that says why."""


def require(condition: bool, sentence: str) -> None:
    """Raise a `RequestError` with this sentence unless the condition holds."""
    if not condition:
        raise RequestError(sentence)


class Answerer:
    """A model with its processor.

    model: has `predict(inputs, processor, batch_size, **parameters)`, as every Hydra
    kind: "image", "text", "audio", "tokens" for texts or lists of words whose entities are found,
        or "zero-shot" for images and the labels in the request
    most_inputs: in one request
    """

    def __init__(self, model: Any, processor: Any, kind: str, most_inputs: int = MOST_INPUTS):
        self.model = model
        self.processor = processor
        self.kind = kind
        self.most_inputs = most_inputs
        self.config = getattr(model, "config", None)
        # Most tokenizers add tokens around a text; those of decoders may not.
        self.takes_empty = kind == "text" and processor is not None and len(processor("")["input_ids"]) > 0
        # Tokenizers are not thread-safe, and requests are read while others are answered.
        self.reader = None
        if kind == "zero-shot":
            self.reader = copy.deepcopy(processor.tokenizer)
        self.one_reads = threading.Lock()

    def read(self, data: Any) -> tuple[list[Any], dict[str, Any]]:
        """Check a request; return its texts, images or audio, and its parameters."""
        require(isinstance(data, dict) and "inputs" in data, 'the request has no inputs: send {"inputs": ...}')
        for name in sorted(data.keys() - {"inputs", "parameters"}):
            raise RequestError(f"the request has an unknown field {name[:40]!r}: send inputs and parameters")
        inputs = data["inputs"]
        if not isinstance(inputs, list):
            inputs = [inputs]
        is_few = 1 <= len(inputs) <= self.most_inputs
        require(is_few, f"inputs has {len(inputs)} entries: send 1 to {self.most_inputs}")
        parameters = data.get("parameters")
        groups = None
        if isinstance(parameters, dict) and "groups" in parameters:
            groups = self.read_groups(parameters["groups"], len(inputs))
            parameters = {name: value for name, value in parameters.items() if name != "groups"}
        parameters = self.read_parameters(parameters)
        if groups is not None:
            parameters["groups"] = groups

        # One after the other, because their sizes together are limited.
        values = []
        taken = 0
        for place, value in enumerate(inputs):
            value, size = self.read_input(value, f"inputs[{place}]", taken)
            values.append(value)
            taken += size
        return values, parameters

    def read_input(self, value: Any, name: str, taken: int = 0) -> tuple[Any, int]:
        """Return an input as the model reads it, and its size: samples, pixels or characters.

        name: for error messages
        taken: the size of the inputs before it, which count towards the limit
        """
        if self.kind in ("text", "tokens"):
            size = self.check_text(value, name)
            limit = f"too many: send at most {MOST_CHARACTERS:,} in one request"
            require(size + taken <= MOST_CHARACTERS, f"{name} has {size:,} characters, {limit}")
            return value, size
        if self.kind == "audio":
            value = read_audio(value, name, self.processor.sampling_rate, taken)
            size = len(value)
            require(
                self.count_frames(size) > 0, f"{name} has {size} samples, too few for this model: send longer audio"
            )
            return value, size
        value = read_image(value, name, taken)
        return value, value.width * value.height

    def count_frames(self, samples: int) -> int:
        """Return how many frames the model's convolutions leave of a waveform."""
        frames = samples
        kernels = getattr(self.config, "conv_kernel", ())
        strides = getattr(self.config, "conv_stride", ())
        for kernel, stride in zip(kernels, strides, strict=True):
            frames = (frames - kernel) // stride + 1
        return frames

    def check_text(self, value: Any, name: str) -> int:
        """Return the number of characters of a text; raise for what is not one.

        A pair of texts is one, too; for token classification a list of words.
        """
        form = '{"text": ..., "text_pair": ...}'
        texts = [value]
        if self.kind == "tokens":
            form = "a list of words"
            if isinstance(value, list):
                texts = value
        elif isinstance(value, dict) and value.keys() == {"text", "text_pair"}:
            texts = list(value.values())
        are_texts = all(is_text(text, math.inf) for text in texts)
        require(are_texts, f"{name} is not a text, or has half a character: send a text, or {form}")
        has_tokens = self.kind == "tokens" or self.takes_empty or "".join(texts).strip() != ""
        require(has_tokens, f"{name} is empty, and this model reads nothing then: send a text")
        return sum(map(len, texts))

    def read_parameters(self, parameters: Any) -> dict[str, Any]:
        """Check the parameters of a request; return them, with defaults for what it leaves out."""
        if parameters is None:
            parameters = {}
        require(isinstance(parameters, dict), "parameters is not an object: send an object")
        known = PARAMETERS.get(self.kind, ("top_k",))
        for name in sorted(parameters.keys() - set(known)):
            names = ", ".join(known) or "none"
            raise RequestError(f"parameters has an unknown {name[:40]!r}: this model knows {names}")
        checked = {"top_k": 5, **parameters}
        is_count = type(checked["top_k"]) is int and checked["top_k"] >= 1
        require(is_count, "top_k must be a whole number from 1 on")
        if self.kind == "zero-shot":
            checked["candidate_labels"] = parameters.get("candidate_labels")
            template = parameters.get("hypothesis_template", DEFAULT_TEMPLATE)
            self.check_labels(checked["candidate_labels"], template)
        return checked

    def read_groups(self, groups: Any, count: int) -> list[str]:
        """Check the groups of a request's inputs, for a model that answers by a column."""
        column = self.group_column
        require(column is not None, "parameters has groups, and this model does not answer by groups: leave them out")
        are_texts = isinstance(groups, list) and all(is_text(group, MOST_OF_A_LABEL) for group in groups)
        require(
            are_texts and len(groups) == count,
            f"groups must be a list of {count} texts: the {column[:100]} of each input",
        )
        return groups

    @property
    def group_column(self) -> str | None:
        """The column by which the model answers; None without one."""
        decision = getattr(self.config, "decision", None) or {}
        return (decision.get("by_group") or {}).get("column")

    def check_labels(self, labels: Any, template: Any) -> None:
        """Raise for labels or a template that are no texts, or longer than the text tower reads."""
        is_list = isinstance(labels, list) and 1 <= len(labels) <= MOST_LABELS
        are_texts = is_list and all(is_text(label, MOST_OF_A_LABEL) and label.strip() for label in labels)
        limits = f"1 to {MOST_LABELS:,} texts of at most {MOST_OF_A_LABEL:,} characters"
        require(are_texts, f"candidate_labels must be a list of {limits}: the model chooses among them")
        require(len(set(labels)) == len(labels), "candidate_labels names a label twice: send each once")

        # Only {}: anything else in braces could read attributes.
        is_plain = is_text(template, MOST_OF_A_LABEL) and re.sub("[^{}]", "", template) == "{}" and "{}" in template
        limit = f"hypothesis_template must be a text of at most {MOST_OF_A_LABEL:,} characters"
        require(is_plain, f"{limit} with one {{}} for the label")

        most = self.model.config.text_config.max_position_embeddings
        with self.one_reads:
            prompts = self.reader([template.format(label) for label in labels])["input_ids"]
        for label, tokens in zip(labels, prompts, strict=True):
            sentence = f"candidate_labels has {label[:40]!r}..., which makes {len(tokens)} tokens: at most {most}"
            require(len(tokens) <= most, sentence)

    def answer(self, inputs: list[Any], parameters: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the model's prediction for each input."""
        return self.model.predict(inputs, self.processor, batch_size=self.together(inputs), **parameters)

    def together(self, inputs: list[Any]) -> int:
        """Return how many inputs share a pass.

        Raw waveforms go one by one, where longer ones beside them would change them: without a
        mask, or where a norm goes over the padding.
        """
        spectrograms = ("num_mel_bins", "chunk_length")  # which have one length
        is_raw = self.kind == "audio" and not any(hasattr(self.processor, name) for name in spectrograms)
        has_masks = getattr(self.processor, "return_attention_mask", False)
        norms_padding = getattr(self.config, "feat_extract_norm", None) == "group"
        if is_raw and (norms_padding or not has_masks):
            return 1
        return len(inputs)


class EndpointHandler(Answerer):
    """A repository as an Inference Endpoint loads it.

    path: the folder of the model, with its code
    """

    def __init__(self, path: str = ""):
        config = json.loads(Path(path, "config.json").read_text(encoding="utf-8"))
        # The config may name a class for several tasks: take the one whose class was saved.
        known = {name: saved.rpartition(".")[2] for name, saved in config["auto_map"].items() if name in KINDS}
        tasks = [name for name, saved in known.items() if saved in (config.get("architectures") or ())]
        task = next(iter(tasks or known))
        kind = KINDS[task]

        device = "cuda" if torch.cuda.is_available() else "cpu"
        model = getattr(transformers, task).from_pretrained(path, trust_remote_code=True)
        processor_class = getattr(transformers, PROCESSORS.get(kind, "AutoTokenizer"))
        processor = processor_class.from_pretrained(path)
        super().__init__(model.to(device).eval(), processor, kind)

    def __call__(self, data: dict[str, Any]) -> dict[str, Any] | list[dict[str, Any]]:
        """Answer a request: return what the model's pipeline gives, a dict, or a list for a list.

        data: {"inputs": one or a list, "parameters": {"top_k": 5}}. An input is a text, or an image
            or a 16-bit WAV file in base64 (or a PIL image or bytes, as Endpoints pass on
            image/jpeg, audio/wav and the like). For CLIP, parameters must have "candidate_labels"
            and may have "hypothesis_template"; for a model that was calibrated by a column they
            must have "groups", its value for each input
        """
        inputs, parameters = self.read(data)
        answers = as_json(self.answer(inputs, parameters))
        if isinstance(data["inputs"], list):
            return answers
        return answers[0]


def as_json(value: Any) -> Any:
    """Return the same with None for NaN and infinity, which JSON does not have.

    A prediction that is not a number abstains.
    """
    if isinstance(value, dict):
        return {name: as_json(part) for name, part in value.items()}
    if isinstance(value, list):
        return [as_json(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def is_text(value: Any, most: float) -> bool:
    """Whether a value is a str of at most so many characters that can be encoded.

    JSON can hold lone surrogates.
    """
    if not isinstance(value, str) or len(value) > most:
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def read_image(value: Any, name: str, taken: int = 0) -> Any:
    """Return an image in RGB, from base64, bytes or a PIL image, never from a path or URL.

    Too large ones are not decoded.
    """
    from PIL import Image, ImageOps

    too_many = f"too many: send at most {MOST_PIXELS:,} in one request"
    image = value
    if not isinstance(value, Image.Image):
        content = _file_content(value, name, "an image")
        try:
            image = Image.open(io.BytesIO(content), formats=FORMATS)
        except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
            raise RequestError(f"{name} has {Image.MAX_IMAGE_PIXELS:,} pixels or more, {too_many}") from error
        except Exception as error:  # decoders raise all kinds of errors
            raise RequestError(f"{name} is not an image that can be read: send {', '.join(FORMATS)}") from error

    # Its size and mode, which its header says.
    size = f"{image.width:,} x {image.height:,} pixels"
    require(image.width * image.height + taken <= MOST_PIXELS, f"{name} has {size}, {too_many}")
    is_long = max(image.size) > MAX_ASPECT_RATIO * min(image.size)
    require(not is_long, f"{name} has {size}: send one at most {MAX_ASPECT_RATIO} times as long as wide")
    # In RGB everything above level 255 would be white.
    is_deep = image.mode.startswith(("I", "F"))
    require(not is_deep, f"{name} has the mode {image.mode}, of more than 256 levels: send 8 bits a channel")

    try:
        # Turned here: the pipeline would fail on broken EXIF data.
        image = ImageOps.exif_transpose(image).convert("RGB")
    except Exception as error:  # its message may reveal something about the server
        raise RequestError(f"{name} is a broken image, its pixels cannot be read: send another") from error
    image.info.clear()
    return image


def read_audio(value: Any, name: str, rate: int, taken: int = 0) -> np.ndarray:
    """Return the samples (samples,) of a 16-bit WAV file, the mean of its channels.

    It comes as base64 or bytes, never as a path or URL.

    rate: samples per second that the model reads, the only rate that is accepted
    """
    content = _file_content(value, name, "a WAV file")
    try:
        with wave.open(io.BytesIO(content)) as file:
            channels = file.getnchannels()
            width = file.getsampwidth()
            file_rate = file.getframerate()
            length = file.getnframes()
            frames = file.readframes(length)
    except Exception as error:  # headers can be broken in many ways
        raise RequestError(f"{name} is not a WAV file that can be read: send one of 16 bits") from error
    form = f"{name} has {8 * width} bits and {file_rate:,} samples per second"
    require((width, file_rate) == (2, rate), f"{form}: send 16 bits and {rate:,} samples per second")
    is_whole = length > 0 and len(frames) >= length * channels * width
    require(is_whole, f"{name} has no samples, or fewer than its header says: send the whole file")
    too_many = f"{name} has {length:,} samples, too many: send at most {MOST_SAMPLES:,} in one request"
    require(length + taken <= MOST_SAMPLES, too_many)

    samples = np.frombuffer(frames, dtype="<i2").reshape(-1, channels)
    return samples.mean(axis=1, dtype=np.float32) / 2**15


def _file_content(value: Any, name: str, kind: str) -> bytes:
    """Return the bytes of a file that was sent as bytes or in base64."""
    if isinstance(value, bytes):
        return value
    require(isinstance(value, str), f"{name} is not a text: send {kind} in base64")
    text = value
    if value.startswith(("data:image/", "data:audio/")):
        _, _, text = value.partition(";base64,")
    try:
        return base64.b64decode(text, validate=True)
    except ValueError as error:  # also for characters outside ASCII
        raise RequestError(f"{name} is not base64: send the bytes of {kind} in it") from error
