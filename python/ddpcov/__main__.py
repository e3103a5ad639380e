"""`python -m ddpcov`."""

import sys

from ddpcov.commands import main

if __name__ == "__main__":
    sys.exit(main())
