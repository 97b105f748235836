"""Kubernetes: a run as a TrainJob of Kubeflow Trainer, handed over with kubectl.

What the manifests say is decided in manifests.py. What a pod does with them is in runs/pod.py.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping
from typing import Any

from train.cluster import manifests
from train.cluster.manifests import Manifest
from train.cluster.submission import FILE, Submission, to_json
from train.errors import Refused, one_line

COMMAND = ["/usr/bin/tini", "--", "python3", "-m", "train.runs.pod", f"{manifests.SUBMISSION}/{FILE}"]
"""Of each node's container. tini hands SIGTERM on, and reaps what ranks leave behind."""
_APPLY = "kubectl apply -k deploy/kubernetes"
_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
"""RFC 1035, which Trainer and JobSet ask of a name."""
_LONGEST = 63
"""Characters of a pod's name, which begins with the run's."""
_QUANTITY = re.compile(r"(\d+(?:\.\d+)?)([KMGTP]i?)")
_BYTES = 1 << 20
"""What a ConfigMap takes."""
_SLOW = "20s"
"""For one answer of the cluster."""
_RESERVED = ("PET_", "TRAIN_RUNS", "HOME")
"""Names of variables that are Trainer's, and ours."""


def options(parser: Any) -> None:
    """What Kubernetes alone knows."""
    add = parser.add_argument
    add("--namespace", metavar="NS", help=f"Kubernetes: where the run goes ({manifests.NAMESPACE})")
    add("--kube-context", metavar="NAME", help="Kubernetes: which cluster, by kubectl's name; default: its current one")
    add("--runs-claim", metavar="NAME", help=f"Kubernetes: volume claim for run folders ({manifests.RUNS_CLAIM})")
    add("--data-claim", metavar="NAME", help=f"Kubernetes: volume claim for /datasets ({manifests.DATA_CLAIM})")
    add("--shm", metavar="SIZE", help=f"Kubernetes: shared memory of each node, part of its --mem ({manifests.SHM})")
    add("--queue", metavar="NAME", help="Kubernetes: local queue of Kueue that starts the run; default: none")
    add("--env", metavar="A=B,...", help="Kubernetes: more environment for each node, such as NCCL_DEBUG=INFO")


def check(submission: Submission) -> None:
    """Whether it can be handed to a cluster from here."""
    name, own = submission.name, submission.own
    if not _LABEL.fullmatch(name):
        raise Refused(f"--name {name}: Kubernetes takes a-z, 0-9 and -, a letter first; such as {_label_of(name)}")
    pod = f"{name}-node-0-{submission.nodes - 1}-abcde"
    if len(pod) > _LONGEST:
        raise Refused(f"--name {name}: too long by {len(pod) - _LONGEST} for the names of its pods, such as {pod}")
    for flag in ("namespace", "runs_claim", "data_claim", "queue"):
        if own[flag] is not None and not re.fullmatch(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?", own[flag]):
            raise Refused(f"--{flag.replace('_', '-')} {own[flag]}: no name that Kubernetes takes: a-z, 0-9 and -")
    _resources(submission)
    _quantity("shm", own["shm"] or manifests.SHM)
    _environment(own["env"])
    if submission.init and not submission.init.startswith((manifests.RUNS + "/", "/datasets/")):
        raise Refused(
            f"--init {submission.init}: pods cannot read this machine's files; lay it into the claim for runs or data, "
            f"and name it as pods see it: {manifests.RUNS}/… or /datasets/…"
        )
    if not submission.is_dry:
        _check_cluster(submission)


def render(submission: Submission) -> str:
    """The manifests, as YAML."""
    _check_size(submission)
    said = (
        "Once for each namespace; train submit leaves one that is there as it is.",
        "What was submitted: every pod reads it.",
        "Pods of this run may talk to each other; nobody else may come in.",
        f"The run. Watch it: {_kubectl_text(submission, 'get pods', '--watch')}",
    )
    return to_yaml([_runtime(submission), *_company(submission), _train_job(submission)], said)


def submit(submission: Submission) -> str:
    """Hand it to the cluster. The TrainJob comes first, for the others belong to it: they go when it goes."""
    _check_size(submission)
    made: list[Manifest] = []
    try:
        runtime = _runtime(submission)
        if not _get(submission, "trainingruntime", runtime["metadata"]["name"]):
            _create(submission, runtime)
            made.append(runtime)
        job = _train_job(submission)
        uid = _create(submission, job)
        made.append(job)
        owner = {"apiVersion": job["apiVersion"], "kind": job["kind"], "name": submission.name, "uid": uid}
        for manifest in _company(submission):
            manifest["metadata"]["ownerReferences"] = [owner]
            _create(submission, manifest)
            made.append(manifest)
    except BaseException:
        for manifest in reversed(made):
            _kubectl(submission, "delete", manifest["kind"], manifest["metadata"]["name"], "--wait=false")
        raise
    suspend = shlex.quote('{"spec":{"suspend":true}}')
    return (
        f"created trainjob {submission.name} in namespace {_namespace(submission)}; "
        f"its log: {_kubectl_text(submission, 'logs', '--prefix --follow')}; "
        f"save and stop it: {_on(submission)} patch trainjob {submission.name} --type merge -p {suspend}"
    )


def _runtime(submission: Submission) -> Manifest:
    return manifests.runtime(namespace=_namespace(submission))


def _company(submission: Submission) -> list[Manifest]:
    """What a run has beside its TrainJob."""
    name, namespace = submission.name, _namespace(submission)
    content = json.loads(submission.files[FILE]) | {"cwd": "/workspace"}  # the image's; this machine's is not there
    return [
        manifests.submitted(name, namespace, submission.files | {FILE: to_json(content)}),
        manifests.among_themselves(name, namespace),
    ]


def _train_job(submission: Submission) -> Manifest:
    own = submission.own
    return manifests.train_job(
        submission.name,
        _namespace(submission),
        COMMAND,
        nodes=submission.nodes,
        nproc=submission.nproc,
        image=submission.image,
        resources=_resources(submission),
        environment=_environment(own["env"]),
        seconds=submission.seconds,
        grace=submission.warn + 60,  # to stop the ranks, write the checkpoint, and end
        runs_claim=own["runs_claim"] or manifests.RUNS_CLAIM,
        data_claim=own["data_claim"] or manifests.DATA_CLAIM,
        shm=_quantity("shm", own["shm"] or manifests.SHM),
        queue=own["queue"],
    )


def _resources(submission: Submission) -> dict[str, str]:
    """Of each node. Request and limit are the same: a node that is squeezed holds all others up."""
    found = {"nvidia.com/gpu": str(submission.gpus_per_node)} if submission.gpus_per_node else {}
    if submission.cpus:
        found["cpu"] = str(submission.cpus)
    if submission.memory is not None:
        found["memory"] = _quantity("mem", submission.memory)
    return found


def _quantity(flag: str, text: str) -> str:
    """A size as Kubernetes has it. 64G is 64Gi, as Slurm and Docker mean it."""
    found = _QUANTITY.fullmatch(text)
    if not found or not float(found[1]):
        raise Refused(f"--{flag} {text}: give a size such as 64G")
    return found[1] + found[2].removesuffix("i") + "i"


def _environment(text: str | None) -> dict[str, str]:
    """What --env says."""
    found: dict[str, str] = {}
    for pair in (text or "").split(",") if text is not None else ():
        key, is_pair, value = pair.partition("=")
        if not is_pair or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", key):
            raise Refused(f"--env {text}: give NAME=VALUE, several with commas: NCCL_DEBUG=INFO,NCCL_IB_DISABLE=1")
        if key.startswith(_RESERVED):
            raise Refused(f"--env {key}: Kubeflow Trainer or the pod itself sets it; leave it out")
        found[key] = value
    return found


def _label_of(name: str) -> str:
    """A name that Kubernetes takes, near to this one."""
    text = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    return text if text[:1].isalpha() else f"run-{text}".strip("-")


def _check_size(submission: Submission) -> None:
    size = sum(len(content) for content in submission.files.values())
    if size > _BYTES - 4096:  # the names and the rest of the object
        raise Refused(
            f"the task file and --config are {size} bytes, and a ConfigMap takes {_BYTES}; lay the data that is in "
            "them into the claim for data"
        )


# --- the cluster


def _check_cluster(submission: Submission) -> None:
    """Find what is missing before anything is created."""
    if shutil.which("kubectl") is None:
        raise Refused("kubectl is not installed, and runs are handed over with it; what it would get: --dry-run")
    name, namespace = submission.name, _namespace(submission)
    if _get(submission, "trainjob", name):
        raise Refused(
            f"namespace {namespace} has a trainjob {name}; it goes on with {_on(submission)} patch trainjob {name} "
            f'--type merge -p \'{{"spec":{{"suspend":false}}}}\' where it was suspended; or give another --name'
        )
    claims = {"runs": submission.own["runs_claim"] or manifests.RUNS_CLAIM}
    claims["data"] = submission.own["data_claim"] or manifests.DATA_CLAIM
    for use, claim in claims.items():
        found = _get(submission, "persistentvolumeclaim", claim)
        if not found:
            raise Refused(f"namespace {namespace} has no volume claim {claim} for {use}; both are made by: {_APPLY}")
        modes = found["spec"].get("accessModes", [])
        if use == "runs" and submission.nodes > 1 and "ReadWriteMany" not in modes:
            raise Refused(
                f"--runs-claim {claim} is {', '.join(modes)}: pods on {submission.nodes} machines need ReadWriteMany; "
                "give another claim, or --nodes 1"
            )


def _get(submission: Submission, kind: str, name: str) -> dict[str, Any]:
    """An object of the cluster; {} where there is none."""
    done = _kubectl(submission, "get", kind, name, "--ignore-not-found", "--output=json")
    if done.returncode:
        raise Refused(_why(submission, done.stderr))
    return dict(json.loads(done.stdout)) if done.stdout.strip() else {}


def _create(submission: Submission, manifest: Manifest) -> str:
    """Create an object. Returns its uid."""
    arguments = ("create", "--filename=-", "--validate=strict", "--output=json")
    done = _kubectl(submission, *arguments, given=json.dumps(manifest))
    if done.returncode:
        raise Refused(_why(submission, done.stderr))
    return str(json.loads(done.stdout)["metadata"]["uid"])


def _why(submission: Submission, said: str) -> str:
    """What kubectl says, in a line that says what to do."""
    lines = [line for line in said.splitlines() if line.strip() and not re.match(r"[EIW]\d{4} ", line)]
    text = one_line(lines[-1] if lines else said) or "kubectl ended without a word"
    if "have a resource type" in text:
        return (
            "this cluster has no Kubeflow Trainer v2 (trainjobs in trainer.kubeflow.org); who runs the cluster can "
            "install it; what it would get: --dry-run"
        )
    if "did you specify the right host" in text or "was refused" in text or "Unable to connect" in text:
        return f"no cluster answers kubectl: {text}; choose one: kubectl config use-context, or --kube-context NAME"
    if "namespaces" in text and "not found" in text:
        return f"there is no namespace {_namespace(submission)}; it is made by: {_APPLY}, or give another --namespace"
    return f"kubectl: {text.removeprefix('error: ')}"


def _kubectl(submission: Submission, *arguments: str, given: str | None = None) -> subprocess.CompletedProcess[str]:
    where = ["--namespace", _namespace(submission), f"--request-timeout={_SLOW}"]
    if submission.own["kube_context"]:
        where += ["--context", submission.own["kube_context"]]
    return subprocess.run(["kubectl", *where, *arguments], input=given, capture_output=True, text=True, check=False)


def _namespace(submission: Submission) -> str:
    return str(submission.own["namespace"] or manifests.NAMESPACE)


def _on(submission: Submission) -> str:
    context = submission.own["kube_context"]
    return f"kubectl{f' --context {shlex.quote(context)}' if context else ''} -n {_namespace(submission)}"


def _kubectl_text(submission: Submission, verb: str, rest: str) -> str:
    return f"{_on(submission)} {verb} -l jobset.sigs.k8s.io/jobset-name={submission.name} {rest}"


# --- YAML, for people


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
