"""What configs of causal language models say and their backbones read, and what they cannot say."""

import pytest
import torch

from hydra_transformers.pruning import prune_heads
from tests.families import GEMMA, LLAMA, QWEN2, Family, for_families, padded_texts


@torch.no_grad()
@for_families([LLAMA, GEMMA])
def test_windows_that_the_backbone_does_not_read_change_nothing(family: Family):
    backbone = family.backbone(layer_types=["sliding_attention"] * 3, sliding_window=2)
    hydra = prune_heads(backbone)
    torch.testing.assert_close(hydra(**padded_texts()).member_logits[:, 0], backbone(**padded_texts()).logits)
    assert all(layer.attention.sliding_window is None for layer in hydra.model.layers)


@pytest.mark.parametrize(
    ("family", "fields", "sentence"),
    [
        (
            QWEN2,
            {"layer_types": ["full_attention", "chunked_attention", "full_attention"]},
            "names 'chunked_attention'",
        ),
        (QWEN2, {"layer_types": ["sliding_attention"] * 3}, "names 'sliding_attention', and sliding_window is None"),
        (LLAMA, {"num_key_value_heads": -2}, "num_attention_heads is 4, num_key_value_heads -2: pass a multiple"),
    ],
    ids=["unknown layers", "no window", "keys"],
)
def test_what_no_layer_can_be_is_refused(family: Family, fields: dict, sentence: str):
    config = family.backbone().config.to_dict() | fields
    with pytest.raises(Exception, match=sentence):
        family.hydra.config_class(**{name: value for name, value in config.items() if name != "model_type"})
