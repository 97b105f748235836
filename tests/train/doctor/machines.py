"""Machines for the tests of the doctor: folders of files, and programs that print what was recorded."""

from __future__ import annotations

from pathlib import Path

from train.doctor.finding import Finding
from train.doctor.machine import Machine

RECORDED = Path(__file__).parent / "recorded"


def machine(folder: Path, files: dict[str, str] | None = None, **environ: str) -> Machine:
    """A machine whose files are under a folder, and whose programs are those in its folder bin."""
    for name, text in (files or {}).items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (folder / "bin").mkdir(parents=True, exist_ok=True)
    return Machine({"PATH": f"{folder / 'bin'}:/usr/bin:/bin", **environ}, folder)


def program(folder: Path, name: str, script: str) -> None:
    """A program of such a machine: a shell script."""
    path = folder / "bin" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def nvidia_smi(folder: Path, xml: str, capability: str) -> None:
    """An nvidia-smi that prints a recording, and the compute capability of each of its cards."""
    (folder / "recorded.xml").write_text(xml)
    lines = "".join(f"{number}, {capability}\\n" for number in range(xml.count("<gpu id=")))
    query = f"case $1 in --query-gpu*) printf '{lines}' ;; *) cat {folder / 'recorded.xml'} ;; esac"
    program(folder, "nvidia-smi", query)


def by_name(findings: list[Finding]) -> dict[str, Finding]:
    return {finding.check: finding for finding in findings}
