"""The profile `monitoring` beside a station: Prometheus scrapes it over the compose network, and nothing else gets out.

No registry has to answer: Prometheus' image is made of Debian's package. It stands in for Grafana's, with a program
that only waits; NVIDIA's is left out.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator

import pytest
import requests
from conftest import Station, base_image, run

from tests.ports import free_port
from tests.waiting import eventually

pytestmark = pytest.mark.turns

DOCKERFILE = """
ARG BASE
FROM $BASE
RUN apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends prometheus \
    && mkdir -p /prometheus && chown nobody /prometheus
USER nobody
ENTRYPOINT ["/usr/bin/prometheus"]
"""


@pytest.fixture(scope="session")
def prometheus_image(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Prometheus from Debian's package; made once on this machine."""
    tag = "trainstation-test-prometheus:bookworm"
    if run("docker", "image", "inspect", tag, check=False).returncode:
        folder = tmp_path_factory.mktemp("prometheus")
        (folder / "Dockerfile").write_text(DOCKERFILE)
        options = {"env": os.environ | {"DOCKER_BUILDKIT": "1"}, "timeout": 600}
        arguments = ("--network", "host", "--build-arg", f"BASE={base_image()}")
        run("docker", "build", *arguments, "-t", tag, str(folder), **options)
    return tag


@pytest.fixture(scope="module")
def watched(
    make_station: Callable[..., Station], prometheus_image: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Station]:
    """A station with the profile, by `make up`."""
    override = tmp_path_factory.mktemp("override") / "monitoring.yml"
    waits = override.with_name("run.sh")
    waits.write_text("#!/bin/sh\nexec sleep infinity\n")
    waits.chmod(0o755)
    grafana = {"image": prometheus_image, "user": "472", "volumes": [f"{waits}:/run.sh:ro"]}
    override.write_text(json.dumps({"services": {"grafana": grafana, "prometheus": {"image": prometheus_image}}}))
    station = make_station(
        "watched", COMPOSE_PROFILES="monitoring", PROMETHEUS_PORT=str(free_port()), GRAFANA_PORT=str(free_port()),
        COMPOSE_FILE=f"docker-compose.yml:docker-compose.cpu.yml:{override}",
    )  # fmt: skip
    station.first_up = station.make("up")  # type: ignore[attr-defined]
    yield station
    station.make("down", check=False)


def query(station: Station, expression: str) -> list[dict[str, object]]:
    url = f"http://127.0.0.1:{station.settings['PROMETHEUS_PORT']}/api/v1/query"
    try:
        answer = requests.get(url, params={"query": expression}, timeout=20)
    except requests.ConnectionError:
        return []
    return answer.json()["data"]["result"] if answer.ok else []


def test_prometheus_scrapes_a_run_in_the_station(watched: Station) -> None:
    eventually("the exporter is scraped", lambda: query(watched, 'up{job="trainstation"} == 1'))
    watched.ssh("train launch digits --name seen --nproc 1 --epochs 100000 --log.every_steps 10")
    try:
        eventually("the run is seen", lambda: query(watched, 'train_run_step{run="seen"} > 0'))
        assert query(watched, 'train_run_state{run="seen",state="running"} == 1')
        eventually("so is its memory", lambda: query(watched, 'train_rank_resident_memory_bytes{run="seen"} > 1e6'))
        rules = requests.get(f"http://127.0.0.1:{watched.settings['PROMETHEUS_PORT']}/api/v1/rules", timeout=20).json()
        assert {rule["health"] for group in rules["data"]["groups"] for rule in group["rules"]} <= {"ok", "unknown"}
    finally:
        watched.dev("train", "stop", "seen", "--now", check=False)


def test_the_exporter_comes_back_alone_and_runs_as_dev(watched: Station) -> None:
    pid = watched.service_pid("exporter")
    owner = watched.root("ps", "-o", "user=", "-p", str(pid)).stdout.strip()
    assert owner == "dev"
    watched.root("kill", "-KILL", str(pid))
    eventually("it is back", lambda: watched.service_pid("exporter") not in (0, pid))
    eventually(
        "it answers", lambda: watched.dev("curl", "-sf", "http://127.0.0.1:9477/metrics", check=False).returncode == 0
    )


@pytest.mark.never_forgiven
def test_nothing_is_published_but_prometheus_on_the_loopback(watched: Station) -> None:
    ports = json.loads(watched.inspect("{{json .NetworkSettings.Ports}}"))
    assert set(filter(ports.get, ports)) == {"8888/tcp", "2222/tcp"}
    id_ = watched.compose("--profile", "monitoring", "ps", "--quiet", "prometheus").stdout.strip()
    bound = json.loads(run("docker", "inspect", "-f", "{{json .HostConfig.PortBindings}}", id_).stdout)
    assert [(port, binding["HostIp"]) for port, found in bound.items() for binding in found] == [
        ("9090/tcp", "127.0.0.1")
    ]


@pytest.mark.never_forgiven
def test_the_page_and_the_log_hold_no_secret(watched: Station) -> None:
    page = watched.dev("curl", "-sf", "http://127.0.0.1:9477/metrics").stdout
    assert "train_runs_disk_free_bytes" in page
    password = (watched.folder / ".secrets" / "grafana_password").read_text()
    assert len(password) == 32
    assert watched.token not in page and password not in page
    assert password not in watched.log + watched.first_up.stdout  # type: ignore[attr-defined]
    assert (watched.folder / ".secrets").stat().st_mode & 0o077 == 0


@pytest.mark.never_forgiven
def test_grafanas_own_user_alone_reads_its_password(watched: Station) -> None:
    file = watched.folder / ".secrets" / "grafana_password"
    assert file.stat().st_mode & 0o777 == 0o600
    id_ = watched.compose("--profile", "monitoring", "ps", "--quiet", "grafana").stdout.strip()
    assert run("docker", "exec", id_, "cat", "/run/secrets/grafana_password").stdout == file.read_text()
    assert file.read_text() not in run("docker", "inspect", id_).stdout
    alone = ("--profile", "monitoring", "up", "--detach", "--no-deps", "--force-recreate", "grafana")
    done = run("docker", "compose", *alone, cwd=watched.folder, env=watched.env, check=False)
    assert done.returncode and '"GRAFANA_PASSWORD" required' in done.stderr


@pytest.mark.never_forgiven
def test_grafana_has_no_default_password_and_images_are_pinned(watched: Station) -> None:
    files = ("-f", "docker-compose.yml", "--profile", "monitoring")
    told = run("docker", "compose", *files, "config", "--format", "json", cwd=watched.folder, env=watched.env)
    services = json.loads(told.stdout)["services"]
    grafana = services["grafana"]["environment"]
    assert grafana["GF_SECURITY_ADMIN_PASSWORD__FILE"] == "/run/secrets/grafana_password"
    assert "GF_SECURITY_ADMIN_PASSWORD" not in grafana and grafana["GF_AUTH_ANONYMOUS_ENABLED"] == "false"
    for name in ("prometheus", "grafana", "dcgm-exporter"):
        image = services[name]["image"]
        assert image.rpartition(":")[2] not in ("", "latest") or name == "prometheus"
        assert all(port["host_ip"] == "127.0.0.1" for port in services[name].get("ports", []))
    assert "default" not in services["grafana"]["networks"]
