"""Copy the course to projects/course/, without outputs, unless a copy is there. Runs as dev: python3 -I -S course.py"""

import json
import re
import sys
from pathlib import Path

NOTEBOOKS = Path("/workspace/notebooks")
COURSE = Path("/workspace/projects/course")


def copy(source: Path, target: Path) -> None:
    """Copy a notebook without its outputs, one folder deeper. An existing file stays."""
    if target.exists():
        return
    notebook = json.loads(source.read_text(encoding="utf-8"))
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            cell |= {"outputs": [], "execution_count": None}
        else:
            cell["source"] = [re.sub(r"\]\(((\.\./)+docs/)", r"](../\1", line) for line in cell["source"]]
    target.parent.mkdir(parents=True, exist_ok=True)
    beside = target.with_name(f".{target.name}.new")
    beside.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    beside.rename(target)


def main() -> None:
    if not COURSE.parent.is_dir():
        return
    for chinese in sorted(NOTEBOOKS.glob("zh/*.ipynb")):
        for source in (NOTEBOOKS / chinese.name, chinese):
            try:
                copy(source, COURSE / source.relative_to(NOTEBOOKS))
            except (OSError, ValueError, KeyError, TypeError) as error:
                text = f"{source} could not be copied to projects/course/ ({error})"
                print(f"trainstation: warning: {text}", file=sys.stderr)


if __name__ == "__main__":
    main()
