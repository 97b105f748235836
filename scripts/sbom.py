"""Print the parts of an image as CycloneDX: the packages of Debian and of Python, and NVIDIA's compiler.

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


def components() -> Iterator[tuple[str, str, str]]:
    """Yield name, version and package URL of each package; Debian's with the source package that advisories name."""
    form = "${db:Status-Status} ${Package} ${Version} ${Architecture} ${source:Package}\\n"
    for line in _output("dpkg-query", "-W", "-f", form).splitlines():
        state, name, version, architecture, source = line.split()
        if state == "installed":
            where = f"arch={architecture}&distro=debian-12&upstream={quote(source, safe='')}"
            yield name, version, f"pkg:deb/debian/{quote(name)}@{quote(version, safe='')}?{where}"
    for found in distributions(path=["/usr/local/lib/python3.11/dist-packages"]):
        name = re.sub(r"[-_.]+", "-", found.metadata["Name"]).lower()
        yield name, found.version, f"pkg:pypi/{name}@{quote(found.version, safe='')}"
    uplot = Path("/usr/share/trainstation/uPlot.iife.min.js")
    if uplot.exists():
        version = uplot.read_text().partition("(v")[2].partition(")")[0]
        yield "uplot", version, f"pkg:npm/uplot@{version}"
    if Path("/usr/local/cuda/bin/nvcc").exists():
        version = _output("/usr/local/cuda/bin/nvcc", "--version").rpartition(", V")[2].split()[0]
        yield "cuda-nvcc", version, f"pkg:generic/cuda-nvcc@{version}"


def _output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


image, image_id, created = sys.argv[1:]
bom = {
    "bomFormat": "CycloneDX",
    "specVersion": "1.6",
    "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_OID, image_id)}",
    "version": 1,
    "metadata": {
        "timestamp": f"{created[:19]}Z",
        "component": {"type": "container", "bom-ref": "image", "name": image, "version": image_id},
    },
    "components": [
        {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}
        for name, version, purl in sorted(components())
    ],
}
print(json.dumps(bom, indent=1))
