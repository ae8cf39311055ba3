"""Run by the environment's Python with `scripts` on its path."""

import sys

from devicecheck.main import main

if __name__ == "__main__":
    sys.exit(main())
