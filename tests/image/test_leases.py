"""The station and the machine around it see the same leases, and nobody can touch the files of others."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

from conftest import ROOT, Station

HOLD = """
import sys
from pathlib import Path
from train.leases import locks
fd = locks.hold(locks.folder() / "core-0", locks.Holder.of("outside"))
print("held" if fd is not None else "taken", flush=True)
sys.stdin.read()
"""


def held(station: Station) -> list[dict[str, object]]:
    found: list[dict[str, object]] = json.loads(station.dev("env", "TRAIN_SLOTS=2", "train", "gpus", "--json").stdout)
    return found


def test_the_machine_and_the_station_share_leases(station: Station) -> None:
    shared = Path(station.env["LEASES_DIR"])
    assert stat.S_IMODE(shared.stat().st_mode) == 0o1777
    with subprocess.Popen(
        [sys.executable, "-c", HOLD], env=os.environ | {"TRAIN_LEASES": str(shared), "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as outside:  # fmt: skip
        assert outside.stdin is not None and outside.stdout is not None
        assert outside.stdout.readline() == "held\n"
        assert [one["run"] for one in held(station)] == ["outside", ""]
        # of another user, so dev can neither remove nor replace it
        assert station.dev("rm", "/var/lib/trainstation/leases/core-0", check=False).returncode != 0
        station.ssh("TRAIN_SLOTS=2 train launch digits --name leased-inside --steps 2000000")
        assert [one["run"] for one in held(station)] == ["outside", "leased-inside"]
        waits = station.ssh("TRAIN_SLOTS=2 train launch digits --name leased-later --steps 2 --queue")
        assert waits.stdout == "leased-later\n"
        assert station.show("leased-later")["state"] == "queued"
        outside.stdin.close()
        outside.wait()
    station.ssh("train wait leased-later --timeout 240")
    station.ssh("train stop --now leased-inside")
    assert [one["run"] for one in held(station)] == ["", ""]
