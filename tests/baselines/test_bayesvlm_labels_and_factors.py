"""BayesVLM takes factors whole or not at all, and has a loss where there are labels."""

import pytest
import torch
from torch import nn

from hydra_transformers.baselines import BayesVLM
from tests.families import CLIP, images, padded_texts


def test_factors_of_one_side_alone_are_not_taken(tmp_path):
    bayesvlm = BayesVLM(CLIP.backbone())
    outputs, inputs = bayesvlm.model.visual_projection.weight.shape
    torch.save(torch.eye(inputs), tmp_path / "A_img_analytic.pt")
    torch.save(torch.eye(outputs), tmp_path / "B_img_analytic.pt")
    with pytest.raises(FileNotFoundError, match=r"A_txt_analytic\.pt does not exist"):
        bayesvlm.load_factors(tmp_path)
    for name, size in (("A", bayesvlm.model.text_projection.in_features), ("B", outputs)):
        torch.save(torch.ones(size, size).triu(), tmp_path / f"{name}_txt_analytic.pt")
    with pytest.raises(ValueError, match="a Kronecker factor is not symmetric"):
        bayesvlm.load_factors(tmp_path)
    assert bayesvlm.image_posterior.prior_precision.isinf()


def test_with_labels_the_loss_is_the_cross_entropy_among_the_texts():
    batch = {"pixel_values": images(), **padded_texts(seed=9)}
    labels = torch.tensor([0, 1, 2, 0])
    bayesvlm = BayesVLM(CLIP.backbone())
    output = bayesvlm(**batch, labels=labels)
    torch.testing.assert_close(output.loss, nn.functional.cross_entropy(output.logits, labels))
    torch.testing.assert_close(bayesvlm(**batch, labels=labels, num_items_in_batch=8).loss, output.loss / 2)


def test_images_and_texts_that_are_no_pairs_are_refused():
    with pytest.raises(ValueError, match="batch 0 of data has 3 images and 4 texts: pass one text for each image"):
        BayesVLM(CLIP.backbone()).fit([{"pixel_values": images(3), **padded_texts(4)}])
    with pytest.raises(ValueError, match="pairs_together is 0: pass at least 2, a whole number"):
        BayesVLM(CLIP.backbone()).fit([], pairs_together=0)
