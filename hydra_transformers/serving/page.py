"""A page in the browser to try a classifier on, made with Gradio; it loads nothing from other servers."""

import logging
import os
from collections.abc import Container, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ..data.tasks import REGRESSION, REWARDS, WORDS
from ..hub.handler import RequestError
from .page_html import answers_html, heading_html, kept_heads_html, sentence_html
from .page_inputs import USUAL, Limits, check_text, read_class_names, read_image, read_sound
from .predictor import HydraPredictor


try:
    import gradio
except ImportError as error:
    raise ImportError("the page needs Gradio: pip install 'gradio>=6' pillow") from error

logger = logging.getLogger(__name__)

CSS = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
FONTS = {
    "font": ("system-ui", "Segoe UI", "Helvetica", "Arial", "sans-serif"),
    "font_mono": ("ui-monospace", "Consolas", "monospace"),
}
# What a visitor is told first, by what the model reads.
HINTS = {
    "images": "Drop an image on the left",
    "sounds": "Drop a WAV file on the left",
    "texts": "Type a text on the left",
}
MISSING = {
    "images": "Send an image first.",
    "sounds": "Send a WAV file first.",
    "texts": "There is no text yet: type some.",
}
MOST_WAITING = 100  # users in the queue
# Uploads are deleted after an hour, and when the server ends.
CLEAN_EVERY, KEEP_FOR = 600, 3600
ONLY_WHAT_WAS_SENT = "The page opens only what was sent to it, and fetches nothing: send the file itself."


def build_page(
    model: HydraPredictor,
    single: HydraPredictor | None = None,
    examples: Mapping[str, Sequence[str]] | None = None,
    limits: Limits = USUAL,
    class_names: Sequence[str] = (),
) -> gradio.Blocks:
    """The page of a model, not yet served: `launch_page` does both.

    single: another model, whose answers stand beside; best one of its backbones, to see what the ensemble adds
    examples: group -> files of images or sounds, or texts to click on, see `read_examples`
    class_names: the first classes for CLIP to choose from; users may name others
    """
    models = [model] if single is None else [model, single]
    _check(models)
    respond = partial(_respond, models, limits)
    reads_files = model.reads != "texts"
    # Gradio would send reports on its use to other servers.
    with gradio.Blocks(
        title=model.name, analytics_enabled=False, fill_width=True, delete_cache=(CLEAN_EVERY, KEEP_FOR)
    ) as page:
        files = SentFiles(page.upload_file_set)
        gradio.HTML(heading_html(model))
        with gradio.Row():
            with gradio.Column(scale=4, min_width=300):
                value = _file_input(model.reads, files) if reads_files else _text_input(limits)
                inputs = [value, *([_classes_input(limits, class_names)] if model.needs_classes else [])]
                if not reads_files and model.task in (REGRESSION, REWARDS):
                    inputs.append(_pair_input(limits))
                # A file alone is answered at once.
                ask = gradio.Button("Ask", variant="primary", visible=not reads_files or model.needs_classes)
                clicks = [_add_examples(group, values, value, files) for group, values in (examples or {}).items()]
            with gradio.Column(scale=8, min_width=320):
                hint = f"{HINTS[model.reads]}{', or click on an example' if examples else ''}."
                answer = gradio.HTML(sentence_html(hint, "hint"), padding=False)
        if hasattr(model.config, "kept_heads"):
            with gradio.Accordion("Which attention heads each member keeps", open=False):
                gradio.HTML(kept_heads_html(model))
        # A file is complete once it is dropped or clicked on, a text only once it is submitted.
        events = [value.change] if reads_files else [click.then for click in clicks]
        events += [ask.click, *(each.submit for each in inputs if isinstance(each, gradio.Textbox))]
        for event in events:
            event(respond, inputs, answer, api_visibility="private", show_progress="minimal", concurrency_id="ask")
    for block in page.blocks.values():
        # Gradio runs this for each file that a request names, for any component, and would fetch URLs, too.
        block.async_move_resource_to_block_cache = files.check
    return page.queue(max_size=MOST_WAITING)


def launch_page(
    model: HydraPredictor,
    single: HydraPredictor | None = None,
    examples: Mapping[str, Sequence[str]] | None = None,
    limits: Limits = USUAL,
    class_names: Sequence[str] = (),
    host: str = "127.0.0.1",
    port: int | None = None,
) -> gradio.Blocks:
    """Serves the page of a model (see `build_page`) and returns at once: `page.local_url` is its address, `page.close()` ends it.

    host: "0.0.0.0" lets other machines in
    port: by default the first free one from 7860 on
    """
    page = build_page(model, single, examples, limits, class_names)
    theme = gradio.themes.Base(primary_hue="blue", neutral_hue="slate", **FONTS)
    switched_off = ("share", "run_history", "enable_monitoring", "ssr_mode", "pwa", "mcp_server")
    page.launch(
        server_name=host,
        server_port=port,
        prevent_thread_lock=True,
        quiet=True,
        max_file_size=int(limits.megabytes * 1_000_000),
        theme=theme.set(body_text_color_subdued="*neutral_500"),  # the default grey of notes is too light to read
        css=CSS,
        footer_links=[],
        **dict.fromkeys(switched_off, False),
    )
    return page


def _respond(models: Sequence[HydraPredictor], limits: Limits, value: Any, beside: str = "") -> str:
    """The answers as HTML, or a sentence about a problem with the input.

    beside: the classes to choose from, or the second text of a pair
    """
    first = models[0]
    try:
        if not value:
            return sentence_html(MISSING[first.reads], "hint")
        if first.reads == "sounds":
            asked = read_sound(value[0], first.processor.sampling_rate, limits, value[1])
        else:
            asked = read_image(value[0], limits, value[1]) if first.reads == "images" else check_text(value, limits)
        class_names = read_class_names(beside, limits) if first.needs_classes else None
        if beside.strip() and not first.needs_classes:
            asked = {"text": asked, "text_pair": check_text(beside, limits)}
        return answers_html([(model.name, model.answer_with_members(asked, class_names)) for model in models])
    except RequestError as error:
        return sentence_html(f"{error}.", "problem")
    except Exception:
        logger.exception("the page could not answer")  # visitors do not see why
        return sentence_html("The model could not answer this: try another input.", "problem")


def _check(models: Sequence[HydraPredictor]) -> None:
    """Refuses models whose answers mean nothing, or that cannot be asked the same."""
    first = models[0]
    for each in models:
        if each.class_names is not None and len(each.class_names) < 2 and each.config.problem_type is None:
            raise ValueError(
                f"{each.name} has a single output and no problem_type in its config: set it to 'regression', or for a yes or no "
                "to 'multi_label_classification'"
            )
        if each.reads != first.reads:
            raise ValueError(f"{each.name} reads {each.reads}, {first.name} {first.reads}: pass two of a kind")
        if first.reads == "sounds" and each.processor.sampling_rate != first.processor.sampling_rate:
            rates = (
                f"{each.processor.sampling_rate:,} samples per second, {first.name} {first.processor.sampling_rate:,}"
            )
            raise ValueError(f"{each.name} reads {rates}: pass two that read the same sounds")
        if {each.task, first.task} not in ({first.task}, {REGRESSION, REWARDS}):
            raise ValueError(
                f"{each.name} is made for {WORDS[each.task]}, {first.name} for {WORDS[first.task]}: pass two of one task"
            )
        if each.class_names != first.class_names:
            raise ValueError(f"{each.name} has other classes than {first.name}: pass one that was trained on the same")


class SentFiles:
    """The only files that a page opens: uploads, and the copies of its examples.

    Gradio checks paths only if a request's `meta` says that it names a file, and a program can leave that out.
    """

    def __init__(self, uploads: Container[str]):
        self.uploads, self.examples = uploads, set()

    def __contains__(self, path: Any) -> bool:
        if not isinstance(path, str) or (path not in self.uploads and path not in self.examples):
            return False
        folder = os.path.realpath(gradio.utils.get_upload_folder())
        return os.path.realpath(path).startswith(os.path.join(folder, ""))  # no link leads out of it

    async def check(self, path: str | Path | None) -> str | None:
        if path is not None and str(path) not in self:
            raise gradio.Error(ONLY_WHAT_WAS_SENT)
        return None if path is None else str(path)

    def sent(self, payload: Any) -> tuple[str, str] | None:
        """The path of an upload, and its name. Gradio itself would open any file, and decode it before its pixels are counted."""
        if payload is None:
            return None
        if payload.path not in self:
            raise gradio.Error(ONLY_WHAT_WAS_SENT)
        return payload.path, payload.orig_name or Path(payload.path).name


def _add_examples(group: str, values: Sequence[str], component: Any, files: SentFiles) -> gradio.events.Dependency:
    """Examples to click on, and the event of a click. Gradio's own Examples would replace `component` by one that opens any file."""
    samples = [[each] for each in values]
    examples = gradio.Dataset(
        components=[component], samples=samples, label=group, type="index", samples_per_page=len(values)
    )
    if not isinstance(component, gradio.Textbox):
        # The copies that the server may show.
        copied = partial(gradio.processing_utils.move_files_to_cache, block=component, keep_in_cache=True)
        values = [copied(component.postprocess(each))["path"] for each in values]
        files.examples.update(values)
    return examples.click(values.__getitem__, examples, component, api_visibility="private", show_progress="hidden")


def _file_input(reads: str, files: SentFiles) -> gradio.Image | gradio.Audio:
    common = {"type": "filepath", "buttons": [], "elem_id": "input"}
    if reads == "sounds":
        component = gradio.Audio(label="Sound", sources=["upload"], editable=False, **common)
    else:
        component = gradio.Image(label="Image", sources=["upload", "clipboard"], height=300, **common)
    # Set on the instance: for a subclass, Gradio would write a file beside its module.
    component.preprocess = files.sent
    return component


def _text_input(limits: Limits) -> gradio.Textbox:
    return gradio.Textbox(
        label="Text", lines=5, max_lines=12, max_length=limits.characters, placeholder="Type a text", elem_id="input"
    )


def _classes_input(limits: Limits, class_names: Sequence[str]) -> gradio.Textbox:
    return gradio.Textbox(
        ", ".join(class_names),
        label="Classes to choose from",
        placeholder="cat, dog, boat",
        max_length=limits.characters,
        elem_id="classes",
    )


def _pair_input(limits: Limits) -> gradio.Textbox:
    label = "Second text, where the model reads pairs"
    return gradio.Textbox(label=label, lines=2, max_lines=12, max_length=limits.characters, elem_id="pair")
