"""The station's files pass the linters of their kind; each exception stands beside what it excepts."""

import json
import re
from pathlib import Path

import pytest
from conftest import ROOT, Station, run

pytestmark = [pytest.mark.never_forgiven, pytest.mark.turns]


def test_hadolint_is_clean() -> None:
    run("hadolint", "Dockerfile", cwd=ROOT)


def test_checkov_is_clean() -> None:
    options = ("--framework", "dockerfile", "--compact", "--skip-download", "-o", "json")
    done = run("checkov", "-f", "Dockerfile", *options, cwd=ROOT, check=False)
    found = json.loads(done.stdout)
    assert found["summary"]["passed"] > 10
    assert not [check["check_id"] + " " + check["check_name"] for check in found["results"]["failed_checks"]]


@pytest.mark.parametrize("files", [["docker-compose.yml"], ["docker-compose.yml", "docker-compose.cpu.yml"]])
def test_the_compose_files_are_valid_on_a_fresh_clone(files: list[str]) -> None:
    arguments = [word for file in files for word in ("-f", file)]
    run("docker", "compose", *arguments, "--env-file", "/dev/null", "config", "--quiet", cwd=ROOT)


def test_every_setting_of_the_compose_file_is_explained() -> None:
    used = set(re.findall(r"\$\{([A-Z_]+)", (ROOT / "docker-compose.yml").read_text()))
    explained = set(re.findall(r"^#?([A-Z_]+)=", (ROOT / ".env.example").read_text(), re.MULTILINE))
    made_by_scripts = {"GPU_IDS", "DEV_UID", "DEV_GID", "STATION_TARGET", "STATION_BUILT"}
    made_by_scripts |= {"STATION_VERSION", "STATION_REVISION"}
    made_by_scripts |= {"STATION_HOSTNAME", "COMPOSE_PROJECT_NAME"}
    assert used - explained - made_by_scripts == set()


def test_the_labels_name_the_versions_that_are_locked(station: Station) -> None:
    printed = run("docker", "image", "inspect", "-f", "{{json .Config.Labels}}", "trainstation:runtime").stdout
    labels = json.loads(printed)
    lock = (ROOT / "requirements.lock").read_text()
    assert f"\ntorch=={labels['trainstation.torch']} " in lock
    assert f"\ntorchvision=={labels['trainstation.torchvision']} " in lock
    assert labels["org.opencontainers.image.version"] == station.dev("train", "--version").stdout.split()[-1]


def test_the_image_stays_under_six_gigabytes(station: Station) -> None:
    assert int(run("docker", "image", "inspect", "-f", "{{.Size}}", "trainstation:runtime").stdout) < 6.0e9


def test_the_devcontainers_name_files_and_services_that_exist() -> None:
    found = sorted((ROOT / ".devcontainer").rglob("devcontainer.json"))
    assert len(found) == 2
    for path in found:
        text = "\n".join(line for line in path.read_text().splitlines() if not line.strip().startswith("//"))
        settings = json.loads(text)
        files = [str((path.parent / name).resolve()) for name in settings["dockerComposeFile"]]
        arguments = [word for name in files for word in ("-f", name)]
        done = run("docker", "compose", *arguments, "--env-file", "/dev/null", "config", "--services", cwd=ROOT)
        assert done.stdout.split() == [settings["service"]]
        assert settings["workspaceFolder"] == "/workspace"


def test_no_file_of_the_station_names_a_package_index_or_mirror() -> None:
    listed = run("git", "ls-files", "-z", cwd=ROOT).stdout.split("\0")
    endings = ("", ".sh", ".yml", ".example", ".lock", ".mk")
    named = re.compile(r"https?://(?!REPLACE_WITH_)[^\s\"']*(/simple|/debian)\b")
    files = [ROOT / name for name in listed if name and Path(name).suffix in endings]
    assert [path for path in files if path.is_file() and named.search(path.read_text(errors="replace"))] == []
