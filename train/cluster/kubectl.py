"""A namespace of a Kubernetes cluster, as kubectl sees it from here."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

from train.cluster.manifests import Manifest
from train.cluster.submission import Silent
from train.errors import Refused, one_line

APPLY = "kubectl apply -k deploy/kubernetes"
_SLOW = 20
"""Seconds for one answer of the cluster."""
_DELETED = 600
"""Seconds for pods to save and end, where one waits until an object is gone."""
_SILENT = ("did you specify the right host", "was refused", "Unable to connect", "no such host", "i/o timeout",
           "deadline exceeded", 'context "', "context was not found", "connection reset", "no route to host",
           "TLS handshake timeout", "must be logged in", "Unauthorized")  # fmt: skip
"""What kubectl says where no cluster has answered it."""


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Where a run is."""

    namespace: str
    context: str | None = None
    """kubectl's name for the cluster; None: it has none, as inside a pod."""

    @classmethod
    def at(cls, text: str) -> Cluster:
        """From what run.json keeps: NAMESPACE or NAMESPACE@CONTEXT."""
        namespace, _, context = text.partition("@")
        return cls(namespace, context or None)

    def __str__(self) -> str:
        return f"{self.namespace}@{self.context}" if self.context else self.namespace

    @property
    def text(self) -> str:
        """How a command begins that people are shown."""
        return f"kubectl{f' --context {shlex.quote(self.context)}' if self.context else ''} -n {self.namespace}"

    def command(self, *arguments: str, patience: int = _SLOW) -> list[str]:
        """What leads there.

        Args:
            patience: seconds for one answer; 0: any time.
        """
        where = ["kubectl", "--namespace", self.namespace, f"--request-timeout={patience}s"]
        return [*where, *(["--context", self.context] if self.context else []), *arguments]

    def said(self, *arguments: str, given: str | None = None, patience: int = _SLOW) -> str:
        """What kubectl prints.

        Raises:
            Silent: there is no kubectl, or no cluster answers it.
            Refused: the cluster does not do it.
        """
        if shutil.which("kubectl") is None:
            raise Silent("there is no kubectl here")
        code, said, problem = _run(self.command(*arguments, patience=patience), given, patience + 30)
        if code:
            raise self._why(problem)
        return said

    def _why(self, said: str) -> Refused:
        """What kubectl says, in a line that says what to do."""
        lines = [line for line in said.splitlines() if line.strip() and not re.match(r"[EIW]\d{4} ", line)]
        text = one_line(lines[-1] if lines else said)
        if not text:
            return Silent("kubectl has ended without a word")
        if "have a resource type" in text:
            return Refused(
                "this cluster has no Kubeflow Trainer v2 (trainjobs in trainer.kubeflow.org); who runs the cluster can "
                "install it; what it would get: --dry-run"
            )
        if any(words in text for words in _SILENT):
            return Silent(f"no cluster answers kubectl: {text.removeprefix('error: ')}")
        if "namespaces" in text and "not found" in text:
            return Refused(
                f"there is no namespace {self.namespace}; it is made by: {APPLY}, or give another --namespace"
            )
        return Refused(f"kubectl: {text.removeprefix('error: ')}")

    def get(self, kind: str, name: str) -> dict[str, Any]:
        """An object; {} where there is none."""
        said = self.said("get", kind, name, "--ignore-not-found", "--output=json")
        return _object(_parsed(said)) if said.strip() else {}

    def those(self, kinds: str, labels: str) -> list[dict[str, Any]]:
        """The objects of these kinds that have these labels."""
        said = self.said("get", kinds, f"--selector={labels}", "--output=json")
        found = _parsed(said)
        items = found.get("items") if isinstance(found, dict) else None
        if not isinstance(items, list):
            raise _odd(said)
        return [_object(one) for one in items]

    def create(self, manifest: Manifest) -> str:
        """Create an object. Returns its uid."""
        said = self.said("create", "--filename=-", "--validate=strict", "--output=json", given=json.dumps(manifest))
        return str(_object(_parsed(said))["metadata"].get("uid"))

    def patch(self, kind: str, name: str, change: dict[str, Any]) -> None:
        """Change some of an object's fields."""
        self.said("patch", kind, name, "--type=merge", f"--patch={json.dumps(change)}")

    def drop(self, *objects: str) -> None:
        """Begin to delete objects (KIND/NAME); what is gone already is no fault."""
        self.said("delete", *objects, "--ignore-not-found", "--wait=false")

    def clear(self, *objects: str) -> None:
        """Delete objects, and return when they and all that belongs to them are gone: pods save before they end."""
        more = ("--ignore-not-found", "--cascade=foreground", f"--timeout={_DELETED}s")
        self.said("delete", *objects, *more, patience=_DELETED)


def current_context() -> str | None:
    """The cluster that kubectl speaks to where it is not told; None: it has no name.

    Raises:
        Silent: kubectl does not say.
    """
    code, said, _ = _run(["kubectl", "config", "current-context"], None, _SLOW)
    return said.strip() or None if code == 0 else None


def _run(command: list[str], given: str | None, seconds: float) -> tuple[int, str, str]:
    """The exit code of kubectl, and what it has said on both ways.

    Raises:
        Silent: it cannot be run, or does not end.
    """
    try:
        done = subprocess.run(
            command, input=given, capture_output=True, encoding="utf-8", errors="replace", check=False, timeout=seconds
        )
    except subprocess.TimeoutExpired:
        raise Silent(f"kubectl has said nothing for {seconds} s") from None
    except OSError as error:
        raise Silent(f"kubectl cannot be run: {error.strerror}") from None
    return done.returncode, done.stdout, done.stderr


def _parsed(said: str) -> Any:
    try:
        return json.loads(said)
    except (ValueError, RecursionError):
        raise _odd(said) from None


@contextlib.contextmanager
def understood() -> Iterator[None]:
    """Around what is made of objects that a cluster has given.

    Raises:
        Silent: they are not of the kinds that they have to be.
    """
    try:
        yield
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise Silent(f"its objects are not those of Trainer 2.3: {one_line(repr(error))}") from None


def _odd(said: str) -> Silent:
    """That this is not what a cluster says."""
    return Silent(f"kubectl answers with something else than objects: {one_line(repr(said[:60]))}")


def _object(one: Any) -> dict[str, Any]:
    """An object, if it is one: of some kind, with a name.

    Raises:
        Silent: it is none.
    """
    kinds = {"kind": str, "metadata": dict}
    if not isinstance(one, dict) or not all(isinstance(one.get(key), kind) for key, kind in kinds.items()):
        raise _odd(json.dumps(one))
    if not isinstance(one["metadata"].get("name"), str) or not isinstance(one.get("spec", {}), dict):
        raise _odd(json.dumps(one))
    return one
