"""All tests: the modules they import are no garbage."""

import gc


def pytest_collection_finish() -> None:
    """Takes what is imported by now out of the garbage collector's sight: full collections, of which every training asks for
    one, would spend half a second each on the modules of torch, Transformers and scikit-learn."""
    gc.collect()
    gc.freeze()
