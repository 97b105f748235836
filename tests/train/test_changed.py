"""`make test CHANGED=REV` runs what a change can break, and all where it may be anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.changed import ALL, ROOT, importers, main, needed, room_of_test

TESTS = [Path(name) for name in (
    "tests/train/data/test_order.py", "tests/train/doctor/test_host.py", "tests/train/sessions/test_session.py",
    "tests/train/slurm/test_slurm.py", "tests/train/commands/test_cli.py", "tests/train/test_run_names.py",
)]  # fmt: skip


@pytest.fixture(scope="module")
def above() -> dict[str, set[str]]:
    pytest.importorskip("grimp", reason="the station has no linters")
    return importers()


@pytest.mark.parametrize(
    ("change", "tests"),
    [
        ("train/data/order.py", {"data", "doctor", "sessions", "slurm", "commands"}),
        ("train/doctor/host.py", {"doctor", "commands"}),
        ("train/cluster/slurm.py", {"slurm", "commands"}),
        ("tests/train/doctor/test_host.py", {"doctor"}),
        ("docker/station.mk", set()),
    ],
)
def test_a_change_needs_the_tests_of_its_room_and_of_those_above(
    above: dict[str, set[str]], change: str, tests: set[str]
) -> None:
    found = needed([change], TESTS, above)
    assert {Path(path).parts[2] for path in found if len(Path(path).parts) > 3} == tests
    # what looks at all rooms, and the pages, which show flags and messages
    assert ("tests/train/test_run_names.py" in found) == ("tests/docs" in found) == change.startswith("train/")


@pytest.mark.parametrize(
    "change", ["tests/train/conftest.py", "tests/tasks/learner.py", "requirements.lock", "Makefile"]
)
def test_what_all_share_needs_all(above: dict[str, set[str]], change: str) -> None:
    assert needed(["docs/tasks.md", change], TESTS, above) == list(ALL)


def test_pages_need_the_tests_of_pages(above: dict[str, set[str]]) -> None:
    assert needed(["docs/tasks.md", "README.md", "examples/gan.py"], TESTS, above) == ["tests/docs", "tests/examples"]


def test_every_test_belongs_to_a_room_or_looks_at_all(above: dict[str, set[str]]) -> None:
    folders = {room_of_test(path.relative_to(ROOT)) for path in (ROOT / "tests" / "train").glob("*/**/test_*.py")}
    assert folders <= above.keys()


def test_a_revision_that_git_does_not_know_is_refused_in_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["no-such-revision"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "CHANGED=no-such-revision" in said and "give a revision" in said
