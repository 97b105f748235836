"""Compares a Chinese page with its English one: what a reader types, clicks or looks up must be the same.

Equal must be: levels of headings, blocks (without comments, but with the file names and exit codes that comments
state) and their marks, the inline code of each row, and below each heading the inline code, links and numbers.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.docs.pages import LINK, ROOT, Block, Page, Span, commands, read

CHINESE = ROOT / "docs" / "zh"
README = ROOT / "README.zh-CN.md"
TERMS = CHINESE / "terms.md"
"""The table of terms, which has no English page. It alone says which words the others may not use."""
_COMMENT = re.compile(r"(^|\s+)#.*$")
IN_ENGLISH = "\uff08\u82f1\u6587\uff09"
_IN_ENGLISH = r"[\uff08\uff0c]\u82f1\u6587\uff09"
_EXPLAINED = re.compile(r"\s*[(\uff08][*A-Za-z -]+[)\uff09]")
_NUMBER = re.compile(r"\d[\d,.]*\d|\d")


def english_of(chinese: Path) -> Path:
    return ROOT / "README.md" if chinese == README else ROOT / "docs" / chinese.name


def chinese_of(english: Path) -> Path:
    return README if english == ROOT / "README.md" else CHINESE / english.name


def differences(chinese: Page, english: Page) -> Iterator[str]:
    """Yield what differs, as `file:line: what to do`."""
    if (mine := [one.level for one in chinese.headings]) != (wanted := [one.level for one in english.headings]):
        line = next(
            (chinese.headings[at].line for at, (a, b) in enumerate(zip(mine, wanted, strict=False)) if a != b), 1
        )
        yield chinese.fault(line, f"{len(mine)} headings, but {len(wanted)} in {english.name}, or on other levels")
        return
    for own, its in itertools.zip_longest(chinese.blocks, english.blocks):
        if own is None or its is None:
            yield chinese.fault(1, f"{len(chinese.blocks)} blocks, but {len(english.blocks)} in {english.name}")
            break
        if (own.language, own.mark) != (its.language, its.mark):
            yield chinese.fault(own.line - 1, f"another language or mark than {english.name}:{its.line - 1}")
            break
        for mine_line, its_line in itertools.zip_longest(_lines(own), _lines(its)):
            if mine_line is None or its_line is None or mine_line.text != its_line.text:
                line, there = mine_line.line if mine_line else own.line, its_line.line if its_line else its.line
                yield chinese.fault(line, f"only comments may differ from {english.name}:{there}")
                break
    yield from _rows(chinese, english)
    for number, heading in enumerate(chinese.headings):
        end = _line_after(chinese, number)
        part = english.headings[number].line, _line_after(english, number)
        for what, shown, expected in (
            ("code", {one.text for one in _in(chinese.codes, (heading.line, end))},
             {one.text for one in _in(english.codes, part)}),
            ("links", {_english(chinese, one.text) for one in _in(chinese.links, (heading.line, end))
                       if ROOT / _target(chinese, one.text)[0] != TERMS},
             {_target(english, one.text) for one in _in(english.links, part)}),
            ("numbers", _numbers(_in(chinese.prose, (heading.line, end))), _numbers(_in(english.prose, part))),
        ):  # fmt: skip
            lacks, has = sorted(map(str, expected - shown)), sorted(map(str, shown - expected))
            if lacks or has:
                where = f"{english.name}:{part[0]}"
                yield chinese.fault(heading.line, f"{what} below this heading: lacks {lacks} of {where}, has {has}")


def _rows(chinese: Page, english: Page) -> Iterator[str]:
    if len(chinese.rows) != len(english.rows):
        yield chinese.fault(1, f"{len(chinese.rows)} rows of tables, but {len(english.rows)} in {english.name}")
    for own_row, its_row in zip(chinese.rows, english.rows, strict=False):
        if own_row.text.count("|") != its_row.text.count("|"):
            yield chinese.fault(own_row.line, f"other columns than {english.name}:{its_row.line}")
        elif _code_of(chinese, own_row) != _code_of(english, its_row):
            yield chinese.fault(own_row.line, f"other inline code than in the row {english.name}:{its_row.line}")
            break


def _lines(block: Block) -> list[Span]:
    """Return the lines of a block without comments, but with the file name and the exit codes that comments state."""
    states = {command.line: f" exit code {command.exit_code}" for command in commands(block) if command.exit_code}
    if block.file:
        states[block.line] = block.file
    found = []
    for number, line in enumerate(block.text.splitlines(), block.line):
        text = _COMMENT.sub("", line).rstrip() + states.get(number, "")
        found += [Span(number, text)] if text else []
    return found


def _code_of(page: Page, row: Span) -> Counter[str]:
    return Counter(one.text for one in page.codes if one.line == row.line)


def _numbers(spans: list[Span]) -> set[str]:
    """Return the numbers of a text, without those in the targets of links."""
    texts = [re.sub(r"\]\([^)]*\)", "]", one.text) for one in spans]
    return {number.replace(",", "") for text in texts for number in _NUMBER.findall(text)}


def _line_after(page: Page, number: int) -> float:
    return page.headings[number + 1].line if number + 1 < len(page.headings) else float("inf")


def _in(spans: list[Span], lines: tuple[float, float]) -> list[Span]:
    return [one for one in spans if lines[0] <= one.line < lines[1]]


def _target(page: Page, link: str) -> tuple[str, str]:
    """Return file and anchor of a link, the file by its path in the checkout."""
    if re.match(r"[a-z][a-z0-9+.-]*:", link):
        return link, ""
    path, _, anchor = link.partition("#")
    target = (page.path.parent / path).resolve() if path else page.path
    return (target.relative_to(ROOT).as_posix() if target.is_relative_to(ROOT) else path), anchor


def _english(page: Page, link: str) -> Any:
    """Return the English target of a link in a Chinese page; a text says that it should lead to the Chinese page."""
    name, anchor = _target(page, link)
    target = ROOT / name
    if target == english_of(page.path):  # the link to the other language
        return page.name, anchor
    if name.startswith("notebooks/zh/"):
        return name.replace("zh/", ""), anchor
    if target in (README, *CHINESE.glob("*.md")):
        english = english_of(target)
        if anchor:
            there = page if target == page.path else read(target)
            places = [one.anchor for one in there.headings]
            if anchor in places:
                anchor = read(english).headings[places.index(anchor)].anchor
        return english.relative_to(ROOT).as_posix(), anchor
    if target.suffix == ".md" and chinese_of(target).exists():
        return f"{link} (there is a Chinese page)"
    return name, anchor


def unwanted(terms: Page) -> dict[str, list[str]]:
    """Map each word that the table of terms forbids to the words that its row gives instead."""
    found = {}
    for row in terms.rows:
        cells = [cell.strip() for cell in row.text.strip().strip("|").split("|")]
        if len(cells) == 4:
            found |= {one: re.split(r"[\u3001\uff0c]", cells[1]) for one in re.findall(r"`([^`]+)`", cells[3])}
    return found


def wrong_words(text: str, words: dict[str, list[str]]) -> Iterator[str]:
    """Yield the forbidden words of a Chinese text without code. English in brackets explains a term, and is allowed."""
    text = _EXPLAINED.sub("", re.sub(r"\]\([^)]*\)", "]", text))
    for word, instead in words.items():
        rest = text
        for right in instead:
            if word in right:
                rest = rest.replace(right, "")
        if re.search(rf"(?<![\w./-]){word}(?![\w/-]|\.\w)" if word.isascii() else word, rest, re.ASCII | re.IGNORECASE):
            yield f"{word}; write {instead[0]} ({TERMS.name})"


def unmarked(chinese: Page) -> Iterator[str]:
    """Yield the links of a Chinese page to English pages that do not say so right behind the link."""
    for one in chinese.prose:
        for found in LINK.finditer(one.text):
            target = ROOT / _target(chinese, found[1])[0]
            is_ours = target.suffix == ".md" and not re.match(r"\w+:", found[1])
            if not is_ours or target == README or "zh" in target.parts or found[0].startswith("[English]"):
                continue
            if not re.match(_IN_ENGLISH, one.text[found.end() :]):
                yield chinese.fault(one.line, f"{found[1]} is English; write {IN_ENGLISH} after the link")


def switches(page: Page, other: Path) -> bool:
    """Whether the first lines of a page, below its title, link the same page in the other language."""
    first = [one for one in page.links if one.line <= 3]
    return any(_target(page, one.text)[0] == other.relative_to(ROOT).as_posix() for one in first)
