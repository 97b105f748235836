"""Every notebook of the course keeps the rules of scripts/course.py, in both languages, and runs.

`make test` checks what is stored. The tests that execute notebooks are marked `minutes`; the station's image runs them
(tests/image/test_inside.py). What a notebook promises is asserted by its own cells.
"""

import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
import course

ENGLISH = course.notebooks()


def name(path: Path) -> str:
    return str(path.relative_to(course.COURSE))


@pytest.mark.parametrize("path", [*ENGLISH, *course.notebooks("zh")], ids=name)
def test_a_notebook_keeps_the_rules(path: Path) -> None:
    assert not list(course.faults(path))


@pytest.mark.parametrize("path", ENGLISH, ids=name)
def test_both_languages_have_the_same_cells(path: Path) -> None:
    assert not list(course.differences(course.COURSE / "zh" / path.name, path))


@pytest.mark.parametrize("language", ["", "zh"])
def test_the_table_lists_each_notebook_with_its_title(language: str) -> None:
    titles = {path.name: course.read(path).cells[0].source.splitlines()[0] for path in course.notebooks(language)}
    table = (course.COURSE / language / "README.md").read_text()
    rows = re.findall(r"^\| (\d+) \| \[(.+?)\]\(([\w.-]+)\) \|", table, re.MULTILINE)
    assert {file: f"# {number}. {title}" for number, title, file in rows} == titles
    assert list(titles) == [path.name for path in ENGLISH]


@pytest.mark.minutes
@pytest.mark.parametrize("path", ENGLISH, ids=name)
def test_a_notebook_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(course.os, "environ", dict(course.os.environ))
    course.execute(path, tmp_path)  # raises the error of a cell that fails
