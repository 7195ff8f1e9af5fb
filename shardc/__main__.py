"""``python -m shardc``: the command line."""

import sys

from shardc.cli.main import main

sys.exit(main())
