"""A page in the browser to try a classifier on, made with Gradio.

It loads nothing from other servers.
"""

import logging
import os
from collections.abc import Container, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ..data.processors import class_prompts
from ..data.zero_shot import ZeroShotClassifier
from .answerer import MOST_CHARACTERS, RequestError, require
from .page_html import answer_html, heading_html, sentence_html
from .predictor import HydraPredictor


try:
    import gradio
except ImportError as error:
    raise ImportError("the page needs Gradio: pip install 'gradio>=6' pillow") from error

logger = logging.getLogger(__name__)

CSS = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
FONTS = {"font": ("system-ui", "Segoe UI", "Arial", "sans-serif"), "font_mono": ("ui-monospace", "monospace")}
# What a visitor is told first, by what the model reads.
HINTS = {
    "images": "Drop an image on the left",
    "audio": "Drop a WAV file on the left",
    "texts": "Type a text on the left",
}
MOST_WAITING = 100  # users in the queue
MOST_MEGABYTES = 10
MOST_OF_A_GROUP = 24  # examples
# Seconds: uploads are deleted after an hour, and when the server ends.
CLEAN_EVERY = 600
KEEP_FOR = 3600
ONLY_WHAT_WAS_SENT = "The page opens only what was sent to it, and fetches nothing: send the file itself."
SWITCHED_OFF = ("share", "run_history", "enable_monitoring", "ssr_mode", "pwa", "mcp_server")


def launch_page(
    model: HydraPredictor,
    examples: str | os.PathLike | None = None,
    class_names: Sequence[str] = (),
    host: str = "127.0.0.1",
    port: int | None = None,
) -> gradio.Blocks:
    """Serve the page of a model and return at once.

    `page.local_url` is its address, `page.close()` ends it.

    Args:
        model (`HydraPredictor`): the model.
        examples (`str` or `os.PathLike`, *optional*): examples to click on: a folder of images or
            WAV files, each folder in it a group; for texts a file with one on each line.
        class_names (`list[str]`, *optional*): the classes for CLIP and SigLIP to choose from, in "A
            photo of a {}."
        host (`str`, defaults to `"127.0.0.1"`): "0.0.0.0" lets other machines in.
        port (`int`, *optional*): by default the first free one from 7860 on.
    """
    if model.needs_classes:
        if len(class_names) < 2:
            raise ValueError(f"{model.name} chooses among classes that you name: pass class_names, or --labels")
        prompts = class_prompts(model.config, model.processor, class_names)
        classifier = ZeroShotClassifier(model.model, prompts, class_names)
        model = HydraPredictor(classifier, model.processor, name=model.name)
    groups = {}
    if examples is not None:
        groups = read_examples(Path(examples), model)
    page = build_page(model, groups)
    theme = gradio.themes.Base(primary_hue="blue", neutral_hue="slate", **FONTS)
    page.launch(
        server_name=host,
        server_port=port,
        prevent_thread_lock=True,
        quiet=True,
        max_file_size=MOST_MEGABYTES * 1_000_000,
        theme=theme.set(body_text_color_subdued="*neutral_500"),  # the default grey of notes is too light to read
        css=CSS,
        footer_links=[],
        **dict.fromkeys(SWITCHED_OFF, False),
    )
    return page


def build_page(model: HydraPredictor, examples: Mapping[str, Sequence[str]]) -> gradio.Blocks:
    """Build the page, not yet served, with the examples of `read_examples`."""
    if not model.needs_classes and not model.info.says_task:
        raise ValueError(
            f"{model.name} has a single output and no problem_type in its config: set it to 'regression', or for a "
            "yes or no to 'multi_label_classification'"
        )
    reads_files = model.reads != "texts"
    # Gradio would send reports on its use to other servers.
    quiet = {"analytics_enabled": False, "delete_cache": (CLEAN_EVERY, KEEP_FOR)}
    with gradio.Blocks(title=model.name, fill_width=True, **quiet) as page:
        files = SentFiles(page.upload_file_set)
        gradio.HTML(heading_html(model))
        with gradio.Row():
            with gradio.Column(scale=4, min_width=300):
                inputs = _inputs(model)
                if reads_files:
                    # On the instance: for a subclass, Gradio would write a file beside its module.
                    inputs[0].preprocess = files.sent
                # A file alone is answered at once.
                ask = gradio.Button("Ask", variant="primary", visible=not reads_files)
                clicks = [_add_examples(group, values, inputs[0], files) for group, values in examples.items()]
            with gradio.Column(scale=8, min_width=320):
                hint = HINTS[model.reads]
                if examples:
                    hint += ", or click on an example"
                answer = gradio.HTML(sentence_html(f"{hint}.", "hint"), padding=False)

        # A file is complete once it is dropped or clicked on, a text only once it is submitted.
        if reads_files:
            events = [inputs[0].change]
        else:
            events = [click.then for click in clicks]
        events.append(ask.click)
        events += [box.submit for box in inputs if isinstance(box, gradio.Textbox)]
        respond = partial(_respond, model)
        for event in events:
            event(respond, inputs, answer, api_visibility="private", show_progress="minimal", concurrency_id="ask")

    for block in page.blocks.values():
        # Gradio runs this for each file that a request names, for any component, and would fetch
        # URLs, too.
        block.async_move_resource_to_block_cache = files.check
    return page.queue(max_size=MOST_WAITING)


def _inputs(model: HydraPredictor) -> list[Any]:
    """Make what a visitor fills: a file or a text, and beside it the second text of a pair."""
    text = partial(gradio.Textbox, max_length=MOST_CHARACTERS, max_lines=12)
    file = {"type": "filepath", "buttons": [], "elem_id": "input"}
    if model.reads == "audio":
        inputs = [gradio.Audio(label="Audio", sources=["upload"], editable=False, **file)]
    elif model.reads == "images":
        inputs = [gradio.Image(label="Image", sources=["upload", "clipboard"], height=300, **file)]
    else:
        inputs = [text(label="Text", lines=5, placeholder="Type a text", elem_id="input")]
    if model.kind == "text" and model.task.predicts_numbers:
        inputs.append(text(label="Second text, where the model reads pairs", lines=2, elem_id="pair"))
    return inputs


def read_examples(path: Path, model: HydraPredictor) -> dict[str, list[str]]:
    """Return group -> files of images or audio, or texts; raise for one that cannot be shown.

    Args:
        path (`Path`): a folder of files, or for texts a file with one on each line.
        model (`HydraPredictor`): reads them.
    """
    groups: dict[str, list[str]] = {}
    if model.reads == "texts":
        expected = "a text file with one text on each line"
        if path.is_file():
            lines = path.read_text(encoding="utf-8").splitlines()
            groups["Examples"] = [line.strip() for line in lines if line.strip()]
    else:
        expected = f"a folder of {model.reads}"
        for file in sorted([*path.glob("[!.]*"), *path.glob("[!.]*/[!.]*")]):
            if file.is_file():
                group = "Examples" if file.parent == path else file.parent.name
                groups.setdefault(group, []).append(str(file.resolve()))
    groups = {name: values[:MOST_OF_A_GROUP] for name, values in groups.items() if values}
    if not groups:
        raise ValueError(f"there are no examples in {path}: pass {expected}")

    # Read each once, so that errors come now.
    for values in groups.values():
        for value in values:
            if model.reads == "texts":
                read_sent(model, value)
            else:
                read_sent(model, (value, Path(value).name))
    return groups


def read_sent(model: HydraPredictor, value: Any, beside: str = "") -> Any:
    """Return what a visitor sent as the model reads it; raise for what cannot be read.

    Args:
        model (`HydraPredictor`): the model.
        value (`str` or `tuple[str, str]`): a text, or the path and the name of a file.
        beside (`str`, *optional*): the second text of a pair.
    """
    if model.reads == "texts":
        if beside.strip():
            value = {"text": value, "text_pair": beside}
        text, _ = model.read_input(value, "The text")
        return text
    path, name = Path(value[0]), value[1]
    # Not a FIFO or device, which could be read for ever.
    require(path.is_file() and not path.is_symlink(), f"{name} cannot be opened: send it again")
    is_small = path.stat().st_size <= MOST_MEGABYTES * 1_000_000
    require(is_small, f"{name} has more than {MOST_MEGABYTES} MB: send a smaller file")
    content, _ = model.read_input(path.read_bytes(), name)
    return content


def _respond(model: HydraPredictor, value: Any, beside: str = "") -> str:
    """Return the answer as HTML, or a sentence about a problem with the input."""
    try:
        if not value:
            return sentence_html(f"{HINTS[model.reads]} first.", "hint")
        answer = model.answer_with_members(read_sent(model, value, beside))
        return answer_html(answer)
    except RequestError as error:
        return sentence_html(f"{error}.", "problem")
    except Exception:
        logger.exception("the page could not answer")  # visitors do not see why
        return sentence_html("The model could not answer this: try another input.", "problem")


class SentFiles:
    """The only files that a page opens: uploads, and the copies of its examples.

    Gradio checks paths only if a request's `meta` says that it names a file, and a program can
    leave that out.
    """

    def __init__(self, uploads: Container[str]):
        self.uploads = uploads
        self.examples: set[str] = set()

    def checked(self, path: Any) -> str:
        """Return the path; raise if the file was not sent, or lies elsewhere by a link."""
        is_known = isinstance(path, str) and (path in self.uploads or path in self.examples)
        folder = os.path.join(os.path.realpath(gradio.utils.get_upload_folder()), "")
        if not is_known or not os.path.realpath(path).startswith(folder):
            raise gradio.Error(ONLY_WHAT_WAS_SENT)
        return path

    async def check(self, path: str | Path | None) -> str | None:
        """Return a path that a request names, checked; Gradio awaits it."""
        if path is None:
            return None
        return self.checked(str(path))

    def sent(self, payload: Any) -> tuple[str, str] | None:
        """Return the path of an upload, and its name.

        Gradio itself would open any file, and decode it before its pixels are counted.
        """
        if payload is None:
            return None
        name = payload.orig_name or Path(payload.path).name
        return self.checked(payload.path), name


def _add_examples(group: str, values: Sequence[str], component: Any, files: SentFiles) -> gradio.events.Dependency:
    """Show examples to click on; return the event of a click.

    Gradio's own Examples would replace `component` by one that opens any file.
    """
    examples = gradio.Dataset(
        components=[component],
        samples=[[value] for value in values],
        label=group,
        type="index",
        samples_per_page=len(values),
    )
    if not isinstance(component, gradio.Textbox):
        # The copies that the server may show.
        copies = []
        for value in values:
            payload = component.postprocess(value)
            moved = gradio.processing_utils.move_files_to_cache(payload, block=component, keep_in_cache=True)
            copies.append(moved["path"])
        values = copies
        files.examples.update(copies)
    return examples.click(values.__getitem__, examples, component, api_visibility="private", show_progress="hidden")
