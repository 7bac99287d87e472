"""Tiny models for server and page, made once."""

from pathlib import Path

import pytest

from tests.serving.tiny import save_clip_hydra, save_image_models, save_text_hydra


@pytest.fixture(scope="session")
def folders(tmp_path_factory) -> dict[str, Path]:
    """A calibrated Hydra of images and its backbone, a Hydra of texts, and one of CLIP; nobody writes into them."""
    folder = tmp_path_factory.mktemp("models")
    hydra, single = save_image_models(folder)
    return {"images": hydra, "single": single, "texts": save_text_hydra(folder), "clip": save_clip_hydra(folder)}
