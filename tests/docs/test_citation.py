"""CITATION.cff: what it must have, and the version of the package."""

from __future__ import annotations

import yaml

import train
from tests.docs.pages import ROOT


def test_the_citation_has_what_the_format_needs_and_our_version() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= cited.keys()
    assert cited["cff-version"] == "1.2.0" and cited["type"] == "software"
    assert str(cited["version"]) == train.__version__
    assert cited["authors"] and all("name" in author or "family-names" in author for author in cited["authors"])
