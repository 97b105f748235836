"""Fetch uPlot, which draws the curves of the page: python3 docker/uplot.py [FOLDER]

The build of the image and `make setup` run this. Two files and their licence go into FOLDER, by default
share/trainstation of this Python. They come from the npm registry, or from NPM_MIRROR.
"""

import hashlib
import io
import os
import sys
import tarfile
import urllib.request
from pathlib import Path

from jupyter_builder.constants import JPBLD_NPM_URL  # JupyterLab's own default

TARBALL = "uplot/-/uplot-1.6.32.tgz"
SHA512 = (
    "2883159c6ebccefbb95d751b0b82d010f9e1c0ec41b8bc96d401eda66e882935"
    "c89a46cb824332fa369b8cb8122cc6ac36e186cd09bf7a9ded3a4c93c6989023"
)
FILES = {
    "package/dist/uPlot.iife.min.js": "uPlot.iife.min.js",
    "package/dist/uPlot.min.css": "uPlot.min.css",
    "package/LICENSE": "uPlot.LICENSE",
}
"""Maps a file of the tarball to its name in the folder."""
TIMEOUT = 60
"""Seconds without a byte after which the registry counts as unreachable."""


def main(folder: Path) -> str:
    """Write the files into the folder. Returns what failed, or an empty text."""
    address = f"{(os.environ.get('NPM_MIRROR') or JPBLD_NPM_URL).rstrip('/')}/{TARBALL}"
    try:
        with urllib.request.urlopen(address, timeout=TIMEOUT) as answer:
            data = answer.read(10_000_000)
        if hashlib.sha512(data).hexdigest() != SHA512:
            return f"{address} is not the file whose SHA-512 is in docker/uplot.py"
        folder.mkdir(parents=True, exist_ok=True)
        with tarfile.open(fileobj=io.BytesIO(data)) as archive:
            for member, name in FILES.items():
                found = archive.extractfile(member)
                assert found
                (folder / name).write_bytes(found.read())
    except (OSError, ValueError) as error:  # ValueError: NPM_MIRROR is no address
        return f"uPlot could not be fetched from {address} ({error}); NPM_MIRROR in .env can name a mirror of npm"
    return ""


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else f"{sys.prefix}/share/trainstation")) or 0)
