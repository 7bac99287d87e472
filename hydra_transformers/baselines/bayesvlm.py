"""BayesVLM (Baumann et al., 2024): a Laplace approximation of CLIP's two projections, and analytic similarities."""

import os
from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError  # only the error
from typing import Any

import torch
from torch import Tensor, nn
from transformers import CLIPModel

from .._io.files import parse_json
from ..data.batches import batches
from ..data.prediction import evaluation_mode
from ..models.modeling_hydra import HydraClassifierOutput, at_least_float32, log_mean_probability
from .baseline import Baseline, check_is_count
from .kronecker import (
    Factors,
    KroneckerPosterior,
    probit_logits,
    second_derivatives_of_similarity,
    without_autocast,
)
from .zero_shot import ZERO_SHOT_USAGE, PromptClassifier


PRIOR_FILE = "prior_precision_analytic.json"


class BayesVLM(Baseline):
    """CLIP with uncertain projections: the embeddings of images and texts get a mean and a variance, and so do their
    similarities. Nothing is trained.

    model: a `CLIPModel`; it becomes part of this.

    `fit` finds the distributions from pairs of images and texts, `load_factors` takes published ones; until then it answers as
    CLIP does. `zero_shot(class_prompts)` is a classifier. The answers are CLIP's logits, damped where they are uncertain (the
    probit approximation): one member. Not a mere temperature: accuracy can change.
    """

    summary = (
        "BayesVLM: a Laplace approximation of CLIP's image and text projections, with Kronecker factors; similarities have an "
        "analytic mean and variance. Members: {members}."
    )
    usage = ZERO_SHOT_USAGE.format(name="BayesVLM")

    def __init__(self, model: CLIPModel):
        if not isinstance(model, CLIPModel):
            raise TypeError(f"model is a {type(model).__name__}: pass a CLIPModel of Transformers")
        super().__init__(model)
        where = {"device": self.device, "dtype": torch.promote_types(model.dtype, torch.float32)}
        for side, projection in self._projections().items():
            posterior = KroneckerPosterior(projection.in_features, projection.out_features, "factors")
            self.add_module(f"{side}_posterior", posterior.to(**where))

    def _projections(self) -> dict[str, nn.Linear]:
        return {"image": self.model.visual_projection, "text": self.model.text_projection}

    def _posteriors(self) -> dict[str, KroneckerPosterior]:
        return {"image": self.image_posterior, "text": self.text_posterior}

    # Fitting

    @torch.no_grad()
    def fit(
        self,
        data: Any,
        batch_size: int = 32,
        pairs_together: int = 32_768,
        prior_precision: float | None = None,
        pseudo_count: float = 1.0,
    ) -> "BayesVLM":
        """Finds the distributions for pairs such as CLIP was trained on, in one pass; returns itself.

        Args:
            data: batches or rows with `pixel_values` and the tokens of one text per image.
            batch_size: rows per batch, where the data is a Dataset of rows.
            pairs_together: how many pairs are each other's classes; what is left over at the end, a part of so many, counts too.
            prior_precision: λ; None for those with the highest evidence, one for images and one for texts.
            pseudo_count: τ, how many times the data count.
        """
        check_is_count(pairs_together, "pairs_together", 2)
        activations: dict[str, list[Tensor]] = {"image": [], "text": []}
        with evaluation_mode(self):
            for number, batch in enumerate(batches(data, batch_size, self.device)):
                missing = {"pixel_values", "input_ids"} - set(batch)
                if missing:
                    raise ValueError(f"batch {number} of data has no {min(missing)}: pass images with a text each")
                if len(batch["pixel_values"]) != len(batch["input_ids"]):
                    raise ValueError(
                        f"batch {number} of data has {len(batch['pixel_values'])} images and {len(batch['input_ids'])} texts: pass "
                        "one text for each image"
                    )
                activations["image"].append(self._image_activations(batch["pixel_values"]))
                texts = {name: batch[name] for name in ("input_ids", "attention_mask") if name in batch}
                activations["text"].append(self._text_activations(**texts))
        if not activations["image"]:
            raise ValueError("data has no samples: pass at least one batch")
        collected = {side: torch.cat(parts) for side, parts in activations.items()}
        weights = {side: at_least_float32(each.weight) for side, each in self._projections().items()}
        embeddings = {side: collected[side] @ weights[side].t() for side in collected}
        found = {}  # both, before either is taken
        for side, other in (("image", "text"), ("text", "image")):
            factors = Factors(*reversed(weights[side].shape), self.device)
            for start in range(0, len(collected[side]), pairs_together):
                part = slice(start, start + pairs_together)
                targets = nn.functional.normalize(embeddings[other][part], dim=-1)
                curvature = self._curvature(embeddings[side][part], targets)
                factors.add(collected[side][part], curvature)
            posterior = self._posteriors()[side]
            found[side] = posterior.found(*factors.scaled(), weights[side], prior_precision, pseudo_count)
        self._take(found)
        return self

    def _take(self, found: Mapping[str, dict[str, Tensor]]) -> None:
        for side, posterior in self._posteriors().items():
            posterior.take(found[side])

    def _curvature(self, embeddings: Tensor, targets: Tensor, rows: int = 1024) -> Tensor:
        """In parts of so many rows, which bounds the memory."""
        scale = at_least_float32(self.model.logit_scale).exp().double()
        return sum(second_derivatives_of_similarity(part, targets, scale) for part in embeddings.split(rows))

    def load_factors(
        self, folder: str | os.PathLike, pseudo_count: float = 1.0, with_published_prior: bool = False
    ) -> "BayesVLM":
        """Takes factors as the authors publish them (github.com/AaltoML/BayesVLM, `hessians/`), of this very CLIP; returns
        itself.

        Args:
            folder: with `A_img_analytic.pt`, `B_img_analytic.pt`, `A_txt_analytic.pt`, `B_txt_analytic.pt`; only tensors are
                read from them.
            pseudo_count: τ, how many times the data count; the authors' scripts take 4 or 10.
            with_published_prior: take λ and τ from `prior_precision_analytic.json`. They were found with an evidence whose log
                determinant had its sizes swapped (AaltoML/BayesVLM #2), so by default λ is found anew.
        """
        folder = Path(folder)
        published = _read_prior(folder) if with_published_prior else {}
        found = {}  # both, before either is taken
        for side, short in {"image": "img", "text": "txt"}.items():
            weight = self._projections()[side].weight.detach()
            sizes = {f"A_{short}": weight.shape[1], f"B_{short}": weight.shape[0]}
            factors = [_read_factor(folder / f"{name}_analytic.pt", size) for name, size in sizes.items()]
            prior, count = published.get(f"lambda_{short}"), published.get(f"n_{short}", pseudo_count)
            found[side] = self._posteriors()[side].found(*factors, weight, prior, count)
        self._take(found)
        return self

    # Predicting

    def _image_activations(self, pixel_values: Tensor) -> Tensor:
        """What the image projection reads: (images, hidden), at least in float32."""
        return at_least_float32(self.model.vision_model(pixel_values=pixel_values).pooler_output)

    def _text_activations(self, **tokens: Tensor) -> Tensor:
        """What the text projection reads, the state of the end-of-text token: (texts, hidden), at least in float32."""
        return at_least_float32(self.model.text_model(**tokens).pooler_output)

    def image_embeddings(self, pixel_values: Tensor) -> tuple[Tensor, Tensor]:
        """Means and variances, (images, dim) each, not normalised."""
        return self._embeddings("image", self._image_activations(pixel_values))

    def text_embeddings(self, **tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Means and variances, (texts, dim) each, not normalised."""
        return self._embeddings("text", self._text_activations(**tokens))

    def _embeddings(self, side: str, activations: Tensor) -> tuple[Tensor, Tensor]:
        with without_autocast(activations.device):
            means = activations @ at_least_float32(self._projections()[side].weight).t()
            return means, self._posteriors()[side].output_variance(activations)

    def logits(self, images: tuple[Tensor, Tensor], texts: tuple[Tensor, Tensor]) -> Tensor:
        """From means and variances of embeddings to (images, 1, texts)."""
        with without_autocast(images[0].device):
            scale = at_least_float32(self.model.logit_scale).exp()
            means, variances = similarity_moments(*images, *texts)
            return probit_logits(scale * means, scale**2 * variances).unsqueeze(1)

    def member_logits(self, pixel_values: Tensor, **tokens: Tensor) -> Tensor:
        """(images, 1, texts)"""
        read = {name: tokens[name] for name in ("input_ids", "attention_mask", "position_ids") if name in tokens}
        return self.logits(self.image_embeddings(pixel_values), self.text_embeddings(**read))

    def loss(self, member_logits: Tensor, labels: Tensor, **kwargs: Any) -> Tensor:
        """The cross-entropy of each image's text, by its number, among all texts; CLIP's own has no labels."""
        total = nn.functional.cross_entropy(member_logits.squeeze(1), labels, reduction="sum")
        return total / kwargs.get("num_items_in_batch", len(labels))

    def zero_shot(self, class_prompts: Mapping[str, Tensor]) -> "BayesVLMClassifier":
        """An image classifier over fixed class prompts, as `ZeroShotClassifier` is of CLIP; its batches hold `pixel_values`."""
        return BayesVLMClassifier(self, class_prompts)


def similarity_moments(
    image_means: Tensor, image_variances: Tensor, text_means: Tensor, text_variances: Tensor
) -> tuple[Tensor, Tensor]:
    """Mean and variance of the cosine similarity of independent normal embeddings with diagonal variances: (images, texts) each.

    The lengths are taken for constants, the roots of their mean squares; the variance is then too large rather than too small.
    """
    image_squares, text_squares = image_means.square(), text_means.square()
    lengths = (image_squares + image_variances).sum(dim=-1)[:, None] * (text_squares + text_variances).sum(dim=-1)
    means = image_means @ text_means.t() / lengths.sqrt()
    variances = image_variances @ (text_variances + text_squares).t() + image_squares @ text_variances.t()
    return means, variances / lengths


class BayesVLMClassifier(PromptClassifier):
    """A `BayesVLM` as an image classifier; the prompts' embeddings are computed once, here."""

    prompts_per_pass = 256

    @torch.no_grad()
    def __init__(self, bayesvlm: BayesVLM, class_prompts: Mapping[str, Tensor]):
        super().__init__(bayesvlm, class_prompts)
        prompts = {name: value.to(bayesvlm.device) for name, value in class_prompts.items()}
        prompts = {name: value for name, value in prompts.items() if name in ("input_ids", "attention_mask")}
        with evaluation_mode(bayesvlm):
            parts = [
                bayesvlm.text_embeddings(
                    **{name: value[start : start + self.prompts_per_pass] for name, value in prompts.items()}
                )
                for start in range(0, len(prompts["input_ids"]), self.prompts_per_pass)
            ]
        for name, tensors in zip(("text_means", "text_variances"), zip(*parts, strict=True), strict=True):
            self.register_buffer(name, torch.cat(tensors), persistent=False)

    def forward(self, pixel_values: Tensor) -> HydraClassifierOutput:
        texts = at_least_float32(self.text_means), at_least_float32(self.text_variances)
        member_logits = self.model.logits(self.model.image_embeddings(pixel_values), texts)
        return HydraClassifierOutput(logits=log_mean_probability(member_logits), member_logits=member_logits)


def _read_prior(folder: Path) -> dict[str, float]:
    path = folder / PRIOR_FILE
    try:
        fields = parse_json(path.read_bytes())
        return {name: float(fields[name]) for name in ("lambda_img", "n_img", "lambda_txt", "n_txt")}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} has no prior precisions ({error}): pass with_published_prior=False") from error


def _read_factor(path: Path, size: int) -> Tensor:
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist: pass a folder with A and B of images and texts")
    try:
        factor = torch.load(path, map_location="cpu", weights_only=True)
    except (UnpicklingError, RuntimeError, EOFError) as error:
        raise ValueError(
            f"{path} is no file of a single tensor, and nothing else is read: pass the factors again"
        ) from error
    if not isinstance(factor, Tensor) or factor.shape != (size, size):
        shape = tuple(factor.shape) if isinstance(factor, Tensor) else type(factor).__name__
        raise ValueError(
            f"{path.name} is {shape}, and this CLIP's projection needs ({size}, {size}): pass its own factors"
        )
    return factor
