"""README and docs: links, headings, blocks, and every command that they name."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs import checks, pages
from tests.docs.pages import ROOT


@pytest.mark.parametrize("path", pages.paths(), ids=lambda path: str(path.relative_to(ROOT)))
def test_the_page_is_in_order(path: Path) -> None:
    if found := checks.faults(pages.read(path)):
        pytest.fail("\n".join(found), pytrace=False)


GOOD = """# Title

Run `train launch TASK [--name N] [--nproc N|auto] [--gpus 0,1|N] …` or `train resume NAME|--all`.
See [there](#to-do), `make -s ssh-command`, `scripts/train ls`, `train/cli.py`, `examples/*.py` and `docs/NAME.md`.
Give `--nproc 2`, `--task.width 3` or `optim.lr`; `ema.accuracy`, `data.json` and `model.eval()` are no fields.

## To do

| command | does |
|---|---|
| `train bench SUBJECT` | measures |
| `train launch digits --optim.lr 0.1 --task.width 3` | starts |

1. An item:
   ```bash
   train launch digits --name demo1 --follow   # it's a comment
   train ls | head -3 && train show demo1 > out.txt
   train resume none  # exit code 2
   ```

<!-- tested by tests/train/launcher/test_launch.py -->
```bash
train launch digits --nproc N
```
<!-- needs root -->
```bash
sudo make engine
```
```python
# name.py
print(1)
```
"""

BAD = {
    "# A\n\n# B": "3: 2 titles",
    "text": "1: 0 titles",
    "## A\n\n# B": "1: 1 titles",
    "# A\n\n### B": "3: skips a level; write ## B",
    "# A\n\n## B\n\n## B": "5: #b is also the anchor of line 3",
    "# A\n\n[x](absent.md)": "3: absent.md does not exist",
    "# A\n\n[x](#absent)": "has no heading #absent",
    "# A\n\n[x](../docs/recipes.md#absent)": "3: recipes.md has no heading #absent",
    "# A\n\n    train ls": "3: indented code",
    "# A\n\n```bash\ntrain ls": "3: this block has no end",
    "# A\n\nan `open one": "3: a ` without its partner",
    "# A\n\n```\ntrain ls\n```": "3: language missing",
    "# A\n\n```console\ntrain ls\n```": "3: language console",
    "# A\n\n```bash\n$ train ls\n```": "4: leave out the prompt",
    "# A\n\n```python\ndef\n```": "4: is no python",
    "# A\n\n```toml\na =\n```": "4: is no toml",
    "# A\n\n```json\n{a}\n```": "4: is no json",
    "# A\n\n```yaml\na: [\n```": "4: is no yaml",
    "# A\n\n<!-- needs luck -->\n```bash\ntrain ls\n```": "3: unknown mark: needs luck",
    "# A\n\n<!-- skip -->\n```bash\ntrain ls\n```": "3: unknown mark: skip",
    "# A\n\n<!-- needs root -->\n\n```bash\ntrain ls\n```": "3: no block follows this mark",
    "# A\n\n<!-- tested by tests/absent.py -->\n```bash\ntrain ls\n```": "3: tests/absent.py is not a test",
    "# A\n\n<!-- tested by tests/waiting.py -->\n```bash\ntrain ls\n```": "5: tests/waiting.py does not call",
    "# A\n\n<!-- tested by tests/waiting.py -->\n```bash\nmake up\n```": "5: tests/waiting.py does not call `make up`",
    "# A\n\n<!-- tested by tests/waiting.py -->\n```bash\nscripts/train ls\n```": "does not call `scripts/train ls`",
    "# A\n\n<!-- tested by tests/waiting.py -->\n```bash\nssh -p 2222 dev@HOST\n```": "does not call `ssh -p`",
    "# A\n\n```bash\ntrain lanch digits\n```": "4: `train lanch digits`: there is no command lanch",
    "# A\n\n```bash\ntrain ls\ntrain launch digits --nprocs 2\n```": "5: `train launch digits --nprocs 2`: unknown",
    "# A\n\n```bash\ntrain launch digits --optim.rate 2\n```": "unknown flag --optim.rate",
    "# A\n\n```bash\ntrain launch digits --optim.lr fast\n```": "4: `train launch digits --optim.lr fast`",
    "# A\n\n```bash\ntrain show\n```": "give NAME",
    "# A\n\n```bash\nls runs && (cd x; train shw a)\n```": "there is no command shw",
    "# A\n\n```bash\nls $(train shw a)\n```": "there is no command shw",
    "# A\n\n```bash\nfor i in 1 2; do\n    train shw a\ndone\n```": "4: `train shw a`",
    "# A\n\nRun `train launch TASK [--name N] [--nprok N|auto]`": "3: `train launch TASK [--name N] [--nprok N|auto]`",
    "# A\n\nRun `train stop|resum NAME`": "there is no command resum",
    "# A\n\n| a |\n|---|\n| `train stop\\|resum NAME` |": "5: `train stop|resum NAME`: there is no command resum",
    "# A\n\nRun `make everything`": "3: `make everything`: make has no target everything",
    "# A\n\n```bash\nmake everything\n```": "make has no target everything",
    "# A\n\nRun `scripts/absent.sh a`": "3: `scripts/absent.sh a`: scripts/absent.sh does not exist",
    "# A\n\nWith `--nprocs 2`": "3: no command takes --nprocs",
    "# A\n\nThe field `optim.rate`": "3: there is no config field optim.rate",
    "# A\n\nSee\n`train/absent.py`": "4: `train/absent.py` does not exist",
}
"""Pages with one fault, and a part of what is said of it."""


def faults(text: str, name: str = "README.md") -> list[str]:
    page = pages.read(ROOT / "docs" / name, text)
    return checks.faults(page)


def test_a_page_in_order_has_no_faults() -> None:
    assert faults(GOOD) == []


@pytest.mark.parametrize("text", BAD)
def test_each_fault_is_found(text: str) -> None:
    found = faults(text)
    assert any(BAD[text] in fault for fault in found), found
    assert all(fault.startswith("docs/README.md:") and "\n" not in fault for fault in found)


def test_a_setting_that_no_file_reads_is_found() -> None:
    table = "# A\n\n| setting | does |\n|---|---|\n| `{}` | x |"
    assert faults(table.format("SSH_PORT"), "station.md") == []
    (fault,) = faults(table.format("SSH_PROT"), "station.md")
    assert fault == "docs/station.md:5: no file reads SSH_PROT; fix its name, or leave the row out"


def test_a_long_readme_is_found(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text("# A\n" + "\n" * 185)
    (fault,) = checks.length(pages.read(readme))
    assert fault.startswith("README.md:186: 186 lines, at most 185")
