"""What the tests here start and ask: exporters and Prometheus."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.ports import free_port
from tests.waiting import eventually

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy" / "monitoring"
PATIENCE = 120.0


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=60) as answer:
        assert answer.status == 200
        return str(answer.read().decode())


def metrics_in(page: str) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    """Samples by name and labels, read by Prometheus' own library."""
    from prometheus_client.parser import text_string_to_metric_families

    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            series = found.setdefault(sample.name, {})
            labels = tuple(sorted(sample.labels.items()))
            assert labels not in series, f"{sample.name}{labels} twice"
            series[labels] = sample.value
    return found


class Exporter:
    """`train exporter` as a process of its own."""

    def __init__(self, runs: Path, log: Path, *arguments: str, env: dict[str, str] | None = None) -> None:
        self.runs, self.log, self.arguments, self.env = runs, log, arguments, env or {}
        self.port = free_port()
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-m", "train", "exporter", "--runs", str(self.runs), "--port", str(self.port)]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*command, *self.arguments], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                env=os.environ | {"PYTHONPATH": str(ROOT)} | self.env,
            )  # fmt: skip
        eventually("the exporter answers", self._answers)

    def _answers(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()
        with socket.socket() as asking:
            return asking.connect_ex(("127.0.0.1", self.port)) == 0

    def page(self) -> str:
        return get(f"http://127.0.0.1:{self.port}/metrics")

    def metrics(self) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
        return metrics_in(self.page())

    def of(self, name: str, /, **labels: str) -> float | None:
        """The one sample with these labels among others."""
        found = [value for key, value in self.metrics().get(name, {}).items() if labels.items() <= dict(key).items()]
        assert len(found) <= 1, found
        return found[0] if found else None

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(PATIENCE)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


_FASTER = {"> 120": "> 3", "> 1800": "> 90", "[30m]": "[60s]", "[1h]": "[60s]"}


def faster_rules() -> str:
    """The alerts, with seconds for what are minutes in them."""
    rules = yaml.safe_load((DEPLOY / "alerts.yml").read_text())
    for group in rules["groups"]:
        group["interval"] = "500ms"
        for rule in group["rules"]:
            for slow, fast in _FASTER.items():
                rule["expr"] = rule["expr"].replace(slow, fast)
            if "for" in rule:
                rule["for"] = "1s"
    return str(yaml.safe_dump(rules))


class Prometheus:
    """A server with this project's settings, but for addresses and times."""

    def __init__(self, tools: Path, folder: Path, exporter: int) -> None:
        self.port, self.folder = free_port(), folder
        config = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())
        config["global"] = {"scrape_interval": "500ms", "scrape_timeout": "500ms", "evaluation_interval": "500ms"}
        (own,) = (job for job in config["scrape_configs"] if job["job_name"] == "trainstation")
        own["static_configs"] = [{"targets": [f"127.0.0.1:{exporter}"]}]
        own["scrape_interval"], own["scrape_timeout"] = "1s", "1s"
        config["scrape_configs"] = [own]
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        (folder / "alerts.yml").write_text(faster_rules())
        with (folder / "prometheus.log").open("wb") as log:
            self.process = subprocess.Popen(
                [tools / "prometheus", f"--config.file={folder / 'prometheus.yml'}",
                 f"--storage.tsdb.path={folder / 'data'}", f"--web.listen-address=127.0.0.1:{self.port}"],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip
        eventually("Prometheus is ready", self._ready)

    def _ready(self) -> bool:
        assert self.process.poll() is None, (self.folder / "prometheus.log").read_text()
        try:
            return "Ready" in get(f"http://127.0.0.1:{self.port}/-/ready")
        except urllib.error.URLError:
            return False

    def api(self, path: str, **parameters: str) -> Any:
        url = f"http://127.0.0.1:{self.port}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            answer = json.loads(get(url))
        except urllib.error.HTTPError as error:
            pytest.fail(f"{parameters}: {error.read().decode()}")
        assert answer["status"] == "success"
        return answer["data"]

    def query(self, expression: str) -> list[dict[str, Any]]:
        return list(self.api("query", query=expression)["result"])

    def firing(self, **labels: str) -> set[str]:
        """Names of the alerts that fire, of those with these labels."""
        found = [alert for alert in self.api("alerts")["alerts"] if alert["state"] == "firing"]
        return {a["labels"]["alertname"] for a in found if labels.items() <= a["labels"].items()}

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


def expressions(dashboard: dict[str, Any]) -> list[tuple[str, str]]:
    """Title and expression of each of a dashboard's targets, for all runs."""
    return [
        (panel["title"], re.sub(r"\$run\b", ".*", target["expr"]))
        for panel in dashboard["panels"]
        for target in panel.get("targets", [])
    ]
