"""scripts/course.py finds each kind of fault, and stores nothing of the machine that executed a notebook."""

import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat.v4 as new
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
import course

from train import __version__

EXERCISES = "\n".join(f"{n}. Do it.\n<details><summary>Solution</summary>\nDone.\n</details>\n" for n in (1, 2, 3))
TEXTS = [
    "# 2. A title\n\nWhy `this`?\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n```python\nx = 1  # one\n```\n[page](https://a.example)"
    "\n\n```text\n+--- RANK 0: a process\n```",
    f"## Exercises\n\n{EXERCISES}\nNext: [two](02-two.ipynb)",
]
CODE = "x = 1  # one\n\n# two\n!echo 'a # b'  # three\nif x:\n    %time x\nprint(f'{x} # {x}')"


def notebook(*texts: str, code: str = CODE) -> Any:
    cell = new.new_code_cell(code, execution_count=1, outputs=[new.new_output("stream", text="1\n")])
    return new.new_notebook(cells=[new.new_markdown_cell(texts[0]), cell, new.new_markdown_cell(texts[1])])


@pytest.fixture
def english(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A notebook without a fault, in a course of its own, followed by another one."""
    monkeypatch.setattr(course, "COURSE", tmp_path)
    (tmp_path / "zh").mkdir()
    course.store(notebook(*TEXTS), tmp_path / "02-two.ipynb")
    course.store(notebook(*TEXTS), tmp_path / "03-three.ipynb")
    return tmp_path / "02-two.ipynb"


def test_a_notebook_without_a_fault_has_none(english: Path) -> None:
    assert not list(course.faults(english))


def change(cell: int, before: str, after: str) -> Callable[[Any], None]:
    def plant(notebook: Any) -> None:
        assert before in notebook.cells[cell].source
        notebook.cells[cell].source = notebook.cells[cell].source.replace(before, after, 1)

    return plant


def output(*outputs: Any, **of_cell: Any) -> Callable[[Any], None]:
    return lambda notebook: notebook.cells[1].update(outputs=list(outputs), **of_cell)


ERROR = new.new_output("error", ename="ValueError", evalue="no", traceback=[])
FAULTS = {
    "another number": (change(0, "# 2.", "# 3."), "the first cell"),
    "no question": (change(0, "?", "."), "the first cell"),
    "two solutions": (change(2, "<summary>Solution</summary>", ""), "2 folded solutions"),
    "no heading": (change(2, "## Exercises", "## More"), "0 folded solutions"),
    "an open solution": (change(2, "</details>", ""), "not closed"),
    "no next notebook": (change(2, "[two](02-two.ipynb)", "two"), "links the next notebook"),
    "a wrong link": (change(2, "02-two", "04-two"), "04-two.ipynb, which does not exist"),
    "open bold text": (change(2, "## Exercises", "**Guess:**one\n\n## Exercises"), "does not close"),
    "not executed": (output(execution_count=None), "were not executed"),
    "an error": (output(ERROR, execution_count=1), "failed: ValueError"),
    "a path": (output(new.new_output("stream", text="/tmp/a/b"), execution_count=1), "paths of a machine: /tmp/a/b"),
    "too large": (output(new.new_output("stream", text="1" * course.LARGEST), execution_count=1), "bytes; at most"),
}


@pytest.mark.parametrize("kind", FAULTS)
def test_each_fault_is_found(english: Path, kind: str) -> None:
    plant, message = FAULTS[kind]
    planted = course.read(english)
    plant(planted)
    course.store(planted, english)
    found = list(course.faults(english))
    assert len(found) == 1 and message in found[0]


def test_an_error_that_a_notebook_shows_is_allowed(english: Path) -> None:
    planted = course.read(english)
    output(ERROR, execution_count=1, metadata={"tags": ["raises-exception"]})(planted)
    course.store(planted, english)
    assert not list(course.faults(english))


TRANSLATED = [
    "# 2. 标题\n\n为什么 `this` 呢\uff1f\n\n| 甲 | 乙 |\n|---|---|\n| 1 | 2 |\n\n```python\nx = 1  # 一\n```\n[页](https://a.example)"
    "\n\n```text\n+--- RANK 0: 一个进程\n```",
    TEXTS[1].replace("Exercises", "练习").replace("Solution", "参考答案"),
]
TRANSLATED_CODE = CODE.replace("# one", "# 一").replace("# two", "# 二").replace("# three", "# 三")
DIFFERENCES = {
    "a cell less": (lambda notebook: notebook.cells.pop(), "not of the same kinds"),
    "other code": (change(1, "x = 1", "x = 2"), "the code differs"),
    "another text": (change(1, "# {x}'", "# 二{x}'"), "the code differs"),
    "another command": (change(1, "a # b", "a"), "the code differs"),
    "another magic": (change(1, "%time", "%timeit"), "the code differs"),
    "other outputs": (output(execution_count=1), "the outputs differ"),
    "another level": (change(2, "## 练习", "### 练习"), "headings differ"),
    "a row less": (change(0, "| 1 | 2 |\n", ""), "rows of tables differ"),
    "a column more": (change(0, "| 1 | 2 |", "| 1 | 2 | 3 |"), "rows of tables differ"),
    "another link": (change(0, "a.example", "b.example"), "links differ"),
    "another block": (change(0, "x = 1", "x = 2"), "fenced blocks differ"),
    "another number in a drawing": (change(0, "RANK 0", "RANK 1"), "fenced blocks differ"),
    "another name in a drawing": (change(0, "RANK 0", "NODE 0"), "fenced blocks differ"),
    "a line less in a drawing": (change(0, "+--- RANK 0: 一个进程\n", ""), "fenced blocks differ"),
    "another word": (change(0, "`this`", "`that`"), "code differ: ['`that`'] and ['`this`']"),
}


@pytest.mark.parametrize("kind", DIFFERENCES)
def test_each_difference_of_languages_is_found(english: Path, kind: str) -> None:
    chinese = course.COURSE / "zh" / english.name
    translated = notebook(*TRANSLATED, code=TRANSLATED_CODE)
    course.store(translated, chinese)
    (course.COURSE / "zh" / "03-three.ipynb").write_bytes(chinese.read_bytes())
    assert not list(course.differences(chinese, english))
    plant, message = DIFFERENCES[kind]
    plant(translated)
    course.store(translated, chinese)
    found = list(course.differences(chinese, english))
    assert len(found) == 1 and message in found[0]
    assert course.main(["--check"]) == 1


def test_a_check_of_some_executes_nothing_and_an_unknown_one_is_refused(english: Path) -> None:
    chinese = notebook(*TRANSLATED, code=TRANSLATED_CODE)
    for name in ("02-two.ipynb", "03-three.ipynb"):
        course.store(chinese, course.COURSE / "zh" / name)
    before = english.read_bytes()
    assert course.main(["--check", "02"]) == 0 and english.read_bytes() == before
    assert course.main(["02", "11"]) == 2 and english.read_bytes() == before


def test_latin_punctuation_in_chinese_is_found(english: Path) -> None:
    translated = notebook(TRANSLATED[0].replace("标题", "标题: 二"), TRANSLATED[1], code=TRANSLATED_CODE)
    course.store(translated, course.COURSE / "zh" / "02-two.ipynb")
    course.store(translated, course.COURSE / "zh" / "03-three.ipynb")
    assert list(course.faults(course.COURSE / "zh" / "02-two.ipynb")) == ["Latin punctuation in Chinese text: 题:"]


def test_comments_of_shell_cells_and_written_files_may_differ() -> None:
    for code in ("%%bash\necho 1  # {}", "%%writefile a.py\nx = 1  # {}", "%%writefile a.toml\nx = 1  # {}"):
        assert course.without_comments(code.format("one")) == course.without_comments(code.format("一"))
        assert course.without_comments(code) != course.without_comments(code.replace("1", "2"))


SHOWN = """\
import os, socket, sys, warnings
print(os.getcwd(), os.environ["TRAIN_RUNS"], sys.prefix, socket.gethostname())
print(1, "of 2\\r", end="", flush=True)
print("2 of 2\\033[31m!\\033[0m")
warnings.warn("careful")
!train --version
1 / 0"""


def test_what_is_stored_names_no_machine(english: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(course.os, "environ", dict(os.environ))
    shown = notebook(*TEXTS, code=SHOWN)
    shown.cells[1].metadata["tags"] = ["raises-exception"]
    course.store(shown, english)
    folder = tmp_path / "folder"
    folder.mkdir()
    texts = []
    for _ in range(2):
        executed = course.execute(english, folder)
        course.store(executed, english)
        assert not list(course.faults(english))
        texts.append(english.read_text())
        (folder / "course").rmdir()
    assert texts[0] == texts[1], "a second execution changes nothing"
    place = sys.prefix if sys.prefix != "/usr" else str(course.COURSE)  # the station's Python is the system's
    for private in (socket.gethostname(), str(tmp_path), place, "ipykernel_", "1 of 2", "\\u001b", "iopub"):
        assert private not in texts[0]
    for text in (
        "/workspace/projects/course /workspace/runs",
        "2 of 2!",
        "cell:5: UserWarning: careful",
        __version__,
    ):
        assert text in texts[0]
