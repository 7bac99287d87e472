"""Tiny models for server and page, made once."""

from pathlib import Path
from types import ModuleType

import pytest
from fastapi.testclient import TestClient

from hydra_transformers.serving import create_app
from tests.serving.tiny import asked, save_clip_hydra, save_image_models, save_text_hydra


@pytest.fixture(scope="session")
def folders(tmp_path_factory) -> dict[str, Path]:
    """A calibrated Hydra of images and its backbone, a Hydra of texts, and one of CLIP; nobody writes into them."""
    folder = tmp_path_factory.mktemp("models")
    hydra, single = save_image_models(folder)
    return {"images": hydra, "single": single, "texts": save_text_hydra(folder), "clip": save_clip_hydra(folder)}


@pytest.fixture(scope="session")
def pages() -> ModuleType:
    """The module of the page. Importing Gradio takes seconds: only the worker with tests of the page spends them."""
    from hydra_transformers.serving import page

    return page


@pytest.fixture(scope="session")
def clients(folders):
    """Of servers with a model of images, of texts, and CLIP."""
    apps = [create_app(asked(folders[name])) for name in ("images", "texts", "clip")]
    with TestClient(apps[0]) as vit, TestClient(apps[1]) as bert, TestClient(apps[2]) as clip:
        yield {"vit": vit, "bert": bert, "clip": clip}
