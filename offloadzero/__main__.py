"""`python -m offloadzero`."""

import sys

from offloadzero.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
