"""Stands where kubectl would, for a cluster that is a folder of JSON files: what was created lies there.

    CLUSTER=DIR kubectl [options] get|create|delete …

DIR/refuses names a kind that the cluster takes no object of. It checks what it is given against the published schemas.
"""

import json
import os
import sys
from pathlib import Path

CLUSTER = Path(os.environ["CLUSTER"])
NAMES = {"trainjob": "TrainJob", "trainingruntime": "TrainingRuntime", "persistentvolumeclaim": "PersistentVolumeClaim"}


def main() -> int:
    words = [word for word in sys.argv[1:] if not word.startswith("--")]
    with (CLUSTER / "calls").open("a") as calls:
        calls.write(json.dumps(sys.argv[1:]) + "\n")
    namespace = sys.argv[1 + sys.argv[1:].index("--namespace") + 1]
    words.remove(namespace)
    verb = words[0]
    if verb == "create":
        return create(namespace)
    kind = NAMES.get(words[1].lower(), words[1])
    file = CLUSTER / namespace / f"{kind}-{words[2]}.json"
    if verb == "get":
        print(file.read_text() if file.exists() else "", end="")
    elif verb == "delete":
        file.unlink()
    return 0


def create(namespace: str) -> int:
    from tests.train.cluster.test_manifests import faults

    manifest = json.load(sys.stdin)
    kind, name = manifest["kind"], manifest["metadata"]["name"]
    file = CLUSTER / namespace / f"{kind}-{name}.json"
    said = "; ".join(faults(manifest))
    if manifest["metadata"]["namespace"] != namespace:
        said = "the namespace from the provided object does not match"
    elif not file.parent.is_dir():
        said = f'namespaces "{namespace}" not found'
    elif file.exists():
        said = f'{kind} "{name}" already exists'
    elif (CLUSTER / "refuses").exists() and (CLUSTER / "refuses").read_text() == kind:
        said = f"{kind} is forbidden: exceeded quota"
    if said:
        print(f"W1122 10:00:00.0 1 warnings.go:70] some warning\nError from server: {said}", file=sys.stderr)
        return 1
    manifest["metadata"]["uid"] = f"uid-of-{name}"
    file.write_text(json.dumps(manifest))
    print(json.dumps(manifest))
    return 0


if __name__ == "__main__":
    sys.exit(main())
