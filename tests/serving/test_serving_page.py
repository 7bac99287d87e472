"""docs/serving.md: its example runs, and it tells every option, status and limit."""

from hydra_transformers.hub.handler import FORMATS, MOST_PIXELS
from hydra_transformers.serving.app import SECONDS_FOR_BODY
from hydra_transformers.serving.running import SECONDS_TO_CLOSE
from tests.pages import ROOT, run_python_blocks


PAGE = "docs/serving.md"


def test_the_example_runs(capsys):
    names = run_python_blocks(PAGE)
    assert names["answer"]["abstain"] is None and names["refused"].status_code == 422
    assert "inputs[0] is no base64" in capsys.readouterr().out


def test_the_page_tells_the_limits():
    page = (ROOT / PAGE).read_text()
    options = (ROOT / "hydra_transformers" / "cli" / "flags" / "serving.py").read_text()
    for flag in ("--max-batch", "--max-wait-ms", "--max-queue", "--max-body-mb"):
        assert flag in page and f'"{flag}"' in options
    assert all(name in page.upper() for name in FORMATS)
    assert f"{MOST_PIXELS // 1_000_000} million pixels" in page
    assert f"within {SECONDS_FOR_BODY:.0f} seconds" in page and f"at most {SECONDS_TO_CLOSE} seconds" in page
