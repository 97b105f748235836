"""docs/fields.md is what scripts/fields.py writes, and names every field once."""

from __future__ import annotations

import runpy

from tests.docs.pages import ROOT
from train import config

WRITER = runpy.run_path(str(ROOT / "scripts" / "fields.py"))


def test_the_page_of_fields_is_fresh() -> None:
    assert WRITER["PAGE"].read_text() == WRITER["page"](), "type make fields, and commit docs/fields.md"


def test_the_page_of_fields_names_each_field_with_its_help() -> None:
    rows = [line for line in WRITER["page"]().splitlines() if line.startswith("| `")]
    assert [row.split("`")[1] for row in rows] == list(config.fields())
    assert all(len(row.split(" | ")[-1].strip(" |")) > 10 for row in rows)
