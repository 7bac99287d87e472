"""What a model reads reaches it through a baseline, whatever it is called; what cannot be right is refused."""

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file
from torch import nn
from transformers import (
    BartConfig,
    BartForSequenceClassification,
    BertConfig,
    BertForTokenClassification,
    GPT2Config,
    GPT2ForSequenceClassification,
    LayoutLMConfig,
    LayoutLMForSequenceClassification,
    Trainer,
    TrainingArguments,
)

from hydra_transformers.baselines import MIMO, BatchEnsemble, DeepEnsemble, HeadEnsemble, LastLayerLaplace, ViLU
from hydra_transformers.data.prediction import predict
from tests.families import BERT, VIT, bert_backbone, randomise, vit_backbone
from tests.training.tiny import QUIET, tiny_dataset, tiny_model


SIZES = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8, "vocab_size": 40}
TEXTS = torch.tensor([[5, 6, 7, 8], [7, 9, 11, 5]])


@pytest.fixture(scope="module")
def layout_model() -> LayoutLMForSequenceClassification:
    """It reads where on a page a token stands, in `bbox`."""
    return randomise(LayoutLMForSequenceClassification(LayoutLMConfig(**SIZES, num_labels=3)).double(), seed=0)


@pytest.mark.parametrize(
    "make",
    [lambda model: BatchEnsemble(model, init="ones"), LastLayerLaplace, ViLU],
    ids=["BatchEnsemble", "Laplace", "ViLU"],
)
def test_inputs_of_other_names_reach_the_model_in_judging(layout_model, make):
    batch = {
        "input_ids": TEXTS,
        "bbox": torch.arange(32).reshape(2, 4, 4).sort(dim=-1).values,
        "labels": torch.zeros(2),
    }
    expected = layout_model(input_ids=TEXTS, bbox=batch["bbox"]).logits
    assert not torch.allclose(expected, layout_model(input_ids=TEXTS).logits)
    torch.testing.assert_close(predict(make(layout_model), batch)[:, 0], expected)


def test_a_mimo_refuses_inputs_that_it_has_no_places_for(layout_model):
    with pytest.raises(
        ValueError, match="reads input_ids, attention_mask, token_type_ids in its places, and got bbox, input_ids"
    ):
        predict(
            MIMO(layout_model, num_members=2), {"input_ids": TEXTS, "bbox": torch.zeros(2, 4, 4, dtype=torch.long)}
        )


def test_a_mimo_refuses_a_decoder_that_looks_for_its_last_token():
    sizes = {"n_embd": 8, "n_layer": 1, "n_head": 2, "vocab_size": 40, "bos_token_id": 1, "eos_token_id": 1}
    model = GPT2ForSequenceClassification(GPT2Config(**sizes, num_labels=3, pad_token_id=0))
    with pytest.raises(ValueError, match="GPT2ForSequenceClassification gives other logits for embeddings"):
        MIMO(randomise(model, seed=0))


@pytest.mark.parametrize("make", [BatchEnsemble, HeadEnsemble, MIMO])
def test_classifiers_of_tokens_are_refused(make):
    with pytest.raises(TypeError, match="BertForTokenClassification, which classifies each token"):
        make(BertForTokenClassification(BertConfig(**SIZES)))


@pytest.mark.parametrize("problem", ["multi_label_classification", "regression"])
def test_a_mimo_learns_several_numbers_per_row(problem):
    """As many as it has members: the labels' columns are not the members'."""
    model = vit_backbone(num_labels=3, problem_type=problem)
    mimo, labels = MIMO(model, num_members=3), torch.rand(4, 3, dtype=torch.float64).round()
    expected = 3 * model(**VIT.inputs(), labels=labels).loss
    torch.testing.assert_close(mimo.eval()(**VIT.inputs(), labels=labels).loss, expected)
    places = torch.tensor([[0, 0, 0], [1, 2, 3]])
    output = mimo.train()(**VIT.inputs(), labels=labels, places=places)
    loss = nn.functional.mse_loss if problem == "regression" else nn.functional.binary_cross_entropy_with_logits
    torch.testing.assert_close(output.loss, 3 * loss(output.member_logits, labels[places]))


@pytest.mark.parametrize("make", [LastLayerLaplace, ViLU])
def test_a_single_output_is_no_choice_of_classes(make):
    with pytest.raises(ValueError, match="model has 1 output"):
        make(bert_backbone(num_labels=1))


def test_a_mimo_of_a_single_output_takes_one_number_per_row():
    model = bert_backbone(num_labels=1, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    labels = torch.rand(4, dtype=torch.float64)
    places = torch.tensor([[0, 1], [2, 3]])
    output = MIMO(model, num_members=2).train()(**BERT.inputs(), labels=labels, places=places)
    squares = (output.member_logits.squeeze(-1) - labels[places]) ** 2
    torch.testing.assert_close(output.loss, 2 * squares.mean())


@pytest.mark.parametrize("make", [BatchEnsemble, HeadEnsemble, MIMO, LastLayerLaplace, ViLU])
def test_a_model_with_adapters_is_refused(make):
    """Saved, it would be the adapters alone."""
    model = vit_backbone()
    model.add_adapter(LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(ValueError, match=r"has adapters of PEFT: pass what merge_and_unload\(\)"):
        make(model)


def small_bart() -> BartForSequenceClassification:
    """Its embeddings have three names; it looks for the end of a text."""
    sizes = {
        f"{part}_{name}": 1 for part in ("encoder", "decoder") for name in ("layers", "attention_heads", "ffn_dim")
    }
    return BartForSequenceClassification(BartConfig(**sizes, d_model=8, vocab_size=40, num_labels=3)).eval()


def test_a_checkpoint_of_tied_weights_is_saved_by_trainer(tmp_path):
    baseline = BatchEnsemble(small_bart(), num_members=2)
    rows = [{"input_ids": torch.tensor([5, 6 + number, 2]), "labels": number} for number in range(2)]
    Trainer(baseline, TrainingArguments(tmp_path, max_steps=1, **QUIET), train_dataset=rows).train()
    saved = load_file(tmp_path / "checkpoint-1" / "model.safetensors")
    assert saved.keys() == baseline.state_dict().keys()
    again = BatchEnsemble(small_bart(), num_members=2)
    again.load_state_dict(saved)
    batch = {"input_ids": torch.stack([row["input_ids"] for row in rows])}
    assert torch.equal(predict(again, batch), predict(baseline, batch))
    with pytest.raises(ValueError, match="BartForSequenceClassification gives other logits for embeddings"):
        MIMO(small_bart())
    with pytest.raises(ValueError, match="BartForSequenceClassification does not have exactly one list of layers"):
        BatchEnsemble(small_bart(), layers=1)


def test_a_loss_of_the_members_mean_is_stopped(tmp_path):
    arguments = TrainingArguments(tmp_path, max_steps=1, label_smoothing_factor=0.1, **QUIET)
    baseline = BatchEnsemble(tiny_model("vit", "backbone"), num_members=2)
    with pytest.raises(RuntimeError, match="each member of a BatchEnsemble has a loss of its own"):
        Trainer(baseline, arguments, train_dataset=tiny_dataset("vit")).train()


@pytest.mark.parametrize(
    "make", [lambda model: BatchEnsemble(model, std=0.5), lambda model: DeepEnsemble([model] * 2)]
)
def test_a_single_output_is_a_number_before_and_after_the_first_loss(make):
    output = make(bert_backbone(num_labels=1)).eval()(**BERT.inputs())
    torch.testing.assert_close(output.logits, output.member_logits.mean(dim=1))
