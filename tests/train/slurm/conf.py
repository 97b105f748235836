"""What the tests' clusters are configured by: the one of processes on this machine, and the one of containers
(tests/image/test_slurm_nodes.py), whose tests have no other package than pytest."""

from __future__ import annotations

_CONF = """\
ClusterName=tests
SlurmctldHost={host}
SlurmUser={users[0]}
SlurmdUser={users[1]}
AuthType=auth/munge
# how long a job that was queued again has to wait: until the credential of its last start cannot be used any more
AuthInfo={socket}cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
ReturnToService=2
JobRequeue=1
SlurmdTimeout=10
KillWait=60
SchedulerParameters=sched_interval=2,bf_interval=2
SlurmdParameters=config_overrides
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
{more}
NodeName={nodes} CPUs=4 State=UNKNOWN
PartitionName=low Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=120 PreemptMode=REQUEUE
PartitionName=high Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=9 PreemptMode=OFF
"""


def slurm_conf(host: str, users: tuple[str, str], folder: str, nodes: str, socket: str = "", **more: object) -> str:
    """The text of slurm.conf.

    Args:
        host: the controller's.
        users: that the controller and the nodes' daemons run as.
        folder: where they keep what is theirs.
        nodes: their names, and how one comes to them.
        socket: munge's, where it is not Debian's.
        more: other lines.
    """
    lines = "\n".join(f"{key}={value}" for key, value in more.items())
    where = f"socket={socket}," if socket else ""
    return _CONF.format(host=host, users=users, folder=folder, nodes=nodes, socket=where, more=lines)
