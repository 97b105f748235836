"""The agent where nothing holds its libraries for it: those of torch are loaded first, beside its own imports.

python -P …/train/own.py train.runs.cold FOLDER_OF_THE_ORDER
"""

from __future__ import annotations

from train.runs import preload


def main() -> None:
    """Become the agent (runs/agent.py)."""
    preload.begin()
    with preload.uncollected():
        from train.runs import agent

    agent.main()


if __name__ == "__main__":
    main()
