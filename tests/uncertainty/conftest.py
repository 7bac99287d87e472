import logging

import pytest
from transformers.utils import logging as transformers_logging


@pytest.fixture
def warned(caplog, monkeypatch):
    """The warnings of Transformers' loggers and of ours below them, each once."""
    logger = logging.getLogger("transformers")
    monkeypatch.setattr(logger, "propagate", False)  # where CI is set, messages would pass, and count twice
    logger.addHandler(caplog.handler)
    transformers_logging.get_logger("transformers").warning_once.cache_clear()
    yield caplog
    logger.removeHandler(caplog.handler)
