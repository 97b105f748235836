"""Each Chinese page says what its English one says: the same headings, commands, tables and links.

Chinese pages and notebooks use the words of docs/zh/terms.md.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.docs import languages, pages
from tests.docs.pages import ROOT

BEGINNERS = ("quickstart", "tasks", "scripts", "sessions", "station", "troubleshooting", "without-docker")


PAGES = [path for path in pages.chinese() if path != languages.TERMS]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
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


WORDS = languages.unwanted(pages.read(languages.TERMS))
NOTEBOOKS = sorted((ROOT / "notebooks" / "zh").glob("*.ipynb"))


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_page_uses_the_words_of_the_table(path: Path) -> None:
    page = pages.read(path)
    found = [page.fault(one.line, word) for one in page.prose for word in languages.wrong_words(one.text, WORDS)]
    if found:
        pytest.fail("\n".join(found), pytrace=False)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_uses_the_words_of_the_table(path: Path) -> None:
    found = []
    for number, cell in enumerate(json.loads(path.read_text())["cells"]):
        if cell["cell_type"] == "markdown":
            for one in pages.read(path, "".join(cell["source"])).prose:
                found += [f"{path.name}: cell {number}: {word}" for word in languages.wrong_words(one.text, WORDS)]
    if found:
        pytest.fail("\n".join(found), pytrace=False)


LINKING = (*PAGES, languages.TERMS)


@pytest.mark.parametrize("path", LINKING, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_page_says_which_links_are_english_and_links_the_english_page(path: Path) -> None:
    page, english = pages.read(path), languages.english_of(path)
    found = list(languages.unmarked(page))
    if path == languages.TERMS:
        english = ROOT / "docs" / "runs.md"
    elif not languages.switches(pages.read(english), path):
        found.append(f"{english.name}:2: link the Chinese page below the title")
    if not languages.switches(page, english):
        found.append(page.fault(2, "link the English page below the title"))
    if found:
        pytest.fail("\n".join(found), pytrace=False)


def test_a_link_to_an_english_page_and_a_missing_one_to_the_other_language_are_found() -> None:
    text = "# T\n\n[English](../tasks.md)\n\n[a](../runs.md)%s[b](station.md) [c](https://a.example/b.md)\n"
    for behind, faults in ((" ", 1), (languages.IN_ENGLISH, 0)):
        page = pages.read(languages.CHINESE / "tasks.md", text % behind)
        assert len(list(languages.unmarked(page))) == faults
    assert languages.switches(page, ROOT / "docs" / "tasks.md")
    assert not languages.switches(page, ROOT / "docs" / "station.md")


ROWS = """# T

| a | b | c | d |
|---|---|---|---|
| station | \u5de5\u4f5c\u7ad9 | x | `station` |
| cell | \u5355\u5143\u683c | x | `\u5355\u5143`\u3001`\u683c\u5b50` |
| fork | `train fork` | x | |

| state | meaning |
|---|---|
| `copy` | x |
"""
SAID = {
    "\u8fd9\u4e2a station \u91cc": ["station"],
    "Station\u91cc\u7684\u683c\u5b50": ["station", "\u683c\u5b50"],
    "\u4e0b\u4e00\u4e2a\u5355\u5143\uff0c\u4e0b\u4e00\u4e2a\u5355\u5143\u683c": ["\u5355\u5143"],
    "\u5de5\u4f5c\u7ad9\uff08*station*\uff09\u548c Trainstation": [],
    "\u5de5\u4f5c\u7ad9 (station)\uff0c[\u5de5\u4f5c\u7ad9](station.md)\uff0cdocs/station.md": [],
    "\u4e0b\u4e00\u4e2a\u5355\u5143\u683c": [],
}
"""Maps a text to the words in it that the table ROWS forbids."""


@pytest.mark.parametrize("text", SAID)
def test_a_word_of_the_table_is_found(text: str) -> None:
    words = languages.unwanted(pages.read(languages.TERMS, ROWS))
    assert sorted(words) == ["station", "\u5355\u5143", "\u683c\u5b50"]
    assert [fault.partition(";")[0] for fault in languages.wrong_words(text, words)] == SAID[text]


def test_the_table_has_the_terms_of_the_english_pages() -> None:
    rows = [row.text.split("|")[1:3] for row in pages.read(ROOT / "docs" / "runs.md").rows]
    start = next(number for number, row in enumerate(rows) if [one.strip() for one in row] == ["term", "meaning"])
    wanted = [term for row in rows[start + 2 :] for term in re.split(r",\s*", row[0].strip())]
    text = languages.TERMS.read_text()
    missing = [term for term in wanted if not re.search(rf"(?m)^\| .*(?<![\w-]){re.escape(term)}(?![\w-])", text)]
    assert len(wanted) > 20 and not missing
