"""`python -m weightbus` is the `weightbus` command."""

from .cli import main

main()
