"""What readers of folders skip: hidden names, and folders that programs leave beside data."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

_LEFT = ("@eaDir", "__MACOSX", "lost+found")
"""Folders of a Synology's index, of macOS in archives, and of a file system check."""


def is_hidden(name: str) -> bool:
    """Whether a file or folder of this name is not data, for example JupyterLab's `.ipynb_checkpoints`."""
    return (name.startswith(".") and name not in (".", "..")) or name in _LEFT


def is_below_hidden(path: str) -> bool:
    """Whether a part of a relative path is hidden."""
    return any(map(is_hidden, path.split("/")))


def visible_folders(folder: str) -> list[str]:
    """Return the names of the folders in a folder, sorted."""
    with os.scandir(folder) as entries:
        return sorted(entry.name for entry in entries if not is_hidden(entry.name) and entry.is_dir())


def without_hidden(kind: type[Any]) -> type[Any]:
    """Return a torchvision dataset class of class folders (DatasetFolder or a subclass) that skips hidden names."""
    from torchvision.datasets import folder

    class Visible(kind):
        def find_classes(self, directory: str) -> tuple[list[str], dict[str, int]]:
            found = visible_folders(directory)
            if not found:
                raise FileNotFoundError(f"Couldn't find any class folder in {directory}.")
            return found, {name: number for number, name in enumerate(found)}

        @staticmethod
        def make_dataset(
            directory: str,
            class_to_idx: dict[str, int],
            extensions: tuple[str, ...] | None = None,
            is_valid_file: Callable[[str], bool] | None = None,
            allow_empty: bool = False,
        ) -> list[tuple[str, int]]:
            def is_sample(path: str) -> bool:
                fits = is_valid_file(path) if is_valid_file else folder.has_file_allowed_extension(path, extensions)
                return bool(fits) and not is_below_hidden(os.path.relpath(path, directory))

            return folder.make_dataset(directory, class_to_idx, None, is_sample, allow_empty)

    Visible.__name__ = Visible.__qualname__ = kind.__name__
    return Visible
