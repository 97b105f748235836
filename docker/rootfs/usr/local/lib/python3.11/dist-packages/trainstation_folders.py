"""Keep Python from importing folders of the station as packages.

Python treats a folder without an __init__.py as a package. It looks in the current folder first, and in a terminal
that is /workspace. So `import datasets` would find the folder of that name. With this module it finds the package
`datasets`, or fails. trainstation.pth installs it in every Python.
"""

import os
import sys
from importlib import machinery

PLACES = ("/", "/workspace", "/home/dev")
"""Folders that contain the folders in NAMES, or links to them."""
NAMES = ("datasets", "deploy", "docker", "docs", "notebooks", "runs", "scripts")
FOLDERS = {"/datasets", *(f"/workspace/{name}" for name in NAMES)}


class Finder(machinery.FileFinder):
    """Python's own finder, except for the folders in FOLDERS."""

    def find_spec(self, fullname, target=None):
        spec = super().find_spec(fullname, target)
        if spec is None or spec.loader is not None:
            return spec
        return None if os.path.realpath(f"{self.path}/{fullname}") in FOLDERS else spec


make = Finder.path_hook(
    (machinery.ExtensionFileLoader, machinery.EXTENSION_SUFFIXES),
    (machinery.SourceFileLoader, machinery.SOURCE_SUFFIXES),
    (machinery.SourcelessFileLoader, machinery.BYTECODE_SUFFIXES),
)


def hook(path):
    """Return a finder for a path in PLACES. Python asks once for each entry of its path.

    Raises:
        ImportError: another path.
    """
    if os.path.abspath(path) not in PLACES:  # noqa: PTH100 - pathlib would make each start of Python slower
        raise ImportError(path)
    return make(path)


sys.path_hooks.insert(0, hook)
