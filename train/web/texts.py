"""The words of the page in English and Chinese, from one table (texts.toml). Reasons and commands stay English."""

from __future__ import annotations

import functools
import re
import tomllib
from pathlib import Path
from typing import Any

from ..format import ago, duration

_UNITS = re.compile(r"(\d) (ms|s|min|h|d)\b")


class Texts:
    """Maps the keys of the table to the words of one language."""

    def __init__(self, language: str) -> None:
        self.language = language
        """Of the element <html>: en or zh-CN."""
        place = 0 if language == "en" else 1
        self._words = {key: both[place] for key, both in _table().items()}

    def __call__(self, key: str, *values: Any) -> str:
        """Return a text of the table with values in it."""
        return self._words[key].format(*values)

    def count(self, key: str, number: int, *values: Any) -> str:
        """Return a text with a number, which has another form for one in English."""
        single = f"{key}_1"
        return self(single if number == 1 and single in self._words else key, number, *values)

    def get(self, key: str) -> str:
        """Return a text of the table; the key itself if it has none."""
        return self._words.get(key, key)

    def duration(self, seconds: float) -> str:
        """Format a duration."""
        return self._units(duration(seconds))

    def ago(self, seconds: float) -> str:
        """Format an age."""
        return self("ago", self._units(ago(max(seconds, 0.0)).removesuffix(" ago")))

    def _units(self, text: str) -> str:
        if self.language == "en":
            return text
        return _UNITS.sub(lambda match: f"{match[1]} {self._words[match[2]]}", text)


@functools.cache
def _table() -> dict[str, list[str]]:
    return tomllib.loads(Path(__file__).with_name("texts.toml").read_text(encoding="utf-8"))


@functools.cache
def _texts(language: str) -> Texts:
    return Texts(language)


def of(accepted: str) -> Texts:
    """Return the words for a browser, given its Accept-Language: the first language that there is; else English."""
    wanted = []
    for place, part in enumerate(accepted.split(",")[:20]):
        name, _, quality = part.strip().partition(";q=")
        with_number = re.fullmatch(r"[01](\.\d{1,3})?", quality.strip())
        wanted.append((-float(quality) if with_number else -1.0, place, name.lower()[:2]))
    found = [name for quality, _, name in sorted(wanted) if name in ("en", "zh") and quality < 0]
    return _texts("zh-CN" if found[:1] == ["zh"] else "en")
