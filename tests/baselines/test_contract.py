"""What every baseline keeps: it answers with its members, is reproducible, leaves the user's model alone, and can be counted."""

import copy

import pytest
import torch
from datasets import Dataset
from peft import get_peft_model
from safetensors.torch import load_file
from torch import nn
from transformers import (
    BartConfig,
    BartForSequenceClassification,
    SwinConfig,
    SwinForImageClassification,
    Trainer,
    TrainingArguments,
)

from hydra_transformers.baselines import (
    MIMO,
    BatchEnsemble,
    BayesVLM,
    DeepEnsemble,
    LastLayerLaplace,
    LoRAEnsemble,
    MCDropout,
    MIMOCollator,
    PackedEnsemble,
    soup,
    temperature_scaled,
)
from hydra_transformers.baselines.kronecker import KroneckerPosterior
from hydra_transformers.cost import count_multiply_adds
from hydra_transformers.data.prediction import predict
from hydra_transformers.training import lora_config
from hydra_transformers.uncertainty import predict_uncertainty
from tests.families import (
    BERT,
    CLIP,
    DEBERTA_V2,
    LLAMA,
    VIT,
    WAVLM,
    WHISPER,
    bert_backbone,
    each_of,
    images,
    padded_texts,
    randomise,
    vit_backbone,
)
from tests.training.tiny import QUIET, tiny_dataset, tiny_model


# Four samples are few for a temperature.
pytestmark = pytest.mark.filterwarnings("ignore:.*edge of the search")
LABELS = torch.tensor([0, 1, 2, 0])


def lora_ensemble(backbone) -> LoRAEnsemble:
    """Two untrained adapters: two members that answer like the backbone."""
    with torch.random.fork_rng():
        model = get_peft_model(copy.deepcopy(backbone), lora_config(backbone), adapter_name="first")
        model.add_adapter("second", lora_config(backbone))
    return LoRAEnsemble(model)


def other(model) -> nn.Module:
    """A model near the given one."""
    return randomise(copy.deepcopy(model), seed=1)


# name: (members, work in forwards of one model, baseline of (model, data, seed))
BASELINES = {
    "DeepEnsemble": (2, 2, lambda model, data, seed: DeepEnsemble([model, other(model)])),
    "MCDropout": (3, 3, lambda model, data, seed: MCDropout(model, num_samples=3, p=0.2, seed=seed)),
    "LoRAEnsemble": (2, (2, 3), lambda model, data, seed: lora_ensemble(model)),
    "BatchEnsemble": (3, 3, lambda model, data, seed: BatchEnsemble(model, num_members=3, seed=seed)),
    "PackedEnsemble": (4, (0.9, 1.2), lambda model, data, seed: PackedEnsemble.from_backbone(model, 4, 2.0, seed)),
    "MIMO": (2, (1, 1.3), lambda model, data, seed: MIMO(model, num_members=2, seed=seed)),
    "LastLayerLaplace": (2, (1, 1.1), lambda model, data, seed: LastLayerLaplace(model, 2).fit(data, seed=seed)),
    "temperature_scaled": (1, 1, lambda model, data, seed: temperature_scaled(model, data)),
    "soup": (1, 1, lambda model, data, seed: soup([model, copy.deepcopy(model)])),
}
SEEDED = ("MCDropout", "BatchEnsemble", "PackedEnsemble", "LastLayerLaplace")  # in what they answer at first
WITH_WEIGHTS = {
    "BatchEnsemble": lambda model: BatchEnsemble(model, num_members=2, std=0.3),
    "MIMO": lambda model: MIMO(model, num_members=2),
}


@pytest.mark.parametrize("name", BASELINES)
@each_of([VIT, BERT])
def test_it_answers_with_its_members_reproducibly_and_leaves_model_and_random_numbers_alone(name, family):
    members, _, make = BASELINES[name]
    model = family.backbone()
    data = [family.inputs() | {"labels": LABELS}]
    modes = model.training
    before = copy.deepcopy(model.state_dict())
    state = torch.get_rng_state()
    baseline = make(model, data, 3)
    member_logits = predict(baseline, data[0])
    assert member_logits.shape == (4, members, model.config.num_labels)
    with torch.no_grad():
        logits = baseline.eval()(**family.inputs()).logits
    torch.testing.assert_close(logits.softmax(-1).double(), member_logits.softmax(-1).mean(1), rtol=0, atol=1e-6)
    assert predict_uncertainty(baseline, data).total.shape == (4,)
    assert torch.equal(predict(make(model, data, 3), data[0]), member_logits)
    if name in SEEDED:
        assert not torch.equal(predict(make(model, data, 4), data[0]), member_logits)
    assert torch.equal(torch.get_rng_state(), state) and model.training is modes
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("name", BASELINES)
def test_its_work_is_counted(name):
    _, expected, make = BASELINES[name]
    model = VIT.backbone()
    ratio = count_multiply_adds(make(model, [VIT.inputs() | {"labels": LABELS}], 0)) / count_multiply_adds(model)
    low, high = expected if isinstance(expected, tuple) else (expected, expected)
    assert low <= ratio <= high


@pytest.mark.parametrize("name", WITH_WEIGHTS)
def test_the_loss_is_the_mean_of_the_members_and_their_own_weights_never_mix(name):
    baseline = WITH_WEIGHTS[name](VIT.backbone()).eval()
    output = baseline(**VIT.inputs(), labels=LABELS, name_that_no_model_has=torch.zeros(4))
    losses = [nn.functional.cross_entropy(output.member_logits[:, member], LABELS) for member in range(2)]
    expected = torch.stack(losses).mean() * (2 if name == "MIMO" else 1)  # whose loss is their sum
    torch.testing.assert_close(output.loss, expected)
    torch.testing.assert_close(baseline(**VIT.inputs(), labels=LABELS, num_items_in_batch=8).loss, expected / 2)
    output.member_logits[:, 1].sum().backward()
    parts = [
        parameter.grad if each.endswith(("factors", "biases")) else torch.stack(parameter.grad.chunk(2))
        for each, parameter in baseline.named_parameters()
        if each.endswith(("factors", "biases")) or (name != "BatchEnsemble" and "classifier" in each)
    ]
    assert parts and all(part[1].any() and not part[0].any() for part in parts)


@pytest.mark.parametrize("name", WITH_WEIGHTS)
def test_all_its_weights_are_saved_and_make_the_same_baseline_again(name, tmp_path):
    model = bert_backbone().bfloat16()
    baseline = randomise(WITH_WEIGHTS[name](model), seed=2)
    baseline.save_pretrained(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    loaded = WITH_WEIGHTS[name](model)
    assert not torch.equal(predict(loaded, BERT.inputs()), predict(baseline, BERT.inputs()))
    loaded.load_state_dict(load_file(tmp_path / "model.safetensors"))
    assert torch.equal(predict(loaded, BERT.inputs()), predict(baseline, BERT.inputs()))


@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_WEIGHTS)
def test_trainer_finds_columns_and_labels_by_itself_and_goes_on_where_it_was(name, tmp_path):
    """`datasets` columns that the model does not read are left out, and a checkpoint holds all of the baseline."""
    rows = Dataset.from_list([row | {"text": "red"} for row in tiny_dataset("bert")])
    results = []
    for resumed in (False, True):
        torch.manual_seed(0)
        baseline = WITH_WEIGHTS[name](tiny_model("bert", "backbone"))
        before = {each: tensor.clone() for each, tensor in baseline.state_dict().items()}
        settings = {"max_steps": 4, "save_steps": 2, "learning_rate": 0.05, "gradient_accumulation_steps": 2}
        options = {"data_collator": MIMOCollator(2, repetitions=2)} if name == "MIMO" else {}
        arguments = TrainingArguments(tmp_path, **settings, **QUIET, remove_unused_columns=name != "MIMO")
        kept = rows.remove_columns("text") if name == "MIMO" else rows
        trainer = Trainer(model=baseline, args=arguments, train_dataset=kept, eval_dataset=kept, **options)
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2") if resumed else None)
        assert trainer.evaluate()["eval_loss"] > 0
        results.append({each: tensor.clone() for each, tensor in baseline.state_dict().items()})
    changed = {each for each, tensor in before.items() if not torch.equal(tensor, results[0][each])}
    assert {"model.classifier.weight"} <= changed
    torch.testing.assert_close(results[1], results[0])


def test_a_checkpoint_of_tied_weights_is_saved_by_trainer(tmp_path):
    """BART's embeddings have three names."""
    sizes = {f"{one}_{name}": 1 for one in ("encoder", "decoder") for name in ("layers", "attention_heads", "ffn_dim")}
    model = BartForSequenceClassification(BartConfig(**sizes, d_model=8, vocab_size=40, num_labels=3)).eval()
    baseline = LastLayerLaplace(model)
    rows = [{"input_ids": torch.tensor([5, 6 + number, 2]), "labels": number} for number in range(2)]
    Trainer(baseline, TrainingArguments(tmp_path, max_steps=1, **QUIET), train_dataset=rows).train()
    again = LastLayerLaplace(model)
    again.load_state_dict(load_file(tmp_path / "checkpoint-1" / "model.safetensors"))
    batch = {"input_ids": torch.stack([row["input_ids"] for row in rows])}
    assert torch.equal(predict(again, batch), predict(baseline, batch))


def test_a_loss_of_the_members_mean_is_stopped(tmp_path):
    arguments = TrainingArguments(tmp_path, max_steps=1, label_smoothing_factor=0.1, **QUIET)
    baseline = BatchEnsemble(tiny_model("vit", "backbone"), num_members=2)
    with pytest.raises(RuntimeError, match="each member of a BatchEnsemble has a loss of its own"):
        Trainer(baseline, arguments, train_dataset=tiny_dataset("vit")).train()


@pytest.mark.parametrize("name", ["DeepEnsemble", "MCDropout", "BatchEnsemble"])
@pytest.mark.parametrize(("problem", "labels"), [("regression", 1), ("multi_label_classification", 3)])
def test_other_tasks_are_answered_as_by_a_hydra(name, problem, labels):
    baseline = BASELINES[name][2](bert_backbone(num_labels=labels, problem_type=problem), None, 0).eval()
    with torch.no_grad():
        output = baseline(**BERT.inputs())
    members = output.member_logits
    expected = members.mean(1) if problem == "regression" else members.sigmoid().mean(1).logit()
    torch.testing.assert_close(output.logits.double(), expected, rtol=0, atol=1e-6)


# One table of refusals: (call, error, words)

TOWERS = "pass a classifier of whole inputs"
CLASSIFIERS = [BatchEnsemble, MIMO, PackedEnsemble.from_backbone]
PLACES = torch.tensor([[3, 1], [1, 0], [2, 3], [3, 2]])


def with_adapters() -> nn.Module:
    model = vit_backbone()
    model.add_adapter(lora_config(model))
    return model


def swin() -> nn.Module:
    """Its rows are windows of images."""
    sizes = {"embed_dim": 8, "depths": [2, 1], "num_heads": [2, 2], "window_size": 2}
    return SwinForImageClassification(SwinConfig(image_size=8, patch_size=2, num_labels=3, **sizes))


def animals(*names: str) -> nn.Module:
    return vit_backbone(num_labels=2, id2label=dict(enumerate(names)), label2id={n: i for i, n in enumerate(names)})


def mimo(**inputs) -> None:
    MIMO(vit_backbone(), num_members=2).train()(**VIT.inputs(), places=PLACES, **inputs)


def mimo_of_a_part() -> None:
    """`nn.DataParallel` splits the examples, and places are numbers of examples in the whole batch."""
    half = MIMO(vit_backbone(), num_members=2).train()._replicate_for_data_parallel()
    half(pixel_values=VIT.inputs()["pixel_values"][:2], labels=LABELS[:2], places=PLACES[:2])


def mimo_with_positions() -> None:
    MIMO(bert_backbone(), num_members=2)(**BERT.inputs(), position_ids=torch.zeros(4, 7, dtype=torch.long))


def pairs(pixel_values: torch.Tensor, **options) -> None:
    BayesVLM(CLIP.backbone()).fit([{"pixel_values": pixel_values, **padded_texts(4)}], **options)


def posterior(factor: float = 1.0, weight: float = 1.0, **options) -> None:
    KroneckerPosterior(2, 2).fit(factor * torch.eye(2), torch.eye(2), weight * torch.eye(2), **options)


TABLE = {
    TypeError: [
        *((lambda make=make: make(VIT.fused()), "HydraViTForImageClassification: " + TOWERS) for make in CLASSIFIERS),
        (lambda: BatchEnsemble(swin()), "model is a SwinForImageClassification: pass"),
        (lambda: BatchEnsemble(WAVLM.backbone()), "WavLMFor.* reads weights without calling their layers"),
        (
            lambda: BatchEnsemble(DEBERTA_V2.backbone()),
            "DebertaV2For.* or a table of positions with them: pass another",
        ),
        (lambda: LastLayerLaplace(VIT.hydra.from_backbone(vit_backbone())), r"has no nn\.Linear with 5 outputs"),
        (lambda: MCDropout(CLIP.backbone(), p=0.1), "CLIPModel, not a classifier: wrap it in ZeroShotClassifier"),
        (lambda: LoRAEnsemble(vit_backbone()), "model is a ViTForImageClassification: pass a PeftModel"),
        (lambda: soup([vit_backbone(), BERT.backbone()]), r"models\[1\] is a BertFor.*, models\[0\] a ViTFor"),
        (lambda: BayesVLM(VIT.backbone()), "model is a ViTForImageClassification: pass a CLIPModel"),
    ],
    ValueError: [
        *(
            (lambda make=make: make(vit_backbone(), num_members=0), "num_members is 0: pass at")
            for make in CLASSIFIERS
        ),
        *(
            (lambda make=make: make(with_adapters()), r"has adapters: pass the result of merge_and_unload\(\)")
            for make in (BatchEnsemble, MIMO, LastLayerLaplace)
        ),
        (lambda: BatchEnsemble(vit_backbone(), std=-1.0), "std is -1.0: pass a number that is not negative"),
        (lambda: MIMOCollator(2, 1.5), "rho is 1.5"),
        (lambda: MIMOCollator(2, 0.5, 0), "repetitions is 0"),
        (lambda: MIMO(LLAMA.backbone()), "LlamaForSequenceClassification gives other logits for embeddings"),
        (lambda: MIMO(WHISPER.backbone()), "pass a classifier of images or texts"),
        (lambda: mimo(num_items_in_batch=4), "leave compute_loss_func and label smoothing out"),
        (mimo_with_positions, "reads input_ids, attention_mask, token_type_ids, and got .*: leave the others out"),
        (lambda: PackedEnsemble.from_backbone(vit_backbone(), 2, 3), r"alpha is 3: pass a width of up to num_members"),
        (lambda: PackedEnsemble.from_backbone(vit_backbone(), 3, 2), r"not a whole number: pass .* such as 2\.25"),
        (lambda: DeepEnsemble([]), "models is empty: pass a list"),
        (lambda: DeepEnsemble([animals("a", "b"), animals("b", "a")]), r"models\[1\] calls its classes b, a, models"),
        (
            lambda: DeepEnsemble([vit_backbone(), vit_backbone(num_labels=7)])(**VIT.inputs()),
            r"models\[1\] has 7 classes, models\[0\] has 5",
        ),
        (lambda: LastLayerLaplace(vit_backbone(), num_samples=-1), "num_samples is -1: pass at least 0"),
        (lambda: LastLayerLaplace(vit_backbone()).fit([]), "data has no samples"),
        (lambda: LastLayerLaplace(bert_backbone(num_labels=1)), "model has 1 output"),
        (lambda: MCDropout(vit_backbone(), p=0.1, num_samples=0), "num_samples is 0"),
        (lambda: MCDropout(vit_backbone(), p=1.0), "p is 1.0: pass a probability"),
        (lambda: MCDropout(nn.Linear(2, 2), p=0.1), "Linear has no dropout"),
        (
            lambda: MCDropout(vit_backbone(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)),
            "every dropout of ViTForImageClassification is 0, .*: pass p",
        ),
        (lambda: temperature_scaled(vit_backbone(), [VIT.inputs()]), "data has no labels"),
        (lambda: soup([vit_backbone(0), vit_backbone(1)]), r"models\[1\] has little in common with models\[0\]"),
        (lambda: soup([vit_backbone(), vit_backbone(num_labels=7)]), r"models\[1\] has other classes"),
        (lambda: soup([vit_backbone(), vit_backbone(intermediate_size=16)]), "has intermediate_size"),
        (lambda: soup(VIT.members()), "models keep different heads, so their attention has no mean"),
        (lambda: BayesVLM(CLIP.backbone()).fit([VIT.inputs()]), "data has no input_ids: pass images and texts"),
        (lambda: BayesVLM(CLIP.backbone()).fit([]), "data has no samples"),
        (lambda: pairs(images(3)), "other numbers of images and texts: pass one for each"),
        (lambda: pairs(images(4), pairs_together=2.5), "pairs_together is 2.5: pass at least 2, a whole number"),
        (lambda: posterior(prior_precision=0), "prior_precision 0, pseudo_count 1.0: pass numbers > 0"),
        (lambda: posterior(pseudo_count=-1), "pseudo_count -1: pass numbers > 0"),
        (lambda: posterior(factor=float("nan")), "a Kronecker factor is not finite"),
        (lambda: posterior(weight=0.0), "or all weights are zero"),
    ],
    RuntimeError: [(mimo_of_a_part, r"nn\.DataParallel splits: train on one GPU, or with torchrun")],
}
REFUSALS = [(call, error, words) for error, rows in TABLE.items() for call, words in rows]


@pytest.mark.parametrize(("call", "error", "words"), REFUSALS, ids=[words[:30] for _, _, words in REFUSALS])
def test_what_cannot_be_right_is_refused(call, error, words):
    with pytest.raises(error, match=words):
        call()
