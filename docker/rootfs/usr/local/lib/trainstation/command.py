"""The command `train`: the package in /workspace where a checkout is mounted, else the one in the image."""

import sys

from train.cli import main

if __name__ == "__main__":  # `train run --spawn` starts processes that import this file again
    sys.exit(main())
