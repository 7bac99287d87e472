"""The config fields of every Hydra: kept heads, shared parts, the trunk, and how its layers are
built."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


# What a Hydra gives beside logits.
OUTPUTS_OF_HYDRAS = ("member_logits", "detector_score", "abstain", "prediction_set", "interval")
# What a saved config says of its decision to clients that know classes and scores alone. A loaded
# one does not: its weights may change.
FOR_ANY_CLIENT = ("abstain_below", "promise")
# What members may share: the mean over the members stands in for each of them.
SHARED_PARTS = ("embeddings", "layernorm", "mlp")
PROBLEM_TYPES = ("single_label_classification", "multi_label_classification", "regression")

KeptHeads = list[list[list[int]]]
TrunkLayers = int | float | dict[str, int | float] | None  # a count or share of the layers: of all towers, or by tower

# More layers, members or heads than any model has; a config that asks for them is broken, or means
# harm.
MAX_LAYERS_HEADS_OR_MEMBERS = 1_000


@dataclass(frozen=True)
class LayerSpec:
    """What a family's layers are made of.

    inner_size: of the MLP, between its two maps
    head_dim: how wide a head is; by default all heads together are as wide as the hidden size
    norm_first: whether a branch normalises what it reads, or the sum is normalised after it
    gated_mlp: whether one half of the MLP's inner layer gates the other
    qkv_bias, output_bias: of queries, keys and values, and of the output projection behind them
    float32_softmax: of the eager backend
    output_dropout, mlp_dropout: behind the output projection and the MLP, None where the backbone
        has none
    inner_dropout: before the MLP's second map
    drop_path: how often a branch is left out in training, in all layers or layer by layer
    trains_key_bias: False where the backbone's keys have no bias and that of a Hydra has to stay
        zero
    layer_scale: the first value of the learned factors on both branches (LayerScale), None where
        the family has none
    """

    inner_size: int
    activation: str
    norm_eps: float
    head_dim: int | None = None
    norm_first: bool = True
    gated_mlp: bool = False
    mlp_bias: bool = True
    qkv_bias: bool = True
    output_bias: bool = True
    float32_softmax: bool = True
    attention_dropout: float = 0.0
    output_dropout: float | None = None
    mlp_dropout: float | None = None
    inner_dropout: float | None = None
    drop_path: float | tuple[float, ...] = 0.0
    trains_key_bias: bool = True
    layer_scale: float | None = None


# The pipelines that say how sure they are: by the Auto class that they run, the class; its task is
# this name with dashes.
PIPELINES = {
    "AutoModelForAudioClassification": "pipeline_hydra_audio.HydraAudioClassificationPipeline",
    "AutoModelForImageClassification": "pipeline_hydra.HydraImageClassificationPipeline",
    "AutoModelForSequenceClassification": "pipeline_hydra_text.HydraTextClassificationPipeline",
    "AutoModelForTokenClassification": "pipeline_hydra_token.HydraTokenClassificationPipeline",
    "AutoModelForZeroShotImageClassification": "pipeline_hydra_zero_shot.HydraZeroShotImageClassificationPipeline",
}


def pipeline_task(path: str) -> str:
    """Return a pipeline's task: of "pipeline_hydra.HydraImageClassificationPipeline" this is
    "hydra-image-classification"."""
    class_name = path.partition(".")[2].removesuffix("Pipeline")
    words = re.findall("[A-Z][a-z]*", class_name)
    return "-".join(words).lower()


class ShippedPipelines:
    """A config that names, in config.json, the pipelines that are saved with the model."""

    _auto_class = "AutoConfig"  # so that Transformers saves the code with it

    def shipped_pipelines(self) -> dict[str, dict]:
        names = [name for name in PIPELINES if name in self.auto_classes]
        # A family may have several heads. With the pipelines of all of them, Transformers could not
        # choose one by itself.
        of_head = [name for name in names if str(self.architectures).endswith(f"{name.removeprefix('AutoModel')}']")]
        return {pipeline_task(PIPELINES[name]): {"impl": PIPELINES[name], "pt": [name]} for name in of_head or names}

    @property
    def custom_pipelines(self) -> dict[str, dict]:
        """Return the pipelines that `pipeline` asks leave to run; not those that the installed
        package has registered."""
        from transformers.pipelines import PIPELINE_REGISTRY

        registered = PIPELINE_REGISTRY.supported_tasks
        return {task: pipeline for task, pipeline in self.shipped_pipelines().items() if task not in registered}

    @custom_pipelines.setter
    def custom_pipelines(self, saved: dict) -> None:
        pass  # they are those of this code

    def to_dict(self) -> dict:
        fields = super().to_dict()
        pipelines = self.shipped_pipelines()
        if pipelines:
            fields["custom_pipelines"] = pipelines
        return fields


@dataclass(kw_only=True, init=False, repr=False, eq=False)
class HydraConfigMixin(ShippedPipelines):
    r"""The fields of every Hydra config. A family adds `auto_classes` and `layer_spec`.

    Args:
        kept_heads (`list[list[list[int]]]`, *optional*):
            `kept_heads[layer][member]`: the backbone heads that a member keeps in a layer, in
            ascending order. By default one member that keeps all heads.
        shared (`list[str]`, *optional*, defaults to `["embeddings", "layernorm", "mlp"]`):
            The parts that exist once for all members. An empty list makes members independent of
            each other.
        trunk_layers (`int`, *optional*, defaults to 0):
            How many leading layers are one for all members, which keep the same heads there, and
            run once.
        ensemble_loss (`str`, *optional*, defaults to `"members"`):
            `"members"` for the mean of the members' losses, `"ensemble"` for the loss of the
            ensemble's prediction.
        problem_type (`str`, *optional*):
            What `logits` mean and which loss they get; labels of another kind are refused. By
            default one label of several, or regression with a single output. A single output that
            is a probability is `"multi_label_classification"`.
        aggregate (`str`, *optional*):
            Makes a regression model with a single output a reward model or reranker, and says how
            its members' scores become the one in `logits`: `"mean"`, `"min"`, or `"mean-2std"` for
            the mean minus twice (or any number of times) the standard deviation between members. It
            may be set on a loaded model, and is saved.
        add_pooling_layer (`bool`, *optional*, defaults to `True`):
            Of families that have it: whether the model without a head has a pooler. Classifiers
            have one where the backbone's do.
    """

    keys_to_ignore_at_inference = list(OUTPUTS_OF_HYDRAS)  # Trainer gathers logits alone
    queries_per_key = 1  # how many query heads read one head of keys and values

    kept_heads: list | None = None  # KeptHeads; the checks say better than a type what is wrong
    shared: list[str] | tuple[str, ...] = SHARED_PARTS
    trunk_layers: int = 0
    ensemble_loss: str = "members"
    aggregate: str | None = None
    decision: dict | None = None

    def __post_init__(self, **kwargs):
        for field in ("num_hidden_layers", "num_attention_heads"):
            if not 1 <= getattr(self, field) <= MAX_LAYERS_HEADS_OR_MEMBERS:  # before lists of this size are made
                raise ValueError(f"{field} is {getattr(self, field)}: use 1 to {MAX_LAYERS_HEADS_OR_MEMBERS:,}")
        super().__post_init__(**kwargs)  # in some families with a list of all layers
        if getattr(self, "is_decoder", False) or getattr(self, "add_cross_attention", False):
            raise ValueError(f"{type(self).__name__} is an encoder's: set is_decoder and add_cross_attention to False")
        if self.kept_heads is None:
            self.kept_heads = [[list(range(self.num_attention_heads))] for _ in self.layer_runs]
        check_kept_heads(self.kept_heads, len(self.layer_runs), self.num_attention_heads)
        self.shared = list(self.shared)
        check_shared(self.shared)
        check_trunk(self)
        set_problem_type(self)
        check_ensemble_loss(self.ensemble_loss)

    @classmethod
    def from_dict(cls, config_dict, **kwargs):
        check_model_type(config_dict, cls)
        config_dict = {name: value for name, value in config_dict.items() if name not in FOR_ANY_CLIENT}
        saved_for = len(config_dict.get("id2label") or ()) or config_dict.get("num_labels", 2)
        if config_dict.get("problem_type") == default_problem_type(saved_for):
            # It was inferred when saved; infer it again for the new num_labels.
            config_dict = {**config_dict, "problem_type": None}
        return super().from_dict(config_dict, **kwargs)

    def make_layer_spec(self, **fields) -> LayerSpec:
        """Make a `LayerSpec` with these fields; those that every family has are found by their most
        frequent names."""
        names = {"inner_size": "intermediate_size", "activation": "hidden_act", "norm_eps": "layer_norm_eps"}
        for field, name in names.items():
            if field not in fields:
                fields[field] = getattr(self, name)
        return LayerSpec(**fields)

    @property
    def num_members(self) -> int:
        return len(self.kept_heads[0])

    @property
    def layer_runs(self) -> list[int]:
        """Return how many times each layer runs, in a row."""
        return [1] * self.num_hidden_layers

    def members_in(self, layer: int) -> int:
        """Return how many members a layer has weights for: one in the trunk, and all of them behind
        it."""
        if layer < self.trunk_layers:
            return 1
        return self.num_members


@dataclass(kw_only=True, init=False, repr=False, eq=False)
class LayerScaleConfigMixin:
    r"""The config field of families with LayerScale, in front of [`HydraConfigMixin`].

    Args:
        layer_scale (`bool`, *optional*, defaults to `True`):
            Whether the factors on the two branches of a layer are weights of their own, as in the
            backbone. Models that were saved before version 0.4 have them folded into their maps:
            the same function, trained otherwise.
    """

    layer_scale: bool = True

    @classmethod
    def from_dict(cls, config_dict, **kwargs):
        is_saved_hydra = "kept_heads" in config_dict
        if is_saved_hydra and "layer_scale" not in config_dict:
            config_dict = {**config_dict, "layer_scale": False}
        return super().from_dict(config_dict, **kwargs)


@contextmanager
def saved_with(config: Any, fields: dict[str, Any]) -> Iterator[None]:
    """Let a config be saved with fields that only hold for the weights that are saved with it."""
    for name, value in fields.items():
        setattr(config, name, value)
    try:
        yield
    finally:
        for name in fields:
            delattr(config, name)


def check_kept_heads(kept_heads: KeptHeads, num_layers: int, num_heads: int) -> None:
    """Raise for a `kept_heads[layer][member]` that no model can have."""
    if len(kept_heads) != num_layers:
        raise ValueError(f"kept_heads has {len(kept_heads)} layers, the model has {num_layers}: give a list for each")
    num_members = len(kept_heads[0])
    if not 1 <= num_members <= MAX_LAYERS_HEADS_OR_MEMBERS:
        raise ValueError(f"kept_heads[0] has {num_members:,} members: use 1 to {MAX_LAYERS_HEADS_OR_MEMBERS:,}")
    for layer, members in enumerate(kept_heads):
        if not isinstance(members, list) or len(members) != num_members:
            raise ValueError(
                f"kept_heads[{layer}] is {str(members)[:100]}: give a list of heads for each of the {num_members} "
                "members (an empty list for a member that keeps no head there)"
            )
        for member, heads in enumerate(members):
            are_heads = isinstance(heads, list) and all(type(head) is int and 0 <= head < num_heads for head in heads)
            if not are_heads or sorted(set(heads)) != heads:
                raise ValueError(
                    f"kept_heads[{layer}][{member}] is {heads!r}: give a list of heads, 0 to {num_heads - 1}, each "
                    "once and in ascending order"
                )


def check_shared(shared: list[str]) -> None:
    """Raise for names in `shared` that are not parts of a Hydra."""
    for name in shared:
        if name not in SHARED_PARTS:
            raise ValueError(f"shared names {name!r}: members can share {', '.join(map(repr, SHARED_PARTS))}")


def check_trunk(config) -> None:
    """Raise for a trunk that members cannot have in common; a single member has none."""
    trunk = config.trunk_layers
    same = count_layers_with_same_heads(config.kept_heads)
    if not 0 <= trunk <= same:
        raise ValueError(f"trunk_layers is {trunk}: pass 0 to {same}, so many first layers have the same heads")
    if config.num_members == 1:
        config.trunk_layers = 0
    if config.trunk_layers and "embeddings" not in config.shared:
        raise ValueError(f"trunk_layers is {trunk}: members enter a trunk as one, so shared has to name 'embeddings'")


def count_layers_with_same_heads(kept_heads: KeptHeads) -> int:
    """Return how many leading layers have the same heads in all members."""
    for layer, members in enumerate(kept_heads):
        if any(heads != members[0] for heads in members):
            return layer
    return len(kept_heads)


def set_problem_type(config) -> None:
    """Set once what the labels are, as Transformers' loss would: what `logits` mean never changes
    after that."""
    if config.problem_type is None:
        config.problem_type = default_problem_type(config.num_labels)
    if config.problem_type not in PROBLEM_TYPES:
        raise ValueError(f"problem_type is {config.problem_type!r}: use one of {', '.join(map(repr, PROBLEM_TYPES))}")
    if config.problem_type == "single_label_classification" and config.num_labels == 1:
        raise ValueError(
            "problem_type is 'single_label_classification' and num_labels is 1, so that every loss would be 0: use "
            "'regression', or 'multi_label_classification' for one label that is true or false"
        )


def default_problem_type(num_labels: int) -> str:
    """Return what Transformers takes labels for where a config does not say."""
    if num_labels == 1:
        return "regression"
    return "single_label_classification"


def check_ensemble_loss(ensemble_loss: str) -> None:
    if ensemble_loss not in ("members", "ensemble"):
        raise ValueError(f"ensemble_loss is {ensemble_loss!r}: use 'members' (the mean of their losses) or 'ensemble'")


def check_model_type(config_dict: dict, config_class: type) -> None:
    """Raise for a backbone's config: its weights have another layout and would load as nonsense."""
    model_type = config_dict.get("model_type", config_class.model_type)
    if model_type != config_class.model_type:
        raise ValueError(
            f"this checkpoint is of type {model_type!r}, {config_class.__name__} reads {config_class.model_type!r}: "
            "load a backbone with its own Transformers class and pass it to from_backbone()"
        )
