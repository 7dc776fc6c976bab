"""``python -m emdcfl``."""

from emdcfl.cli import main

if __name__ == "__main__":
    main()
