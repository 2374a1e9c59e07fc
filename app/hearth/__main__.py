"""`python -m hearth`."""

from hearth.cli import main

main()
