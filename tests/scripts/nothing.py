"""A script without torch."""

import sys

print("torch" in sys.modules, sys.argv[1:])
sys.exit(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
