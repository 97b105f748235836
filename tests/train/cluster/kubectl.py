"""Stands where kubectl would, for a cluster that is a folder of JSON files: what was created lies there.

    CLUSTER=DIR kubectl [options] get|create|patch|delete|logs|config …

It checks what it is given against the published schemas. DIR/refuses names a kind that the cluster takes no object of;
while DIR/down is there, no cluster answers; while DIR/controllers is there, somebody (controllers.py) does what those
of a cluster do, and a deletion takes its time.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

KINDS = ("TrainJob", "TrainingRuntime", "PersistentVolumeClaim", "ConfigMap", "NetworkPolicy", "Pod")
FINAL = ("Succeeded", "Failed")


@contextlib.contextmanager
def locked(cluster: Path) -> Iterator[None]:
    """Alone with the objects."""
    with (cluster / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat()


class Objects:
    """Those of a namespace."""

    def __init__(self, cluster: Path, namespace: str) -> None:
        self.cluster, self.folder = cluster, cluster / namespace

    def path(self, kind: str, name: str) -> Path:
        full = next(one for one in KINDS if one.lower() == kind.lower())
        return self.folder / f"{full}-{name}.json"

    def read(self, kind: str, name: str) -> dict[str, Any] | None:
        path = self.path(kind, name)
        return json.loads(path.read_text()) if path.exists() else None

    def write(self, one: dict[str, Any]) -> None:
        path = self.path(one["kind"], one["metadata"]["name"])
        fresh = path.with_suffix(".new")
        fresh.write_text(json.dumps(one))
        fresh.replace(path)

    def those(self, kind: str, labels: dict[str, str]) -> list[dict[str, Any]]:
        prefix = self.path(kind, "").name.removesuffix(".json")
        found = [json.loads(path.read_text()) for path in sorted(self.folder.glob(f"{prefix}*.json"))]
        return [one for one in found if labels.items() <= (one["metadata"].get("labels") or {}).items()]

    def remove(self, one: dict[str, Any]) -> None:
        """It is gone, and the garbage collector takes what belongs to it."""
        self.path(one["kind"], one["metadata"]["name"]).unlink()
        for kind in KINDS:
            for other in self.those(kind, {}):
                owners = other["metadata"].get("ownerReferences") or ()
                if any(owner["uid"] == one["metadata"]["uid"] for owner in owners):
                    self.remove(other)


class Kubectl:
    """One call."""

    def __init__(self, cluster: Path, arguments: list[str]) -> None:
        words = list(arguments)
        self.given: dict[str, str] = {}
        for name in ("--namespace", "--context"):
            if name in words:
                at = words.index(name)
                self.given[name[2:]] = words[at + 1]
                del words[at : at + 2]
        for word in words:
            if word.startswith("--"):
                name, _, value = word[2:].partition("=")
                self.given[name] = value
        self.words = [word for word in words if not word.startswith("--")]
        self.cluster, self.objects = cluster, Objects(cluster, self.given.get("namespace", ""))

    def run(self) -> int:
        verb = self.words.pop(0)
        if verb == "config":
            print("test")
            return 0
        if (self.cluster / "down").exists() or self.given.get("context", "test") != "test":
            return self.fail("The connection to the server 203.0.113.1:6443 was refused - did you specify the right "
                             "host or port?")  # fmt: skip
        return int(getattr(self, verb)())

    def fail(self, said: str) -> int:
        print(f"W1122 10:00:00.0 1 warnings.go:70] some warning\n{said}", file=sys.stderr)
        return 1

    def selected(self) -> dict[str, str]:
        return dict(one.split("=", 1) for one in self.given["selector"].split(","))

    def get(self) -> int:
        assert self.given["output"] == "json"
        with locked(self.cluster):
            if "selector" in self.given:
                kinds = self.words[0].split(",")
                items = [one for kind in kinds for one in self.objects.those(kind, self.selected())]
                print(json.dumps({"apiVersion": "v1", "kind": "List", "items": items}))
                return 0
            found = self.objects.read(*self.words)
        if found is not None:
            print(json.dumps(found))
        return 0

    def create(self) -> int:
        assert self.given["validate"] == "strict"
        manifest = json.load(sys.stdin)
        kind, name = manifest["kind"], manifest["metadata"]["name"]
        said = self.faults(manifest)
        with locked(self.cluster):
            if manifest["metadata"]["namespace"] != self.given["namespace"]:
                said = "the namespace from the provided object does not match"
            elif not self.objects.folder.is_dir():
                said = f'namespaces "{self.given["namespace"]}" not found'
            elif self.objects.path(kind, name).exists():
                said = f'{kind} "{name}" already exists'
            elif (self.cluster / "refuses").exists() and (self.cluster / "refuses").read_text() == kind:
                said = f"{kind} is forbidden: exceeded quota"
            if said:
                return self.fail(f"Error from server: {said}")
            many = len(list(self.cluster.glob("made-*")))
            (self.cluster / f"made-{many}").touch()
            manifest["metadata"] |= {"uid": f"uid-{many}-of-{name}", "creationTimestamp": now()}
            self.objects.write(manifest)
        print(json.dumps(manifest))
        return 0

    def faults(self, manifest: dict[str, Any]) -> str:
        # jsonschema would load a grammar for a format of strings that no schema of ours has: seconds, for each call
        sys.modules["rfc3987_syntax"] = None  # type: ignore[assignment]
        from tests.train.cluster.published import faults

        return "; ".join(faults(manifest))

    def patch(self) -> int:
        assert self.given["type"] == "merge"
        with locked(self.cluster):
            found = self.objects.read(*self.words)
            if found is None:
                return self.fail(f'Error from server (NotFound): {self.words[0]} "{self.words[1]}" not found')
            merge(found, json.loads(self.given["patch"]))
            plain = {key: value for key, value in found.items() if key != "status"}
            if said := self.faults(plain):
                return self.fail(f"Error from server: {said}")
            self.objects.write(found)
        return 0

    def delete(self) -> int:
        with locked(self.cluster):
            if "selector" in self.given:
                for pod in self.objects.those(self.words[0], self.selected()):
                    grace = int(self.given["grace-period"])
                    pod["metadata"] |= {"deletionTimestamp": now(), "deletionGracePeriodSeconds": grace}
                    self.objects.write(pod)
                return 0
            targets = [self.objects.read(*word.split("/")) for word in self.words]
            for one in filter(None, targets):
                if one["kind"] == "TrainJob" and (self.cluster / "controllers").exists():
                    self.objects.write(one | {"metadata": one["metadata"] | {"deletionTimestamp": now()}})
                elif self.objects.path(one["kind"], one["metadata"]["name"]).exists():
                    self.objects.remove(one)
        while self.given.get("wait") != "false" and any(self.is_there(one) for one in filter(None, targets)):
            time.sleep(0.05)
        return 0

    def is_there(self, one: dict[str, Any]) -> bool:
        with locked(self.cluster):
            found = self.objects.read(one["kind"], one["metadata"]["name"])
        return found is not None and found["metadata"]["uid"] == one["metadata"]["uid"]

    def logs(self) -> int:
        name = self.words[0].removeprefix("pod/")
        path = self.cluster / "logs" / name
        with path.open("rb") as file:
            while True:
                with locked(self.cluster):
                    pod = self.objects.read("Pod", name)
                over = "follow" not in self.given or pod is None or pod["status"]["phase"] in FINAL
                sys.stdout.buffer.write(file.read())
                sys.stdout.buffer.flush()
                if over:
                    return 0
                time.sleep(0.05)


def merge(into: dict[str, Any], change: dict[str, Any]) -> None:
    """RFC 7386."""
    for key, value in change.items():
        if isinstance(value, dict):
            merge(into.setdefault(key, {}), value)
        elif value is None:
            into.pop(key, None)
        else:
            into[key] = value


if __name__ == "__main__":
    folder = Path(os.environ["CLUSTER"])
    with (folder / "calls").open("a") as calls:
        calls.write(json.dumps(sys.argv[1:]) + "\n")
    sys.exit(Kubectl(folder, sys.argv[1:]).run())
