"""The page itself, made of Gradio: served by this machine alone, with nothing from elsewhere."""

import sys
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from .page_answers import AskedModel
from .page_html import answers_html, heading_html, kept_heads_html, sentence_html
from .page_inputs import USUAL, InputError, Limits, check_text, read_class_names, read_image


try:
    import gradio
except ImportError as error:
    raise ImportError("the page needs Gradio: pip install 'gradio>=6' pillow") from error

CSS = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
FONTS = {
    "font": ("system-ui", "Segoe UI", "Helvetica", "Arial", "sans-serif"),
    "font_mono": ("ui-monospace", "Consolas", "monospace"),
}
MOST_WAITING = 100  # users in the queue
# Uploads are deleted when they are an hour old, and when the server ends.
CLEAN_EVERY, KEEP_FOR = 600, 3600


def build_page(
    model: AskedModel,
    single: AskedModel | None = None,
    examples: Mapping[str, Sequence[str]] | None = None,
    limits: Limits = USUAL,
    class_names: Sequence[str] = (),
) -> gradio.Blocks:
    """The page of a model, not yet served: `launch_page` does both.

    model: the one that the page is about
    single: another, whose answers stand beside; best one model of its kind, to see what the ensemble adds
    examples: group -> files of images, or texts, to click on: see `read_examples`
    class_names: which are there first, for CLIP that chooses among those that a user names
    """
    models = [model] if single is None else [model, single]
    _check_are_alike(models)
    respond = partial(_respond, models, limits)
    # Gradio itself would report on its use, to servers elsewhere.
    with gradio.Blocks(
        title=model.name, analytics_enabled=False, fill_width=True, delete_cache=(CLEAN_EVERY, KEEP_FOR)
    ) as page:
        gradio.HTML(heading_html(model))
        with gradio.Row():
            with gradio.Column(scale=4, min_width=300):
                value = _image_input() if model.reads == "images" else _text_input(limits)
                inputs = [value, *([_classes_input(limits, class_names)] if model.needs_classes else [])]
                # An image alone is answered when it is there.
                ask = gradio.Button("Ask", variant="primary", visible=model.reads == "texts" or model.needs_classes)
                clicks = [_add_examples(group, values, value) for group, values in (examples or {}).items()]
            with gradio.Column(scale=8, min_width=320):
                first = "Drop an image on the left" if model.reads == "images" else "Type a text on the left"
                hint = f"{first}, or click on an example." if examples else f"{first}."
                answer = gradio.HTML(sentence_html(hint, "hint"), padding=False)
        if model.kept_heads is not None:
            with gradio.Accordion("Which attention heads each member keeps", open=False):
                gradio.HTML(kept_heads_html(model))
        # An image is there as soon as it is dropped or clicked on; of a text nobody knows when it is whole.
        events = [value.change] if model.reads == "images" else [click.then for click in clicks]
        events += [ask.click, *(each.submit for each in inputs if isinstance(each, gradio.Textbox))]
        for event in events:
            event(respond, inputs, answer, api_visibility="private", show_progress="minimal", concurrency_id="ask")
    return page.queue(max_size=MOST_WAITING)


def launch_page(
    model: AskedModel,
    single: AskedModel | None = None,
    examples: Mapping[str, Sequence[str]] | None = None,
    limits: Limits = USUAL,
    class_names: Sequence[str] = (),
    host: str = "127.0.0.1",
    port: int | None = None,
) -> gradio.Blocks:
    """Serves the page of a model (see `build_page`) and returns at once: `page.local_url` is its address, `page.close()` ends it.

    host: "0.0.0.0" for all who can reach this machine
    port: by default the first free one from 7860 on
    """
    page = build_page(model, single, examples, limits, class_names)
    page.launch(
        server_name=host,
        server_port=port,
        prevent_thread_lock=True,
        quiet=True,
        share=False,
        max_file_size=int(limits.megabytes * 1_000_000),
        # The usual grey of notes is too light to be read by all.
        theme=gradio.themes.Base(primary_hue="blue", neutral_hue="slate", **FONTS).set(
            body_text_color_subdued="*neutral_500"
        ),
        css=CSS,
        footer_links=[],
        run_history=False,
        enable_monitoring=False,
        ssr_mode=False,
        pwa=False,
        mcp_server=False,
    )
    return page


def _respond(models: Sequence[AskedModel], limits: Limits, value: Any, classes: str = "") -> str:
    """What the page shows of an input; a sentence where there is something wrong with it."""
    first = models[0]
    try:
        if not value:
            wanted = "Send an image first." if first.reads == "images" else "There is no text yet: type some."
            return sentence_html(wanted, "hint")
        asked = read_image(value[0], limits, value[1]) if first.reads == "images" else check_text(value, limits)
        class_names = read_class_names(classes, limits) if first.needs_classes else None
        return answers_html([(model.name, model.answer(asked, class_names)) for model in models])
    except InputError as error:
        return sentence_html(str(error), "problem")
    except Exception:
        traceback.print_exc(file=sys.stderr)  # for who runs the server; a visitor learns nothing of it
        return sentence_html("The model could not answer this: try another input.", "problem")


def _check_are_alike(models: Sequence[AskedModel]) -> None:
    """Refuses a single model that cannot be asked the same."""
    first, *others = models
    for other in others:
        if other.reads != first.reads:
            raise ValueError(f"{other.name} reads {other.reads}, {first.name} {first.reads}: pass two of a kind")
        if other.class_names != first.class_names:
            raise ValueError(
                f"{other.name} has other classes than {first.name}: pass one that was trained on the same"
            )


def _add_examples(group: str, values: Sequence[str], component: Any) -> gradio.events.Dependency:
    """Examples to click on, and the event of a click. Gradio's own Examples would put a new component in the place of this one, which read what users
    send in the usual way."""
    examples = gradio.Dataset(
        components=[component],
        samples=[[each] for each in values],
        label=group,
        type="index",
        samples_per_page=len(values),
    )

    def chosen(index: int) -> str:
        value = examples.samples[index][0]
        return value["path"] if isinstance(value, dict) else value  # the copy that the server may show

    return examples.click(chosen, examples, component, api_visibility="private", show_progress="hidden")


def _image_input() -> gradio.Image:
    """Gives the path of what a user sent, unopened, and what the user calls it; fetches nothing."""
    image = gradio.Image(
        label="Image", sources=["upload", "clipboard"], type="filepath", height=300, buttons=[], elem_id="input"
    )
    # On this one image, and not in a class derived from Gradio's, beside whose module Gradio would write a file.
    image.preprocess = _sent
    image.async_move_resource_to_block_cache = partial(_from_a_user, image.async_move_resource_to_block_cache)
    return image


def _sent(payload: Any) -> tuple[str, str] | None:
    """In place of Gradio's way, which decodes a file before its pixels are counted."""
    return None if payload is None else (payload.path, payload.orig_name or Path(payload.path).name)


async def _from_a_user(move: Callable[[str], Awaitable[str]], path: str | Path | None) -> str | None:
    """Gradio would have the server fetch whatever address a visitor sends in place of a file."""
    if str(path).lower().startswith(("http://", "https://")):
        raise gradio.Error("The page fetches nothing from elsewhere: send the file itself.")
    return await move(path)


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
