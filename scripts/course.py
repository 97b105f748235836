#!/usr/bin/env python3
"""Executes the notebooks of the course and stores what they print: `make course`, or `make course IN="02 06"`.
`make course IN=--check` executes nothing and prints which rules the stored notebooks break (some: IN="--check 02").

Each English notebook runs in an empty folder with its own runs, as in a fresh station. Its outputs are stored in it and
in the Chinese notebook of the same name, which has the same code. The rules that tests/notebooks checks are here, too.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

COURSE = Path(__file__).resolve().parents[1] / "notebooks"
LIMIT = 120
"""Seconds that a notebook may take on two cores."""
LARGEST = 400_000
"""Maximum size of a stored notebook, in bytes."""
PLACE = "/workspace/projects/course"
"""The folder in which people run the course in the station."""
METADATA = {
    "kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"},
    "language_info": {
        "codemirror_mode": {"name": "ipython", "version": 3}, "file_extension": ".py", "mimetype": "text/x-python",
        "name": "python", "nbconvert_exporter": "python", "pygments_lexer": "ipython3", "version": "3.11.2",
    },
}  # fmt: skip
"""What the station's kernel says of itself. JupyterLab marks a notebook as changed if it says something else."""
EXECUTED = Path(__file__).with_suffix(".sha256")
"""A line for each notebook, as sha256sum writes it: the digest of what was executed when its outputs were stored."""
WORDS = {"": ("## Exercises", "Solution"), "zh": ("## 练习", "参考答案")}
"""Maps the folder of a language to the heading of the exercises and the title of a solution."""
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_CODE = re.compile(r"`[^`\n]+`")
_BLOCK = re.compile(r"^ *```\w*\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
_DRAWING = re.compile(r"^( *```text\n)(.*?)(?=^ *```)", re.MULTILINE | re.DOTALL)


def notebooks(language: str = "") -> list[Path]:
    return sorted((COURSE / language).glob("*.ipynb"))


def read(path: Path) -> Any:
    return nbformat.read(path, as_version=4)


def execute(path: Path, folder: Path) -> Any:
    """Run all cells of a notebook with this folder as the current one. Returns the notebook with its outputs.

    Raises:
        CellExecutionError: a cell fails, and is not tagged `raises-exception`.
    """
    notebook = read(path)
    here = str(Path(sys.executable).parent)
    os.environ["PATH"] = os.pathsep.join([here, os.environ["PATH"]])
    os.environ["TRAIN_RUNS"] = str(folder / "runs")
    work = folder / "course"
    work.mkdir()
    for variable in ("COLUMNS", "LINES", "TMUX"):
        os.environ.pop(variable, None)
    client = NotebookClient(
        notebook, timeout=LIMIT * 3, kernel_name="python3", store_widget_state=False, record_timing=False,
        resources={"metadata": {"path": str(work)}},
    )  # fmt: skip
    try:
        client.execute()
    finally:
        for record in (folder / "runs").glob("*/run.json"):
            if json.loads(record.read_text())["state"] == "running":  # a cell started it and did not wait
                subprocess.run(["train", "stop", record.parent.name, "--now"], capture_output=True, check=False)
    places = {
        str(work): PLACE, str(folder): "/workspace",
        sys.prefix: "/usr/local", sys.base_prefix: "/usr", str(COURSE.parent): "/workspace",
    }  # fmt: skip
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if "outputs" in cell:
            cell.outputs = _joined(cell.outputs)
        for output in cell.get("outputs", []):
            _clean(output, places)
    return notebook


def _clean(output: Any, places: dict[str, str]) -> None:
    """Replace paths of this machine, and leave out colours and what a terminal overwrites."""

    def plain(text: str) -> str:
        text = _ESCAPES.sub("", text)
        for real, shown in places.items():
            text = text.replace(os.path.realpath(real), shown).replace(real, shown)
        text = re.sub(r"/tmp/ipykernel_\d+/\d+\.py", "cell", text).replace(os.uname().nodename, "station")
        return "\n".join(line.rstrip("\r").rsplit("\r", 1)[-1] for line in text.split("\n"))

    if "text" in output:
        output.text = plain(output.text)
    if "traceback" in output:
        output.evalue, output.traceback = plain(output.evalue), [plain(part) for part in output.traceback]
    for kind, value in output.get("data", {}).items():
        if isinstance(value, str) and not kind.startswith("image/"):
            output.data[kind] = plain(value)
    output.get("metadata", {}).clear()


def _joined(outputs: list[Any]) -> list[Any]:
    """Join the texts of each stream, stdout first: how they were cut and mixed depends on the clock."""
    joined: list[Any] = []
    streams: dict[str, Any] = {}
    for output in outputs:
        if output.output_type != "stream":
            joined.append(output)
            streams = {}
        elif output.name in streams:
            streams[output.name].text += output.text
        else:
            joined.insert(len(joined) - (output.name == "stdout" and len(streams)), output)
            streams[output.name] = output
    return joined


def store(notebook: Any, path: Path) -> None:
    """Write a notebook so that a second execution changes only what it prints."""
    notebook.metadata = nbformat.from_dict(METADATA)
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number:02}"
    nbformat.validate(notebook)
    nbformat.write(notebook, path)


def take_outputs(chinese: Any, english: Any) -> None:
    """Copy the outputs of cells with the same code."""
    pairs = zip(code_cells(chinese), code_cells(english), strict=True)
    for own, other in pairs:
        own.outputs, own.execution_count = other.outputs, other.execution_count


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


# --- rules


def _shell(command: str) -> str:
    try:
        return " ".join(shlex.split(command, comments=True))
    except ValueError:  # a quote that is not closed, as in a here-document
        return command


def without_comments(source: str) -> str:
    """Return code without comments and empty lines. It may hold magics (`!`, `%`, `%%bash`, `%%writefile`)."""
    head, _, rest = source.partition("\n") if source.startswith("%%") else ("", "", source)
    if head and not (head.startswith("%%writefile") and head.endswith(".py")):
        return f"{head}\n" + "\n".join(filter(None, map(_shell, rest.splitlines())))
    masked = re.sub(r"^(\s*)([!%].*)$", lambda m: f"{m[1]}__magic__({_shell(m[2])!r})", rest, flags=re.MULTILINE)
    try:
        tokens = list(tokenize.generate_tokens(io.StringIO(masked).readline))
    except (tokenize.TokenError, SyntaxError):  # a file that is not Python
        return source
    kept = [(kind, text) for kind, text, *_ in tokens if kind not in (tokenize.COMMENT, tokenize.NL)]
    return f"{head}\n" + " ".join(text for kind, text in kept if kind != tokenize.NEWLINE or text)


def faults(path: Path) -> Iterator[str]:
    """Yield what is wrong with a stored notebook, one line each."""
    notebook, raw = read(path), path.read_text()
    heading, title = WORDS["zh" if path.parent.name == "zh" else ""]
    texts = [cell.source for cell in notebook.cells if cell.cell_type == "markdown"]
    first = notebook.cells[0].source
    if not first.startswith(f"# {int(path.name[:2])}. ") or not re.search(r"[?\uff1f]", first):  # or the Chinese one
        yield "the first cell does not begin with `# NUMBER. Title` and ask a question"
    text = "\n".join(texts)
    exercises = text.partition(f"\n{heading}\n")[2]
    if (found := exercises.count(f"<summary>{title}</summary>")) != 3:
        yield f"below {heading} there are {found} folded solutions ({title}), not 3"
    if exercises.count("<details>") != exercises.count("</details>"):
        yield "a folded solution is not closed"
    is_last = path.name == notebooks()[-1].name
    if not is_last and not re.search(r"\]\([\w./-]+\.ipynb\)", notebook.cells[-1].source.rpartition("</details>")[2]):
        yield "no line after the last solution links the next notebook"
    for target in (target for text in texts for target in _LINK.findall(text) if target.endswith((".ipynb", ".md"))):
        if not (path.parent / target).is_file():
            yield f"a link leads to {target}, which does not exist"
    counts = [cell.execution_count for cell in code_cells(notebook)]
    if counts != list(range(1, len(counts) + 1)):
        yield f"its cells were not executed from the first to the last: make course IN={path.name[:2]}"
    for number, cell in enumerate(code_cells(notebook), 1):
        errors = [one for one in cell.outputs if one.output_type == "error"]
        if errors and "raises-exception" not in cell.metadata.get("tags", []):
            yield f"code cell {number} failed: {errors[0].ename}"
    words = _CODE.sub("", _BLOCK.sub("", text))
    if marks := re.findall(r"[\u4e00-\u9fff][,:;?!](?=[\s\u4e00-\u9fff])", words):
        yield f"Latin punctuation in Chinese text: {', '.join(marks)}"
    yield from _unclosed(words)
    outside = re.sub(r'"image/png": "[^"]*"', "", raw)
    if found_paths := re.findall(r"(?:/tmp/|/root/|/home/(?!dev)|/work/)[\w./-]*", outside):
        yield f"it holds paths of a machine: {found_paths[0]}"
    if len(raw.encode()) > LARGEST:
        yield f"it has {len(raw.encode())} bytes; at most {LARGEST} are stored"


def _unclosed(words: str) -> Iterator[str]:
    """Find bold text whose end CommonMark does not see, because it is between a punctuation mark and a letter."""
    for paragraph in re.split(r"\n\s*\n", words):
        parts = paragraph.split("**")
        for text, after in zip(parts[1::2], parts[2::2], strict=False):
            if re.search(r"[^\w\s]$", text) and re.match(r"\w", after):
                yield f"bold text that does not close; put a space after it: {text}"


def differences(chinese: Path, english: Path) -> Iterator[str]:
    """Yield how two languages of a notebook differ in more than their words, one line each."""
    one, other = read(chinese).cells, read(english).cells
    if [cell.cell_type for cell in one] != [cell.cell_type for cell in other]:
        yield f"their cells are not of the same kinds: {len(one)} and {len(other)}"
        return
    for number, (own, its) in enumerate(zip(one, other, strict=True)):
        where = f"cell {number}"
        if own.cell_type == "code":
            if without_comments(own.source) != without_comments(its.source):
                yield f"{where}: the code differs"
            if own.get("outputs") != its.get("outputs"):
                yield f"{where}: the outputs differ: make course IN={english.name[:2]}"
            continue
        for what, shape in SHAPES.items():
            if (mine := shape(own.source)) != (wanted := shape(its.source)):
                only = [[one for one in a if one not in b] for a, b in ((mine, wanted), (wanted, mine))]
                yield f"{where}: {what} differ: {only[0]} and {only[1]}" if any(only) else f"{where}: {what} differ"


def _fenced(text: str) -> list[str]:
    """Return the fenced blocks of a text: code without comments, and of a drawing what no translation changes."""
    text = _DRAWING.sub(lambda m: m[1] + "\n".join(_names(line) for line in m[2].splitlines()) + "\n", text)
    return list(map(without_comments, _BLOCK.findall(text)))


def _names(line: str) -> str:
    return " ".join(re.findall(r"[A-Z][A-Z_]+(?![a-z])|\d+|[+|-]{2,}", line))


def _pages(links: list[str]) -> list[str]:
    """Return links without the folder of a language. Only Chinese has a page of terms."""
    return sorted(re.sub(r"^(\.\./)+docs/(zh/)?", "docs/", link) for link in links if not link.endswith("/terms.md"))


SHAPES: dict[str, Any] = {
    "headings": lambda text: [len(mark) for mark in re.findall(r"^(#+) ", text, re.MULTILINE)],
    "rows of tables": lambda text: [line.count("|") for line in text.splitlines() if line.startswith("|")],
    "links": lambda text: _pages(_LINK.findall(text)),
    "fenced blocks": _fenced,
    "code": lambda text: sorted(set(_CODE.findall(_BLOCK.sub("", text)))),
}
"""What two languages of a text have in common."""


def picture_sizes(notebook: Any) -> list[int]:
    """Return the sizes of the stored pictures, in bytes."""
    data = [one.get("data", {}).get("image/png") for cell in code_cells(notebook) for one in cell.outputs]
    return [len(base64.b64decode(one)) for one in data if one]


def digest(path: Path) -> str:
    """Return the SHA-256 of a notebook's code and of what it shows most of: the Python API and sessions."""
    package = COURSE.parent / "train"
    code = [without_comments(cell.source).encode() for cell in code_cells(read(path))]
    code += [file.read_bytes() for file in [package / "api.py", *sorted((package / "sessions").glob("*.py"))]]
    return hashlib.sha256(b"\0".join(code)).hexdigest()


def executed() -> dict[str, str]:
    """Return `EXECUTED` by the name of the notebook."""
    lines = EXECUTED.read_text().splitlines() if EXECUTED.exists() else []
    return {name: found for found, _, name in (line.partition("  ") for line in lines)}


def due(turn: int) -> list[Path]:
    """List the notebooks that a check executes: the changed ones, the first one, and one more, by turns."""
    known, (first, *others) = executed(), notebooks()
    changed = [path for path in notebooks() if known.get(path.name) != digest(path)]
    return sorted({first, others[turn % len(others)], *changed})


def main(wanted: list[str]) -> int:
    if wanted[:1] == ["--due"]:  # asked by tests/image/test_inside.py
        print(*(path.stem for path in due(int(wanted[1]))))
        return 0
    numbers = [one for one in wanted if one != "--check"]
    for number in numbers:
        if not any(path.name.startswith(number) for path in notebooks()):
            print(f"course: no notebook begins with {number}", file=sys.stderr)
            return 2
    chosen = [path for path in notebooks() if not numbers or path.name.startswith(tuple(numbers))]
    slow = [] if "--check" in wanted else [path for path in chosen if renew(path) > LIMIT]
    return check(chosen) or bool(slow)


def renew(path: Path) -> float:
    """Execute a notebook and store what it prints, in both languages. Returns the seconds that it took."""
    started, folder = time.monotonic(), Path(tempfile.mkdtemp(prefix="course-"))
    try:
        notebook = execute(path, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    seconds = time.monotonic() - started
    store(notebook, path)
    if (chinese := COURSE / "zh" / path.name).exists():
        translated = read(chinese)
        take_outputs(translated, notebook)
        store(translated, chinese)
    known = executed() | {path.name: digest(path)}
    EXECUTED.write_text("".join(f"{known[name]}  {name}\n" for name in sorted(known)))
    sizes = f"{path.stat().st_size // 1000} kB, pictures {sum(picture_sizes(notebook)) // 1000} kB"
    print(f"{path.name}: {seconds:.0f} s{f' (at most {LIMIT})' if seconds > LIMIT else ''}, {sizes}")
    return seconds


def check(chosen: list[Path]) -> int:
    """Print which rules these notebooks break, in both languages. Returns the exit code."""
    found = []
    for path in chosen:
        found += [f"{path.name}: {fault}" for fault in faults(path)]
        if (chinese := COURSE / "zh" / path.name).exists():
            found += [f"zh/{path.name}: {fault}" for fault in (*faults(chinese), *differences(chinese, path))]
    if missing := {path.name for path in notebooks()} ^ {path.name for path in notebooks("zh")}:
        found.append(f"only one language has {', '.join(sorted(missing))}")
    print(*found or ["every notebook keeps the rules"], sep="\n")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
