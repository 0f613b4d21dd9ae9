"""`python -m moe_train`: the command line."""

import sys

from moe_train.cli import main

sys.exit(main())
