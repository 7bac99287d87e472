"""The comparison on CLIP: a CLIP made of DINOv2 and of captions, label sets, and its smallest form."""

import sys

import pytest
import torch
from transformers import CLIPModel

from experiments import clip_training as training
from experiments import zero_shot, zero_shot_settings
from experiments.captions import captions_for, prompts_for, word_tokenizer
from experiments.smallest import splits
from hydra_transformers.cost import count_multiply_adds, multiply_adds_of
from hydra_transformers.data.zero_shot import ZeroShotClassifier
from hydra_transformers.fusion.structure import without_weights


NAMES = [["fur coat"], ["beacon", "lighthouse"], ["potter's wheel"]]


def tokenizer(names=NAMES):
    return word_tokenizer([caption for of_class in names for caption in captions_for(of_class)], max_length=24)


def test_the_vision_tower_computes_what_dinov2_does():
    dinov2 = training.smallest_dinov2().eval()
    with torch.no_grad():
        for parameter in dinov2.parameters():
            parameter.normal_(std=0.3)
        clip = training.new_clip(dinov2, tokenizer(), image_size=12).eval()
        pixels = torch.randn(3, 3, 12, 12)
        expected = dinov2(pixels).last_hidden_state[:, 0]
        torch.testing.assert_close(clip.vision_model(pixels).pooler_output, expected, rtol=1e-4, atol=1e-4)
    assert clip.config.text_config.vocab_size == len(tokenizer())


def test_without_repeated_classes_the_loss_is_clips_and_with_them_all_are_pairs():
    torch.manual_seed(0)
    rows = torch.randn(4, 6)
    texts = torch.randn(4, 6)
    scale = torch.tensor(1.5)
    units = [torch.nn.functional.normalize(each, dim=-1) for each in (rows, texts)]
    logits = scale.exp() * units[0] @ units[1].t()
    both = [-each.log_softmax(-1).diagonal().mean() for each in (logits, logits.t())]
    found = training.contrastive_loss(rows, texts, scale, torch.arange(4))
    torch.testing.assert_close(found, sum(both) / 2)
    labels = torch.tensor([0, 0, 1, 2])
    targets = torch.tensor([[0.5, 0.5, 0, 0], [0.5, 0.5, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]])
    both = [-(targets * each.log_softmax(-1)).sum(-1).mean() for each in (logits, logits.t())]
    torch.testing.assert_close(training.contrastive_loss(rows, texts, scale, labels), sum(both) / 2)


def test_label_sets_are_all_classes_and_halves_counted_from_0():
    data = splits()
    sets = zero_shot_settings.halves(data, training.SMALLEST_NAMES)
    assert [len(each.names) for each in sets.values()] == [3, 2, 2]
    second = sets["the second half"]
    assert second.prompts == ["A photo of a grey.", "A photo of a bright thing."]
    labels = data.test.tensors["labels"]
    assert torch.equal(second.test.tensors["labels"], labels[labels >= 1] - 1)
    assert torch.equal(sets["all classes"].test.tensors["labels"], labels)


def test_a_zero_shot_classifier_costs_an_image_and_its_products_with_the_prompts():
    made = tokenizer()
    clip = training.new_clip(training.smallest_dinov2(), made, image_size=8).eval()
    prompts = made(prompts_for(["fur coat", "beacon"]), padding=True, return_tensors="pt")
    without = without_weights(CLIPModel, clip.config)
    image = multiply_adds_of(without.get_image_features, pixel_values=torch.zeros(1, 3, 8, 8, device="meta"))
    assert count_multiply_adds(ZeroShotClassifier(clip, prompts)) == image + 2 * clip.config.projection_dim


@pytest.mark.slow
def test_the_comparison_runs_without_data_and_leaves_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["zero_shot", "--smallest", "--device", "cpu", "--threads", "1"])
    zero_shot.main()
    output = capsys.readouterr().out
    for row in ("Single", "BayesVLM", "ViLU", "Taylor, vision tower", "**Hydra (Circ)**, both towers"):
        assert f"| {row} |" in output
    assert "| the first half |" in output and not list(tmp_path.iterdir())
