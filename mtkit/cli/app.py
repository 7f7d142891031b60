"""The `mtkit` command: its subcommands, and the only place that prints a user's mistake."""

import hashlib
import importlib
import io
import os
import re
import sys
from keyword import iskeyword
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer import Option

from mtkit.errors import MtkitError, check_utf8, cut, cut_words, reason
from mtkit.version import __version__

COMMANDS = (
    "prepare",
    "train",
    "translate",
    "score",
    "report",
    "serve",
    "align",
    "plot",
    "import",
    "export",
    "attentions",
    "tasks",
    "benchmark",
    "compare",
    "recipes",
    "studies",
)
"""Commands in the order of the help. The module `mtkit.cli.NAME` has the function or command group NAME; after a
keyword of Python, both names have an underscore."""

HELP = "Train and evaluate translation models in which the attention mechanism is a choice."


class _EndedError(Exception):
    """A broken pipe or a keyboard interrupt, which is the cause of this error."""


class _Commands(typer.core.TyperGroup):
    """The subcommands. Typer would end a broken pipe or an interrupt silently, with its own exit code."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (BrokenPipeError, KeyboardInterrupt) as error:
            raise _EndedError from error


app = typer.Typer(
    name="mtkit",
    cls=_Commands,
    help=HELP,
    epilog="Without arguments the commands use a built-in corpus: mtkit prepare && mtkit train --attention longformer "
    "&& mtkit translate && mtkit score",
    invoke_without_command=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
)


def _print_version(requested: bool) -> None:
    if requested:
        typer.echo(f"mtkit {__version__}")
        raise typer.Exit


@app.callback(help=HELP)
def _mtkit(
    context: typer.Context,
    version: Annotated[
        bool, Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    from mtkit.process import collect_garbage_rarely, keep_freed_memory, set_environment

    set_environment()
    keep_freed_memory()
    collect_garbage_rarely()
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


for _command in COMMANDS:
    _name = f"{_command}_" if iskeyword(_command) else _command
    _entry = getattr(importlib.import_module(f"mtkit.cli.{_name}"), _name)
    if isinstance(_entry, typer.Typer):
        app.add_typer(_entry, name=_command)
    else:
        app.command(_command)(_entry)


def main() -> None:
    """Run the command line. A user's mistake is printed as one line on standard error, with exit code 2."""
    _buffer_stdout()
    try:
        for word in sys.argv:
            check_utf8(word)
        _exit(app(prog_name="mtkit", standalone_mode=False) or 0)
    except MtkitError as error:
        _exit(2, " ".join(str(error).split()))
    except _EndedError as error:
        if isinstance(error.__cause__, BrokenPipeError):
            _exit(0)  # the reader of our output has closed it
        _exit(130, "stopped")
    except (KeyboardInterrupt, typer.Abort):
        _exit(130, "stopped")
    except OSError as error:
        _exit(2, f"{error.filename}: {reason(error)}" if error.filename else reason(error))
    except (MemoryError, RuntimeError) as error:
        from mtkit.memory import is_oom

        if not is_oom(error):
            raise
        _exit(2, "the memory is full; use a smaller model, smaller batches or fewer processes, or free some memory")
    except Exception as error:
        if not hasattr(error, "format_message"):  # click's error classes, of which some versions of typer have a copy
            raise
        command = getattr(getattr(error, "ctx", None), "command_path", "mtkit")
        _exit(2, f"{cut_words(error.format_message())} (see `{command} --help`)")


def _exit(code: int, message: str | None = None) -> NoReturn:
    """Print a message and exit. Output that cannot be written is dropped: Python would retry it and exit with 120."""
    # print would use standard output instead of None
    if message is not None and sys.stderr is not None and not _is_printed(message):
        message = re.sub(r"[^\s/:]{256,}", lambda word: cut(word[0]), message)  # longer than any file name
        try:
            print(f"mtkit: {message}", file=sys.stderr)
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
    try:
        if sys.stdout is not None:  # None if the shell has closed it
            sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)


def _is_printed(message: str) -> bool:
    """Return whether another process of the same torchrun has printed the message: all find a user's mistake."""
    report = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not report:
        return False
    attempt = Path(report).parents[1]  # a folder of torchrun, with a folder for each process of this machine
    try:
        (attempt / f"mtkit-{hashlib.sha256(message.encode()).hexdigest()[:16]}").touch(exist_ok=False)
    except FileExistsError:
        return True
    except (OSError, ValueError):
        return False
    return False


def _buffer_stdout() -> None:
    """Buffer a standard output that PYTHONUNBUFFERED has left unbuffered.

    On a full disk, an unbuffered file writes a part of the text and raises nothing.
    """
    raw = getattr(sys.stdout, "buffer", None)
    if isinstance(raw, io.RawIOBase):
        sys.stdout = io.TextIOWrapper(
            io.BufferedWriter(raw), encoding=sys.stdout.encoding, errors=sys.stdout.errors, line_buffering=True
        )
