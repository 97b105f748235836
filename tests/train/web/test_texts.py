"""The table of the page's words."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import train.web
from train.monitor import time_spent
from train.run import states
from train.web import texts

HOME = Path(train.web.__file__).parent
TABLE = texts._table()


def test_both_languages_have_every_text_with_the_same_values() -> None:
    for key, (english, chinese) in TABLE.items():
        assert english.count("{}") == chinese.count("{}"), key
        assert english and chinese, key


def test_every_text_that_is_asked_for_is_there_and_no_other() -> None:
    sources = [path.read_text() for path in (*HOME.glob("*.py"), *HOME.glob("templates/*.html"))]
    used = {key for text in sources for key in re.findall(r"\bt(?:exts)?(?:\.count)?\(\s*\"(\w+)\"", text)}
    made = {
        *states.ALL,
        *(f"part_{part}" for part in time_spent.PARTS),
        "ms",
        "s",
        "min",
        "h",
        "d",
        "ago",
        "last",
        "top",
    }
    made |= {key for key in TABLE if key.startswith("do_")} | {f"{key}_1" for key in used if f"{key}_1" in TABLE}
    assert used | made == set(TABLE)


@pytest.mark.parametrize(
    ("accepted", "language"),
    [
        ("", "en"), ("zh", "zh-CN"), ("zh-TW,en", "zh-CN"), ("en-GB,zh;q=0.9", "en"), ("fr,zh;q=0.2,en;q=0.1", "zh-CN"),
        ("zh;q=0,en", "en"), ("zh;q=<b>", "zh-CN"), (",;,;q=9e9", "en"),
    ],
)  # fmt: skip
def test_the_browser_chooses_the_language(accepted: str, language: str) -> None:
    assert texts.of(accepted).language == language


def test_times_are_in_the_language() -> None:
    assert texts.of("en").ago(7200) == "2 h ago" and texts.of("en").duration(250) == "4 min 10 s"
    assert "h" not in texts.of("zh").ago(7200) and "min" not in texts.of("zh").duration(250)
