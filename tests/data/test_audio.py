"""Audio in data sets and files becomes what a model reads, in Python and on the command line."""

import base64
import io
import re
import wave

import datasets
import numpy as np
import pytest
import torch
from transformers import ASTFeatureExtractor, Wav2Vec2FeatureExtractor, WhisperFeatureExtractor

from hydra_transformers import load_data
from hydra_transformers.baselines import DeepEnsemble
from hydra_transformers.data.audio import waveform
from hydra_transformers.data.batches import collate
from hydra_transformers.hub import create_model_card
from hydra_transformers.models.modeling_hydra_waveforms import frames_of
from hydra_transformers.serving.answerer import Answerer, RequestError, read_audio
from hydra_transformers.serving.predictor import HydraPredictor
from tests.families import AST, HUBERT, WAV2VEC2, WHISPER, each_of


RATE = 16_000
EXTRACTOR = ASTFeatureExtractor(num_mel_bins=7, max_length=10)


def tone(pitch: float, seed: int = 0, samples: int = 1_600) -> np.ndarray:
    noise = 0.01 * np.random.default_rng(seed).standard_normal(samples)
    return (0.5 * np.sin(np.arange(samples) * pitch) + noise).astype(np.float32)


def wav(samples: np.ndarray, rate: int = RATE, channels: int = 1) -> bytes:
    content = io.BytesIO()
    with wave.open(content, "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes((samples * 2**15).astype("<i2").repeat(channels).tobytes())
    return content.getvalue()


@pytest.fixture(scope="module")
def hydra():
    return AST.fused().float()


def tone_rows(count: int = 12) -> datasets.Dataset:
    """Files of low and high tones."""
    labels = [index % 2 for index in range(count)]
    files = [{"bytes": wav(tone((0.05, 1.0)[label], index)), "path": ""} for index, label in enumerate(labels)]
    rows = datasets.Dataset.from_dict({"audio": files, "label": labels})
    return rows.cast_column("audio", datasets.Audio()).cast_column("label", datasets.ClassLabel(names=["low", "high"]))


def in_base64(content: bytes) -> str:
    return base64.b64encode(content).decode()


def scores_of(answers: list[dict]) -> list[float]:
    return [answer["score"] for answer in answers]


# Waveforms


def test_audio_is_the_same_in_every_form_it_comes_in(tmp_path):
    expected = np.round(tone(0.3) * 2**15 - 0.5) / 2**15
    (tmp_path / "tone.wav").write_bytes(wav(tone(0.3)))
    forms = [
        tone(0.3),
        {"array": tone(0.3).tolist(), "sampling_rate": RATE},
        np.stack([tone(0.3), tone(0.3)]),
        torch.tensor(tone(0.3)),
        wav(tone(0.3)),
        wav(tone(0.3), channels=2),
        {"bytes": wav(tone(0.3)), "path": "other.wav"},
        {"bytes": None, "path": str(tmp_path / "tone.wav")},
        tmp_path / "tone.wav",
    ]
    for form in forms:
        samples = waveform(form, RATE)
        assert samples.dtype == np.float32 and samples.shape == (1_600,)
        assert np.abs(samples - expected).max() < 1e-4


CUT_OFF = {rate: wav(tone(0.3), rate=rate)[:-200] for rate in (RATE, 8_000)}


@pytest.mark.parametrize(
    ("audio", "words"),
    [
        (
            {"array": [0.0], "sampling_rate": 44_100},
            "has 44100 samples per second, the model reads 16000: resample it",
        ),
        (object(), "float"),
        (np.zeros((2, 3, 4)), r"has the shape \(2, 3, 4\)"),
        ([], r"has the shape \(0,\)"),
        (np.array([1200, -30000], dtype=np.int16), r"holds whole numbers \(int16\): divide them"),
        (np.zeros((1600, 2), dtype=np.float32), r"the shape \(1600, 2\): pass \(samples,\), or \(channels, samples\)"),
        (CUT_OFF[RATE], "the WAV file is cut off"),
        (CUT_OFF[8_000], "the WAV file is cut off"),  # which ffmpeg would read as far as it goes
        ({"bytes": CUT_OFF[RATE], "path": None}, "the WAV file is cut off"),
    ],
)
def test_what_is_not_audio_raises(audio, words):
    with pytest.raises((TypeError, ValueError), match=words):
        waveform(audio, RATE)


# Data


def test_rows_of_files_are_prepared_without_torchcodec():
    data = load_data(tone_rows(), EXTRACTOR)
    samples = waveform(wav(tone(1.0, 1)), RATE)
    expected = EXTRACTOR(samples, sampling_rate=RATE, return_tensors="pt")["input_values"][0]
    assert torch.equal(data[1]["input_values"], expected) and data[1]["labels"] == 1
    batch = collate([data[0], data[1]])
    assert batch["input_values"].shape == (2, 10, 7) and batch["labels"].tolist() == [0, 1]
    named = [{"recording": {"array": tone(1.0), "sampling_rate": RATE}, "other": tone(0.1), "label": 0}]
    for column in (None, "other"):
        assert load_data(named, EXTRACTOR, column=column)[0]["input_values"].shape == (10, 7)
    with pytest.raises(ValueError, match=r"row 0 .* read as audio"):
        load_data([{"audio": "x", "label": 0}], EXTRACTOR, column="audio")[0]


def test_a_wav_file_that_is_cut_off_is_read_nowhere(hydra, tmp_path):
    with pytest.raises(ValueError, match=r"row 0 of the data cannot be read as audio \(the WAV file is cut off"):
        load_data([{"audio": {"bytes": CUT_OFF[RATE], "path": None}, "label": 0}], EXTRACTOR)[0]
    (tmp_path / "cut.wav").write_bytes(CUT_OFF[RATE])
    with pytest.raises(ValueError, match="the WAV file is cut off"):
        hydra.predict([tmp_path / "cut.wav"], EXTRACTOR)
    answer, bad = HydraPredictor(hydra, EXTRACTOR, name="audio").answers([wav(tone(0.3)), CUT_OFF[RATE]])
    assert answer["label"] is not None and "the WAV file is cut off" in bad["error"]


# Requests


@pytest.mark.slow
def test_it_is_published_with_a_card_and_a_handler_that_reads_wav_files(hydra):
    assert "pipeline_tag: audio-classification" in str(create_model_card(hydra, repo_id="someone/hydra-ast"))
    answerer = Answerer(hydra, EXTRACTOR, "audio")
    contents = [wav(tone(1.0)), wav(tone(0.2), channels=2)]
    inputs, parameters = answerer.read({"inputs": list(map(in_base64, contents))})
    for content, samples in zip(contents, inputs, strict=True):
        assert np.array_equal(samples, waveform(content, RATE))
    expected = hydra.predict([waveform(content, RATE) for content in contents], EXTRACTOR)
    assert scores_of(answerer.answer(inputs, parameters)) == pytest.approx(scores_of(expected), abs=1e-6)


@pytest.mark.parametrize(
    ("audio", "words"),
    [
        (3, "inputs[0] is not a text: send a WAV file in base64"),
        ("/etc/passwd!", "inputs[0] is not base64"),
        (b"no sound", "inputs[0] is not a WAV file"),
        (wav(tone(1.0), rate=8_000), "inputs[0] has 16 bits and 8,000 samples per second: send 16 bits and 16,000"),
        (wav(np.zeros(0)), "inputs[0] has no samples"),
        (wav(tone(1.0))[:-10], "inputs[0] has no samples, or fewer than its header says"),
        (wav(np.zeros(5_000_001)), "inputs[0] has 5,000,001 samples, too many: send at most 5,000,000"),
    ],
    ids=range(7),
)
def test_a_request_without_audio_that_can_be_read_raises(audio, words):
    with pytest.raises(RequestError, match=re.escape(words)):
        read_audio(audio, "inputs[0]", RATE)


def test_audio_too_short_for_a_frame_is_refused_before_it_shares_a_pass_with_longer_audio():
    answerer = Answerer(WAV2VEC2.fused(), Wav2Vec2FeatureExtractor(), "audio")
    least = next(samples for samples in range(1, 999) if frames_of(samples, answerer.config) == 1)
    assert len(answerer.read({"inputs": in_base64(wav(np.zeros(least)))})[0][0]) == least
    with pytest.raises(RequestError, match=rf"inputs\[0\] has {least - 1} samples, too few for this model"):
        answerer.read({"inputs": in_base64(wav(np.zeros(least - 1)))})


@pytest.mark.slow
@each_of([WAV2VEC2, HUBERT])
def test_audio_shares_a_pass_only_where_zeros_behind_shorter_audio_change_nothing(family):
    """Not without masks, and not where a norm goes over the zeros: the first of these models has
    one, as Wav2Vec2-base."""
    waves = [tone(1.0, samples=samples) for samples in (200, 2_000)]
    for masks, together in ((False, 1), (True, 2)):
        answerer = Answerer(None, Wav2Vec2FeatureExtractor(return_attention_mask=masks), "audio")
        assert answerer.together(waves) == together
    masks = Wav2Vec2FeatureExtractor(return_attention_mask=True)
    predictor = HydraPredictor(DeepEnsemble([family.fused().float()]), masks, name="audio")
    assert predictor.together(waves) == (1 if family is WAV2VEC2 else 2)
    alone = [predictor.answer([samples], {})[0] for samples in waves]
    assert scores_of(predictor.answer(waves, {})) == pytest.approx(scores_of(alone), abs=1e-6)


@pytest.mark.slow
def test_whisper_reads_audio_of_all_lengths_together():
    whisper = WhisperFeatureExtractor(feature_size=7, chunk_length=1, hop_length=1_600)
    hydra = WHISPER.fused().float()
    contents = [wav(tone(1.0, samples=samples)) for samples in (2_000, 17_000)]
    waves = [waveform(content, RATE) for content in contents]
    with torch.no_grad():
        scores = hydra(**whisper(waves, sampling_rate=RATE, return_tensors="pt")).logits.softmax(-1).amax(-1).tolist()
    data = load_data([{"audio": {"array": wave, "sampling_rate": RATE}, "label": 0} for wave in waves], whisper)
    batch = collate([data[0], data[1]])
    assert batch["input_features"].shape == (2, 7, 10)
    with torch.no_grad():
        assert hydra(batch["input_features"]).logits.softmax(-1).amax(-1).tolist() == pytest.approx(scores, abs=1e-5)
    assert Answerer(None, whisper, "audio").together(waves) == 2
    assert scores_of(hydra.predict(waves, whisper, batch_size=2)) == pytest.approx(scores, abs=1e-5)
