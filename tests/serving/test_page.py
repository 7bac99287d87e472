"""The page in a real browser: headless Chromium, and a server in this process."""

import json
import shutil

import httpx
import pytest
from PIL import Image

from hydra_transformers.serving import answerer
from tests.serving.tiny import asked
from tests.tiny_data import CLASSES, pictures


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
OFFLINE = ["--headless", "--no-sandbox", "--disable-gpu"]
OFFLINE += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
SECONDS = 20_000  # in milliseconds, for machines that do much else

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Images to send, by name."""
    folder = tmp_path_factory.mktemp("images")
    for name, image in zip(CLASSES, pictures([0, 1, 2], seed=4), strict=True):
        image.save(folder / f"{name}.png")
    (folder / "broken.png").write_bytes((folder / "red.png").read_bytes()[:60])
    (folder / "huge.png").write_bytes((folder / "red.png").read_bytes() + bytes(1_300_000))
    Image.new("1", (4_000, 4_000)).save(folder / "many-pixels.png")
    return {path.stem: path for path in folder.iterdir()}


@pytest.fixture(scope="module")
def model(folders):
    return asked(folders["images"])


@pytest.fixture(scope="module")
def server(pages, model, files, tmp_path_factory):
    examples = tmp_path_factory.mktemp("examples")
    for group, name in (("in distribution", "red"), ("out of distribution", "blue")):
        (examples / group).mkdir()
        shutil.copy(files[name], examples / group)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pages, "MOST_MEGABYTES", 1)
        patch.setattr(answerer, "MOST_PIXELS", 1_000_000)
        page = pages.launch_page(model, examples)
        yield page.local_url.rstrip("/")
        page.close(verbose=False)


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    if CHROMIUM is None:
        pytest.skip("needs Chromium, which is not installed here")
    with playwright.sync_playwright() as started:
        chromium = started.chromium.launch(executable_path=CHROMIUM, args=OFFLINE)
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def asked_for():
    """The addresses that browsers asked for."""
    return []


@pytest.fixture(scope="module")
def visit(browser, asked_for):
    """Opens a page as a new user."""

    def open_page(url):
        page = browser.new_context().new_page()
        page.set_default_timeout(SECONDS)
        page.on("request", lambda request: asked_for.append(request.url))
        page.goto(url)
        page.wait_for_selector(".hydra-hint")
        return page

    return open_page


@pytest.fixture(scope="module")
def user(visit, server):
    return visit(server)


def send(page, path) -> None:
    """Takes away what is there, and sends a file."""
    if page.locator("#input button[aria-label='Remove Image']").count():
        page.click("#input button[aria-label='Remove Image']")
        page.wait_for_selector(".hydra-hint")
    page.set_input_files("#input input[type=file]", path)


def told(page) -> str:
    """What the card says first: label or "I don't know"."""
    page.wait_for_selector(".hydra-card")
    return page.locator(".hydra-verdict").evaluate("node => node.firstChild.textContent")


def wait_for_verdict(page, label: str) -> None:
    page.wait_for_function(
        "label => document.querySelector('.hydra-verdict')?.firstChild.textContent == label", arg=label
    )


def expected(model, path) -> str:
    answer = model.answer_with_members(Image.open(path).convert("RGB"))
    return "I don't know" if answer["abstain"] else answer["label"]


def test_an_image_and_an_example_are_answered_or_not(user, model, files):
    says = {}
    for name in CLASSES:
        send(user, files[name])
        says[name] = told(user)
        assert says[name] == expected(model, files[name])
    assert {"I don't know"} < set(says.values())
    assert user.locator(".hydra-member").count() == 3 and user.locator(".hydra-epistemic").count() == 1
    assert user.locator(".hydra-track i").count() == 9  # three members' dots for each of three classes
    image = user.locator("#input img")  # a small one is enlarged
    assert image.evaluate("node => getComputedStyle(node).objectFit") == "contain"
    assert image.evaluate("node => node.naturalWidth") == 8 < 100 < image.bounding_box()["width"]
    assert user.get_by_text("in distribution", exact=True).is_visible()
    send(user, files["red"])
    assert told(user) == says["red"] != says["blue"]
    user.locator("button.gallery-item").last.click()
    wait_for_verdict(user, says["blue"])


def test_a_bad_file_gets_a_sentence_and_the_next_one_an_answer(user, server, model, files):
    for name, sentence in (
        ("broken", "broken.png is a broken image, its pixels cannot be read: send another."),
        ("many-pixels", "many-pixels.png has 4,000 x 4,000 pixels, too many: send at most 1,000,000 in one request."),
    ):
        send(user, files[name])
        user.wait_for_selector(".hydra-problem")
        assert user.inner_text(".hydra-problem") == sentence
    send(user, files["huge"])
    user.wait_for_selector(".toast-body")
    assert "exceed the maximum allowed size" in user.inner_text(".toast-body")
    user.click(".toast-close")
    with files["huge"].open("rb") as file:
        assert httpx.post(f"{server}/gradio_api/upload", files={"files": file}).status_code == 413
    send(user, files["green"])
    assert told(user) == expected(model, files["green"])


def test_two_users_at_once_see_their_own_answers(user, visit, server, model, files):
    other = visit(server)
    for mine, theirs in (("red", "blue"), ("green", "red")):
        send(user, files[mine])
        send(other, files[theirs])
        assert told(user) == expected(model, files[mine])
        assert told(other) == expected(model, files[theirs])


def test_a_text_is_answered(pages, visit, folders, tmp_path):
    model = asked(folders["texts"])
    film, joy = (model.answer_with_members(text)["label"] for text in ("a film of joy", "good <b>joy</b>"))
    assert film != joy
    (tmp_path / "reviews.txt").write_text("a film of joy")
    page = pages.launch_page(model, tmp_path / "reviews.txt")
    try:
        user = visit(page.local_url)
        user.fill("#input textarea", "good <b>joy</b>")
        user.get_by_role("button", name="Ask").click()
        assert told(user) == joy
        user.get_by_text("a film of joy").click()
        wait_for_verdict(user, film)
        user.close()
    finally:
        page.close(verbose=False)


def test_no_browser_asks_for_anything_but_the_page(user, asked_for):
    hosts = {url.split("/")[2] for url in asked_for if not url.startswith(("data:", "blob:"))}
    assert len(asked_for) > 50 and {host.partition(":")[0] for host in hosts} == {"127.0.0.1"}


# Without a browser


def test_a_page_of_clip_needs_its_classes(pages, folders, files):
    with pytest.raises(ValueError, match="chooses among classes that you name: pass class_names, or --labels"):
        pages.launch_page(asked(folders["clip"]), class_names=["cat"])
    page = pages.launch_page(asked(folders["clip"]), class_names=["cat", "dog"])
    page.close(verbose=False)
    assert "single label classification, 2 labels" in json.dumps(page.get_config_file(), default=str)


def test_what_went_wrong_inside_is_told_to_the_server_alone(pages, model, files, monkeypatch, caplog):
    def fails(*_):
        raise RuntimeError("secret")

    monkeypatch.setattr(model, "answer_with_members", fails)
    said = pages._respond(model, (str(files["red"]), "red.png"))
    assert "could not answer" in said and "secret" not in said and "secret" in caplog.text
