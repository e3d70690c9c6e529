"""`python -m identikit`: the command line."""

from identikit.cli import main

main()
