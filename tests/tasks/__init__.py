"""Tasks that tests train."""

from pathlib import Path

TASKS = Path(__file__).parent
