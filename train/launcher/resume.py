"""Prepares a resume: the run must be unchanged, except for what a resume may change."""

from __future__ import annotations

from .. import config as configuration
from ..build.first_weights import mender
from ..build.objects import config_of, task_of
from ..checkpoint import manifest as manifests
from ..config import Config
from ..config.resolve import check_changes
from ..errors import Refused
from ..parallel.devices import NoGPU
from ..run.owner import TrustedRun
from ..run.spec import spec_of
from . import checks
from .case import Case, Kind, Past
from .request import ALONE
from .resumable import fork_of
from .unused_fields import asked


def prepare_resume(
    own: TrustedRun, flags: dict[str, str], local: int, nodes: range = ALONE
) -> tuple[Config, list[str]]:
    """Check that a run can continue with these changes. Writes nothing but a damaged file of frozen weights. Also
    returns warnings.

    Args:
        local: Number of ranks on this machine.
        nodes: Possible numbers of machines.

    Raises:
        Refused: the run cannot continue as it is, or not with these changes.
    """
    record, run = own.read(), own.by_path()
    spec = spec_of(record, own.read_config())
    task = task_of(run, spec)
    config = kept = config_of(run, task)
    if flags:
        before = configuration.to_flat(config)
        config = configuration.with_flags(flags, settings=task.Settings, task_file=task.file, flat=before)
        check_changes(before, configuration.to_flat(config), what=f"cannot change {run.name}", way=fork_of(run, flags))
    told: list[str] = []
    step, manifest, unused = manifests.newest_valid(run, mend=mender(run, task, kept, tell=told.append))
    if manifest:
        what = f"{run.folder / 'config.toml'} does not fit the checkpoints of {run.name}"
        check_changes(manifest["config"], configuration.to_flat(config), what=what)
        if manifest.get("task_sha256") != task.sha256:
            if not task.is_built_in:
                raise Refused(f"{task.file} has changed since {run.name} started; put the original back")
            unused.append(f"the task {task.name} has changed since; {run.name} continues with the new version")
    case = Case(
        kind=Kind.RESUME, task=task, config=config, asked=asked(flags), local=local, nodes=nodes,
        past=Past(run, spec, record, step, kept, flags), reads=spec.has_effect, warnings=[*told, *unused],
    )  # fmt: skip
    try:
        checks.run(case)
    except NoGPU:
        on_cpu = f"check with nvidia-smi, or continue on the CPU with other bits: train resume {run.name} --device cpu"
        raise NoGPU(f"{run.name} computes on GPUs, but torch sees none here; {on_cpu}") from None
    return config, case.warnings
