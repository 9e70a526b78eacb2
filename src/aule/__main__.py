"""``python -m aule``: the command line where no script is on the path."""

import sys

from aule.cli import main

sys.exit(main())
