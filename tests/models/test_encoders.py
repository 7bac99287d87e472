"""What encoders return is not misread by tools that know nothing of members: means in the usual places."""

import torch
from transformers import AutoModel, pipeline

from tests.families import (
    BERT,
    CLIP,
    VIT,
    bert_backbone,
    clip_backbone,
    for_families,
    images,
)
from tests.models.test_hub import bert_tokenizer


def tight(tensor, expected):
    torch.testing.assert_close(tensor, expected, atol=1e-10, rtol=1e-10)


@torch.no_grad()
@for_families([VIT, BERT])
def test_states_are_means_with_each_members_beside_them(family):
    hydra = family.fused().base_model
    outputs = hydra(**family.inputs())
    tokens = 5 if family is VIT else 7
    assert outputs.last_hidden_state.shape == (4, tokens, 32)
    assert outputs.member_last_hidden_state.shape == (4, 3, tokens, 32)
    tight(outputs.last_hidden_state, outputs.member_last_hidden_state.mean(1))
    if outputs.pooler_output is not None:
        assert outputs.pooler_output.shape == (4, 32) and outputs.member_pooler_output.shape == (4, 3, 32)
        tight(outputs.pooler_output, outputs.member_pooler_output.mean(1))
    assert torch.equal(hydra(**family.inputs(), return_dict=False)[0], outputs.last_hidden_state)


@torch.no_grad()
def test_the_feature_extraction_pipeline_gives_a_vector_per_token(tmp_path):
    backbones = [bert_backbone(seed).float() for seed in range(3)]
    BERT.hydra.from_pruned_members(backbones, shared=()).save_pretrained(tmp_path)
    tokenizer = bert_tokenizer(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    model = AutoModel.from_pretrained(tmp_path)
    features = pipeline("feature-extraction", model=model, tokenizer=tokenizer)("a good film", return_tensors=True)
    tokens = tokenizer("a good film", return_tensors="pt")
    expected = torch.stack([backbone.bert(**tokens).last_hidden_state for backbone in backbones]).mean(0)
    torch.testing.assert_close(features, expected, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_similarity_of_clip_is_that_of_the_pair_alone():
    backbones = [clip_backbone(seed) for seed in range(3)]
    hydra, inputs = CLIP.hydra.from_pruned_members(backbones, shared=()), CLIP.inputs()
    outputs = hydra(**inputs)
    tight(outputs.similarity, torch.stack([backbone(**inputs).logits_per_image for backbone in backbones]).mean(0))
    for image in range(4):
        for text in range(3):
            pair = {name: value[text : text + 1] for name, value in inputs.items() if name != "pixel_values"}
            alone = hydra(pixel_values=images()[image : image + 1], **pair)
            tight(alone.similarity[0, 0], outputs.similarity[image, text])
            assert abs(alone.logits_per_image.item()) < 1e-12  # the only text of the call has probability 1
