"""The commands of each page, executed in the order in which they stand there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs import pages, shell
from tests.docs.pages import ROOT

pytestmark = pytest.mark.pages


ALWAYS = {ROOT / "README.md", ROOT / "docs" / "quickstart.md"}
"""Pages that CI runs each time; the others take turns."""


@pytest.mark.parametrize("path", [
    pytest.param(path, marks=() if path in ALWAYS else pytest.mark.turns) for path in pages.english()
], ids=lambda path: str(path.relative_to(ROOT)))  # fmt: skip
def test_the_commands_of_the_page_do_what_it_says(path: Path, tmp_path: Path) -> None:
    if failed := shell.execute(pages.read(path), tmp_path):
        pytest.fail(failed, pytrace=False)


@pytest.mark.parametrize("words", shell.ELSEWHERE, ids=" ".join)
def test_what_is_not_executed_here_is_executed_elsewhere(words: tuple[str, str]) -> None:
    assert re.search(rf"[\"' ]{words[1]}[\"' ]", (ROOT / shell.ELSEWHERE[words]).read_text())


PAGE = """# Title

```bash
. .venv/bin/activate
train run digits --steps 2 --name demo1 2>&1 | grep -c . > lines
wc -l < examples/gan.py > /dev/null
```

```python
# numbers/one.py
print(1)
```
```bash
NUMBER=$(python numbers/one.py)
cat > text <<END
a
END
grep a text && [ "$NUMBER" = 1 ]
train attach demo1
train show absent  # exit code 2
train launch digits --name demo2 --epochs 100000
sleep 600 &
```
"""


def execute(text: str, folder: Path) -> str | None:
    return shell.execute(pages.read(ROOT / "docs" / "page.md", text), folder)


def test_commands_run_in_one_shell_and_nothing_is_left_of_them(tmp_path: Path) -> None:
    assert execute(PAGE, tmp_path) is None
    folder = tmp_path / "checkout"
    assert (folder / "runs" / "demo1" / "run.json").exists() and (folder / "runs" / "demo2" / "run.json").exists()
    assert shell.living(folder) == []


@pytest.mark.parametrize(
    ("last", "says"),
    [("ls absent", "exit code 2, not 0"), ("train ls  # exit code 2", "exit code 0, not 2"), ("exit 0", "")],
)
def test_a_command_that_fails_is_shown_with_its_output(tmp_path: Path, last: str, says: str) -> None:
    text = f"# Title\n\n```bash\necho before\n{last}\ntrain nothing\n```\n"
    failed = execute(text, tmp_path)
    assert failed is not None and failed.startswith(f"docs/page.md:5: {last}\n")
    assert says in failed and "before" not in failed


def test_a_block_with_a_mark_is_not_executed(tmp_path: Path) -> None:
    text = "# Title\n\n<!-- needs root -->\n```bash\nfalse\n```\n"
    assert execute(text, tmp_path) is None


def test_commands_that_hang_are_ended_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shell, "PATIENCE", 1)
    failed = execute("# Title\n\n```bash\nsleep 600\n```\n", tmp_path)
    assert failed is not None and failed.startswith("docs/page.md:4: sleep 600\n(hangs)")
