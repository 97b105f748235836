"""Keeps folders of the station from being imported as packages.

Python takes a folder without an __init__.py for a package. The current folder is where it looks first, and in a
terminal that is /workspace: `import datasets` would find the folder of that name. With this it finds the package
`datasets`, or says that there is none. trainstation.pth installs it in every Python.
"""

import os
import sys
from importlib import machinery

PLACES = ("/", "/workspace", "/home/dev")
"""Folders that hold those folders, or links to them."""
NAMES = ("datasets", "deploy", "docker", "docs", "notebooks", "runs", "scripts")
FOLDERS = {"/datasets", *(f"/workspace/{name}" for name in NAMES)}


class Finder(machinery.FileFinder):
    """Finds what Python's own finder does, except those folders."""

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
    """Makes a finder for one of those places; Python asks once for each entry of its path."""
    if os.path.abspath(path) not in PLACES:  # noqa: PTH100 - pathlib would make each start of Python slower
        raise ImportError(path)
    return make(path)


sys.path_hooks.insert(0, hook)
