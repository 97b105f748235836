"""The package `train` under a name that a user's own train.py cannot hide.

    import trainstation

A script is often called train.py. Python searches the script's folder first, so `import train` finds the script. This
module takes the folder of the package `train` as its path: `trainstation.cli` is the file train/cli.py. It never
imports or registers `train`.
"""

from pathlib import Path

__path__ = [str(Path(__file__).parents[1] / "train")]
_FILE = Path(__path__[0], "__init__.py")
exec(compile(_FILE.read_bytes(), _FILE, "exec"))  # what `train` itself offers, under this name
