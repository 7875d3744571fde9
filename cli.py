"""The `weightbus` command: the composition root."""

from __future__ import annotations

import typer

app = typer.Typer(name="weightbus", no_args_is_help=True, add_completion=False)


def main() -> None:
    """Run the command line."""
    app()
