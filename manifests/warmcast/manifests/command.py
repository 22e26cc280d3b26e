"""The ``warmcast`` command: finds its subcommands, and turns errors into one line.

A subcommand is an entry point in the group ``warmcast.commands``: a function that typer
understands, or a typer app with subcommands of its own. Only the one that is called is imported,
so that no command pays for another's libraries. Exit codes: 0, 1 for a failed job, 2 for wrong
usage, 130 after Ctrl-C.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import EntryPoint, entry_points, version

import typer

from warmcast.manifests.errors import UsageError, WarmcastError, one_line

GROUP = "warmcast.commands"
_INTERRUPTED = 130


def main(
    arguments: Sequence[str] | None = None, entries: Iterable[EntryPoint] | None = None
) -> None:
    """Run the command line and exit; ``--debug``, anywhere in it, shows tracebacks.

    ``entries`` are the subcommands; None: those of the packages that are installed.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in words
    words = [word for word in words if word != "--debug"]
    try:
        code = run(words, entries)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, a `head` perhaps, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    except KeyboardInterrupt:
        if debug:
            raise
        _complain("interrupted; what was begun can be run again")
        code = _INTERRUPTED
    except Exception as cause:  # the last handler of a process
        if debug:
            raise
        code = explain(cause)
    sys.exit(code)


def explain(cause: Exception) -> int:
    """Print one line for an error; the exit code that goes with it."""
    if isinstance(cause, WarmcastError):
        _complain(str(cause))
        return cause.exit_code
    format_message = getattr(cause, "format_message", None)
    if callable(format_message):  # the argument parser's own errors, whichever parser typer has
        _complain(f"{one_line(format_message()).rstrip('.')} (see --help)")
        return int(getattr(cause, "exit_code", 2))
    if isinstance(cause, OSError) and cause.strerror:
        named = "" if cause.filename is None else f"{cause.filename}: "
        _complain(one_line(f"{named}{cause.strerror}"))
        return 1
    line = one_line(cause) or "no message"
    _complain(f"{type(cause).__name__}: {line} (a bug, or a case we missed: --debug shows where)")
    return 1


def run(words: Sequence[str], entries: Iterable[EntryPoint] | None = None) -> int:
    """Run one subcommand; its exit code. Errors of ours pass through."""
    found = entry_points(group=GROUP) if entries is None else entries
    commands = {entry.name: entry for entry in found}
    if list(words) == ["--version"]:
        print(f"warmcast {version('warmcast')}")
        return 0
    if words and not words[0].startswith("-") and words[0] not in commands:
        raise UsageError(
            "command line",
            expected=f"a command of {', '.join(sorted(commands))}",
            found=repr(words[0]),
        )
    # Help over all commands needs all of them; anything else needs the one that is called.
    wanted = [commands[words[0]]] if words and words[0] in commands else list(commands.values())
    app = _app(wanted)
    try:
        result = app(list(words) or ["--help"], prog_name="warmcast", standalone_mode=False)
    except typer.Abort as cause:
        raise KeyboardInterrupt from cause
    if result == _INTERRUPTED:  # what typer makes of Ctrl-C
        raise KeyboardInterrupt
    if not words:
        return UsageError.exit_code
    return result if isinstance(result, int) else 0


def _app(entries: Sequence[EntryPoint]) -> typer.Typer:
    app = typer.Typer(
        name="warmcast",
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )

    @app.callback()
    def root() -> None:
        """Verified weights from the fastest place that has them."""

    for entry in sorted(entries, key=lambda e: e.name):
        try:
            command, settings = entry.load(), {}
        except ModuleNotFoundError as cause:
            command, settings = _missing(entry.name, cause), _ANY_ARGUMENTS
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=entry.name)
        else:
            app.command(entry.name, context_settings=settings)(command)
    return app


_ANY_ARGUMENTS = {"allow_extra_args": True, "ignore_unknown_options": True}


def _missing(command: str, cause: ModuleNotFoundError) -> Callable[[], None]:
    """What stands for a command whose libraries are not installed, so that help shows the rest."""

    def missing() -> None:
        raise UsageError(
            f"warmcast {command}",
            expected=f"the package {cause.name!r}",
            found="it is not installed",
            do="install the extra of warmcast that brings it",
        ) from cause

    missing.__doc__ = f"Needs the package {cause.name!r}, which is not installed."
    return missing


def _complain(line: str) -> None:
    print(f"warmcast: {line}", file=sys.stderr)
