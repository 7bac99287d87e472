"""Audio in data sets and files becomes what a model reads, in Python and on the command line."""

import base64
import io
import re
import wave

import datasets
import numpy as np
import pytest
import torch
from fastapi.testclient import TestClient
from transformers import (
    ASTConfig,
    ASTFeatureExtractor,
    ASTForAudioClassification,
    BertTokenizer,
    Wav2Vec2FeatureExtractor,
    WhisperFeatureExtractor,
)

from experiments.heads.noise import with_noise
from hydra_transformers import AutoHydra, load_data
from hydra_transformers.baselines import MIMO, DeepEnsemble
from hydra_transformers.cli import main
from hydra_transformers.data.audio import waveform
from hydra_transformers.data.batches import collate
from hydra_transformers.fusion import example_inputs
from hydra_transformers.hub import create_model_card, publishing
from hydra_transformers.hub.handler import Answerer, RequestError, read_sound
from hydra_transformers.reports.evaluation import evaluate_uncertainty
from hydra_transformers.serving import create_app
from hydra_transformers.serving.predictor import HydraPredictor
from hydra_transformers.training.recipes import default_recipe
from tests.families import AST, AUDIO_SIZES, HUBERT, SIZES, WAV2VEC2, WHISPER, for_families


RATE = 16_000


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


def extractor() -> ASTFeatureExtractor:
    return ASTFeatureExtractor(num_mel_bins=7, max_length=10)


def tone_rows(count: int = 12) -> datasets.Dataset:
    """Files of low and high tones."""
    labels = [index % 2 for index in range(count)]
    sounds = [{"bytes": wav(tone((0.05, 1.0)[label], index)), "path": ""} for index, label in enumerate(labels)]
    rows = datasets.Dataset.from_dict({"audio": sounds, "label": labels})
    return rows.cast_column("audio", datasets.Audio()).cast_column("label", datasets.ClassLabel(names=["low", "high"]))


def save_ast(folder) -> None:
    torch.manual_seed(0)
    names = {"id2label": {0: "low", 1: "high"}, "label2id": {"low": 0, "high": 1}}
    sizes = {**SIZES, **AUDIO_SIZES, "num_hidden_layers": 2, "num_labels": 2}
    config = ASTConfig(**sizes, **names, initializer_range=0.2)
    ASTForAudioClassification(config).save_pretrained(folder)
    extractor().save_pretrained(folder)


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
    data = load_data(tone_rows(), extractor())
    samples = waveform(wav(tone(1.0, 1)), RATE)
    expected = extractor()(samples, sampling_rate=RATE, return_tensors="pt")["input_values"][0]
    assert torch.equal(data[1]["input_values"], expected) and data[1]["labels"] == 1
    batch = collate([data[0], data[1]])
    assert batch["input_values"].shape == (2, 10, 7) and batch["labels"].tolist() == [0, 1]


def test_a_wav_file_that_is_cut_off_is_a_bad_row_of_data_and_tables():
    with pytest.raises(ValueError, match=r"row 0 of the data cannot be read as audio \(the WAV file is cut off"):
        load_data([{"audio": {"bytes": CUT_OFF[RATE], "path": None}, "label": 0}], extractor())[0]
    predictor = HydraPredictor(AST.fused().float(), extractor(), name="audio", strict=False)
    answers = predictor({"audio": [wav(tone(0.3)), CUT_OFF[RATE]]})
    assert answers["label"][0] is not None and answers["label"][1] is None
    assert "the WAV file is cut off" in answers["error"][1]


def test_wrong_columns_raise():
    rows = [{"recording": {"array": tone(1.0), "sampling_rate": RATE}, "other": tone(0.1), "label": 0}]
    assert load_data(rows, extractor())[0]["input_values"].shape == (10, 7)
    assert load_data(rows, extractor(), audio="other")[0]["input_values"].shape == (10, 7)
    calls = (
        (
            lambda: load_data(rows, extractor(), text="words"),
            "'words' does not go with a model of audio: name it as audio=",
        ),
        (lambda: load_data([{"label": 0}], extractor()), "data has no audio column among label"),
        (lambda: load_data([{"audio": "x", "label": 0}], extractor(), audio="audio")[0], "row 0 .* read as audio"),
        (
            lambda: load_data(rows, BertTokenizer(vocab={"[UNK]": 0}), audio="other"),
            "'other' does not go with .* texts",
        ),
    )
    for call, words in calls:
        with pytest.raises(ValueError, match=words):
            call()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:12 samples are fewer")
def test_what_works_on_images_and_texts_works_on_audio():
    members = [AST.backbone(seed, num_labels=2).float() for seed in range(2)]
    data = load_data(tone_rows(), extractor())
    hydra = AutoHydra.from_pruned_members(members, shared=())
    found = evaluate_uncertainty({"fused": hydra, "apart": DeepEnsemble(members)}, data).models
    assert found["fused"].id["nll"] == pytest.approx(found["apart"].id["nll"], abs=1e-4)
    [noisy] = with_noise([collate([data[0], data[1]])])
    assert noisy["input_values"].sub(collate([data[0], data[1]])["input_values"]).std() > 0.3
    assert example_inputs(hydra.config, 3)["input_values"].shape == (3, 10, 7)
    assert default_recipe(hydra.config, data).train_transforms == ()
    with pytest.raises(ValueError, match="ASTForAudioClassification: pass a classifier of images or texts"):
        MIMO(members[0])


@pytest.mark.slow
def test_the_card_says_that_it_classifies_audio():
    card = str(create_model_card(AST.fused().float(), repo_id="someone/hydra-ast"))
    assert "pipeline_tag: audio-classification" in card and "AutoModelForAudioClassification" in card
    assert "Multiply-adds per sound of 10 frames" in card


@pytest.mark.slow
def test_it_is_published_with_a_handler_that_reads_wav_files(tmp_path):
    hydra = AST.fused().float()
    publishing._stage(tmp_path, hydra, extractor(), None, None)
    assert {"preprocessor_config.json", "audio.py", "handler.py"} <= {path.name for path in tmp_path.iterdir()}
    answerer = Answerer(hydra, extractor(), "audio")
    contents = [wav(tone(1.0)), wav(tone(0.2), channels=2)]
    inputs, parameters = answerer.read({"inputs": [base64.b64encode(each).decode() for each in contents]})
    for content, sound in zip(contents, inputs, strict=True):
        assert np.array_equal(sound, waveform(content, RATE))
    found = answerer.answer(inputs, parameters)
    expected = hydra.predict([waveform(each, RATE) for each in contents], extractor())
    assert [each["label"] for each in found] == [each["label"] for each in expected]
    assert [each["score"] for each in found] == pytest.approx([each["score"] for each in expected], abs=1e-6)


@pytest.mark.parametrize(
    ("sound", "sentence"),
    [
        (3, "inputs[0] is a number: send a WAV file in base64"),
        ("/etc/passwd!", "inputs[0] is no base64"),
        (b"no sound", "inputs[0] is no WAV file"),
        (wav(tone(1.0), rate=8_000), "inputs[0] has 16 bits and 8,000 samples per second: send 16 bits and 16,000"),
        (wav(np.zeros(0)), "inputs[0] has no samples"),
        (wav(np.zeros(5_000_001)), "inputs[0] has 5,000,001 samples, too many: send at most 5,000,000"),
    ],
    ids=["number", "path", "broken", "rate", "empty", "long"],
)
def test_a_request_without_audio_that_can_be_read_raises(sound, sentence):
    with pytest.raises(RequestError, match=re.escape(sentence)):
        read_sound(sound, "inputs[0]", RATE)


def test_raw_audio_without_masks_are_answered_one_by_one():
    """Zeros behind shorter audio would change its prediction."""
    sounds = [np.zeros(40, dtype=np.float32)] * 3
    for masks, together in ((False, 1), (True, 3)):
        answerer = Answerer(None, Wav2Vec2FeatureExtractor(return_attention_mask=masks), "audio")
        assert answerer.together(sounds) == together
    assert Answerer(None, extractor(), "audio").together(sounds) == 3


@pytest.mark.slow
@for_families([WAV2VEC2, HUBERT])
def test_audio_shares_a_pass_only_where_no_norm_goes_over_the_zeros_behind_shorter_ones(family):
    """The first of these models has one, as Wav2Vec2-base; the second has none."""
    hydra, masks = family.fused().float(), Wav2Vec2FeatureExtractor(return_attention_mask=True)
    predictor = HydraPredictor(DeepEnsemble([hydra]), masks, name="audio")
    sounds = [tone(1.0, samples=samples) for samples in (200, 2_000)]
    assert predictor.together(sounds) == (1 if family is WAV2VEC2 else 2)
    for answer, sound in zip(predictor.answer(sounds, {}), sounds, strict=True):
        assert answer["score"] == pytest.approx(predictor.answer([sound], {})[0]["score"], abs=1e-6)


def test_audio_too_short_for_a_frame_raises():
    answerer = Answerer(WAV2VEC2.fused(), Wav2Vec2FeatureExtractor(), "audio")
    shortest, shorter = ({"inputs": base64.b64encode(wav(np.zeros(count))).decode()} for count in (10, 9))
    answerer.answer(*answerer.read(shortest))
    with pytest.raises(RequestError, match=r"inputs\[0\] has 9 samples, too few for this model: send at least 10"):
        answerer.read(shorter)


# The command line


@pytest.mark.slow
def test_prune_fuse_info_and_predict(tmp_path, capsys):
    save_ast(tmp_path / "ast")
    tone_rows(24).save_to_disk(tmp_path / "tones")
    (tmp_path / "tone.wav").write_bytes(wav(tone(1.0)))
    (tmp_path / "broken.wav").write_bytes(b"no sound")
    prune = ["prune", str(tmp_path / "ast"), "--data", str(tmp_path / "tones"), "--output", str(tmp_path / "members")]
    assert main([*prune, "--objectives", "acc", "--budget", "2", "--members", "2"]) == 0
    assert "audio: column 'audio'" in capsys.readouterr().out
    assert main(["fuse", str(tmp_path / "members"), "--output", str(tmp_path / "hydra")]) == 0
    assert main(["info", str(tmp_path / "hydra")]) == 0
    capsys.readouterr()
    main(["predict", str(tmp_path / "hydra"), str(tmp_path / "tone.wav"), str(tmp_path / "broken.wav")])
    found = capsys.readouterr()
    assert "low" in found.out or "high" in found.out
    assert "broken.wav cannot be read as a sound" in found.err
    assert "1 of 2 sounds could not be read, the others are answered" in found.err


@pytest.mark.slow
def test_the_server_answers_each_audio_as_if_it_were_alone():
    """By a model without masks, whose prediction would depend on longer audio beside it."""
    hydra, contents = WAV2VEC2.fused().float(), [wav(tone(1.0, samples=samples)) for samples in (200, 333)]
    predictor = HydraPredictor(hydra, Wav2Vec2FeatureExtractor(return_attention_mask=False), name="audio")
    with TestClient(create_app(predictor)) as client:
        sounds = [base64.b64encode(each).decode() for each in contents]
        found = client.post("/predict", json={"inputs": sounds}).json()
        refused = client.post("/predict", json={"inputs": "no sound"})
    for answer, content in zip(found, contents, strict=True):
        [expected] = hydra.predict([waveform(content, RATE)], predictor.processor)
        assert answer["label"] == expected["label"] and answer["score"] == pytest.approx(expected["score"], abs=1e-6)
    assert refused.status_code == 422 and "send the bytes of a WAV file" in refused.json()["error"]


@pytest.mark.slow
def test_whisper_reads_audio_of_all_lengths_together_wherever_audio_is_taken():
    """In data, by `predict`, by a predictor of tables and by the server, as its feature extractor and it say by hand."""
    whisper = WhisperFeatureExtractor(feature_size=7, chunk_length=1, hop_length=1_600)
    hydra, contents = WHISPER.fused().float(), [wav(tone(1.0, samples=samples)) for samples in (2_000, 17_000)]
    waves = [waveform(content, RATE) for content in contents]
    with torch.no_grad():
        scores = hydra(**whisper(waves, sampling_rate=RATE, return_tensors="pt")).logits.softmax(-1).amax(-1).tolist()
    data = load_data([{"audio": {"array": wave, "sampling_rate": RATE}, "label": 0} for wave in waves], whisper)
    batch = collate([data[0], data[1]])
    assert batch["input_features"].shape == (2, 7, 10)
    [noisy] = with_noise([batch])
    assert noisy["input_features"].sub(batch["input_features"]).std() > 0.3
    with torch.no_grad():
        assert hydra(batch["input_features"]).logits.softmax(-1).amax(-1).tolist() == pytest.approx(scores, abs=1e-5)
    predictor = HydraPredictor(hydra, whisper, name="audio")
    assert Answerer(None, whisper, "audio").together(waves) == 2
    table = predictor({"audio": np.array([*contents, None], dtype=object)[:2]})
    with TestClient(create_app(predictor)) as client:
        served = client.post(
            "/predict", json={"inputs": [base64.b64encode(each).decode() for each in contents]}
        ).json()
    for found in (hydra.predict(waves, whisper, batch_size=2), served):
        assert [answer["score"] for answer in found] == pytest.approx(scores, abs=1e-5)
    assert list(table["score"]) == pytest.approx(scores, abs=1e-5)
    assert "Multiply-adds per sound of 10 frames" in str(create_model_card(hydra, repo_id="someone/hydra-whisper"))
