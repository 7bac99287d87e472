"""Error messages of the command line: any exception as one sentence."""

import errno
import re
from collections.abc import Sequence

from .._io.access import first_line, in_one_line


# Errors that the user can fix.
MISTAKES = (ValueError, TypeError, OSError, ImportError, RuntimeError)
NUMBER_OF_ERROR = re.compile(r"\[Errno \d+\] ")
# Words of the Python functions' errors, and the flags that they stand for.
FLAGS = {
    r"num_members\b": "--members",
    r"candidate_labels\b": "--labels",
    r"set HF_TOKEN, or pass token=": "or set HF_TOKEN",
    r"pass another token=": "set another HF_TOKEN",
    r"pass method='(\w+)'": r"pass --method \1",
    r"call calibrate\(\) first": "run `hydra-transformers calibrate` first",
}


def sentence_of(error: Exception, flags: Sequence[str] = ()) -> str:
    """Return any exception as one line; one that the user cannot fix is called unexpected.

    flags: of the command, which errors of Python functions name without dashes (`trunk_layers` for
        --trunk-layers)
    """
    if not isinstance(error, MISTAKES):
        return f"unexpected {type(error).__name__}: {first_line(error)} (--debug shows where)"

    # Errors of the system.
    sentence = NUMBER_OF_ERROR.sub("", in_one_line(error))
    if isinstance(error, FileNotFoundError) and error.filename:
        sentence = f"there is no file {error.filename}"
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        sentence = "the disk is full: free some space, and the same command continues"

    # Arguments of Python functions, by the flags that they came from.
    for word, flag in FLAGS.items():
        sentence = re.sub(word, flag, sentence)
    for flag in flags:
        name = flag.removeprefix("--").replace("-", "_")
        sentence = re.sub(rf"^{name}(?= (is|has)\b)", flag, sentence)
        if "_" in name:
            sentence = re.sub(rf"(?<![\w/.-]){name}(?![\w/-])", flag, sentence)
    return sentence
