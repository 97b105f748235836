"""Kubernetes: a run as a TrainJob of Kubeflow Trainer, handed over with kubectl.

What the manifests say is decided in manifests.py, how a TrainJob stands in trainjob.py. What a pod does is in
runs/pod.py. The run is kept in the cluster; the folder here has what was handed over, and what the cluster said last.
"""

from __future__ import annotations

import json
import posixpath
import re
import shutil
from typing import Any

from train.cluster import handed, manifests, trainjob
from train.cluster.kubectl import APPLY, Cluster, current_context, understood
from train.cluster.manifests import FromSecret, Manifest
from train.cluster.podlog import PodLog, print_log
from train.cluster.submission import FILE, Silent, Standing, Submission, to_json
from train.errors import Refused
from train.record import durable, environment, folders, store
from train.record.store import Run

FAR = True
MANIFESTS = "job.yaml"
"""In the run folder: what the cluster was given."""
COMMAND = ["/usr/bin/tini", "--", "python3", "-m", "train.runs.pod", f"{manifests.SUBMISSION}/{FILE}"]
"""Of each node's container. tini hands SIGTERM on, and reaps what ranks leave behind."""
_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
"""RFC 1035, which Trainer and JobSet ask of a name."""
_LONGEST = 63
"""Characters of a pod's name, which begins with the run's."""
_DAY = 86400
_QUANTITY = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)([KMGTP]i?)")
_BYTES = 1 << 20
"""What a ConfigMap takes."""
_RESERVED = ("PET_", "TRAIN_RUNS", "HOME")
"""Names of variables that are Trainer's, and ours."""

__all__ = [
    "FAR", "adopt", "again", "check", "forget", "halt", "log", "options", "print_log", "render", "standings", "submit",
]  # fmt: skip


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
    add(
        "--env-from", metavar="A=SECRET,...",
        help="Kubernetes: environment out of Secrets, by the key A of SECRET, or A=SECRET/KEY",
    )  # fmt: skip


def check(submission: Submission) -> None:
    """Whether it can be handed to a cluster from here."""
    name, own = submission.name, submission.own
    if not _LABEL.fullmatch(name):
        raise Refused(f"--name {name}: Kubernetes takes a-z, 0-9 and -, a letter first; such as {_label_of(name)}")
    pod = f"{name}-node-0-{submission.nodes - 1}-abcde"
    if len(pod) > _LONGEST:
        raise Refused(f"--name {name}: too long by {len(pod) - _LONGEST} for the names of its pods, such as {pod}")
    for flag, longest in (("namespace", 63), ("runs_claim", 253), ("data_claim", 253), ("queue", 63)):
        given = own[flag]
        if given is not None and (len(given) > longest or not re.fullmatch(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?", given)):
            raise Refused(f"--{flag.replace('_', '-')} {given}: no name that Kubernetes takes: a-z, 0-9 and -")
    context = own["kube_context"]
    if context is not None and (not context or not context.isprintable()):
        raise Refused(f"--kube-context {context!r}: give a name, as kubectl config get-contexts shows it")
    if submission.image is not None and not re.fullmatch(r"[\x21-\x7e]+", submission.image):
        raise Refused(f"--container {submission.image!r}: give an image as docker push has it: REGISTRY/NAME:TAG")
    if submission.warn > _DAY:
        raise Refused(f"--warn {submission.warn}: at most {_DAY} seconds, in which all ranks save")
    _resources(submission)
    _quantity("shm", manifests.SHM if own["shm"] is None else own["shm"])
    _environment(submission)
    if submission.init and not posixpath.normpath(submission.init).startswith((manifests.RUNS + "/", "/datasets/")):
        raise Refused(
            f"--init {submission.init}: pods cannot read this machine's files; lay it into the claim for runs or data, "
            f"and name it as pods see it: {manifests.RUNS}/… or /datasets/…"
        )
    if not submission.is_dry:
        _check_there(submission)


def render(submission: Submission) -> str:
    """The manifests, as YAML."""
    return _text(submission, _objects(submission))


def _text(submission: Submission, objects: list[Manifest]) -> str:
    said = (
        "Once for each namespace; train submit leaves one that is there as it is.",
        "What was submitted: every pod reads it.",
        "Pods of this run may talk to each other; nobody else may come in.",
        f"The run. Watch it: {_cluster(submission).text} get pods -l {manifests.RUN}={submission.name} --watch",
    )
    return handed.to_yaml(objects, said)


def submit(submission: Submission) -> str:
    """Hand it to the cluster, and keep here what was handed over."""
    asked, cluster = submission, _cluster(submission)
    if cluster.context is None:
        cluster = Cluster(cluster.namespace, current_context())
    objects = _objects(asked)
    text = _text(asked, objects)
    made = _create(cluster, objects)
    try:
        files = asked.files | {MANIFESTS: text}
        record = asked.record | {"submitted": _taken(cluster, asked.name), "reason": "handed to Kubernetes"}
        run = folders.create(asked.runs, asked.name, files, record)
    except BaseException:
        _withdraw(cluster, made)
        raise
    return f"trainjob {asked.name} in {cluster}: {run.folder / MANIFESTS}; how it stands: train show {asked.name}"


def _taken(cluster: Cluster, name: str) -> dict[str, Any]:
    return {"engine": "kubernetes", "job": name, "at": str(cluster), "handed": store.now()}


def _create(cluster: Cluster, objects: list[Manifest]) -> list[str]:
    """Create what a run is, all or nothing. Returns what was made, as KIND/NAME, the last one first.

    The TrainJob comes before the others, for they belong to it: they go when it goes.
    """
    runtime, *company, job = objects
    made: list[str] = []
    try:
        if not cluster.get("trainingruntime", runtime["metadata"]["name"]):
            _make(cluster, runtime, made)
        uid = _make(cluster, job, made)
        owner = {"apiVersion": job["apiVersion"], "kind": job["kind"], "name": job["metadata"]["name"], "uid": uid}
        for manifest in company:
            _make(cluster, manifest | {"metadata": manifest["metadata"] | {"ownerReferences": [owner]}}, made)
    except BaseException:
        _withdraw(cluster, made)
        raise
    return made


def _make(cluster: Cluster, manifest: Manifest, made: list[str]) -> str:
    """Create an object, and note it in `made`: before it is asked for, for the answer may be lost, or not be waited
    for. Returns its uid."""
    path = _path(manifest)
    made.insert(0, path)
    try:
        return cluster.create(manifest)
    except Silent:
        raise
    except Refused:  # that is an answer: what lies under this name is another's
        made.remove(path)
        raise


def _withdraw(cluster: Cluster, made: list[str]) -> None:
    """Delete what a hand-over that failed has made.

    Raises:
        Refused: the cluster does not do it; it names what is left.
    """
    try:
        if made:
            cluster.drop(*made)
    except Refused as error:
        raise Refused(
            f"the hand-over failed, and so did taking it back ({error}); once the cluster answers: "
            f"{cluster.text} delete --ignore-not-found {' '.join(made)}"
        ) from None


def _path(manifest: Manifest) -> str:
    return f"{manifest['kind'].lower()}/{manifest['metadata']['name']}"


def _objects(submission: Submission) -> list[Manifest]:
    """All that a run is: what its namespace has once, what it has beside its TrainJob, and that."""
    _check_size(submission)
    name, namespace = submission.name, _cluster(submission).namespace
    return [
        manifests.runtime(namespace=namespace),
        manifests.submitted(name, namespace, submission.files | {FILE: _for_pods(submission.files[FILE])}),
        manifests.among_themselves(name, namespace),
        _train_job(submission),
    ]


def _for_pods(text: str | bytes) -> str:
    """The submission as pods read it: they work in the image's folder, for this machine's is not there."""
    return to_json(json.loads(text) | {"cwd": "/workspace"})


def _train_job(submission: Submission) -> Manifest:
    own = submission.own
    return manifests.train_job(
        submission.name,
        _cluster(submission).namespace,
        COMMAND,
        nodes=submission.nodes,
        nproc=submission.nproc,
        image=submission.image,
        resources=_resources(submission),
        environment=_environment(submission),
        seconds=submission.seconds,
        grace=submission.warn + 60,  # to stop the ranks, write the checkpoint, and end
        runs_claim=own["runs_claim"] or manifests.RUNS_CLAIM,
        data_claim=own["data_claim"] or manifests.DATA_CLAIM,
        shm=_quantity("shm", manifests.SHM if own["shm"] is None else own["shm"]),
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


def _environment(submission: Submission) -> dict[str, str | FromSecret]:
    """What --env and --env-from say."""
    own = submission.own
    plain, secret = _pairs("env", own["env"]), _pairs("env-from", own["env_from"])
    for name, value in plain.items():
        if environment.tells_secret(name, value):
            raise Refused(
                f"--env {name}: reads like a secret, which everybody who may look at the TrainJob would read; lay it "
                f"down with: {_cluster(submission).text} create secret generic NAME --from-file={name}=FILE, and give "
                f"--env-from {name}=NAME"
            )
    both = plain.keys() & secret.keys()
    if both:
        raise Refused(f"--env and --env-from both give {min(both)}; leave one of them out")
    return plain | {name: _from_secret(name, text) for name, text in secret.items()}


def _pairs(flag: str, text: str | None) -> dict[str, str]:
    example = {"env": "NCCL_DEBUG=INFO,NCCL_IB_DISABLE=1", "env-from": "WANDB_API_KEY=SECRET,HF_TOKEN=SECRET/KEY"}[flag]
    found: dict[str, str] = {}
    for pair in text.split(",") if text is not None else ():
        name, is_pair, value = pair.partition("=")
        if not is_pair or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise Refused(f"--{flag} {pair}: give NAME=VALUE, several with commas: {example}")
        if name.startswith(_RESERVED):
            raise Refused(f"--{flag} {name}: Kubeflow Trainer or the pod itself sets it; leave it out")
        found[name] = value
    return found


def _from_secret(name: str, text: str) -> FromSecret:
    secret, is_other, key = text.partition("/")
    if not is_other:
        key = name
    if not re.fullmatch(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?", secret) or not re.fullmatch(r"[-._A-Za-z0-9]+", key):
        raise Refused(
            f"--env-from {name}={text}: give the name of a Secret, and its key if that is another: SECRET/KEY"
        )
    return FromSecret(secret, key)


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


def _check_there(submission: Submission) -> None:
    """Find what is missing in the cluster before anything is created."""
    if shutil.which("kubectl") is None:
        raise Refused("kubectl is not installed, and runs are handed over with it; what it would get: --dry-run")
    name, cluster = submission.name, _cluster(submission)
    try:
        if cluster.get("trainjob", name):
            raise Refused(
                f"namespace {cluster.namespace} has a trainjob {name} already; give another --name, or delete it: "
                f"{cluster.text} delete trainjob {name}"
            )
        _check_claims(submission, cluster)
    except Silent as error:
        raise Refused(f"{error}; choose one: kubectl config use-context, or --kube-context NAME") from None


def _check_claims(submission: Submission, cluster: Cluster) -> None:
    claims = {"runs": submission.own["runs_claim"] or manifests.RUNS_CLAIM}
    claims["data"] = submission.own["data_claim"] or manifests.DATA_CLAIM
    for use, claim in claims.items():
        found = cluster.get("persistentvolumeclaim", claim)
        if not found:
            raise Refused(
                f"namespace {cluster.namespace} has no volume claim {claim} for {use}; both are made by: {APPLY}"
            )
        modes = found.get("spec", {}).get("accessModes") or []
        if use == "runs" and submission.nodes > 1 and "ReadWriteMany" not in modes:
            raise Refused(
                f"--runs-claim {claim} is {', '.join(modes)}: pods on {submission.nodes} machines need ReadWriteMany; "
                "give another claim, or --nodes 1"
            )


def _cluster(submission: Submission) -> Cluster:
    return Cluster(submission.own["namespace"] or manifests.NAMESPACE, submission.own["kube_context"])


# --- a run that was handed over


def standings(at: str | None) -> dict[str, Standing]:
    """All TrainJobs of ours in a namespace, by name, those that have ended among them."""
    found = Cluster.at(at or manifests.NAMESPACE).those("trainjob,pod", manifests.SELECTOR)
    with understood():
        return trainjob.standings(found)


def halt(run: Run, standing: Standing, now: bool) -> None:
    """Suspend it: its pods get SIGTERM, save, and are gone.

    What Kueue has started it would start again: that is deleted. Its folder stays in the cluster either way.
    """
    cluster, job = _there(run)
    if not job or job["metadata"].get("deletionTimestamp"):
        return
    if (job["metadata"].get("labels") or {}).get(manifests.QUEUE):
        cluster.drop(f"trainjob/{run.name}")
    elif not trainjob.suspended(job):
        cluster.patch("trainjob", run.name, {"spec": {"suspend": True}})
    if now:
        cluster.said("delete", "pod", f"--selector={manifests.RUN}={run.name}", "--grace-period=1", "--wait=false")


def again(run: Run) -> None:
    """Let a TrainJob that is suspended go on; where there is none, or it is to do something else, make it anew."""
    cluster, job = _there(run)
    path = run.folder / MANIFESTS
    objects = handed.read(path)
    content = _for_pods((run.folder / FILE).read_text(encoding="utf-8"))
    files = next(one for one in objects if one["kind"] == "ConfigMap")["data"]
    if trainjob.suspended(job) and files[FILE] == content:
        cluster.patch("trainjob", run.name, {"spec": {"suspend": False}})
    else:
        if job:
            cluster.clear(*(f"{kind}/{run.name}" for kind in ("trainjob", "configmap", "networkpolicy")))
        files[FILE] = content  # a ConfigMap of ours cannot be changed, only replaced
        _create(cluster, objects)
        durable.write_atomically(path, handed.to_yaml(objects))
    run.update(submitted=_taken(cluster, run.name), reason="handed to Kubernetes")


def adopt(run: Run) -> None:
    """A TrainJob has the run's name: there is none that is not known."""


def forget(run: Run) -> str:
    """Delete its TrainJob, and all that belongs to it."""
    cluster, job = _there(run)
    if job:
        cluster.drop(f"trainjob/{run.name}")
    return f"{run.name}: what it has saved stays in the claim for runs of {cluster}, under the same name"


def log(run: Run, rank: int) -> PodLog:
    """What the pods of that rank's node say, one after the other."""
    return PodLog(run, rank)


def _there(run: Run) -> tuple[Cluster, dict[str, Any]]:
    """Where a run is, and its TrainJob; {} where there is none."""
    cluster = Cluster.at(run.read()["submitted"]["at"])
    return cluster, cluster.get("trainjob", run.name)
