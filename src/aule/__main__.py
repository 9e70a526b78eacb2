"""``python -m aule``: the command line, if the script is not on the path."""

import sys

from aule.cli import main

sys.exit(main())
