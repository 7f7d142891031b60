"""The `mtkit` command, which `python -m mtkit` is too."""

import sys

from mtkit.process import restart_without_cache

AT_ONCE = {"-h", "--help", "--version"}
"""Words of commands that only print; the start of another process would take a quarter of their time."""


def main() -> None:
    """Run the command line; a command that computes runs in a process without glibc's cache (`mtkit.process`)."""
    if len(sys.argv) > 1 and AT_ONCE.isdisjoint(sys.argv):
        restart_without_cache()
    from mtkit.cli.app import main

    main()


if __name__ == "__main__":
    main()
