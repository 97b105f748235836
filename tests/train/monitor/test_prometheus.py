"""The real Prometheus scrapes the real exporter: every panel has data, and alerts come and go with what happens."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import yaml
from monitored import DEPLOY, Exporter, Prometheus, expressions

from tests.cuda.cards import Cards
from tests.cuda.standin import environment
from tests.waiting import eventually
from train.gpus import sees_host_ids

if TYPE_CHECKING:
    from conftest import Station

ENDLESS = ["--epochs", "100000", "--log.every_steps", "1", "--cpu_threads", "1", "--checkpoint.every_steps", "5"]
DASHBOARD = json.loads((DEPLOY / "grafana" / "dashboards" / "trainstation.json").read_text())


@pytest.mark.minutes
def test_a_run_that_stands_still_and_is_killed_raises_its_alerts_and_clears_them(
    station: Station, exporters: Callable[..., Exporter], prometheus: Callable[[int], Prometheus]
) -> None:
    exporter = exporters(station.runs)
    server = prometheus(exporter.port)
    run = station.start("run", "digits", "--name", "one", *ENDLESS)
    try:
        station.wait_for_step("one", 6)
        eventually("the run is seen", lambda: server.query('train_run_step{run="one"} > 0'))
        eventually("its figures rise", lambda: server.query('delta(train_run_step{run="one"}[30s]) > 0'))
        run.send_signal(signal.SIGSTOP)
        eventually("it stalls", lambda: "TrainRunStalled" in server.firing(run="one"))
        run.send_signal(signal.SIGCONT)
        eventually("it goes on", lambda: "TrainRunStalled" not in server.firing(run="one"))
        run.send_signal(signal.SIGKILL)
        eventually("it is interrupted", lambda: "TrainRunInterrupted" in server.firing(run="one"))
        assert server.query('train_run_deaths_total{run="one"}')[0]["value"][1] == "1"
        more = station.record("one")["step"] + 200  # a checkpoint may be further than what run.json says of one killed
        station.ok("resume", "one", "--steps", more, "--follow", env={"TRAIN_WARM": "off"})
        eventually("it is well again", lambda: not server.firing(run="one"))
        eventually("its end is seen", lambda: server.query('train_run_state{run="one",state="finished"} == 1'))
    finally:
        run.kill()
        run.wait()

    failed = station("run", "digits", "--name", "bad", "--optim.lr", "1e30", "--steps", 20, "--cpu_threads", 1)
    assert failed.returncode == 3
    eventually("it has failed", lambda: server.firing(run="bad") == {"TrainRunFailed"})
    station.ok("rm", "bad")
    eventually("it is removed", lambda: not server.firing(run="bad"))

    assert exporter.stop() == 0
    eventually("the exporter is missed", lambda: "TrainExporterDown" in server.firing())
    exporter.start()
    eventually("the exporter is back", lambda: not server.firing())


@pytest.mark.minutes
@pytest.mark.skipif(not sees_host_ids(), reason="process ids here are not the host's")
def test_every_panel_has_data_and_a_lost_gpu_is_missed(
    station: Station, exporters: Callable[..., Exporter], prometheus: Callable[[int], Prometheus], gpus: Cards
) -> None:
    exporter = exporters(station.runs, env=environment(gpus))
    server = prometheus(exporter.port)
    run = station.start("run", "digits", "--name", "one", *ENDLESS)
    try:
        station.wait_for_step("one", 6)
        pid = station.record("one").get("pids", {}).get("ranks", [run.pid])[0]
        gpus.write(0, pid=pid, bytes=7 << 30)
        eventually("memory on GPUs is told", lambda: server.query("train_rank_gpu_memory_bytes"))
        assert server.query("train_rank_gpu_memory_bytes")[0]["value"][1] == str(7 << 30)
        for title, expression in expressions(DASHBOARD):
            eventually(
                f"the panel {title} has data: {expression}", lambda expression=expression: server.query(expression)
            )  # type: ignore[misc]
        names = server.api("label/run/values")
        assert names == ["one"]  # what the dashboard's variable asks for

        gpus.write(1, answers=0)
        eventually("the GPU is missed", lambda: server.firing(gpu="1") == {"TrainGpuLost"})
        assert server.query("count(train_gpu_up == 0)")[0]["value"][1] == "1"
        gpus.write(1, answers=1, celsius=88)
        eventually("it is back, and hot", lambda: server.firing(gpu="1") == {"TrainGpuHot"})
        gpus.write(1, celsius=50, reasons=0x8)
        eventually("it is held back", lambda: server.firing(gpu="1") == {"TrainGpuThrottled"})
        gpus.write(1, reasons=0, uncorrected=2)
        eventually("it reads wrongly", lambda: server.firing(gpu="1") == {"TrainGpuMemoryErrors"})
        assert not server.firing(gpu="0")
    finally:
        run.kill()
        run.wait()


@pytest.mark.minutes
def test_what_is_given_to_prometheus_is_well_formed(tools: Path) -> None:
    for arguments in (
        ["check", "config", DEPLOY / "prometheus.yml"],
        ["check", "rules", DEPLOY / "alerts.yml"],
        ["test", "rules", Path(__file__).with_name("alerts_test.yml")],
    ):
        done = subprocess.run([tools / "promtool", *arguments], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_says_how_bad_it_is_and_what_to_do_and_is_in_the_documentation() -> None:
    text = (DEPLOY / "README.md").read_text()
    for group in yaml.safe_load((DEPLOY / "alerts.yml").read_text())["groups"]:
        for rule in group["rules"]:
            assert rule["labels"]["severity"] in ("warning", "critical")
            assert set(rule["annotations"]) == {"summary", "action"}
            assert f"`{rule['alert']}`" in text


def test_the_dashboard_is_whole() -> None:
    (source,) = yaml.safe_load((DEPLOY / "grafana" / "datasources" / "prometheus.yml").read_text())["datasources"]
    panels = DASHBOARD["panels"]
    ids = [panel["id"] for panel in panels]
    assert len(set(ids)) == len(ids)
    assert DASHBOARD["uid"] and DASHBOARD["schemaVersion"] >= 39
    own = {"type": "prometheus", "uid": source["uid"]}
    assert all(variable["datasource"] == own for variable in DASHBOARD["templating"]["list"])
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {(place["x"] + i, place["y"] + j) for i in range(place["w"]) for j in range(place["h"])}
        assert not cells & taken and place["x"] + place["w"] <= 24, panel["title"]
        taken |= cells
        if panel["type"] == "row":
            continue
        assert panel["datasource"] == own and panel["targets"], panel["title"]
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
        assert all(target["datasource"] == own for target in panel["targets"])
