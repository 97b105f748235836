"""Any torchrun program, unmodified: launched with a run folder, logs, stop and restart; and a task under torchrun."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.ports import free_port
from train.launcher import foreground
from train.launcher.launches import NewRun
from train.run import folders, states

if TYPE_CHECKING:
    from conftest import Station

# As the tutorials of PyTorch write it ("Fault-tolerant Distributed Training with torchrun").
SCRIPT = """
import os
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


def main(snapshot, steps, pause):
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    model = torch.nn.Linear(8, 1)
    first = 0
    if os.path.exists(snapshot):
        state = torch.load(snapshot, weights_only=True)
        model.load_state_dict(state["model"])
        first = state["step"]
        print(f"resuming from step {first}", flush=True)
    ddp = DDP(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in range(first, steps):
        optimizer.zero_grad()
        x = torch.randn(16, 8)
        loss = F.mse_loss(ddp(x), x.sum(1, keepdim=True))
        loss.backward()
        optimizer.step()
        time.sleep(pause)
        if rank == 0:
            torch.save({"model": model.state_dict(), "step": step + 1}, snapshot + ".new")
            os.replace(snapshot + ".new", snapshot)
    print(f"rank {rank} of {world} done, loss {loss.item():.3f}", file=sys.stderr)
    dist.destroy_process_group()


if __name__ == "__main__":
    print("arguments", sys.argv[1:], flush=True)
    print("wandb", os.environ["WANDB_RUN_ID"], os.environ["WANDB_RESUME"], flush=True)
    if "--fail" in sys.argv:
        sys.exit(7)
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
"""


@pytest.fixture(scope="module", autouse=True)
def script(shared_station: Station) -> None:
    (shared_station.folder / "ddp.py").write_text(SCRIPT)


def test_a_script_gets_its_arguments_logs_per_rank_and_is_restarted_after_a_kill(shared_station: Station) -> None:
    station = shared_station
    snapshot = station.folder / "kill.pt"
    done = station.ok(
        "launch", "--script", "ddp.py", "--name", "again", "--nproc", 2, "--max-restarts", 1, "--",
        snapshot, 40, "0.05", "--optim.lr", "3", "--", "-h",
    )  # fmt: skip
    assert done.stdout == "again\n"
    station.wait("again", lambda record: snapshot.exists() and len(record["pids"].get("ranks", [])) == 2, "a snapshot")
    os.kill(station.record("again")["pids"]["ranks"][1], signal.SIGKILL)
    record = station.wait_for_end("again")
    assert record["state"] == states.FINISHED, station.logs("again")
    assert [attempt["end"] for attempt in record["attempts"]] == ["died", "finished"]
    for rank in (0, 1):
        text = station.ok("logs", "again", "--rank", rank).stdout
        assert f"arguments {[str(snapshot), '40', '0.05', '--optim.lr', '3', '--', '-h']}" in text
        assert f"rank {rank} of 2 done" in text
        assert "resuming from step" in text
        there = record["wandb_id"] + ("-1" if rank else "")
        assert f"wandb {there} allow\n" in text
        assert f"wandb {there} allow\n" in station.ok("logs", "again", "--rank", rank, "--attempt", 1).stdout
    assert "resuming" not in station.ok("logs", "again", "--attempt", 1).stdout


# As nanoGPT does: it begins anew and overwrites what is there, unless it is told to resume.
RESUMES = """
import os, sys, time
from pathlib import Path
out, is_told, path = Path(sys.argv[1]), "--init=resume" in sys.argv, None
ckpt = out / f"ckpt-{os.environ['TRAIN_ATTEMPT']}.txt"
step = int(Path(sys.argv[sys.argv.index("--from") + 1]).read_text()) if is_told else 0
print(os.environ["TRAIN_NAME"], "begins at step", step, sys.argv[2:], flush=True)
out.mkdir(exist_ok=True)
while step < 100:
    while step == 60 and not (out / "go").exists():
        time.sleep(0.01)
    step += 1
    ckpt.with_suffix(".new").write_text(str(step))
    ckpt.with_suffix(".new").replace(ckpt)
"""


def test_an_unmodified_script_continues_in_the_folder_of_its_run(shared_station: Station) -> None:
    station = shared_station
    (station.folder / "resumes.py").write_text(RESUMES)
    order = ["launch", "--script", "resumes.py", "--on-restart", "--init=resume --from {newest:{run}/out/ckpt-*.txt}"]
    for name in ("left", "right"):  # side by side
        station.ok(*order, "--name", name, "--", "{run}/out", "--init=scratch", "{epoch}")

    def out(name: str) -> Path:
        return Path(station.run(name).folder / "out")

    def kill(name: str) -> None:
        step = out(name) / "ckpt-1.txt"
        station.wait(name, lambda _: step.exists() and step.read_text() == "60", "step 60")
        station.wait(name, lambda record: record["pids"].get("ranks"), "the rank's process id")
        os.kill(station.record(name)["pids"]["ranks"][0], signal.SIGKILL)
        station.wait(name, lambda _: f"{name} begins at step 60" in station.logs(name), "its restart")

    kill("left")
    station.ok("stop", "left", "--now")
    station.ok("mv", "left", "shifted")
    (out("shifted") / "go").touch()
    station.ok("resume", "shifted")
    record = station.wait_for_end("shifted")
    assert (record["state"], len(record["attempts"])) == (states.FINISHED, 3), station.logs("shifted")
    said = station.ok("logs", "shifted", "--attempt", "3").stdout
    newest = out("shifted") / "ckpt-1.txt"
    assert f"attempt 3 starts with --init=resume --from {newest} (--on-restart)\n" in said
    assert f"shifted begins at step 60 ['--init=resume', '{{epoch}}', '--from', '{newest}']" in said
    assert (out("shifted") / "ckpt-3.txt").read_text() == "100"
    assert "begins at step 0 ['--init=scratch', '{epoch}']" in station.ok("logs", "shifted", "--attempt", "1").stdout
    kill("right")  # its folder is its own, so it has not seen the other one's file
    (out("right") / "go").touch()
    assert station.wait_for_end("right")["state"] == states.FINISHED


def test_what_nothing_says_to_continue_is_not_restarted_and_that_is_said(shared_station: Station) -> None:
    station, begins = shared_station, "begins at step 0, unless the script loads its own checkpoint"
    (station.folder / "dies.py").write_text(
        "import os, time\nif 'stay' in os.sys.argv: time.sleep(999)\nos.kill(os.getpid(), 9)"
    )
    said = station.ok("launch", "--script", "dies.py", "--name", "unasked").stderr
    assert f"warning: a restart of dies.py {begins}; if it can continue: --on-restart 'ARGS'" in said
    record = station.wait_for_end("unasked")
    assert (record["state"], len(record["attempts"])) == (states.FAILED, 1)
    assert f"  on restart   {begins}\n" in station.ok("show", "unasked").stdout
    # from now on
    station.ok("resume", "unasked", "--on-restart", "")
    record = station.wait_for_end("unasked")
    assert (record["state"], len(record["attempts"])) == (states.FAILED, 5)  # three restarts
    assert "  on restart   continues by itself\n" in station.ok("show", "unasked").stdout
    refused = station("resume", "unasked", "--on-restart", "{newest:}")
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    said = station.ok("launch", "--script", "dies.py", "--name", "known", "--on-restart", "", "--", "stay").stderr
    assert said == ""
    station.ok("stop", "known", "--now")


def test_a_script_that_dies_before_it_opens_its_session_is_restarted(shared_station: Station) -> None:
    station = shared_station
    text = (
        "import os\nif os.environ['TRAIN_ATTEMPT'] != '3':\n    os.kill(os.getpid(), 9)  # as while torch is imported\n"
    )
    (station.folder / "opens.py").write_text(text + "if not os:\n    import trainstation as ts\n    ts.session(seed=0)")
    done = station.ok("launch", "--script", "opens.py", "--name", "opens")
    assert done.stderr == ""
    record = station.wait_for_end("opens")
    assert (record["state"], len(record["attempts"]), record.get("session")) == (states.FINISHED, 3, None)
    assert "on restart" not in station.ok("show", "opens").stdout


# As PyTorch's tutorial "Getting Started with Distributed Data Parallel" does.
SPAWNS = """
import os, sys, torch, torch.distributed as dist, torch.multiprocessing as mp
def main(rank):
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = "{port}"
    dist.init_process_group("gloo", rank=rank, world_size=2)
    total = torch.ones(1)
    dist.all_reduce(total)
    print("total", total.item(), flush=True)
    dist.destroy_process_group()
if __name__ == "__main__":
    mp.spawn(main, nprocs=2)
"""


@pytest.mark.minutes
def test_a_script_that_starts_its_own_ranks_at_a_port_of_its_own(shared_station: Station) -> None:
    station, port = shared_station, free_port()
    (station.folder / "spawns.py").write_text(SPAWNS.format(port=port))
    station.ok("launch", "--script", "spawns.py", "--name", "spawns", "--on-restart", "")
    assert station.wait_for_end("spawns")["state"] == states.FINISHED
    assert station.logs("spawns").count("total 2.0") == 2
    with socket.create_server(("", port)):
        done = station.ok("launch", "--script", "spawns.py", "--name", "taken", "--max-restarts", 0, "--on-restart", "")
        record = station.wait_for_end("taken")
    assert done.stderr.startswith(f"train: warning: spawns.py sets MASTER_PORT to {port}, which is in use")
    assert f"port {port} is in use by another process" in record["reason"]


def test_a_module_is_started_like_python_m(shared_station: Station) -> None:
    station = shared_station
    package = station.folder / "lab" / "train"
    package.mkdir(parents=True)
    (station.folder / "lab" / "__init__.py").write_text("print('lab', flush=True)")
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text("import sys\nfrom lab import train\nprint(__package__, sys.argv[1:])")
    station.ok("launch", "--module", "lab.train", "--name", "packed", "--on-restart", "", "--", "{run}", "--lr=1")
    assert station.wait_for_end("packed")["state"] == states.FINISHED
    assert station.logs("packed").endswith(f"lab\nlab.train [{str(station.run('packed').folder)!r}, '--lr=1']\n")
    assert f"  script       {package / '__main__.py'}\n" in station.ok("show", "packed").stdout
    record = station.record("packed")
    assert (record["script_module"], str(package / "__main__.py") in record["script_files"]) == ("lab.train", True)


@pytest.mark.minutes
def test_a_script_is_stopped_and_continued(shared_station: Station) -> None:
    station = shared_station
    snapshot = station.folder / "stop.pt"
    station.ok("launch", "--script", "ddp.py", "--name", "rests", "--", snapshot, 10**6, "0.02")
    station.wait("rests", lambda record: snapshot.exists(), "a snapshot")
    station.ok("stop", "rests")
    assert station.record("rests")["state"] == states.STOPPED and not station.run("rests").alive()
    refused = station("resume", "rests", "--steps", 5)
    assert refused.returncode == 2 and "script" in refused.stderr
    for command in (["eval", "rests"], ["export", "rests", "--to", "x.pt"]):
        refused = station(*command)
        assert refused.returncode == 2 and "runs a script" in refused.stderr and refused.stderr.count("\n") == 1
    station.ok("resume", "rests")
    station.wait(
        "rests", lambda record: "resuming from step" in station.logs("rests").rpartition("attempt-2")[2], "its resume"
    )
    station.ok("stop", "rests", "--now")
    assert len(station.record("rests")["attempts"]) == 2


def test_a_restart_of_torchrun_finds_its_run_beside_a_damaged_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("TORCHELASTIC_RUN_ID", "job"), ("TORCHELASTIC_RESTART_COUNT", "1")):
        monkeypatch.setenv(name, value)
    damaged = folders.create(tmp_path, "a", files={}, record={})
    (damaged.folder / "run.json").write_text("{")
    ours = folders.create(tmp_path, "b", files={}, record={"torchelastic": f"job/{os.getppid()}"})
    found, lock = foreground.open_under_torchrun(NewRun("digits", runs=str(tmp_path)))
    lock.release()
    assert found.path == ours.path


def test_ranks_that_something_else_than_torchrun_starts_share_a_name_or_its_refusal(shared_station: Station) -> None:
    station, place = shared_station, {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = ["run", "digits", "--name", "srun", "--steps", 5, "--cpu_threads", 1]
    station.environment("run")  # what the two are forked from is there
    for code, said in ((0, ""), (2, "a run named srun exists")):
        with ThreadPoolExecutor(2) as both:
            ranks = [*both.map(lambda rank: station(*command, env=place | {"RANK": rank}), ("0", "1"))]
        assert [rank.returncode for rank in ranks] == [code, code], ranks
        assert said in ranks[0].stderr
    assert (station.record("srun")["state"], station.record("srun")["world_size"]) == (states.FINISHED, 2)


@pytest.mark.never_forgiven
@pytest.mark.minutes
def test_a_task_trains_under_plain_torchrun_and_continues_after_a_restart(shared_station: Station) -> None:
    station = shared_station
    process = subprocess.Popen(
        [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts",
            "1", "--monitor-interval", "0.1", "-m", "train", "run", "digits", "--name", "torchrun", "--steps", "120",
            "--checkpoint.every_steps", "10", "--log.every_steps", "1", "--log.samples", "true", "--cpu_threads", "1",
            "--eval.every_epochs", "0",
        ],
        cwd=station.folder, env=station.environment(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    station.wait("torchrun", lambda record: bool(station.run("torchrun").steps_saved()), "a checkpoint")
    os.kill(station.record("torchrun")["pids"]["ranks"][0], signal.SIGKILL)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    record = station.record("torchrun")
    assert record["state"] == states.FINISHED and record["step"] == 120 and record["world_size"] == 2
    assert len(record["attempts"]) == 2 and record["attempts"][1]["from_step"] > 0
    steps = [line["step"] for line in station.metrics("torchrun") if "loss" in line]
    assert steps == list(range(1, 121))
    # every step consumed its global batch once, also around the kill
    samples = station.samples("torchrun")
    assert list(samples) == list(range(1, 121)) and len(samples[1]) == 64
    assert json.loads(station.ok("show", "torchrun", "--json").stdout)["metrics"].keys() == {"loss", "accuracy"}
