"""Trainstation: exact, unkillable, observable training runs.

Importing this package imports no torch: `train ls`, `train show` and `--help` answer at once.
"""

__version__ = "0.1.0"
