"""Configurations of HydraBert, HydraRoberta, HydraElectra, HydraAlbert and HydraDistilBert."""

from collections import Counter
from dataclasses import replace

from huggingface_hub.dataclasses import strict
from transformers import AlbertConfig, BertConfig, DistilBertConfig, ElectraConfig, RobertaConfig

from .configuration_hydra import HydraConfigMixin, LayerSpec


def bert_layer_spec(config: HydraConfigMixin) -> LayerSpec:
    return config.make_layer_spec(
        norm_first=False,
        float32_softmax=False,
        attention_dropout=config.attention_probs_dropout_prob,
        output_dropout=config.hidden_dropout_prob,
        mlp_dropout=config.hidden_dropout_prob,
    )


@strict
class HydraBertConfig(HydraConfigMixin, BertConfig):
    r"""A [`BertConfig`] with the fields of [`HydraConfigMixin`], and `add_pooling_layer`."""

    model_type = "hydra_bert"
    add_pooling_layer: bool = True
    auto_classes = {
        "AutoConfig": "configuration_hydra_bert.HydraBertConfig",
        "AutoModel": "modeling_hydra_bert.HydraBertModel",
        "AutoModelForSequenceClassification": "modeling_hydra_bert.HydraBertForSequenceClassification",
        "AutoModelForTokenClassification": "modeling_hydra_bert.HydraBertForTokenClassification",
    }
    layer_spec = property(bert_layer_spec)


@strict
class HydraRobertaConfig(HydraConfigMixin, RobertaConfig):
    r"""A [`RobertaConfig`] with the fields of [`HydraConfigMixin`], and `add_pooling_layer`."""

    model_type = "hydra_roberta"
    add_pooling_layer: bool = True
    auto_classes = {
        "AutoConfig": "configuration_hydra_bert.HydraRobertaConfig",
        "AutoModel": "modeling_hydra_bert.HydraRobertaModel",
        "AutoModelForSequenceClassification": "modeling_hydra_bert.HydraRobertaForSequenceClassification",
        "AutoModelForTokenClassification": "modeling_hydra_bert.HydraRobertaForTokenClassification",
    }
    layer_spec = property(bert_layer_spec)


@strict
class HydraElectraConfig(HydraConfigMixin, ElectraConfig):
    r"""An [`ElectraConfig`] with the fields of [`HydraConfigMixin`]."""

    model_type = "hydra_electra"
    auto_classes = {
        "AutoConfig": "configuration_hydra_bert.HydraElectraConfig",
        "AutoModel": "modeling_hydra_bert.HydraElectraModel",
        "AutoModelForSequenceClassification": "modeling_hydra_bert.HydraElectraForSequenceClassification",
        "AutoModelForTokenClassification": "modeling_hydra_bert.HydraElectraForTokenClassification",
    }
    layer_spec = property(bert_layer_spec)


@strict
class HydraAlbertConfig(HydraConfigMixin, AlbertConfig):
    r"""An [`AlbertConfig`] with the fields of [`HydraConfigMixin`].

    ALBERT has one layer for each of `num_hidden_groups`, most often a single one, which runs again
    and again until `num_hidden_layers` have run. `kept_heads` and `trunk_layers` are about the
    layers with weights of their own: a head that is cut out of a layer is missing each time that
    the layer runs.
    """

    model_type = "hydra_albert"
    add_pooling_layer: bool = True
    auto_classes = {
        "AutoConfig": "configuration_hydra_bert.HydraAlbertConfig",
        "AutoModel": "modeling_hydra_bert.HydraAlbertModel",
        "AutoModelForSequenceClassification": "modeling_hydra_bert.HydraAlbertForSequenceClassification",
        "AutoModelForTokenClassification": "modeling_hydra_bert.HydraAlbertForTokenClassification",
    }

    def __post_init__(self, **kwargs):
        if self.inner_group_num != 1:
            raise ValueError(f"inner_group_num is {self.inner_group_num}: a Hydra has one layer in each group, use 1")
        if not 1 <= self.num_hidden_groups <= self.num_hidden_layers:
            raise ValueError(
                f"num_hidden_groups is {self.num_hidden_groups} and num_hidden_layers {self.num_hidden_layers}: use 1 "
                f"to {self.num_hidden_layers} groups, so that each of them runs"
            )
        super().__post_init__(**kwargs)

    @property
    def layer_runs(self) -> list[int]:
        runs = self.num_hidden_layers / self.num_hidden_groups  # rounded as in ALBERT, where layers differ
        return list(Counter(int(run / runs) for run in range(self.num_hidden_layers)).values())

    @property
    def layer_spec(self) -> LayerSpec:
        return replace(bert_layer_spec(self), mlp_dropout=None)


@strict
class HydraDistilBertConfig(HydraConfigMixin, DistilBertConfig):
    r"""A [`DistilBertConfig`] with the fields of [`HydraConfigMixin`]."""

    model_type = "hydra_distilbert"
    auto_classes = {
        "AutoConfig": "configuration_hydra_bert.HydraDistilBertConfig",
        "AutoModel": "modeling_hydra_bert.HydraDistilBertModel",
        "AutoModelForSequenceClassification": "modeling_hydra_bert.HydraDistilBertForSequenceClassification",
        "AutoModelForTokenClassification": "modeling_hydra_bert.HydraDistilBertForTokenClassification",
    }

    @property
    def layer_spec(self) -> LayerSpec:
        return LayerSpec(
            inner_size=self.hidden_dim,
            activation=self.activation,
            norm_eps=1e-12,
            norm_first=False,
            float32_softmax=False,
            attention_dropout=self.attention_dropout,
            mlp_dropout=self.dropout,
        )
