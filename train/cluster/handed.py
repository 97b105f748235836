"""What a cluster was given, as a run folder keeps it: YAML, for people, and read when the run is handed over again."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from train.cluster.manifests import Manifest
from train.cluster.submission import FILE
from train.errors import Refused


def to_yaml(documents: list[Manifest], said: tuple[str, ...] = ()) -> str:
    """Objects as one YAML stream, each with a line before it."""
    import yaml

    class Readable(yaml.SafeDumper):
        """Lists stand under their key, and texts of many lines as they are."""

        def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
            super().increase_indent(flow, False)

        def ignore_aliases(self, data: Any) -> bool:
            return True

    def text(dumper: Any, value: str) -> Any:
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)

    Readable.add_representer(str, text)
    parts = [yaml.dump(one, Dumper=Readable, sort_keys=False, width=120, allow_unicode=True) for one in documents]
    comments: Mapping[int, str] = dict(enumerate(said))
    return "".join(f"---\n# {comments[n]}\n{part}" if n in comments else f"---\n{part}" for n, part in enumerate(parts))


def read(path: Path) -> list[Manifest]:
    """What a cluster was given, as the run folder has it.

    Raises:
        Refused: it is damaged.
    """
    import yaml

    try:
        found = list(yaml.safe_load_all(path.read_text(encoding="utf-8")))
        kinds = [one["kind"] for one in found if one["metadata"]["name"]]
        if kinds == ["TrainingRuntime", "ConfigMap", "NetworkPolicy", "TrainJob"] and found[1]["data"][FILE]:
            return found
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError):
        pass
    raise Refused(f"{path} is missing or damaged; restore it, or submit the run anew under another name")
