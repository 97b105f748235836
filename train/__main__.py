"""`python -m train` is the command `train`."""

from .cli import main

if __name__ == "__main__":
    main()
