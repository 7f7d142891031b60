"""`python -m mtkit` is the `mtkit` command."""

from mtkit.cli.app import main

main()
