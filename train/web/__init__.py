"""The page: the runs and the machine in a browser, as an extension of Jupyter's server. Imports no torch.

Jupyter's login protects it: every handler is one of Jupyter's, and asks for the login itself.
"""

from typing import Any


def _jupyter_server_extension_points() -> list[dict[str, str]]:
    """Return what Jupyter loads."""
    return [{"module": __name__}]


def _load_jupyter_server_extension(app: Any) -> None:
    """Add the page to a server of Jupyter."""
    import os
    from pathlib import Path

    from . import handlers

    runs = Path(os.environ.get("TRAIN_RUNS") or Path(app.root_dir) / "runs").absolute()
    handlers.add(app.web_app, runs, has_lab="jupyterlab" in app.extension_manager.extensions)
