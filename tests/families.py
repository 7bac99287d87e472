"""The table of model families: tiny backbones, their inputs, and the plain Transformers reference that tests compare with.

A test with an argument `family` runs for every row with code of its own; with `@each_of(FEW)` for others.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, cached_property

import pytest
import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.beit.modeling_beit import BeitRelativePositionBias

from hydra_transformers.data.batches import AUDIO_INPUTS
from hydra_transformers.models.auto import hydra_class
from hydra_transformers.models.configuration_hydra import SHARED_PARTS


HEAD_DIM = 8
DEPTH = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
SIZES = {**DEPTH, "intermediate_size": 40}
IMAGE_SIZES = {"image_size": 8, "patch_size": 4, "num_labels": 5}
TEXT_SIZES = {"vocab_size": 40, "max_position_embeddings": 16, "num_labels": 3}
# Patches overlap: two by three of them.
AUDIO_SIZES = {
    "patch_size": 4,
    "frequency_stride": 3,
    "time_stride": 3,
    "max_length": 10,
    "num_mel_bins": 7,
    "num_labels": 5,
}
CLIP_END = {"bos_token_id": 38, "eos_token_id": 39}
TINY_TEXT = {**SIZES, "vocab_size": 40, "max_position_embeddings": 16, **CLIP_END}


def randomise(model: PreTrainedModel, seed: int) -> PreTrainedModel:
    """Weights large enough that every part of the model matters for the logits."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64, device="cpu")
            parameter.copy_(0.2 * values)
    return model.eval()


def backbone(model_class: type, defaults: dict, configure: Callable | None = None) -> Callable[..., PreTrainedModel]:
    """Builds backbones by seed and config fields; `configure` makes configs whose fields are nested. Without fields each is a
    copy of one that is kept, for the test to change; that one with `kept`."""
    configure = configure or model_class.config_class

    def build(seed: int = 0, **fields) -> PreTrainedModel:
        return randomise(model_class(configure(**{**defaults, **fields})).double(), seed)

    built = cache(build)

    def backbone_of(seed: int = 0, kept: bool = False, **fields) -> PreTrainedModel:
        return build(seed, **fields) if fields else built(seed) if kept else copy.deepcopy(built(seed))

    return backbone_of


def keep_layers(hydra: torch.nn.Module, *numbers: int) -> None:
    """Of each tower these layers: one says as much about a format or a compiler as three do, in half of the time. In the last one
    members keep different numbers of heads, and one has none."""
    for module in hydra.modules():
        if isinstance(getattr(module, "layers", None), torch.nn.ModuleList):
            module.layers = torch.nn.ModuleList(module.layers[number] for number in numbers)


vit_backbone = backbone(transformers.ViTForImageClassification, {**SIZES, **IMAGE_SIZES})
bert_backbone = backbone(transformers.BertForSequenceClassification, {**SIZES, **TEXT_SIZES})


def of_vision_tower(config_class: type) -> Callable:
    """The config of an image classifier that is one of two towers, by the fields of that one."""

    def build(num_labels: int, **fields) -> PreTrainedConfig:
        return config_class(vision_config=fields, text_config=TINY_TEXT, num_labels=num_labels)

    return build


clip_backbone = backbone(
    transformers.CLIPModel,
    {"text_config": TINY_TEXT, "vision_config": {**SIZES, "image_size": 8, "patch_size": 4}, "projection_dim": 12},
)
siglip_backbone = backbone(
    transformers.SiglipModel,
    {
        "text_config": {**TINY_TEXT, "projection_size": 32},
        "vision_config": {**SIZES, "image_size": 8, "patch_size": 4},
    },
)


def images(batch: int = 4, seed: int = 0) -> torch.Tensor:
    return torch.randn(batch, 3, 8, 8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def spectrograms(batch: int = 4, seed: int = 0) -> torch.Tensor:
    return torch.randn(batch, 10, 7, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def log_mel(batch: int = 4, seed: int = 0) -> torch.Tensor:
    """Spectrograms as Whisper reads them."""
    return torch.randn(batch, 7, 10, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def padded_sounds(batch: int = 4, samples: int = 40, seed: int = 0) -> dict[str, torch.Tensor]:
    """Sounds of different lengths, filled up with zeros."""
    sounds = torch.randn(batch, samples, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    mask = (torch.arange(samples) < samples - 5 * (torch.arange(batch) % 4).unsqueeze(1)).long()
    return {"input_values": sounds * mask, "attention_mask": mask}


def padded_texts(batch: int = 4, tokens: int = 7, seed: int = 0) -> dict[str, torch.Tensor]:
    """Texts of different lengths, each ended by token 39 (CLIP's end of text) and padded."""
    input_ids = torch.randint(3, 38, (batch, tokens), generator=torch.Generator().manual_seed(seed))
    attention_mask = torch.ones_like(input_ids)
    for row in range(batch):
        length = tokens - row % (tokens - 2)
        input_ids[row, length - 1] = 39
        input_ids[row, length:] = 0
        attention_mask[row, length:] = 0
    return {"input_ids": input_ids, "attention_mask": attention_mask}


def softmax(logits: torch.Tensor) -> torch.Tensor:
    return logits.softmax(dim=-1)


@dataclass(frozen=True, eq=False)
class Family:
    """What a test needs to know about a model family.

    outputs: the names of the backbone's output projections, by tower, with {} for the layer
    older: a part of these names, and what it was in older versions of Transformers
    dropout: config fields that switch every dropout of the layers on
    tokens: how many tokens `inputs` become
    probabilities: what logits stand for, (..., classes) -> (..., classes)
    gradient_tolerance: how far gradients in float64 may lie apart, where backbones round to float32 on the way
    """

    name: str
    backbone: Callable[..., PreTrainedModel]
    inputs: Callable[[], dict[str, torch.Tensor]]
    outputs: dict[str, str]
    tokens: int
    older: tuple[str, str] | None = None
    dropout: dict[str, float] = field(
        default_factory=lambda: {"hidden_dropout_prob": 0.3, "attention_probs_dropout_prob": 0.3}
    )
    probabilities: Callable[[torch.Tensor], torch.Tensor] = softmax
    gradient_tolerance: float = 1e-10

    def inputs_in(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        return {name: each.to(dtype) if each.is_floating_point() else each for name, each in self.inputs().items()}

    @cached_property
    def hydra(self) -> type:
        return hydra_class(self.backbone(kept=True))

    @property
    def has_towers(self) -> bool:
        return len(self.outputs) > 1

    @property
    def reads_images(self) -> bool:
        return "pixel_values" in self.inputs()

    @property
    def reads_audio(self) -> bool:
        return self.audio_name is not None

    @property
    def audio_name(self) -> str | None:
        return next((name for name in AUDIO_INPUTS if name in self.inputs()), None)

    def sounds(self, batch: int = 4, seed: int = 0) -> dict[str, torch.Tensor]:
        """Spectrograms, or raw sounds of different lengths with their masks."""
        if self.audio_name == "input_features":
            return {"input_features": log_mel(batch, seed)}
        is_raw = self.inputs()["input_values"].dim() == 2
        return padded_sounds(batch, seed=seed) if is_raw else {"input_values": spectrograms(batch, seed)}

    @property
    def num_classes(self) -> int:
        """For two towers the number of texts."""
        return len(self.inputs()["input_ids"]) if self.has_towers else self.backbone(kept=True).config.num_labels

    @property
    def heads_to_prune(self) -> tuple[dict, ...]:
        """Head sets of three members: ragged, one member without any head in a layer, one layer without heads of any member."""
        return RAGGED_IN_TWO_TOWERS if self.has_towers else RAGGED

    def in_every_tower(self, heads_to_prune: dict) -> dict:
        return dict.fromkeys(self.outputs, heads_to_prune) if self.has_towers else heads_to_prune

    def logits(self, model: PreTrainedModel, **inputs) -> torch.Tensor:
        """Logits (batch, classes) of a plain Transformers model; for CLIP of the images over the texts."""
        return self.ensemble_logits(model(**inputs))

    def ensemble_logits(self, outputs) -> torch.Tensor:
        return outputs.logits_per_image if self.has_towers else outputs.logits

    def ablate(self, model: PreTrainedModel, heads_to_prune: dict) -> PreTrainedModel:
        """A copy of the backbone with the output-projection slices of these heads zeroed."""
        model = copy.deepcopy(model)
        for tower, layers in (heads_to_prune if self.has_towers else {"": heads_to_prune}).items():
            for layer, heads in layers.items():
                projection = self.output_projection(model, tower, layer)
                for head in heads:
                    with torch.no_grad():
                        projection.weight[:, head * HEAD_DIM : (head + 1) * HEAD_DIM] = 0
        return model

    def output_projection(self, model: PreTrainedModel, tower: str, layer: int) -> torch.nn.Linear:
        name = self.outputs[tower].format(layer)
        if self.older is not None and name not in dict(model.named_modules()):
            name = name.replace(*self.older)
        return model.get_submodule(name)

    def members(self) -> list[PreTrainedModel]:
        """One-member Hydras from different backbones with different heads pruned, for the test to change as it likes."""
        return copy.deepcopy(_members(self, "ragged"))

    def fused(self, heads: str = "ragged", shared: tuple[str, ...] = SHARED_PARTS) -> PreTrainedModel:
        """A Hydra of three members from different backbones, for the test to change as it likes.

        heads: "ragged", as of `heads_to_prune`; "uniform", one pruned in each layer, another one for each member; or "all"
        """
        return copy.deepcopy(_fused(self, heads, shared))


# Building a tiny Hydra takes far longer than running it, or than copying it; most of that is the comparison with its members.
@cache
def _members(family: Family, heads: str) -> list[PreTrainedModel]:
    backbones = [family.backbone(seed, kept=True) for seed in range(3)]
    if heads == "all":
        return backbones
    uniform = [family.in_every_tower({layer: [member] for layer in range(3)}) for member in range(3)]
    prunings = {"ragged": family.heads_to_prune, "uniform": uniform}[heads]
    return [family.hydra.from_backbone(each, pruned) for each, pruned in zip(backbones, prunings, strict=True)]


@cache
def _fused(family: Family, heads: str, shared: tuple[str, ...]) -> PreTrainedModel:
    return family.hydra.from_pruned_members(_members(family, heads), shared, check=False)


RAGGED = ({0: [1], 1: [0, 1, 2, 3], 2: [0, 3]}, {1: [0, 1, 2, 3]}, {0: [0, 2, 3], 1: [0, 1, 2, 3], 2: [0, 1, 2, 3]})
RAGGED_IN_TWO_TOWERS = (
    {"vision": RAGGED[0], "text": {0: [1]}},
    {"vision": RAGGED[1], "text": {2: [0, 1, 2, 3], 0: [2, 3]}},
    {"vision": RAGGED[2]},
)


def pixels() -> dict[str, torch.Tensor]:
    return {"pixel_values": images()}


def of_images(name: str, model_class: type, output: str, tokens: int = 5, sizes: dict = SIZES, **options) -> Family:
    """options: `configure` of `backbone`, fields of the config, and of `Family`"""
    configure = options.pop("configure", None)
    of_family = _of_family(options)
    make = backbone(model_class, {**sizes, **IMAGE_SIZES, **options}, configure)
    return Family(name, make, pixels, {"": output}, tokens, **of_family)


def of_texts(name: str, model_class: type, output: str, sizes: dict = SIZES, **options) -> Family:
    of_family = _of_family(options)
    return Family(
        name, backbone(model_class, {**sizes, **TEXT_SIZES, **options}), padded_texts, {"": output}, 7, **of_family
    )


def of_audio(name: str, model_class: type, inputs: Callable, output: str, tokens: int, **options) -> Family:
    of_family = _of_family(options)
    return Family(name, backbone(model_class, options), inputs, {"": output}, tokens, **of_family)


def _of_family(options: dict) -> dict:
    names = ("older", "dropout", "probabilities", "gradient_tolerance")
    return {name: options.pop(name) for name in names if name in options}


VIT = Family("vit", vit_backbone, pixels, {"": "vit.layers.{}.attention.o_proj"}, 5)
BERT = Family("bert", bert_backbone, padded_texts, {"": "bert.encoder.layer.{}.attention.output.dense"}, 7)
IN_A_TOWER = "encoder.layers.{}.self_attn.out_proj"
CLIP = Family(
    "clip",
    clip_backbone,
    lambda: {**pixels(), **padded_texts(batch=3)},
    {"vision": f"vision_model.{IN_A_TOWER}", "text": f"text_model.{IN_A_TOWER}"},
    5,
)
DEIT = of_images("deit", transformers.DeiTForImageClassification, "deit.layers.{}.attention.o_proj", 6)
IN_DINOV2 = {"sizes": DEPTH, "mlp_ratio": 2, "older": ("o_proj", "output.dense")}
IN_DINOV2["dropout"] = {"attention_probs_dropout_prob": 0.3, "drop_path_rate": 0.3}
DINOV2, DINOV2_GATED = (
    of_images(
        name,
        transformers.Dinov2ForImageClassification,
        "dinov2.encoder.layer.{}.attention.o_proj",
        use_swiglu_ffn=is_gated,
        **IN_DINOV2,
    )
    for name, is_gated in (("dinov2", False), ("dinov2-swiglu", True))
)
DINOV2_WITH_REGISTERS = of_images(
    "dinov2_with_registers",
    transformers.Dinov2WithRegistersForImageClassification,
    "dinov2_with_registers.encoder.layer.{}.attention.o_proj",
    9,
    **IN_DINOV2,
)
# Kept by Transformers for all calls, the first of which must not be in inference mode.
BeitRelativePositionBias.generate_relative_position_index((2, 2))
BEIT = of_images(
    "beit",
    transformers.BeitForImageClassification,
    "beit.layers.{}.attention.o_proj",
    use_relative_position_bias=True,
    drop_path_rate=0.0,
    gradient_tolerance=1e-5,  # the eager softmax computes in float32
)
ROBERTA, XLM_ROBERTA, CAMEMBERT = (
    of_texts(name, model_class, "roberta.encoder.layer.{}.attention.output.dense", pad_token_id=0)
    for name, model_class in (
        ("roberta", transformers.RobertaForSequenceClassification),
        ("xlm-roberta", transformers.XLMRobertaForSequenceClassification),
        ("camembert", transformers.CamembertForSequenceClassification),
    )
)
DISTILBERT = of_texts(
    "distilbert",
    transformers.DistilBertForSequenceClassification,
    "distilbert.transformer.layer.{}.attention.out_lin",
    {"dim": 32, "n_layers": 3, "n_heads": 4, "hidden_dim": 40},
    dropout={"dropout": 0.3, "attention_dropout": 0.3},
)
ELECTRA = of_texts(
    "electra",
    transformers.ElectraForSequenceClassification,
    "electra.encoder.layer.{}.attention.output.dense",
    embedding_size=24,
)
# Three layers, each of which runs twice.
ALBERT = of_texts(
    "albert",
    transformers.AlbertForSequenceClassification,
    "albert.encoder.albert_layer_groups.{}.albert_layers.0.attention.dense",
    {**SIZES, "num_hidden_layers": 6, "num_hidden_groups": 3},
    embedding_size=24,
)
MPNET = of_texts("mpnet", transformers.MPNetForSequenceClassification, "mpnet.encoder.layer.{}.attention.attn.o")
IN_DEBERTA = {**SIZES, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]}
# As in DeBERTa-v3, with fewer buckets than distances; and as in DeBERTa-v2, with maps of their own for positions and smaller
# embeddings.
DEBERTA, DEBERTA_V2 = (
    of_texts(
        name,
        transformers.DebertaV2ForSequenceClassification,
        "deberta.encoder.layer.{}.attention.output.dense",
        IN_DEBERTA | fields,
    )
    for name, fields in (
        (
            "deberta",
            {
                "share_att_key": True,
                "position_buckets": 4,
                "norm_rel_ebd": "layer_norm",
                "position_biased_input": False,
            },
        ),
        ("deberta-v2", {"embedding_size": 24, "type_vocab_size": 2}),
    )
)
AST = of_audio(
    "ast",
    transformers.ASTForAudioClassification,
    lambda: {"input_values": spectrograms()},
    "audio_spectrogram_transformer.layers.{}.attention.o_proj",
    8,
    **SIZES,
    **AUDIO_SIZES,
)
WAVEFORM_SIZES = {
    **SIZES,
    "conv_dim": (6, 6),
    "conv_stride": (3, 2),
    "conv_kernel": (4, 3),
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "layerdrop": 0.0,
    "mask_time_prob": 0.0,
    "classifier_proj_size": 12,
    "num_labels": 5,
}
WAVEFORM_DROPOUT = {"hidden_dropout": 0.3, "activation_dropout": 0.3, "attention_dropout": 0.3}
# HuBERT with norms before the branches, and a head that reads all layers.
OF_HUBERT = {"do_stable_layer_norm": True, "feat_extract_norm": "layer", "conv_bias": True, "mask_time_prob": 0.05}
OF_HUBERT |= {"use_weighted_layer_sum": True, "apply_spec_augment": False}
WAV2VEC2, HUBERT, WAVLM = (
    of_audio(
        name,
        model_class,
        padded_sounds,
        f"{name}.encoder.layers.{{}}.attention.out_proj",
        6,
        dropout=WAVEFORM_DROPOUT,
        **WAVEFORM_SIZES | fields,
    )
    for name, model_class, fields in (
        ("wav2vec2", transformers.Wav2Vec2ForSequenceClassification, {}),
        ("hubert", transformers.HubertForSequenceClassification, OF_HUBERT),
        ("wavlm", transformers.WavLMForSequenceClassification, {"num_buckets": 8, "max_bucket_distance": 5}),
    )
)
WHISPER = of_audio(
    "whisper",
    transformers.WhisperForAudioClassification,
    lambda: {"input_features": log_mel()},
    "encoder.layers.{}.self_attn.out_proj",
    5,
    **DEPTH,
    **{
        "encoder_ffn_dim": 40,
        "num_mel_bins": 7,
        "max_source_positions": 5,
        "classifier_proj_size": 12,
        "num_labels": 5,
    },
    dropout={"dropout": 0.3, "activation_dropout": 0.3, "attention_dropout": 0.3},
)
ATTENTION_DROPOUT = {"attention_dropout": 0.3}
CLIP_CLASSIFIER, SIGLIP_CLASSIFIER = (
    of_images(
        name,
        model_class,
        f"vision_model.{IN_A_TOWER}",
        tokens,
        configure=of_vision_tower(model_class.config_class),
        dropout=ATTENTION_DROPOUT,
    )
    for name, model_class, tokens in (
        ("clip-classifier", transformers.CLIPForImageClassification, 5),
        ("siglip-classifier", transformers.SiglipForImageClassification, 4),
    )
)
SIGLIP = Family(
    "siglip", siglip_backbone, CLIP.inputs, CLIP.outputs, 4, dropout=ATTENTION_DROPOUT, probabilities=torch.sigmoid
)
# One layer sees all of a text, two see no further than three tokens to each side, and so at least a token that is not padding:
# Transformers' own eager attention gives no numbers in float64 where there is none.
MODERNBERT = of_texts(
    "modernbert",
    transformers.ModernBertForSequenceClassification,
    "model.layers.{}.attn.Wo",
    local_attention=6,
    **{"pad_token_id": 0, "cls_token_id": 1, "sep_token_id": 2, "bos_token_id": 1, "eos_token_id": 2},
    dropout={"attention_dropout": 0.3, "mlp_dropout": 0.3},
    gradient_tolerance=1e-6,  # queries and keys are turned by their positions in float32
)
NARROW = {"hidden_size": 16, "head_dim": HEAD_DIM}
ROPE_BY_LAYER = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10.0},
    "full_attention": {"rope_type": "linear", "rope_theta": 100.0, "factor": 2.0},
}
OF_GEMMA3 = {"sliding_window": 4, "query_pre_attn_scalar": 20, "rope_parameters": ROPE_BY_LAYER}
OF_GEMMA3["sliding_window_pattern"] = 2  # the second of three layers sees all of a text
LLAMA, QWEN2, GEMMA, QWEN3, GEMMA3 = DECODERS = [
    of_texts(
        name,
        model_class,
        "model.layers.{}.self_attn.o_proj",
        {**SIZES, "num_key_value_heads": 2, "pad_token_id": 0, **fields},
        dropout=ATTENTION_DROPOUT,
        gradient_tolerance=tolerance,  # RMSNorms compute in float32
    )
    for name, model_class, fields, tolerance in (
        ("llama", transformers.LlamaForSequenceClassification, {}, 1e-6),
        ("qwen2", transformers.Qwen2ForSequenceClassification, {}, 1e-6),
        ("gemma", transformers.GemmaForSequenceClassification, NARROW | {"num_key_value_heads": 1}, 1e-5),
        ("qwen3", transformers.Qwen3ForSequenceClassification, {"head_dim": HEAD_DIM}, 1e-5),
        ("gemma3", transformers.Gemma3TextForSequenceClassification, NARROW | OF_GEMMA3, 1e-5),
    )
]
FAMILIES = [VIT, BERT, CLIP, DEIT, DINOV2, DINOV2_GATED, DINOV2_WITH_REGISTERS, BEIT]
FAMILIES += [ROBERTA, XLM_ROBERTA, CAMEMBERT, DISTILBERT, ELECTRA, ALBERT, MPNET, DEBERTA, DEBERTA_V2, MODERNBERT]
FAMILIES += [AST, WAV2VEC2, HUBERT, WAVLM, WHISPER, CLIP_CLASSIFIER, SIGLIP, SIGLIP_CLASSIFIER]
FAMILIES += [LLAMA, QWEN2, GEMMA, QWEN3, GEMMA3]
# As the published models: two registers beside the [CLS] token, keys without a bias.
DINOV3 = Family(
    "dinov3",
    backbone(
        transformers.DINOv3ViTModel,
        {**SIZES, "image_size": 8, "patch_size": 4, "num_register_tokens": 2, "rope_theta": 10.0},
    ),
    pixels,
    {"": "model.layer.{}.attention.o_proj"},
    7,
    dropout={"attention_dropout": 0.3, "drop_path_rate": 0.3},
)
# Encoders of which Transformers has no classifier.
ENCODERS = [DINOV3]
# Four that cover every kind: images, texts, two towers, a causal language model. The short run has the first three.
FEW = [VIT, BERT, CLIP, LLAMA]
# Rows whose layers differ from those of every other row here.
OWN_LAYERS = [VIT, BERT, CLIP, DINOV2, BEIT, ALBERT, MPNET, DEBERTA, MODERNBERT, LLAMA, GEMMA3]
# Rows that run no line of code which another row does not: compared with their backbones, saved and loaded, and no more.
SAME_CODE = [DEIT, DINOV2_GATED, XLM_ROBERTA, CAMEMBERT, HUBERT, QWEN2, QWEN3]
DISTINCT = [family for family in FAMILIES if family not in SAME_CODE]
# Rows that differ from another in a few parts, which need no compilation of their own.
VARIANTS = [*SAME_CODE, DEBERTA_V2, GEMMA, CLIP_CLASSIFIER, SIGLIP_CLASSIFIER]


def each_of(rows: list[Family]) -> pytest.MarkDecorator:
    """Runs a test once for each of these rows, its argument `family`; without it, a test runs for all but `SAME_CODE`."""
    return pytest.mark.parametrize("family", rows, ids=lambda family: family.name)
