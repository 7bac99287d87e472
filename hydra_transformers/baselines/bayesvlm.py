"""BayesVLM (Baumann et al., 2024): a Laplace approximation of CLIP's two projections.

The similarities of their embeddings are analytic.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import CLIPModel

from ..data.batches import batches
from ..models.ensembling import at_least_float32, log_mean_probability
from ..models.inputs import evaluation_mode
from ..models.modeling_hydra import HydraClassifierOutput
from .baseline import check_is_count
from .kronecker import Factors, KroneckerPosterior, probit_logits, second_derivatives_of_similarity, without_autocast
from .prompt_classifier import ClipBaseline, check_has_images_and_texts


SIDES = ("image", "text")
SHORT_NAMES = {"image": "img", "text": "txt"}  # in published factors
ROWS_PER_PASS = 1024  # bounds the memory of a curvature


class BayesVLM(ClipBaseline):
    """CLIP with uncertain projections, so that embeddings have a mean and a variance.

    So do their similarities. Nothing trains. `fit` finds the distributions from pairs of images and
    texts; until then the answers are CLIP's. `zero_shot(class_prompts)` is a classifier. The one
    member's logits are CLIP's, damped where they are uncertain (the probit approximation), which
    can change accuracy too.

    Args:
        model (`CLIPModel`): becomes part of this.
    """

    def __init__(self, model: CLIPModel):
        super().__init__(model)
        dtype = torch.promote_types(model.dtype, torch.float32)
        for side in SIDES:
            projection = self._projection(side)
            posterior = KroneckerPosterior(projection.in_features, projection.out_features, "factors")
            self.add_module(f"{side}_posterior", posterior.to(self.device, dtype))

    def _projection(self, side: str) -> nn.Linear:
        """Return the last linear map of one side."""
        if side == "image":
            return self.model.visual_projection
        return self.model.text_projection

    def _posterior(self, side: str) -> KroneckerPosterior:
        """Return the distribution of that map's weights."""
        return self.get_submodule(f"{side}_posterior")

    @torch.no_grad()
    def fit(
        self,
        data: Any,
        batch_size: int = 32,
        pairs_together: int = 32_768,
        prior_precision: float | None = None,
        pseudo_count: float = 1.0,
    ) -> "BayesVLM":
        """Find the distributions in one pass over pairs like CLIP's training data; return itself.

        Args:
            data: batches or rows with `pixel_values` and the tokens of one text per image.
            batch_size (`int`, defaults to 32): rows per batch, for a Dataset of rows.
            pairs_together (`int`, defaults to 32768): how many pairs are each other's classes; a
                smaller rest at the end counts too.
            prior_precision (`float`, *optional*): λ; None for those with the highest evidence, one
                per tower.
            pseudo_count (`float`, defaults to 1.0): τ, how many times the data count.
        """
        check_is_count(pairs_together, "pairs_together", 2)

        # The inputs of both projections, for all pairs.
        activations: dict[str, list[Tensor]] = {side: [] for side in SIDES}
        with evaluation_mode(self):
            for batch in batches(data, batch_size, self.device):
                check_has_images_and_texts(batch, "data")
                if len(batch["pixel_values"]) != len(batch["input_ids"]):
                    raise ValueError("a batch has other numbers of images and texts: pass one for each")
                activations["image"].append(self._activations("image", pixel_values=batch["pixel_values"]))
                activations["text"].append(self._activations("text", **batch))
        if not activations["image"]:
            raise ValueError("data has no samples: pass at least one batch")

        # Their outputs.
        inputs = {side: torch.cat(parts) for side, parts in activations.items()}
        weights = {side: at_least_float32(self._projection(side).weight) for side in SIDES}
        embeddings = {side: inputs[side] @ weights[side].t() for side in SIDES}
        scale = at_least_float32(self.model.logit_scale).exp().double()

        # The curvature of each side's loss, whose classes are the pairs' other sides.
        fitted = {}
        for side, other in (("image", "text"), ("text", "image")):
            num_outputs, num_inputs = weights[side].shape
            factors = Factors(num_inputs, num_outputs, self.device)
            for start in range(0, len(inputs[side]), pairs_together):
                pairs = slice(start, start + pairs_together)
                targets = nn.functional.normalize(embeddings[other][pairs], dim=-1)
                curvature = 0
                for rows in embeddings[side][pairs].split(ROWS_PER_PASS):
                    curvature = curvature + second_derivatives_of_similarity(rows, targets, scale)
                factors.add(inputs[side][pairs], curvature)
            input_factor, output_factor = factors.scaled()
            fitted[side] = self._posterior(side).fit(
                input_factor, output_factor, weights[side], prior_precision, pseudo_count
            )

        # Both at once: an error above leaves this as it was.
        for side, values in fitted.items():
            self._posterior(side).set(values)
        return self

    @torch.no_grad()
    def load_factors(
        self,
        factors: Mapping[str, Tensor],
        prior_precision: Mapping[str, float] | float | None = None,
        pseudo_count: float = 1.0,
    ) -> "BayesVLM":
        """Take Kronecker factors that were computed elsewhere for this very CLIP; return itself.

        The authors publish those of LAION-400M for several CLIPs (AaltoML/BayesVLM, `hessians/`).
        Their files are called A_img_analytic.pt and so on; `torch.load(path, weights_only=True)`
        reads one.

        Args:
            factors (`Mapping[str, torch.Tensor]`): "A_img" (inputs, inputs) and "B_img" (outputs,
                outputs) of the image projection, "A_txt" and "B_txt" of the text projection.
            prior_precision (`float` or `Mapping[str, float]`, *optional*): λ, or one for each side,
                {"image": λ, "text": λ}; None for those with the highest evidence.
            pseudo_count (`float`, defaults to 1.0): τ, how many times the data count; the authors'
                scripts take 4 or 10.
        """
        if not isinstance(prior_precision, Mapping):
            prior_precision = dict.fromkeys(SIDES, prior_precision)
        if set(prior_precision) != set(SIDES):
            raise ValueError(f"prior_precision has {', '.join(prior_precision)}: pass a number for image and for text")

        fitted = {}
        for side in SIDES:
            projection = self._projection(side)
            sizes = {"A": projection.in_features, "B": projection.out_features}
            read = []
            for letter, size in sizes.items():
                name = f"{letter}_{SHORT_NAMES[side]}"
                read.append(_checked_factor(name, factors.get(name), size).to(self.device))
            weight = at_least_float32(projection.weight)
            fitted[side] = self._posterior(side).fit(*read, weight, prior_precision[side], pseudo_count)
        for side, values in fitted.items():
            self._posterior(side).set(values)
        return self

    def _activations(self, side: str, **inputs: Tensor) -> Tensor:
        """Return the inputs of a projection, (images or texts, hidden), at least in float32."""
        if side == "image":
            tower = self.model.vision_model
            names = ("pixel_values",)
        else:
            tower = self.model.text_model
            names = ("input_ids", "attention_mask", "position_ids")
        read = {name: inputs[name].to(self.device) for name in names if name in inputs}
        return at_least_float32(tower(**read).pooler_output)

    def image_embeddings(self, pixel_values: Tensor) -> tuple[Tensor, Tensor]:
        """Return means and variances, (images, dim) each, not normalised."""
        return self._embeddings("image", self._activations("image", pixel_values=pixel_values))

    def text_embeddings(self, **tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return means and variances, (texts, dim) each, not normalised."""
        return self._embeddings("text", self._activations("text", **tokens))

    def _embeddings(self, side: str, activations: Tensor) -> tuple[Tensor, Tensor]:
        """Project activations; return means and variances of the result."""
        with without_autocast(activations.device):
            weight = at_least_float32(self._projection(side).weight)
            variances = self._posterior(side).output_variance(activations)
            return activations @ weight.t(), variances

    def logits(self, images: tuple[Tensor, Tensor], texts: tuple[Tensor, Tensor]) -> Tensor:
        """Return logits (images, 1, texts) of embeddings, each given by means and variances."""
        with without_autocast(images[0].device):
            scale = at_least_float32(self.model.logit_scale).exp()
            means, variances = similarity_moments(*images, *texts)
            logits = probit_logits(scale * means, scale**2 * variances)
            return logits.unsqueeze(1)

    def member_logits(self, pixel_values: Tensor, **tokens: Tensor) -> Tensor:
        """Return (images, 1, texts)."""
        images = self.image_embeddings(pixel_values)
        texts = self.text_embeddings(**tokens)
        return self.logits(images, texts)

    def loss(self, member_logits: Tensor, labels: Tensor, **kwargs: Any) -> Tensor:
        """Return the cross-entropy over the texts; labels: the number of each image's text."""
        total = nn.functional.cross_entropy(member_logits.squeeze(1), labels, reduction="sum")
        return total / kwargs.get("num_items_in_batch", len(labels))

    def prompt_features(self, **prompts: Tensor) -> tuple[Tensor, Tensor]:
        """Return means and variances of the prompts' embeddings, (classes, dim) each."""
        return self.text_embeddings(**prompts)

    def classify(
        self, pixel_values: Tensor, means: Tensor, variances: Tensor, labels: Tensor | None = None
    ) -> HydraClassifierOutput:
        """Return the prediction for images over classes of these means and variances."""
        member_logits = self.logits(self.image_embeddings(pixel_values), (means, variances))
        loss = None
        if labels is not None:
            loss = self.loss(member_logits, labels)
        return HydraClassifierOutput(loss, log_mean_probability(member_logits), member_logits=member_logits)


def _checked_factor(name: str, factor: Tensor | None, size: int) -> Tensor:
    """Return a factor in float64; raise for one that cannot be this projection's."""
    shape = None if factor is None else tuple(factor.shape)
    if shape != (size, size):
        found = "missing" if shape is None else f"of shape {shape}"
        raise ValueError(
            f"factors[{name!r}] is {found}: this CLIP's projection needs ({size}, {size}), pass its own factors"
        )
    factor = factor.double()
    tolerance = 1e-3 * factor.abs().max()
    if not torch.isfinite(factor).all() or (factor - factor.t()).abs().max() > tolerance:
        raise ValueError(f"factors[{name!r}] is not a symmetric matrix of finite numbers: pass it as it was published")
    return factor


def similarity_moments(
    image_means: Tensor, image_variances: Tensor, text_means: Tensor, text_variances: Tensor
) -> tuple[Tensor, Tensor]:
    """Return mean and variance of the cosine similarities of embeddings, (images, texts) each.

    The embeddings are independent and normal, with diagonal variances. Their lengths count as
    constants, the roots of their mean squares; this makes the variance rather too large than too
    small.
    """
    image_squares = image_means.square()
    text_squares = text_means.square()
    image_lengths = (image_squares + image_variances).sum(dim=-1)  # squared
    text_lengths = (text_squares + text_variances).sum(dim=-1)
    lengths = image_lengths[:, None] * text_lengths
    means = image_means @ text_means.t() / lengths.sqrt()
    variances = image_variances @ (text_variances + text_squares).t() + image_squares @ text_variances.t()
    return means, variances / lengths
