"""`python -m hydra_transformers.cli` runs the command."""

import sys

from . import main


sys.exit(main())
