"""What pruning refuses, in one table: (arguments, words) of each call; a function makes those that take long."""

import math
from functools import partial

import pytest
import torch
from transformers import GPT2Config, GPT2ForSequenceClassification, T5Config, T5EncoderModel

from hydra_transformers import HydraViTModel
from hydra_transformers.pruning import (
    Circuit,
    ablated,
    draw_members,
    extract_circuit,
    head_scores,
    lowest_heads,
    oba_prune,
    prune_heads,
    taylor_prune,
    taylor_scores,
    to_transformers,
)
from hydra_transformers.pruning.members import half_of_each, make_members
from tests.families import BERT, CLIP, VIT, WAVLM, bert_backbone, padded_texts
from tests.pruning.backbones import CLASSES, bert, class_prompts, family, images, vit


MODEL, BATCHES, OOD, _ = family("vit")
TEXTS = {**padded_texts(4), "labels": torch.tensor([0, 1, 2, -100])}
RANKING = [(layer, head) for head in range(3) for layer in range(3)]
CIRCUIT = Circuit(RANKING, [0.5] * 9, 0.6, "avg")
EQUAL = {0: [1, 3], 1: [0, 2], 2: [2, 3]}


def with_labels(labels: torch.Tensor | None) -> list[dict]:
    batch = {"pixel_values": images(4, 0)}
    return [batch if labels is None else batch | {"labels": labels}]


def with_label(label: int) -> list[dict]:
    return with_labels(torch.tensor([0, 1, 2, label]))


def compiled():
    model = VIT.backbone()
    model.compile(backend="eager")
    return model


def sliced_by_hand():
    model = VIT.backbone()
    projection = model.vit.layers[0].attention.o_proj
    projection.weight = torch.nn.Parameter(projection.weight[:, :24])
    projection.in_features = 24
    return model


def with_nan():
    model = vit()
    model.classifier.bias.data[0] = math.nan
    return model


def t5():
    return T5EncoderModel(T5Config(vocab_size=40, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2))


def gpt2():
    """Its linear layers are of a class of their own."""
    sizes = {"n_embd": 8, "n_layer": 1, "n_head": 2, "vocab_size": 40, "bos_token_id": 1, "eos_token_id": 1}
    return GPT2ForSequenceClassification(GPT2Config(**sizes, num_labels=3, pad_token_id=0))


def turn_off(make, heads):
    with ablated(make(), heads):
        pass


def extract(model=MODEL, data=BATCHES, ood_data=OOD, objective="avg", **settings):
    return extract_circuit(model, data, ood_data, objective, **{"budget": 2} | settings)


def extract_clip(**settings):
    model, data, ood_data, _ = family("clip")
    return extract(model, data, ood_data, **settings)


def draw(model=None, **settings):
    return draw_members(vit() if model is None else model, **settings)


def make(models=1, **settings):
    """Refusals come before the data is looked at."""
    models = [vit(seed=seed) for seed in range(models)] if isinstance(models, int) else models
    return make_members(models, None, **{"method": "circuits"} | settings)


oba = partial(oba_prune, MODEL, BATCHES)
taylor = partial(taylor_prune, MODEL, BATCHES)
SCORES = {(0, 0): 3.0, (0, 1): 0.5, (1, 0): 1.0, (1, 1): math.nan}

TABLE = {
    turn_off: [
        ((t5, {0: [0]}), "model is a T5EncoderModel: pass a Hydra or one of"),
        ((VIT.fused, {0: [0]}), "model has 3 members, which keep different heads: pass model.member"),
        ((compiled, {0: [0]}), "model is compiled"),
        ((sliced_by_hand, {0: [0]}), "o_proj reads 24 numbers, not 4 heads of 8"),
        ((WAVLM.backbone, {0: [0]}), "WavLM.* reads its projections without calling them: pass prune_heads"),
        ((CLIP.backbone, {0: [0]}), r"heads_to_prune is .*: pass \{'vision'"),
        ((lambda: prune_heads(vit(), {0: [2]}), {0: [2]}), r"names 2: the heads are \[0, 1\]"),
    ],
    prune_heads: [((torch.nn.Linear(2, 2),), "model is a Linear: pass a Hydra or one of AutoHydra.supported")],
    extract: [
        ({"budget": 9}, "budget is 9: 9 heads compete, so pass 1 to 8"),
        ({"budget": 2.5}, "budget is 2.5: pass a whole number, 1 to 8"),
        ({"budget": True}, "budget is True: pass a whole number, 1 to 8"),
        ({"budget": 3, "trunk_layers": 0.75}, "budget is 3: 3 heads compete, so pass 1 to 2"),
        ({"trunk_layers": 3}, r"trunk_layers is 3: there are 3 layers, .*, so pass 0 to 2"),
        ({"objective": "auroc"}, "objective is 'auroc' and mode 'exact': pass one of 'acc', 'ood', 'avg' or a func"),
        ({"mode": "fast"}, "and mode 'fast': pass one of .*, and one of 'exact', 'shortlist'"),
        ({"checkpoint": __file__ + "/run.json"}, "where no file can be written"),
        ({"checkpoint": "."}, "where no file can be written"),
        ({"towers": ("vision",)}, "only CLIP and SigLIP have towers"),
        ({"class_prompts": class_prompts()}, "class_prompts is for CLIP and SigLIP"),
        ({"model": HydraViTModel.from_backbone(MODEL)}, "HydraViTModel has no classifier"),
        ({"ood_data": [{"pixel_values": images(1, 0)}]}, "ood_data has 1 sample"),
        ({"ood_data": None}, "objective 'avg' needs ood_data"),
        ({"data": [{"pixel_values": images(1, 0), "labels": torch.tensor([1])}]}, "data has 1 sample"),
        ({"data": []}, "data has no samples"),
        ({"data": [{"pixels": images(2, 0)}]}, "data has no pixel_values"),
        ({"data": with_labels(None)}, "data has no labels"),
        ({"data": with_label(CLASSES)}, "data has the label 5: the model's classes are 0 to 4"),
        ({"data": with_label(-100)}, "data has the label -100: the model's classes are 0 to 4"),
        ({"data": with_labels(torch.rand(4))}, r"labels of data are torch.float32 of shape \(4,\): pass class ind"),
        (lambda: {"model": with_nan()}, "the logits on data are NaN with 0 heads removed"),
        ({"objective": lambda logits, labels: logits}, "returned 125 numbers: it has to return one"),
        ({"objective": lambda logits, labels: math.nan}, "returned nan: it has to be a finite number"),
        ({"objective": lambda logits, labels: 0.0, "data": with_labels(None)}, "data has no labels: give every batch"),
    ],
    extract_clip: [
        ({}, "class_prompts has no input_ids"),
        ({"class_prompts": class_prompts(), "towers": ("audio",)}, 'pass some of "vision" and "text"'),
    ],
    CIRCUIT.heads_to_prune: [((10,), "budget is 10: this circuit ranks 9 heads")],
    head_scores: [
        ((MODEL, None, "gradient"), "method is 'gradient': pass one of 'michel', 'taylor'"),
        ((MODEL, None, "michel"), "data is missing: 'michel' is computed on data"),
        (lambda: (bert_backbone(), [TEXTS], "leave_one_out"), "data has the label -100"),
        (
            lambda: (bert_backbone(), [TEXTS | {"labels": torch.rand(4, 3)}], "leave_one_out"),
            r"the labels are torch.float32 of shape \(4, 3\): pass class indices",
        ),
    ],
    lowest_heads: [
        ((SCORES,), "pass either budget"),
        ((SCORES, 5), r"the score of \(1, 1\) is nan"),
        ((dict(list(SCORES.items())[:3]), 5), "budget is 5: 3 heads can go"),
    ],
    taylor: [
        ({"heads_per_layer": 4}, "heads_per_layer is 4: it says how many heads to keep, so pass 1 to 3"),
        ({"heads_per_layer": 1.5}, r"heads_per_layer is 1\.5: pass a whole number"),
        ({"heads_per_layer": 2, "scope": "model"}, "scope is 'model'"),
    ],
    taylor_scores: [
        ((MODEL, []), "data has no samples"),
        ((MODEL, with_labels(None)), "data has no labels"),
        ((MODEL, with_label(-100)), "data has the label -100: the model's classes are 0 to 4"),
        ((MODEL.vit, BATCHES), "has no classifier"),
        (lambda: (with_nan(), BATCHES), r"the score of \(0, 0\) is nan"),
        (lambda: family("clip")[:2], "class_prompts has no input_ids"),
    ],
    oba: [
        ({"sparsity": 1.0}, "sparsity is 1.0, .*: pass a share from 0 to below 1"),
        ({"sparsity": 0.1, "score": "magnitude"}, "score 'magnitude' .* one of 'plain', 'reference'"),
        ({"sparsity": 0.1, "steps": 0}, "steps 0: .* 1 step or more"),
    ],
    partial(oba_prune, sparsity=0.1): [
        ((MODEL, with_labels(None)), "data has no labels"),
        ((MODEL.vit, BATCHES), "ViTModel has no classifier"),
        (lambda: (prune_heads(MODEL), BATCHES), "is a HydraViTFor.*: pass a plain model"),  # q, k, v are one
        (lambda: (gpt2(), [TEXTS | {"labels": torch.arange(4) % 3}]), r"GPT2.* has no linear layer"),
    ],
    draw: [
        ({}, "nothing to draw from"),
        ({"circuit": CIRCUIT, "data": [], "budget": 1}, "circuit and data"),
        ({"model": [vit()] * 3, "circuit": CIRCUIT, "budget": 2}, "got circuit: pass circuits .one for each"),
        ({"model": [vit()] * 3, "circuits": [CIRCUIT] * 2, "budget": 2}, "models: 3, circuits: 2"),
        ({"model": [vit()] * 3, "num_members": 2}, "models: 3, num_members: 2"),
        ({"model": [vit()] * 3, "budget": 2}, "budget is 2, which drawing from the models alone has no use for"),
        ({"model": []}, "models: 0"),
        ({"model": [vit(), bert()]}, r"model\[1\] is a BertForSequenceClassification"),
        ({"model": [vit(), vit().vit]}, r"model\[1\]"),
        ({"circuits": [CIRCUIT], "budget": 2, "num_members": 7}, "circuits: 1, num_members: 7"),
        ({"circuits": [CIRCUIT]}, "budget is None: pass a whole number, 0 to 9"),
        ({"circuits": [CIRCUIT], "budget": "most"}, "budget is 'most': pass a whole number, 0 to 9"),
        ({"circuits": [CIRCUIT], "budget": 3, "tolerance": 0.1}, r"tolerance is 0\.1, which goes with budget='best'"),
        ({"circuit": CIRCUIT, "budget": 2, "num_members": 0}, "num_members: 0"),
        ({"circuit": CIRCUIT}, "budget is None: pass a whole number, 1 to 9"),
        ({"circuit": CIRCUIT, "budget": "best"}, "budget is 'best': pass a whole number, 1 to 9"),
        ({"circuit": CIRCUIT, "budget": 5, "out_of": 4}, "budget is 5: heads are sampled from the first 4"),
        ({"circuit": CIRCUIT, "budget": 5, "out_of": 20}, "out_of is 20: this circuit ranks 9 heads"),
        ({"circuit": CIRCUIT, "budget": 2, "heads_per_layer": 1}, "heads_per_layer is 1, which drawing"),
        ({"circuit": CIRCUIT, "budget": 1, "trunk_layers": 0.75}, r"ranks head \(0, 0\), which is in the first 2 lay"),
        ({"circuits": [CIRCUIT], "budget": 1, "trunk_layers": 2}, r"circuits\[0\] ranks head \(0, 0\)"),
        ({"data": BATCHES}, "heads_per_layer is None: pass a whole number"),
        ({"data": [], "heads_per_layer": 2, "budget": 3}, "budget is 3, which drawing from data has no use"),
    ],
    half_of_each: [(([{"x": torch.zeros(3), "labels": torch.zeros(2)}], 0), "has 3 rows, and 2 as its labels")],
    make: [
        ({"budget": 9}, "budget is 9: 9 heads compete, so pass 1 to 8"),
        ({"budget": 8}, "there are only 1 ways to lose 8 of 8 heads, for 3 members"),
        ({"trunk_layers": 3}, "trunk_layers is 3"),
        ({"models": 2, "num_members": 3}, "there are 2 models, each of which makes one member"),
        ({"models": [vit(), bert()]}, r"models\[1\] is a BertForSequenceClassification"),
    ],
    to_transformers: [
        (lambda: (prune_heads(VIT.backbone(), {0: [1]}),), "a plain ViTForImage.* cannot have these heads"),
        (lambda: (prune_heads(CLIP.backbone(), {"text": {0: [1]}}),), "a plain CLIPModel cannot have these heads"),
        (lambda: (prune_heads(BERT.backbone(), EQUAL),), "a plain BertForSequence.* cannot have .*fill_up=True"),
        (lambda: (VIT.fused(),), r"model is a HydraViTFor.*: pass a Hydra with one member"),
        (lambda: (VIT.backbone(),), "model is a ViTForImageClassification: pass a Hydra with one member"),
    ],
}
ROWS = [(call, arguments, words) for call, rows in TABLE.items() for arguments, words in rows]


@pytest.mark.parametrize(("call", "arguments", "words"), ROWS, ids=[words[:40] for *_, words in ROWS])
def test_what_cannot_be_right_is_refused(call, arguments, words):
    arguments = arguments() if callable(arguments) else arguments
    with pytest.raises((TypeError, ValueError), match=words):
        call(**arguments) if isinstance(arguments, dict) else call(*arguments)
