"""Entry point of `kernelbraid` and `python -m kernelbraid`."""

from kernelbraid.cli import main

if __name__ == "__main__":
    main()
