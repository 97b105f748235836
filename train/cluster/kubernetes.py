"""Run on Kubernetes: a run is a TrainJob of Kubeflow Trainer (job.yaml), submitted with kubectl.

The TrainingRuntime of the namespace describes the pod (deploy/kubernetes/runtime.yaml). The run itself is in the
cluster, in the claim for runs. The local run folder records what was submitted.
"""

from __future__ import annotations

import contextlib
import functools
import json
import posixpath
import re
from collections.abc import Mapping
from typing import Any

from ..errors import Refused, one_line
from ..run import environment, states
from ..run.record import Record
from ..run.run_folder import Run
from .engine import CONFIG, FILE, TASK, JobStatus, Submission, call, template

SCRIPT = "job.yaml"
APPLY = "kubectl apply -k deploy/kubernetes"
NAMESPACE, RUNS_CLAIM, DATA_CLAIM, SHM = "trainstation", "trainstation-runs", "trainstation-data", "16Gi"
_OURS, _ID = "app.kubernetes.io/name", "trainstation/submission"
"""Labels of everything that is ours, including pods; and of everything that belongs to one submission."""
_RUN, _NODE = "jobset.sigs.k8s.io/jobset-name", "batch.kubernetes.io/job-completion-index"
"""Labels of a pod: the run's name, and the number of its node."""
_ALL = "trainjob,configmap,networkpolicy"
"""Kinds of objects that a run has in a cluster."""
_NAME = r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?"
_NO_TRAINER = "this cluster has no Kubeflow Trainer v2, which runs need; ask its administrator to install it"
_HINTS = {
    "no matches for kind": _NO_TRAINER,
    "have a resource type": _NO_TRAINER,
    "namespaces ": f"create the namespace: {APPLY}, or give another --namespace",
    "already exists": "give another --name, or delete it with kubectl",
    "no kubectl": "install kubectl, or use --dry-run",
    "was refused": "choose a cluster: kubectl config use-context, or --kube-context NAME",
}
"""Maps words of kubectl's messages to what the user can do."""

__all__ = ["SCRIPT", "check", "jobs", "logs", "options", "place", "remove", "render", "stop", "submit"]


def options(parser: Any) -> None:
    """Add the options that only Kubernetes has."""
    add = functools.partial(parser.add_argument, section="options of --on kubernetes")
    add("--namespace", metavar="NS", help=f"Namespace of the run. Default: {NAMESPACE}.")
    add("--runs-claim", metavar="NAME", help=f"Volume claim for the run folders. Default: {RUNS_CLAIM}.")
    add("--data-claim", metavar="NAME", help=f"Volume claim for /datasets. Default: {DATA_CLAIM}.")
    add("--shm", metavar="SIZE", help=f"Shared memory of each node, part of its --mem. Default: {SHM}.")
    add("--env", metavar="A=B,...", help="Environment variables for each node, such as NCCL_DEBUG=INFO.")
    text = "Environment variables from Secrets: the key A of SECRET, or A=SECRET/KEY."
    add("--env-from", metavar="A=SECRET,...", help=text)
    add("--queue", metavar="NAME", help="Local queue of Kueue that starts the run. Default: none.")
    add("--kube-context", metavar="NAME", help="Context of kubectl, which names the cluster. Default: the current one.")


def check(asked: Submission) -> None:
    """Check whether a request can be submitted from here. The API server is asked, which creates nothing.

    Raises:
        Refused: it cannot.
    """
    own = asked.own
    if not re.fullmatch(r"[a-z]([-a-z0-9]{0,43}[a-z0-9])?", asked.name):
        taken = re.sub(r"[^a-z0-9]+", "-", asked.name.lower()).lstrip("-0123456789")[:45].strip("-") or "run"
        raise Refused(
            f"--name {asked.name}: Kubernetes takes up to 45 of a-z, 0-9 and -, a letter first: --name {taken}"
        )
    for flag in ("namespace", "runs_claim", "data_claim", "queue"):
        if own[flag] is not None and (len(own[flag]) > 63 or not re.fullmatch(_NAME, own[flag])):
            raise Refused(f"--{flag.replace('_', '-')} {own[flag]}: not a name for Kubernetes; use a-z, 0-9 and -")
    if own["kube_context"] is not None and not re.fullmatch(r"[\x21-\x7e]+", own["kube_context"]):
        raise Refused(f"--kube-context {own['kube_context']!r}: give a name from kubectl config get-contexts")
    if asked.image is not None and not re.fullmatch(r"[\x21-\x7e]+", asked.image):
        raise Refused(f"--container {asked.image!r}: give an image as for docker push: REGISTRY/NAME:TAG")
    if asked.warn > 86400:
        raise Refused(f"--warn {asked.warn}: give at most 86400 seconds")
    init = asked.flags.get("init")
    if init and not posixpath.normpath(init).startswith(("/workspace/runs/", "/datasets/")):
        raise Refused(
            f"--init {init}: pods cannot read this machine's files; put it into the claim for runs or data, and "
            "give its path in the pods: /workspace/runs/… or /datasets/…"
        )
    text = render(asked)
    if not asked.is_dry:
        _kubectl(place(asked), "create", "--dry-run=server", "--validate=strict", "--filename=-", given=text)


def place(asked: Submission) -> str:
    """Return NAMESPACE@CONTEXT, with the current context by name, because it may change later."""
    context = asked.own["kube_context"]
    if context is None and not asked.is_dry:
        with contextlib.suppress(Refused):  # inside a pod the context has no name
            context = call("kubectl", "config", "current-context").strip()
    return f"{asked.own['namespace'] or NAMESPACE}@{context or ''}"


def render(asked: Submission) -> str:
    """Return the TrainJob."""
    own = asked.own
    resources = {"nvidia.com/gpu": str(asked.gpus_per_node)} if asked.gpus_per_node else {}
    resources |= {"cpu": str(asked.cpus)} if asked.cpus else {}
    resources |= {"memory": _quantity("mem", asked.memory)} if asked.memory is not None else {}
    namespace = own["namespace"] or NAMESPACE
    return template(
        SCRIPT,
        name=asked.name,
        id=asked.id,
        namespace=namespace,
        kubectl=f"kubectl -n {namespace}",
        queue=own["queue"],
        seconds=asked.seconds,
        image=asked.image,
        nodes=asked.nodes,
        nproc=asked.nproc,
        environment=_environment(own["env"], own["env_from"]),
        resources=resources,
        grace=asked.warn + 60,  # to stop the ranks, write the checkpoint, and end
        runs_claim=own["runs_claim"] or RUNS_CLAIM,
        data_claim=own["data_claim"] or DATA_CLAIM,
        shm=_quantity("shm", SHM if own["shm"] is None else own["shm"]),
    )


def _quantity(flag: str, text: str) -> str:
    """Return a size in Kubernetes' form. 64G becomes 64Gi, which is what Slurm and Docker mean by it."""
    found = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)([KMGTP]i?)", text)
    if not found or not float(found[1]):
        raise Refused(f"--{flag} {text}: give a size such as 64G")
    return found[1] + found[2].removesuffix("i") + "i"


def _environment(plain: str | None, secret: str | None) -> list[dict[str, Any]]:
    """Return the variables of --env and --env-from one by one, because containers of a TrainJob have no envFrom."""
    found: dict[str, dict[str, Any]] = {}
    for name, value in _pairs("env", plain):
        if environment.is_secret(name, value):
            raise Refused(
                f"--env {name}: looks like a secret, and the TrainJob would show it; make a Secret: kubectl create "
                f"secret generic NAME --from-file={name}=FILE, and give --env-from {name}=NAME"
            )
        found[name] = {"name": name, "value": value}
    for name, value in _pairs("env-from", secret):
        where, _, key = value.partition("/")
        if not re.fullmatch(_NAME, where) or not re.fullmatch(r"[-._A-Za-z0-9]+", key or name):
            raise Refused(f"--env-from {name}={value}: give the name of a Secret, or SECRET/KEY")
        found[name] = {"name": name, "valueFrom": {"secretKeyRef": {"name": where, "key": key or name}}}
    return list(found.values())


def _pairs(flag: str, text: str | None) -> list[tuple[str, str]]:
    pairs = [pair.partition("=") for pair in text.split(",")] if text is not None else []
    for name, equals, _ in pairs:
        if not equals or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise Refused(f"--{flag} {name}{equals}: give NAME=VALUE, several separated by commas")
        if name.startswith(("PET_", "TRAIN_RUNS", "HOME")):
            raise Refused(f"--{flag} {name}: Kubeflow Trainer or the pod itself sets it; leave it out")
    return [(name, value) for name, _, value in pairs]


def submit(run: Run, record: Record) -> str:
    """Delete what an earlier start left, then create what the pods need, then the TrainJob."""
    at = _place_of(record)
    _delete(record, _ALL, "--cascade=foreground", "--wait", seconds=600)
    company = _company(run, record["submission"], at.partition("@")[0])
    _kubectl(at, "create", "--filename=-", given="\n---\n".join(map(json.dumps, company)))
    _kubectl(at, "create", "--filename=-", given=(run.folder / SCRIPT).read_text(encoding="utf-8"))
    return f"trainjob {run.name} in {at.rstrip('@')}"


def _company(run: Run, submission: str, namespace: str) -> list[dict[str, Any]]:
    """Return a ConfigMap of the files that pods read, and a policy that lets only pods of this run connect to them."""
    labels = {_OURS: "trainstation", _ID: submission}
    metadata = {"name": run.name, "namespace": namespace, "labels": labels}
    files = {name: run.folder / name for name in (FILE, TASK, CONFIG) if (run.folder / name).is_file()}
    try:
        texts = {name: path.read_text(encoding="utf-8") for name, path in files.items()}
    except UnicodeDecodeError:
        raise Refused("the task file and --config must be UTF-8 for a ConfigMap; convert them") from None
    pods = {"podSelector": {"matchLabels": {_RUN: run.name}}}
    return [
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": texts},
        {
            "apiVersion": "networking.k8s.io/v1",
            "kind": "NetworkPolicy",
            "metadata": metadata,
            "spec": {**pods, "policyTypes": ["Ingress"], "ingress": [{"from": [pods]}]},
        },
    ]


def jobs(place: str | None) -> dict[str, JobStatus]:
    """Return our TrainJobs in a namespace, including those that have ended."""
    output = _kubectl(place or NAMESPACE, "get", "trainjob,pod", f"--selector={_OURS}=trainstation", "--output=json")
    try:
        items = json.loads(output)["items"]
        pods = [one for one in items if one["kind"] == "Pod"]
        return {
            one["metadata"]["labels"][_ID]: _job(
                one, [pod for pod in pods if pod["metadata"]["labels"].get(_RUN) == one["metadata"]["name"]]
            )
            for one in items
            if one["kind"] == "TrainJob" and _ID in one["metadata"]["labels"]
        }
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise Refused(f"kubectl did not answer with TrainJobs and pods: {one_line(repr(error))}") from None


def _job(job: Mapping[str, Any], pods: list[dict[str, Any]]) -> JobStatus:
    """Return the state of a TrainJob from its conditions and its pods."""
    for condition in job.get("status", {}).get("conditions") or ():
        if condition["status"] == "True" and condition["type"] == "Complete":
            return JobStatus(states.FINISHED, "its trainjob is complete")
        if condition["status"] == "True" and condition["type"] == "Failed":
            return JobStatus(states.FAILED, _words(condition) or "its trainjob has failed")
    phases = [pod.get("status", {}).get("phase", "Pending") for pod in pods]
    running, nodes = phases.count("Running"), job["spec"]["trainer"]["numNodes"]
    if job["metadata"].get("deletionTimestamp"):
        return JobStatus(states.RUNNING, f"its trainjob is being deleted; {running} pods still run")
    pending = next((pod for pod, phase in zip(pods, phases, strict=True) if phase == "Pending"), None)
    why = f"; {pending['metadata']['name']} waits: {_waits(pending)}" if pending else ""
    return JobStatus(states.RUNNING if running else states.QUEUED, f"{running} of {nodes} pods run{why}")


def _waits(pod: Mapping[str, Any]) -> str:
    """Return why a pod does not run."""
    status = pod.get("status", {})
    waits = [one.get("state", {}).get("waiting") for one in status.get("containerStatuses") or ()]
    waits += [one for one in status.get("conditions") or () if one["status"] != "True"]
    return next((_words(one) for one in waits if one), "its container is not there yet")


def _words(condition: Mapping[str, Any]) -> str:
    """Return `reason: message` of a condition, as far as it has them."""
    return one_line(": ".join(filter(None, (condition.get("reason"), condition.get("message")))))


def stop(run: Run, record: Record, job: JobStatus, now: bool) -> None:
    """Delete the TrainJob. Its pods get SIGTERM, save and end. The checkpoints stay in the claim."""
    _delete(record, "trainjob", "--cascade=foreground", "--wait=false")
    if now:
        pods = ("delete", "pod", f"--selector={_RUN}={run.name}", "--grace-period=1", "--wait=false")
        _kubectl(_place_of(record), *pods)


def logs(record: Record, rank: int, since: str | None = None) -> list[str] | None:
    """Return the kubectl command that prints the output of that rank's node."""
    if rank >= record["world_size"]:
        raise Refused(f"{record['name']} has no rank {rank}; give one from 0 to {record['world_size'] - 1}")
    pods = f"--selector={_RUN}={record['name']},{_NODE}={rank // record['nproc']}"
    going_on = [] if since is None else ["--follow", *([f"--since-time={since}"] if since else [])]
    return _command(_place_of(record), "logs", pods, "--container=node", "--tail=-1", *going_on)


def remove(record: Record) -> str:
    """Delete the TrainJob of a run and everything that belongs to it."""
    _delete(record, _ALL, "--wait=false")
    return f"{record['name']}: its checkpoints stay in the claim for runs of {_place_of(record)}, under the same name"


def _delete(record: Record, kinds: str, *options: str, seconds: int = 20) -> None:
    mine = f"--selector={_ID}={record['submission']}"
    _kubectl(_place_of(record), "delete", kinds, mine, *options, seconds=seconds)


def _place_of(record: Record) -> str:
    return str(record["submitted"].get("at") or NAMESPACE)


def _command(place: str, *arguments: str, seconds: int = 0) -> list[str]:
    """Return kubectl's command line for a namespace and context. `seconds`: time for an answer; 0: no limit."""
    namespace, _, context = place.partition("@")
    where = ["--namespace", namespace, *(["--context", context] if context else [])]
    return ["kubectl", *where, f"--request-timeout={seconds}s", *arguments]


def _kubectl(place: str, *arguments: str, given: str | None = None, seconds: int = 20) -> str:
    """Run kubectl and return what it prints.

    Raises:
        Refused: it fails. The message says what to do, if that is known.
    """
    try:
        return call(*_command(place, *arguments, seconds=seconds), given=given, seconds=seconds + 30)
    except Refused as error:
        hint = next((hint for words, hint in _HINTS.items() if words in str(error)), "")
        raise Refused(f"{error}; {hint}" if hint else error) from None
