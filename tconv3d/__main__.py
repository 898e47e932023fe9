"""`python -m tconv3d`: the command line, where the command `tconv3d` is not on the path."""

import sys

from .tools.cli import main

if __name__ == "__main__":
    sys.exit(main())
