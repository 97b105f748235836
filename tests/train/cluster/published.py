"""What Kubernetes and Kubeflow Trainer publish that they take (schemas/)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema

PUBLISHED = json.loads((Path(__file__).parent / "schemas" / "published.json").read_text())


def faults(manifest: dict[str, Any]) -> list[str]:
    """What an API server would refuse, strictly."""
    definition = PUBLISHED["objects"][f"{manifest['apiVersion']}/{manifest['kind']}"]
    schema = {"$ref": f"#/$defs/{definition}", "$defs": PUBLISHED["$defs"]}
    found = jsonschema.Draft202012Validator(schema).iter_errors(manifest)
    return [f"{error.json_path}: {error.message}" for error in found]
