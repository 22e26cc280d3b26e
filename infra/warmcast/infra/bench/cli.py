"""The commands ``warmcast bench ...``, as functions for typer; each measures when it is called."""

from __future__ import annotations

import typer

bench = typer.Typer(rich_markup_mode=None)


@bench.callback()
def root() -> None:
    """Measure this machine: each figure beside the limit of the same run."""
