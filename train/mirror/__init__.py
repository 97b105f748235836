"""The copy of a run elsewhere: on another disk, in an object store, on another machine. Imports no torch."""
