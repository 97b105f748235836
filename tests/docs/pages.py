"""Reads README.md, docs/*.md and the pages beside the code.

Finds headings, links, fenced blocks with their marks, inline code, and shell commands.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("benchmarks", "deploy/monitoring", "tests/cuda", "tests/gpu", "train")
"""Folders with a page for those who work on them."""

_FENCE = re.compile(r"( *)(`{3,}|~{3,})\s*(\S*)\s*$")
_HEADING = re.compile(r"(#{1,6})\s+(.+?)\s*#*$")
_COMMENT = re.compile(r"\s*<!--\s*(.*?)\s*-->\s*$")
_CODE = re.compile(r"(?<!`)(`+)(?!`)(.+?)(?<!`)\1(?!`)", re.DOTALL)
LINK = re.compile(r"\[(?:[^\[\]]|\[[^\[\]]*\])*\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)")
_ITEM = re.compile(r"( *)([-*+]|\d+[.)]) +")
_EXIT_CODE = re.compile(r"#\s*exit code (\d+)\s*$")
_NAME = re.compile(r"#\s*(\S+\.py)\s*$")


@dataclass(frozen=True)
class Command:
    """One command of a shell block, with all of its lines."""

    line: int
    text: str

    @property
    def exit_code(self) -> int:
        """The exit code that its last line states, else 0."""
        found = _EXIT_CODE.search(self.text)
        return int(found[1]) if found else 0


@dataclass(frozen=True)
class Block:
    """A fenced block."""

    line: int
    """Line number of its first line of content."""
    language: str
    text: str
    mark: str | None
    """Text of the HTML comment on the line before the block."""

    @property
    def file(self) -> str | None:
        """The file that a `python` block is written to: the name in its first line."""
        found = _NAME.match(self.text.partition("\n")[0]) if self.language == "python" else None
        return found[1] if found else None


@dataclass(frozen=True)
class Heading:
    """A heading, with the anchor that GitHub gives it."""

    line: int
    level: int
    text: str
    anchor: str


@dataclass(frozen=True)
class Span:
    """Inline code, or the target of a link."""

    line: int
    text: str


@dataclass
class Page:
    """What a page consists of."""

    path: Path
    blocks: list[Block] = field(default_factory=list)
    headings: list[Heading] = field(default_factory=list)
    links: list[Span] = field(default_factory=list)
    codes: list[Span] = field(default_factory=list)
    rows: list[Span] = field(default_factory=list)
    """Rows of tables."""
    prose: list[Span] = field(default_factory=list)
    """Paragraphs, headings and rows of tables, with x for inline code."""
    faults: list[str] = field(default_factory=list)
    """What the reader does not accept: `file:line: what to do`."""

    @property
    def name(self) -> str:
        """Its path in the checkout."""
        return self.path.relative_to(ROOT).as_posix() if self.path.is_relative_to(ROOT) else self.path.name

    def fault(self, line: int, text: str) -> str:
        """A fault as one line."""
        return f"{self.name}:{line}: {text}"


AGENTS = ROOT / "docker/rootfs/etc/trainstation/AGENTS.md"
"""The page for coding agents, which the station copies to its users."""


def english() -> list[Path]:
    """Every English page, in a fixed order."""
    beside_code = [ROOT / folder / "README.md" for folder in FOLDERS]
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *beside_code, AGENTS]


def chinese() -> list[Path]:
    """Every Chinese page. Their commands are those of the English pages."""
    return [ROOT / "README.zh-CN.md", *sorted((ROOT / "docs" / "zh").glob("*.md"))]


def paths() -> list[Path]:
    """Every page, in a fixed order."""
    return english() + chinese()


def anchor_of(text: str) -> str:
    """The anchor that GitHub makes of a heading's text."""
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text).replace("`", "").replace("*", "")
    return re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")


def read(path: Path, text: str | None = None) -> Page:
    """Read a page. `text` stands for the content of the file in tests of the tests."""
    page = Page(path)
    lines = (path.read_text() if text is None else text).splitlines()
    prose: list[tuple[int, str]] = []
    number, before, in_list = 0, "", False
    while number < len(lines):
        line = lines[number]
        if opened := _FENCE.match(line):
            prose.append((number, ""))
            number = _read_block(page, lines, number, opened)
            before = "```"
            continue
        if _is_stray_mark(lines, number):
            page.faults.append(page.fault(number + 1, "no block follows this mark; put it on the line before ```"))
        if line.strip():
            in_list = bool(_ITEM.match(line)) or (in_list and line.startswith(" "))
        if line.startswith("    ") and not before.strip() and not in_list:
            page.faults.append(page.fault(number + 1, "indented code; write a ``` block with a language"))
        if not _COMMENT.match(line):
            prose.append((number, line))
        before, number = line, number + 1
    for start, paragraph in _paragraphs(prose):
        _read_prose(page, start, paragraph)
    return page


def _is_stray_mark(lines: list[str], number: int) -> bool:
    """Whether this line is a mark without a block right after it."""
    comment = _COMMENT.match(lines[number])
    is_mark = comment is not None and comment[1].startswith(("needs ", "tested by "))
    return is_mark and (number + 1 == len(lines) or not _FENCE.match(lines[number + 1]))


def _read_block(page: Page, lines: list[str], number: int, opened: re.Match[str]) -> int:
    """Add the block that opens in this line. Returns the number of the line after it."""
    indent, fence, language = opened[1], opened[2], opened[3]
    end = number + 1
    while end < len(lines) and not re.fullmatch(rf"\s*{fence[0]}{{{len(fence)},}}\s*", lines[end]):
        end += 1
    if end == len(lines):
        page.faults.append(page.fault(number + 1, "this block has no end; close it with ```"))
    mark = _COMMENT.match(lines[number - 1]) if number else None
    text = "\n".join(line.removeprefix(indent) for line in lines[number + 1 : end])
    page.blocks.append(Block(number + 2, language, text, mark[1] if mark else None))
    return end + 1


def _paragraphs(prose: list[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    """The number of the first line and the text of each paragraph; rows of a table are paragraphs."""
    start, gathered = 0, []
    for number, line in prose:
        is_alone = line.lstrip().startswith(("|", "#")) or bool(_ITEM.match(line))
        if gathered and (not line.strip() or is_alone):
            yield start, "\n".join(gathered)
            gathered = []
        if line.strip():
            if not gathered:
                start = number
            gathered.append(line)
    if gathered:
        yield start, "\n".join(gathered)


def _read_prose(page: Page, start: int, text: str) -> None:
    """Add the heading, the links and the inline code of a paragraph."""
    if heading := _HEADING.fullmatch(text):
        anchor = anchor_of(heading[2])
        page.headings.append(Heading(start + 1, len(heading[1]), heading[2], anchor))
    is_row = text.lstrip().startswith("|")
    if is_row:
        page.rows.append(Span(start + 1, text))
    for found in _CODE.finditer(text):
        code = " ".join(found[2].split())
        line = start + 1 + text.count("\n", 0, found.start())
        page.codes.append(Span(line, code.replace("\\|", "|") if is_row else code))
    plain = _CODE.sub(lambda code: "x" + "\n" * code[0].count("\n"), text)
    page.prose.append(Span(start + 1, plain))
    if "`" in plain:
        page.faults.append(page.fault(start + 1, "a ` without its partner; close the inline code"))
    for found in LINK.finditer(plain):
        page.links.append(Span(start + 1 + plain.count("\n", 0, found.start()), found[1]))


def commands(block: Block) -> list[Command]:
    """The commands of a shell block: a line each, or as many lines as bash needs for a whole command."""
    found: list[Command] = []
    gathered: list[str] = []
    for number, line in enumerate(block.text.splitlines()):
        gathered.append(line)
        text = "\n".join(gathered)
        if not is_whole(text):
            continue
        if text.strip() and not text.lstrip().startswith("#"):
            found.append(Command(block.line + number - len(gathered) + 1, text))
        gathered = []
    if gathered:
        found.append(Command(block.line + len(block.text.splitlines()) - len(gathered), "\n".join(gathered)))
    return found


def is_whole(text: str) -> bool:
    """Whether bash takes this text for a whole command."""
    if text.endswith("\\"):
        return False
    if not re.search(r"<<|['\"({]|\b(for|while|until|if|case|do|then)\b", text):  # most lines need no bash to say so
        return True
    done = subprocess.run(["bash", "-n"], input=text + "\n", capture_output=True, text=True, check=False)
    return done.returncode == 0 and "here-document" not in done.stderr


_KEYWORDS = {"do", "then", "else", "if", "while", "until", "!", "{", "(", "time", "sudo", "exec", "nohup", "env", "&"}
_ENDS = {"&&", "||", ";", "|", "&", ";;", "(", ")", "|&"}
_SUBSTITUTION = re.compile(r"\$\(([^()]*)\)")
_TOKEN = re.compile(
    r"""[#][^\n]*
    |(?P<operator>&>>?|&&|\|\||;;|\|&|[\n;|&()])
    |(?P<word>(?:\\.|'[^']*'|"(?:\\.|[^"\\])*"|[<>]&|[^\s;|&()'"\\])+)""",
    re.VERBOSE | re.DOTALL,
)
_QUOTED = re.compile(r"\\(.)|'([^']*)'|\"((?:\\.|[^\"\\])*)\"", re.DOTALL)
_REDIRECTION = re.compile(r"\d*(>>|>|<|>&|<&|<<<|&>|<<-?)\S*$")


def programs(text: str) -> list[list[str]]:
    """The words of each program that a shell command calls, without assignments, redirections and comments."""
    found: list[list[str]] = []
    for piece in _pieces(_without_heredocs(text)):
        words = list(piece)
        while words and (words[0] in _KEYWORDS or re.match(r"[A-Za-z_]\w*=", words[0])):
            words.pop(0)
        if words and words[0] not in ("for", "case", "done", "fi", "esac", "}"):
            found.append(words)
    return found


def _without_heredocs(text: str) -> str:
    """The command without the lines of its here-documents."""
    lines, kept, end = text.splitlines(), [], None
    for line in lines:
        if end is not None:
            end = None if line.strip() == end else end
            continue
        kept.append(line)
        if found := re.search(r"<<-?\s*['\"]?(\w+)['\"]?", line):
            end = found[1]
    return "\n".join(kept)


def _pieces(text: str) -> Iterator[list[str]]:
    """The words between the operators of a shell; $( ) and ` ` give pieces of their own."""
    piece: list[str] = []
    skip = False
    for token in _tokens(text):
        if skip:
            skip = False
        elif token in _ENDS or token == "\n":
            if piece:
                yield piece
            piece = []
        elif redirection := _REDIRECTION.match(token):
            skip = redirection[0].endswith((">", "<", "-"))
        else:
            piece.append(token)
    if piece:
        yield piece


def _tokens(text: str) -> Iterator[str]:
    """The words and operators of a command, with quotes removed. Commands in $( ) come after the others."""
    text = text.replace("\\\n", " ")
    for found in _TOKEN.finditer(_SUBSTITUTION.sub("$SUBSTITUTED", text)):
        if found["operator"]:
            yield found["operator"]
        elif found["word"]:
            yield _QUOTED.sub(lambda part: part[1] or part[2] or part[3] or "", found["word"])
    for found in _SUBSTITUTION.finditer(text):
        yield "\n"
        yield from _tokens(found[1])
