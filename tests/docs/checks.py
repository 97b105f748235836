"""What a page must fulfil; each check yields its faults as `file:line: what to do`."""

from __future__ import annotations

import ast
import functools
import itertools
import json
import re
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import yaml

from tests.docs.pages import ROOT, Block, Page, commands, programs, read
from train import config
from train.commands import COMMANDS
from train.commands.parser import Parser, parse, parser_of
from train.errors import Refused

LANGUAGES = {"bash", "text", "python", "toml", "yaml", "json", "ini", "dockerfile", "mermaid"}
NEEDS = ("a GPU", "two machines", "Slurm", "Kubernetes", "a browser", "the internet", "root")
"""What a block may need to run: `<!-- needs a GPU -->`."""
FOLDERS = ("train/", "tests/", "docs/", "examples/", "scripts/", "deploy/", "docker/", "benchmarks/")
"""Inline code that begins so is a path of the checkout."""
README_LINES = 185
"""Maximum number of lines of README.md."""

EXECUTE_MARKED = {"tests/image/test_backup.py", "tests/image/test_pages.py"}
"""Tests that execute the blocks that name them, as they stand."""

FILES_OF_USERS = ("docker/mine.yml",)
"""Files that pages tell their readers to make."""

OTHERS_FLAGS = {"log-dir", "rdzv-id", "redirects", "tee"}
"""Flags of torchrun that only pages name."""

_PLACEHOLDER = re.compile(r"[A-Z][A-Z0-9_]*([@:.,/=-][A-Z0-9_]+)*|\$\{?\w+\}?.*|<.*>")
_ASSIGNED = re.compile(r"[A-Za-z_]\w*=")


def faults(page: Page) -> list[str]:
    """Everything that is wrong with a page, in the order of its lines."""
    found = page.faults + [fault for check in CHECKS for fault in check(page)]
    return sorted(found, key=lambda fault: int(fault.split(":")[1]))


def headings(page: Page) -> Iterator[str]:
    """Check that a page has one title, skips no level and gives each anchor once."""
    titles = [heading for heading in page.headings if heading.level == 1]
    if len(titles) != 1 or page.headings[0] is not titles[0]:
        line = titles[1].line if len(titles) > 1 else 1
        yield page.fault(line, f"{len(titles)} titles; begin the page with one line `# Title`, and use ## below it")
    for above, below in itertools.pairwise(page.headings):
        if below.level > above.level + 1:
            yield page.fault(below.line, f"skips a level; write {'#' * (above.level + 1)} {below.text}")
    seen: dict[str, int] = {}
    for heading in page.headings:
        if heading.anchor in seen:
            first = seen[heading.anchor]
            yield page.fault(heading.line, f"#{heading.anchor} is also the anchor of line {first}; use another heading")
        seen.setdefault(heading.anchor, heading.line)


def links(page: Page) -> Iterator[str]:
    """Check that files and anchors of relative links exist."""
    for link in page.links:
        if re.match(r"[a-z][a-z0-9+.-]*:", link.text):
            continue
        path, _, anchor = link.text.partition("#")
        target = (page.path.parent / path).resolve() if path else page.path
        if target != page.path and not target.exists():
            yield page.fault(link.line, f"{path} does not exist; fix the link")
        elif anchor and target.suffix == ".md":
            there = page if target == page.path else _page(target)
            if anchor not in (heading.anchor for heading in there.headings):
                yield page.fault(link.line, f"{target.name} has no heading #{anchor}; fix the link")


@functools.cache
def _page(path: Path) -> Page:
    return read(path)


def blocks(page: Page) -> Iterator[str]:
    """Check languages, marks and the syntax of blocks."""
    for block in page.blocks:
        if block.language not in LANGUAGES:
            known = ", ".join(sorted(LANGUAGES))
            yield page.fault(block.line - 1, f"language {block.language or 'missing'}; use one of {known}")
        if block.mark is not None:
            yield from _mark(page, block, block.mark)
        if reason := _syntax_error(block):
            yield page.fault(block.line, f"is no {block.language}: {reason}; fix it, or make it a text block")
        if block.language == "bash" and re.search(r"^\s*\$ ", block.text, re.MULTILINE):
            yield page.fault(block.line, "leave out the prompt $; put output into a text block")


def _mark(page: Page, block: Block, mark: str) -> Iterator[str]:
    line = block.line - 2
    if mark.startswith("needs "):
        unknown = set(re.split(r", | and ", mark.removeprefix("needs "))) - set(NEEDS)
        if unknown:
            yield page.fault(line, f"unknown mark: needs {unknown.pop()}; use one of {', '.join(NEEDS)}")
        return
    if not mark.startswith("tested by "):
        yield page.fault(line, f"unknown mark: {mark}; use `tested by FILE` or `needs …`")
        return
    files = re.split(r", | and ", mark.removeprefix("tested by "))
    if missing := [file for file in files if not (file.startswith("tests/") and (ROOT / file).is_file())]:
        yield page.fault(line, f"{missing[0]} is not a test; name the file below tests/ that runs this")
        return
    if block.language != "bash" or EXECUTE_MARKED & set(files):
        return
    tests = "\n".join((ROOT / file).read_text() for file in files)
    for command in commands(block):
        for words in programs(command.text):
            if not _is_called(words, tests):
                wanted = " ".join(words[:2])
                yield page.fault(command.line, f"{', '.join(files)} does not call `{wanted}`; name the test that does")


def _is_called(words: list[str], tests: str) -> bool:
    """Whether a test contains a command: its program and what it is to do, side by side as words or as list items."""
    program, rest = words[0], [word for word in words[1:] if not word.startswith("-") and not _ASSIGNED.match(word)]
    between = r"[\"',\s(\[]+"
    if program.startswith("scripts/"):
        found = re.search(rf"scripts[/\"',\s]+{re.escape(program.partition('/')[2])}\b", tests)
        return found is not None
    if program not in ("train", "make") or not rest:
        return re.search(rf"(?<![\w-]){re.escape(program)}(?![\w-])", tests) is not None
    what = rf"{re.escape(rest[0])}(?![\w-])"
    after = rf"\b{program}{between}(-\w+{between})?{what}"
    alone = rf"\(\s*\[?\"{what}"  # the tests' own helpers call train: station.ok("launch", …)
    return re.search(after if program == "make" else f"{after}|{alone}", tests) is not None


def _syntax_error(block: Block) -> str | None:
    readers: dict[str, Callable[[str], object]] = {
        "python": ast.parse,
        "toml": tomllib.loads,
        "json": json.loads,
        "yaml": lambda text: list(yaml.safe_load_all(text)),
    }
    try:
        readers.get(block.language, str)(block.text)
    except (SyntaxError, ValueError, yaml.YAMLError) as error:
        return " ".join(str(error).split())
    return None


def commands_in_blocks(page: Page) -> Iterator[str]:
    """Check the train, make and scripts/ commands of `bash` blocks."""
    for block in page.blocks:
        if block.language != "bash":
            continue
        for command in commands(block):
            for words in programs(command.text):
                if reason := _wrong(words, is_whole=True):
                    yield page.fault(command.line, f"`{' '.join(words)}`: {reason}")


def commands_in_prose(page: Page) -> Iterator[str]:
    """Check inline code that begins with train, make or scripts/; alternatives one by one."""
    for code in page.codes:
        if not re.match(r"(train|make)( |$)|scripts/", code.text):
            continue
        for text in _alternatives(code.text):
            reasons = [reason for words in programs(text) if (reason := _wrong(words, is_whole=False))]
            if reasons:
                yield page.fault(code.line, f"`{code.text}`: {reasons[0]}")
                break


def _alternatives(text: str) -> Iterator[str]:
    """What `a [b|c] …` stands for: without brackets and dots, with each of the words in its turn."""
    plain = re.sub(r"[\[\]]|…|(?<!\.)\.\.\.(?!\.)", " ", text) if "'" not in text else text.replace("…", " ")
    words = [word.split("|") if re.search(r"[^|]\|[^|]", word) else [word] for word in plain.split()]
    for number in range(max(map(len, words), default=0)):
        yield " ".join(word[min(number, len(word) - 1)] for word in words)


def _wrong(words: list[str], is_whole: bool) -> str | None:
    """What is wrong with a command of this project, or None. `is_whole`: it has all of its arguments."""
    program, arguments = words[0], words[1:]
    if program in ("train", "scripts/train") or words[:3] == ["python", "-m", "train"]:
        arguments = arguments if "train" in program else words[3:]
        try:
            _check_train(arguments, is_whole)
        except Refused as error:
            return str(error)
    elif program == "make":
        unknown = [word for word in arguments if re.match(r"[a-z]", word) and "=" not in word]
        unknown = [word for word in unknown if word not in _targets()]
        return f"make has no target {unknown[0]}; make help lists them" if unknown else None
    elif program.startswith(("scripts/", "./scripts/")):
        path = program.removeprefix("./")
        known = _PLACEHOLDER.search(path) or any(ROOT.glob(path))
        return None if known else f"{path} does not exist; name a file of scripts/"
    return None


@functools.cache
def _targets() -> set[str]:
    """Every target of make."""
    found: set[str] = set()
    for file in ("Makefile", "docker/station.mk"):
        for names in re.findall(r"^([a-z][a-z -]*):(?!=)", (ROOT / file).read_text(), re.MULTILINE):
            found |= set(names.split())
    return found


@functools.cache
def _parser(command: str) -> Parser:
    return parser_of(command)


def _check_train(arguments: list[str], is_whole: bool) -> None:
    """Check one command of train by its real parser.

    Raises:
        Refused: the program would refuse it, whatever the placeholders stand for.
    """
    while arguments and arguments[0] == "--runs":
        arguments = arguments[2:]
    if not arguments or _PLACEHOLDER.fullmatch(arguments[0]) or arguments[0] in ("--help", "--version", "help"):
        if is_whole and not arguments:
            raise Refused("give a command; train --help lists them")
        return
    command, rest = arguments[0], arguments[1:]
    if command not in COMMANDS:
        raise Refused(f"there is no command {command}; train --help lists them")
    end = rest.index("--") if "--" in rest else len(rest)
    if "--help" in rest[:end]:
        return
    parser = _parser(command)
    given = _with_values(parser, rest[:end])
    try:
        options = parse(parser, [*given, *rest[end:]])
    except Refused as error:
        if not is_whole and (str(error).startswith("give ") or "expected" in str(error)):
            return
        raise
    config.check_flags({name: value for name, value in options.flags.items() if not _PLACEHOLDER.fullmatch(value)})


def _with_values(parser: Parser, words: list[str]) -> list[str]:
    """The arguments with a value that is allowed for each placeholder, and for each flag that is named without one."""
    found: list[str] = []
    left = list(words)
    while left:
        word = left.pop(0)
        if not word.startswith("--") and word not in parser.short:
            choices = [action.choices for action in parser._actions if not action.option_strings and action.choices]
            is_free = _PLACEHOLDER.fullmatch(word) and choices and not found
            found.append(str(next(iter(choices[0] or ()))) if is_free else word)
            continue
        name, equals, value = word.partition("=")
        action = parser.short.get(name) or parser.flag(name[2:])
        if action.nargs == 0:
            found.append(word)
            continue
        if not equals:
            takes = left and (not left[0].startswith("--") or action.option_strings[-1] in parser.verbatim)
            value = left.pop(0) if takes else "VALUE"
        if action.choices and _PLACEHOLDER.fullmatch(value):
            value = str(next(iter(action.choices)))
        found.append(f"{name}={value}")
    return found


def flags_in_prose(page: Page) -> Iterator[str]:
    """Check that flags and config fields that inline code names alone exist."""
    for code in page.codes:
        if found := re.match(r"--([a-z][\w.-]*)", code.text):
            if not _is_flag(found[1]):
                yield page.fault(code.line, f"no command takes {found[0]}; train COMMAND --help lists the flags")
        elif re.fullmatch(r"[a-z_]+\.[a-z_]+", code.text) and not _is_field(code.text):
            yield page.fault(code.line, f"there is no config field {code.text}; train run --help lists the fields")


def _is_flag(name: str) -> bool:
    """Whether a command of train takes this flag, or a script, a test or another program that one of them calls."""
    plain = name.replace("-", "_")
    if plain.startswith(("task.", "optim.args.")) or name in OTHERS_FLAGS:
        return True
    return any(plain in _parser(command).flags for command in COMMANDS) or f"--{name}" in _settings()


def _is_field(name: str) -> bool:
    """Whether this is a field, a figure of the averaged weights, a file, or no name of the configuration at all."""
    group, _, last = name.partition(".")
    groups = {field.partition(".")[0] for field in config.fields() if "." in field}
    is_other = group not in groups or group == "ema" or last in ("json", "safetensors")
    return is_other or name in config.fields() or name == "optim.args"


def paths_in_prose(page: Page) -> Iterator[str]:
    """Check that files of the checkout that inline code names exist."""
    for code in page.codes:
        if not code.text.startswith(FOLDERS):
            continue
        path = re.split(r"[\s:#(]", code.text)[0].rstrip("/.,;")
        path = re.sub(r"\{[^}]*\}|…|<[^>]*>|\b[A-Z][A-Z0-9_]*\b", "*", path)
        if path in ("train", *FILES_OF_USERS) or any(ROOT.glob(path)):
            continue
        yield page.fault(code.line, f"`{code.text}` does not exist in the checkout; fix the path")


def variables(page: Page) -> Iterator[str]:
    """Check that the settings in tables of docs/station.md are read somewhere."""
    if page.name != "docs/station.md":
        return
    for row in page.rows:
        first = row.text.strip().strip("|").split("|")[0]
        for name in re.findall(r"`([A-Z][A-Z0-9_]{2,})(?:=[^`]*)?`", first):
            if not re.search(rf"\b{name}\b", _settings()):
                yield page.fault(row.line, f"no file reads {name}; fix its name, or leave the row out")


@functools.cache
def _settings() -> str:
    """The text of all files that read or name settings of the station."""
    patterns = (".env*.example", "docker-compose*.yml", "Dockerfile", "Makefile", "entrypoint.sh")
    files = [path for pattern in patterns for path in ROOT.glob(pattern)]
    for folder in ("scripts", "docker", "train", "tests/gpu", "tests/torture"):
        files += [path for path in (ROOT / folder).rglob("*") if path.is_file() and path.suffix != ".pyc"]
    return "\n".join(path.read_text(errors="replace") for path in files)


def length(page: Page) -> Iterator[str]:
    """Check that README.md is short."""
    if page.name == "README.md" and (lines := len(page.path.read_text().splitlines())) > README_LINES:
        yield page.fault(lines, f"{lines} lines, at most {README_LINES}; move facts into docs/")


CHECKS = (
    headings,
    links,
    blocks,
    commands_in_blocks,
    commands_in_prose,
    flags_in_prose,
    paths_in_prose,
    variables,
    length,
)
