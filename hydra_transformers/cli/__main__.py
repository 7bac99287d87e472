"""`python -m hydra_transformers.cli`"""

import sys

from . import main


sys.exit(main())
