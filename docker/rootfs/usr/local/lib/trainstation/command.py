"""The command `train`: from the package in /workspace if a checkout is mounted, otherwise from the image."""

import sys

from train.cli import main

if __name__ == "__main__":  # processes of `train run --spawn` import this file again
    sys.exit(main())
