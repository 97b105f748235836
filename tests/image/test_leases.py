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
from train.leases import locks
fd = locks.hold(locks.folder() / "core-7", locks.Holder.of("outside"))
print("held" if fd is not None else "taken", flush=True)
sys.stdin.read()
"""


def holders(station: Station) -> list[str]:
    """Who holds each of eight cores, as the station sees it. Runs of other tests may hold the first ones."""
    found = json.loads(station.dev("env", "TRAIN_SLOTS=8", "train", "gpus", "--json").stdout)
    return [one["run"] for one in found]


def test_the_machine_and_the_station_share_leases(station: Station) -> None:
    shared = Path(station.env["LEASES_DIR"])
    assert stat.S_IMODE(shared.stat().st_mode) == 0o1777
    with subprocess.Popen(
        [sys.executable, "-c", HOLD], env=os.environ | {"TRAIN_LEASES": str(shared), "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as outside:  # fmt: skip
        assert outside.stdin is not None and outside.stdout is not None
        assert outside.stdout.readline() == "held\n"
        assert holders(station)[7] == "outside"
        # of another user, so dev can neither remove nor replace it
        assert station.dev("rm", "/var/lib/trainstation/leases/core-7", check=False).returncode != 0
        station.ssh("TRAIN_SLOTS=8 train launch digits --name leased-inside --steps 2000000")
        assert "leased-inside" in holders(station)
        notes = [path.read_text() for path in shared.glob("core-*")]
        assert any('"leased-inside"' in note for note in notes)
        waits = station.ssh("TRAIN_SLOTS=8 train launch digits --name leased-later --nproc 8 --steps 2 --queue")
        assert waits.stdout == "leased-later\n"
        assert station.show("leased-later")["state"] == "queued"
        station.ssh("train stop leased-later")
        station.ssh("train stop --now leased-inside")
        assert "leased-inside" not in holders(station)
        outside.stdin.close()
        outside.wait()
    assert "outside" not in holders(station)
