"""Copy standard input to standard output without what steers a terminal: python3 -I -S printable.py"""

import re
import sys

STEERS = re.compile(rb"\x1b\[[0-?]*[ -/]*[@-~]|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]|\xc2[\x80-\x9f]")
"""Sequences of ESC [, which would leave letters behind, and all control characters but tab and ends of lines; those of
two bytes in UTF-8 too."""


def main() -> None:
    """Pass on what there is at once: a question without an end of line is waiting for its answer."""
    held = b""  # half of a character, whose other half may come
    while data := sys.stdin.buffer.read1(65536):
        text = held + data
        while text != (text := STEERS.sub(b"", text)):  # what was taken out may have stood between two halves
            pass
        held = b"\xc2" if text.endswith(b"\xc2") else b""
        sys.stdout.buffer.write(text[: len(text) - len(held)])
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    try:
        main()
    except (BrokenPipeError, KeyboardInterrupt):
        sys.exit(1)
