"""What the image is made of: where its packages come from, each with its version, and which are out of date."""

import json
import re

import pytest
from conftest import ROOT, Station, run
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

pytestmark = [pytest.mark.never_forgiven, pytest.mark.turns]

SOURCES = str(ROOT / "docker" / "debian-sources.sh")


def test_packages_come_from_one_day_of_a_snapshot_archive_where_the_mirror_names_it() -> None:
    day = "https://snapshot.invalid/archive/debian/20261101T000000Z"
    lines = run(SOURCES, f"{day}/").stdout.splitlines()
    security = day.replace("/debian/", "/debian-security/")
    assert [line for line in lines if line.startswith("URIs")] == [f"URIs: {day}", f"URIs: {security}"]
    assert lines.count("Check-Valid-Until: no") == 2
    lines = run(SOURCES, "https://mirror.invalid/debian").stdout.splitlines()
    assert lines.count("URIs: https://mirror.invalid/debian-security") == 1
    assert "Check-Valid-Until: no" not in lines


def test_the_base_images_are_named_by_digest_in_one_place() -> None:
    dockerfile = (ROOT / "Dockerfile").read_text()
    for name in ("BASE_IMAGE", "CUDA_IMAGE"):
        assert re.search(rf"^ARG {name}=\S+:\S+@sha256:[0-9a-f]{{64}}$", dockerfile, re.MULTILINE)
    others = ("docker-compose.yml", ".env.example", "scripts/station-image.sh", "docs/station.md")
    assert not [name for name in others if "sha256:" in (ROOT / name).read_text()]


def test_make_sbom_lists_each_package_as_the_schema_has_it(station: Station) -> None:
    assert "packages of trainstation:runtime-" in station.make("sbom").stdout
    text = (station.folder / "build" / "sbom.json").read_text()
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
    found = {part["purl"].split("?")[0] for part in json.loads(text)["components"]}
    locked = re.findall(r"^torch(?:vision)?==[^ ;]+", (ROOT / "requirements.lock").read_text(), re.MULTILINE)
    assert {f"pkg:pypi/{name.replace('==', '@')}" for name in locked} <= found
    assert "pkg:npm/uplot@1.6.32" in found
    states = station.root("dpkg-query", "-W", "-f", "${db:Status-Status}\\n").stdout.split()
    assert states.count("installed") == len([purl for purl in found if purl.startswith("pkg:deb/")]) > 150


def test_make_audit_asks_the_archive(station: Station) -> None:
    done = station.make("audit", check=False)
    pending = "Debian has fixed these since" in done.stdout
    assert pending or "has every security update" in done.stdout, done.stderr
    assert (done.returncode != 0) == pending
