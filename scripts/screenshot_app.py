"""Takes docs/images/app.png: the page of a Hydra of digits, asked about a patch of a photo. A few minutes on two cores.

    python scripts/screenshot_app.py [--chromium /usr/bin/chromium]

The models are the demo's: three fine-tunings, each without the heads that its circuit names, fused and calibrated; and one of
the three beside it. The patch is the one that the demo asks about, chosen before any model was asked. Needs playwright and Chromium.
"""

import argparse
import tempfile
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from playwright.sync_api import sync_playwright
from transformers import ViTImageProcessorPil

from hydra_transformers import AutoHydra
from hydra_transformers.demo.digits import DemoData, load_data
from hydra_transformers.demo.pretraining import load_shipped_model
from hydra_transformers.demo.story import BATCH_SIZE, FULL, calibrate, finetuned, pruned_members
from hydra_transformers.serving.page import launch_page
from hydra_transformers.serving.page_inputs import read_examples
from hydra_transformers.serving.predictor import HydraPredictor


OUTPUT = Path(__file__).parents[1] / "docs" / "images" / "app.png"
SIZE = {"width": 1280, "height": 830}
PIXELS = 8 * 20  # of an example: a digit of 8 pixels could not be seen
IN_A_GROUP = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--chromium", default="/usr/bin/chromium", help="default: %(default)s")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="default: %(default)s")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # sums have one order, and every run the same figures
    data = load_data()
    with tempfile.TemporaryDirectory() as temporary:
        hydra = model_of(data, Path(temporary))
        patch = write_examples(data, Path(temporary) / "examples")
        page = launch_page(hydra, read_examples(Path(temporary) / "examples", "images"))
        try:
            take(page.local_url, patch, arguments.chromium, arguments.output)
        finally:
            page.close(verbose=False)
    print(f"the picture is in {arguments.output}")


def model_of(data: DemoData, folder: Path) -> HydraPredictor:
    """The Hydra of the demo."""
    fine_tunings = finetuned(load_shipped_model(), data, FULL, folder / "fine-tuning")
    hydra = AutoHydra.from_pruned_members(pruned_members(fine_tunings, data, FULL, folder / "circuits"))
    calibrate(hydra, data, BATCH_SIZE)
    processor = ViTImageProcessorPil(size={"height": 8, "width": 8})
    return HydraPredictor(hydra, processor, name="hydra-vit-digits")


def write_examples(data: DemoData, folder: Path) -> Path:
    """Images by group, the first of the judged sets; returns the patch that is asked about."""
    photo = data.far["photo patches"].pixels
    groups = {
        "Digits that it learned": data.test.pixels[:IN_A_GROUP],
        "Digits that it never saw": np.concatenate([images.pixels[:2] for images in data.near.values()]),
        "Patches of a photo": photo[len(photo) // 2 : len(photo) // 2 + IN_A_GROUP],
    }
    for group, images in groups.items():
        (folder / group).mkdir(parents=True)
        for number, pixels in enumerate(images):
            enlarged = Image.fromarray(pixels).resize((PIXELS, PIXELS), Image.Resampling.NEAREST)
            enlarged.save(folder / group / f"{number}.png")
    return folder / "Patches of a photo" / "0.png"


def take(url: str, patch: Path, chromium: str, output: Path) -> None:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=chromium, args=["--headless", "--no-sandbox", "--disable-gpu"]
        )
        page = browser.new_page(viewport=SIZE)
        page.goto(url)
        page.wait_for_selector(".hydra-hint")
        page.set_input_files("#input input[type=file]", patch)
        page.wait_for_selector(".hydra-card")
        page.wait_for_timeout(1000)  # until all pictures are drawn
        page.screenshot(path=output, full_page=True)
        browser.close()


if __name__ == "__main__":
    main()
