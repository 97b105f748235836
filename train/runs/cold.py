"""The agent where nothing holds its libraries for it: those of torch are loaded first, beside its own imports.

python -P …/train/own.py train.runs.cold FOLDER_OF_THE_ORDER
"""

from __future__ import annotations

from types import ModuleType

from train.runs import preload


def load() -> ModuleType:
    """Import the agent (runs/agent.py), while a thread loads the libraries of torch."""
    preload.begin()
    with preload.uncollected():
        from train.runs import agent
    return agent


def main() -> None:
    """Become the agent."""
    load().main()


if __name__ == "__main__":
    main()
