"""``python -m torchtitan`` is the command ``torchtitan``."""

import sys

from torchtitan.cli.main import main

sys.exit(main())
