"""What cannot be is refused in a line, before anything is created; and which way leads to the others."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ports import free_port
from tests.tasks import TASKS
from tests.train.cluster.conftest import Machines
from tests.train.conftest import Station
from train.errors import Refused
from train.nodes import address

pytestmark = pytest.mark.never_forgiven


@pytest.mark.parametrize(
    "arguments, words",
    [
        (("--nnodes", 2, "--rendezvous", "127.0.0.1:29999"), "--node-rank"),
        (("--nnodes", 2, "--node-rank", 0), "--rendezvous"),
        (("--nnodes", 2, "--node-rank", 2, "--rendezvous", "127.0.0.1:29999"), "from 0 to 1"),
        (("--nnodes", "3:2", "--node-rank", 0, "--rendezvous", "127.0.0.1:29999"), "--nnodes 3:2"),
        (("--nnodes", "x", "--node-rank", 0, "--rendezvous", "127.0.0.1:29999"), "--nnodes x"),
        (("--node-rank", 1, "--rendezvous", "127.0.0.1:29999"), "--nnodes is missing"),
        (("--nnodes", 2, "--node-rank", 0, "--rendezvous", "127.0.0.1"), "HOST:PORT"),
        (("--nnodes", 2, "--node-rank", 1, "--rendezvous", "no-such-host.invalid:29999"), "does not resolve"),
        (("--nnodes", 2, "--node-rank", 0, "--rendezvous", "127.0.0.1:2", "--wait-minutes", 0), "--wait-minutes"),
    ],
)
def test_a_wrong_request(station: Station, arguments: tuple[object, ...], words: str) -> None:
    done = station.here("launch", "digits", "--name", "a", *map(str, arguments))
    assert done.returncode == 2 and words in done.stderr and done.stderr.count("\n") == 1, done.stderr
    assert not station.runs.exists()


def test_a_name_is_needed_and_a_script_is_torchruns_business(station: Station) -> None:
    cluster = ("--nnodes", 2, "--node-rank", 0, "--rendezvous", "127.0.0.1:29999")
    assert "--name" in station("launch", "digits", *cluster).stderr
    (station.folder / "s.py").write_text("")
    done = station("launch", "--script", "s.py", "--name", "a", *cluster)
    assert done.returncode == 2 and "torchrun" in done.stderr


def test_copies_of_a_model_that_the_ranks_of_all_nodes_do_not_make(machines: Machines) -> None:
    spread = ("--parallel.strategy", "hsdp", "--parallel.shard_size")
    for shard_size, nnodes, ranks in (
        (3, 2, 4),
        (4, "1:2", 2),
    ):  # the second fits two nodes, and not the one that may be left
        done = machines.launch("a", 1, *spread, shard_size, nnodes=nnodes, nproc=2)
        assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
        assert f"shard_size {shard_size} does not divide the {ranks} ranks" in done.stderr
    assert not any((machine.runs / "a").exists() for machine in machines.stations)


def test_a_port_that_is_taken(machines: Machines) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        machines.rendezvous = f"127.0.0.1:{other.getsockname()[1]}"
        done = machines.launch("a", 0)
    assert done.returncode == 2 and "cannot listen" in done.stderr and done.stderr.count("\n") == 1
    assert not any((machine.runs / "a").exists() for machine in machines.stations)


@pytest.mark.minutes
def test_a_node_that_differs_is_refused_on_both_and_the_run_waits_for_a_fitting_one(machines: Machines) -> None:
    for station in machines.stations:
        (station.folder / "t.py").write_text((TASKS / "few_numbers.py").read_text())
    task = machines.stations[1].folder / "t.py"
    task.write_text(task.read_text() + "\n# changed\n")
    cluster = ("--nnodes", 2, "--rendezvous", machines.rendezvous, "--wait-minutes", 0.8)
    for node, station in enumerate(machines.stations):
        station.ok("launch", "t.py", "--name", "a", "--steps", 5, "--node-rank", node, *cluster)
    refused = machines.stations[1].wait_for_end("a")
    assert refused["state"] == "failed" and "another task file" in refused["reason"] and "node 1" in refused["reason"]
    machines.wait_for_reason("a", 0, "another task file")
    # nobody else comes: it says who is missing
    record = machines.stations[0].wait_for_end("a")
    assert record["state"] == "interrupted" and "node 1 of 2" in record["reason"], record["reason"]


def test_a_port_listens_where_its_name_leads() -> None:
    port = free_port()
    with address.listen(address.Place("127.0.0.1", port)) as one:
        assert one.getsockname() == ("127.0.0.1", port)
        with pytest.raises(Refused, match="cannot listen"):
            address.listen(address.Place("127.0.0.1", port))
    # an address that others know this machine by, and it does not
    with address.listen(address.Place("203.0.113.7", port)) as one:
        assert one.getsockname()[0] == "0.0.0.0"


def test_the_interface_is_the_one_that_leads_to_the_others_unless_the_user_says() -> None:
    name, wanted = address.interfaces("127.0.0.1", 1, environ={"NCCL_SOCKET_IFNAME": "ib0"})
    assert (name, wanted) == ("lo", {"GLOO_SOCKET_IFNAME": "lo"})


def test_a_name_that_is_127_0_1_1_on_its_own_machine_is_not_the_way_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(address, "source_towards", lambda to, _: to)
    monkeypatch.setattr(address, "interface_of", lambda source: "eth0" if source == "10.0.0.5" else "lo")
    place = ("127.0.1.1", 29400)
    name, wanted = address.interfaces(*place, environ={}, reached="10.0.0.5")
    assert (name, wanted["GLOO_SOCKET_IFNAME"], wanted["NCCL_SOCKET_IFNAME"]) == ("eth0", "eth0", "=eth0")
    assert address.interfaces(*place, environ={})[0] == "lo"  # both nodes are on this machine


def test_the_rooms_code_needs_no_torch() -> None:
    text = "import sys, train.nodes.nodes, train.nodes.rendezvous; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", text], check=False).returncode == 0


def test_the_script_finds_which_host_this_is() -> None:
    script = Path(__file__).parents[3] / "scripts" / "train-multinode.sh"

    def said(*arguments: str) -> tuple[int, str]:
        done = subprocess.run([script, *arguments], capture_output=True, text=True, check=False)
        return done.returncode, done.stderr

    assert "--hosts" in said("digits")[1]
    code, text = said("--hosts", "203.0.113.1,203.0.113.2", "digits")
    assert code == 2 and "none of" in text
    code, text = said("--hosts", "@/tmp", "digits")
    assert code == 2 and text == "train-multinode: cannot read /tmp\n"
    code, text = said("--hosts", "203.0.113.1,127.0.0.1", "--rank", "9" * 30, "digits")
    assert code == 2 and text.count("\n") == 1 and "give a number from 0 to 1" in text
    code, text = said("--hosts", "::1,203.0.113.2", "--rank", "1", "digits")
    assert code == 2 and "all nodes meet at [::1]:29400" in text and "--name" in text
    code, text = said("--hosts", "203.0.113.1,127.0.0.1", "digits")  # without --name
    assert (
        code == 2
        and "this is node 1 of 2 (127.0.0.1); all nodes meet at 203.0.113.1:29400" in text
        and "--name" in text
    )
