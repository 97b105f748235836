"""Copy standard input to standard output without control characters for terminals: python3 -I -S printable.py"""

import os
import re
import sys

STEERS = re.compile(rb"\x1b\[[0-?]*[ -/]*[@-~]|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]|\xc2[\x80-\x9f]")
"""Sequences that begin with ESC [, and all control characters except tab and newline, also of two bytes in UTF-8."""


def main() -> None:
    """Pass on input at once, because a question without a newline may be waiting for an answer."""
    held = b""  # the first half of a character whose second half may follow
    while data := sys.stdin.buffer.read1(65536):
        text = held + data
        while text != (text := STEERS.sub(b"", text)):  # removing a sequence may join the halves of another one
            pass
        held = b"\xc2" if text.endswith(b"\xc2") else b""
        sys.stdout.buffer.write(text[: len(text) - len(held)])
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    try:
        main()
    except BrokenPipeError:  # the reader has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(141)
    except KeyboardInterrupt:
        sys.exit(1)
