"""The models speak through Transformers' logger: its verbosity counts, and the command line turns it into notes."""

import pytest

from tests.fresh_process import run_fresh


FUSE_STRANGERS = """
import sys, transformers
usual = transformers.logging.get_verbosity()
transformers.logging.set_verbosity_error()
from tests.families import VIT, vit_backbone
VIT.hydra.from_pruned_members([vit_backbone(0), vit_backbone(1)])
print("as usual:", file=sys.stderr)
transformers.logging.set_verbosity(usual)
VIT.hydra.from_pruned_members([vit_backbone(0), vit_backbone(1)])
"""


@pytest.mark.slow
def test_transformers_verbosity_silences_the_models(tmp_path):
    result = run_fresh(FUSE_STRANGERS, folder=tmp_path)
    assert result.returncode == 0, result.stderr
    silenced, usual = result.stderr.split("as usual:")
    assert "little in common" not in silenced and "little in common" in usual, result.stderr
