"""Each Chinese page says what its English one says: the same headings, commands, tables and links."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs import languages, pages
from tests.docs.pages import ROOT

BEGINNERS = ("quickstart", "tasks", "scripts", "sessions", "station", "troubleshooting", "without-docker")


@pytest.mark.parametrize("path", pages.chinese(), ids=lambda path: str(path.relative_to(ROOT)))
def test_both_languages_of_a_page_agree(path: Path) -> None:
    if found := list(languages.differences(pages.read(path), pages.read(languages.english_of(path)))):
        pytest.fail("\n".join(found), pytrace=False)


def test_the_pages_that_a_beginner_needs_are_there_in_chinese() -> None:
    names = {"README.zh-CN.md", *(f"docs/zh/{name}.md" for name in BEGINNERS)}
    assert names <= {path.relative_to(ROOT).as_posix() for path in pages.chinese()}


ENGLISH = """# Title

Type `train ls`, and see [runs](docs/runs.md#after-a-crash) or [the start](docs/quickstart.md#install).

| a | b |
|---|---|
| `x` | y |
| `z` | waits 30 s |

![Loss](docs/top.png)

<!-- needs root -->
```bash
make engine   # installs it
train show absent  # exit code 2
```

```python
# one.py
print("a")   # prints it
```

## More

`done`
"""
CHINESE = """# \u6807\u9898

\u8f93\u5165 `train ls`\uff0c\u53c2\u89c1[\u8bad\u7ec3](docs/runs.md#after-a-crash)
\u6216[\u5f00\u59cb](docs/zh/quickstart.md#\u5b89\u88c5)\u3002

| a | b |
|---|---|
| `x` | y |
| `z` | 30 s |

![loss](docs/top.png)

<!-- needs root -->
```bash
make engine   # \u5b89\u88c5
train show absent  # exit code 2
```

```python
# one.py
print("a")   # \u6253\u5370
```

## \u66f4\u591a

`done`
"""
FAULTS = {
    "headings": ("## \u66f4\u591a", "### \u66f4\u591a"),
    "lacks ['train ls']": ("`train ls`", "train ls"),
    "has ['train top']": ("`done`", "`done` `train top`"),
    "of README.md:1, has [\"('docs/quickstart.md', '')\"]": ("zh/quickstart.md#\u5b89\u88c5", "zh/quickstart.md"),
    "there is a Chinese page": ("docs/zh/quickstart.md#\u5b89\u88c5", "docs/quickstart.md#install"),
    "lacks [\"('docs/top.png', '')\"]": ("![loss](docs/top.png)", ""),
    "other columns": ("| `x` | y |", "| `x` |"),
    "rows of tables": ("| `x` | y |", "| `x` | y |\n| z | y |"),
    "8: other inline code than in the row README.md:7": ("| `x` | y |\n| `z` |", "| `z` | y |\n| `x` |"),
    "lacks ['30'] of README.md:1, has ['20']": ("30 s", "20 s"),
    "15: only comments may differ from README.md:14": ("make engine", "make up"),
    "16: only comments may differ from README.md:15": ("exit code 2", "exit code 3"),
    "21: only comments may differ from README.md:20": ('print("a")', 'print("b")'),
    "20: only comments may differ from README.md:19": ("# one.py", "# two.py"),
    "13: another language or mark than README.md:13": ("<!-- needs root -->\n", ""),
    "another language": ("```python", "```text"),
    "1: 1 blocks, but 2": ('```python\n# one.py\nprint("a")   # \u6253\u5370\n```\n', ""),
}
"""Maps a part of what is said to the fault that is planted into the Chinese page."""


@pytest.mark.parametrize("fault", FAULTS)
def test_a_difference_is_found(fault: str) -> None:
    english = pages.read(ROOT / "README.md", ENGLISH)
    assert not list(languages.differences(pages.read(languages.README, CHINESE), english))
    old, new = FAULTS[fault]
    assert old in CHINESE
    found = list(languages.differences(pages.read(languages.README, CHINESE.replace(old, new, 1)), english))
    assert len(found) <= 2 and any(fault in one for one in found), found
