"""Prints what an image is made of, as CycloneDX: the packages of Debian and of Python, and NVIDIA's compiler.

scripts/sbom.sh runs it inside the image: python3 -I - IMAGE ID CREATED.
"""

import json
import re
import subprocess
import sys
import uuid
from collections.abc import Iterator
from importlib.metadata import distributions
from pathlib import Path
from urllib.parse import quote


def main(image: str, image_id: str, created: str) -> None:
    components = sorted([*debian(), *python(), *cuda()], key=lambda component: str(component["bom-ref"]))
    bom = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_OID, image_id)}",
        "version": 1,
        "metadata": {
            "timestamp": f"{created[:19]}Z",
            "component": {"type": "container", "bom-ref": "image", "name": image, "version": image_id},
        },
        "components": components,
    }
    print(json.dumps(bom, indent=1))


def component(name: str, version: str, purl: str, **more: object) -> dict[str, object]:
    return {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl, **more}


def debian() -> Iterator[dict[str, object]]:
    """Each with its source package, by which Debian's security advisories go."""
    form = "${db:Status-Status} ${Package} ${Version} ${Architecture} ${source:Package}\\n"
    for line in _output("dpkg-query", "-W", "-f", form).splitlines():
        state, name, version, architecture, source = line.split()
        if state != "installed":
            continue
        qualifiers = f"arch={architecture}&distro=debian-12&upstream={quote(source, safe='')}"
        yield component(name, version, f"pkg:deb/debian/{quote(name)}@{quote(version, safe='')}?{qualifiers}")


def python() -> Iterator[dict[str, object]]:
    """What pip has installed; Debian's own Python packages are among Debian's."""
    for found in distributions(path=["/usr/local/lib/python3.11/dist-packages"]):
        name = re.sub(r"[-_.]+", "-", found.metadata["Name"]).lower()
        licence = found.metadata["License-Expression"] or found.metadata["License"] or ""
        known = {"licenses": [{"license": {"name": licence}}]} if licence and "\n" not in licence else {}
        yield component(name, found.version, f"pkg:pypi/{name}@{quote(found.version, safe='')}", **known)


def cuda() -> Iterator[dict[str, object]]:
    if Path("/usr/local/cuda/bin/nvcc").exists():
        version = _output("/usr/local/cuda/bin/nvcc", "--version").rpartition(", V")[2].split()[0]
        yield component("cuda-nvcc", version, f"pkg:generic/cuda-nvcc@{version}")


def _output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


main(*sys.argv[1:])
