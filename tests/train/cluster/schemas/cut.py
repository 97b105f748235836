"""Cuts the published schemas of Kubernetes and of Kubeflow Trainer down to what our manifests are made of.

    pip download --no-deps -d WHEELS kubernetes-validate==1.37.0 kubeflow-trainer-api==2.3.0
    python tests/train/cluster/schemas/cut.py WHEELS

Both packages carry what their projects publish: Kubernetes' OpenAPI of each version as JSON Schema, and the models of
Trainer's and JobSet's objects. Nothing is added. Texts go, and so does what DROPPED names, with all that only it
leads to. What is left is as strict as an API server with fieldValidation=Strict: a field that is not there is refused,
and so is null where a value belongs.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any
from zipfile import ZipFile

KUBERNETES, TRAINER = "1.36.0", "2.3.0"
"""Trainer 2.3.0 is built with the libraries of Kubernetes 1.36."""
OBJECTS = {
    "v1/Namespace": "io.k8s.api.core.v1.Namespace",
    "v1/ConfigMap": "io.k8s.api.core.v1.ConfigMap",
    "v1/PersistentVolumeClaim": "io.k8s.api.core.v1.PersistentVolumeClaim",
    "networking.k8s.io/v1/NetworkPolicy": "io.k8s.api.networking.v1.NetworkPolicy",
    "trainer.kubeflow.org/v1alpha1/TrainJob": "TrainerV1alpha1TrainJob",
    "trainer.kubeflow.org/v1alpha1/TrainingRuntime": "TrainerV1alpha1TrainingRuntime",
}
"""apiVersion/kind, and the definition that says how it is made."""
DROPPED = {
    "": {"status", "managedFields", "dataSource", "dataSourceRef"},  # an API server's own; sources
    "io.k8s.api.core.v1.Volume": {"*", "-name", "-configMap", "-emptyDir", "-persistentVolumeClaim"},
    "io.k8s.api.core.v1.PodSpec": {
        "affinity", "dnsConfig", "ephemeralContainers", "hostAliases", "initContainers", "os", "overhead",
        "readinessGates", "resourceClaims", "resources", "schedulingGates", "schedulingGroup",
        "topologySpreadConstraints", "workloadRef",
    },
    "TrainerV1alpha1PodSpecPatch": {"affinity", "initContainers", "schedulingGates"},
    "io.k8s.api.core.v1.Container": {
        "lifecycle", "livenessProbe", "readinessProbe", "resizePolicy", "restartPolicyRules", "startupProbe",
        "volumeDevices",
    },
    "io.k8s.api.batch.v1.PodFailurePolicyOnPodConditionsPattern": {"-status"},
    "io.k8s.api.core.v1.EnvVarSource": {"fileKeyRef"},
    "io.k8s.api.core.v1.SecurityContext": {"seLinuxOptions", "windowsOptions", "appArmorProfile"},
    "io.k8s.api.core.v1.PodSecurityContext": {"seLinuxOptions", "windowsOptions", "appArmorProfile", "sysctls"},
    "TrainerV1alpha1TrainJobSpec": {"initializer"},
    "TrainerV1alpha1TrainingRuntimeSpec": {"podGroupPolicy"},
    "TrainerV1alpha1MLPolicy": {"mpi", "flux", "jax", "xgboost"},
    "JobsetV1alpha2JobSetSpec": {"coordinator", "volumeClaimPolicies"},
}  # fmt: skip
"""Fields that are left out of a definition; "": of all; "*": all of it. With a minus: kept all the same."""

Schema = dict[str, Any]


def main() -> None:
    """Write the file from the packages in the folder that is given."""
    wheels = Path(sys.argv[1])
    found = _kubernetes(_only(wheels, "kubernetes_validate-*.whl"))
    found |= _trainer(_only(wheels, f"kubeflow_trainer_api-{TRAINER}-*.whl"), found)
    kept: dict[str, Schema] = {}
    for root in OBJECTS.values():
        _keep(root, found, kept)
    content = {"kubernetes": KUBERNETES, "trainer": TRAINER, "objects": OBJECTS, "$defs": dict(sorted(kept.items()))}
    text = re.sub(r"\n {4,}|\n {3}(?=[\]}])", "", json.dumps(content, indent=1))  # a line for each definition
    (Path(__file__).parent / "published.json").write_text(text + "\n", encoding="utf-8")


def _only(folder: Path, pattern: str) -> Path:
    (found,) = folder.glob(pattern)
    return found


def _kubernetes(wheel: Path) -> dict[str, Schema]:
    name = f"kubernetes_validate/kubernetes-json-schema/v{KUBERNETES}-local-strict/_definitions.json"
    with ZipFile(wheel) as opened:
        return dict(json.loads(opened.read(name))["$defs"])


def _trainer(wheel: Path, kubernetes: dict[str, Schema]) -> dict[str, Schema]:
    """The definitions of Trainer and JobSet; what they take from Kubernetes is taken from Kubernetes."""
    sys.path.insert(0, str(wheel))
    from kubeflow_trainer_api import models  # type: ignore[import-not-found]

    there = {re.sub(r"[^a-z0-9]", "", name.lower()): name for name in kubernetes}
    found: dict[str, Schema] = {}
    for name in (name for name in OBJECTS.values() if not name.startswith("io.k8s.")):
        tree = getattr(models, name).model_json_schema()
        found |= tree.pop("$defs") | {name: tree}
    text = json.dumps({name: schema for name, schema in found.items() if name.lower() not in there})
    text = re.sub(r'"#/\$defs/(\w+)"', lambda ref: f'"{there.get(ref[1].lower(), ref[1])}"', text)
    return dict(json.loads(text))


def _keep(name: str, found: dict[str, Schema], kept: dict[str, Schema]) -> None:
    """Take a definition over, and all that it leads to."""
    if name in kept:
        return
    kept[name] = {}
    schema = _plain(found[name])
    fields = schema.get("properties", {})
    dropped = DROPPED.get(name, set()) | DROPPED[""]
    for field in list(fields):
        if dropped & {field, "*"} and f"-{field}" not in dropped:
            del fields[field]
    if fields:
        schema["additionalProperties"] = False
    kept[name] = schema
    for ref in re.findall(r'"\$ref": "#/\$defs/([^"]+)"', json.dumps(schema)):
        _keep(ref, found, kept)


def _plain(tree: Any) -> Any:
    """Without texts, and without null beside a type."""
    if isinstance(tree, list):
        return [_plain(one) for one in tree if one is not None]
    if not isinstance(tree, dict):
        return tree
    if set(tree.get("required", ())) <= {"apiVersion", "kind"}:
        tree = {key: value for key, value in tree.items() if key != "required"}
    others = [one for one in tree.get("anyOf", ()) if one != {"type": "null"}]
    if len(others) == 1:
        return _plain(others[0])
    plain: Schema = {}
    for key, value in tree.items():
        if key == "properties":
            plain[key] = {name: _plain(one) for name, one in value.items()}
        elif key == "type" and isinstance(value, list):
            types = [one for one in value if one != "null"]
            plain[key] = types[0] if len(types) == 1 else types
        elif key == "$ref":
            plain[key] = "#/$defs/" + value.split("/")[-1]
        elif key in ("items", "additionalProperties", "oneOf", "anyOf", "allOf", "enum", "required", "format", "type"):
            plain[key] = _plain(value)
        elif key not in ("description", "title", "default", "$schema") and not key.startswith("x-kubernetes"):
            raise SystemExit(f"cut.py does not know what to do with {key}: {value}")
    return plain


if __name__ == "__main__":
    main()
