"""The `mtkit` command: its commands by name, and the one place where a user's mistake becomes one line."""

import importlib
import io
import os
import re
import sys
from keyword import iskeyword
from typing import Annotated, Any, NoReturn

import typer

from mtkit.errors import MtkitError, cut, cut_words
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
    "benchmark",
    "compare",
    "recipes",
)
"""In the order of the work; each is the function, or the group of commands, of that name in the module of that name.
A name that is a word of Python has an underscore behind it there."""


class _EndedError(Exception):
    """A command whose reader has left, or that was told to stop: the cause of this error."""


class _Commands(typer.core.TyperGroup):
    """The commands as a group. typer would end both of these itself, without a word and with a code of its own."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (BrokenPipeError, KeyboardInterrupt) as error:
            raise _EndedError from error


app = typer.Typer(
    name="mtkit",
    cls=_Commands,
    help="Train and evaluate translation models in which the attention mechanism is a choice.",
    epilog="Without arguments the commands use a built-in corpus: mtkit prepare && mtkit train --attention longformer "
    "&& mtkit translate && mtkit score",
    invoke_without_command=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"mtkit {__version__}")
        raise typer.Exit


@app.callback()
def _mtkit(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Train and evaluate translation models in which the attention mechanism is a choice."""
    from mtkit.memory import keep_freed_memory

    # PyTorch reads this when it is first imported: large tensors on the CPU get large pages. The C library maps each of
    # them anew, and to fault one in by pages of 4 KB takes longer than much of the arithmetic on it
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    if "OMP_WAIT_POLICY" not in os.environ:
        # and libgomp this: threads that wait for each other sleep after so many looks, not after 300,000. Where other
        # work wants the core as well, such a thread takes it from the one that it waits for
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    keep_freed_memory()
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
    """Run the command line; a user's mistake is one line on stderr and exit code 2."""
    _write_whole()
    try:
        _check_words(sys.argv)
        _leave(app(prog_name="mtkit", standalone_mode=False) or 0)
    except MtkitError as error:
        _say(" ".join(str(error).split()))
        _leave(2)
    except _EndedError as error:
        if isinstance(error.__cause__, BrokenPipeError):
            _leave(0)  # whoever read our output has had enough; nothing more can be said to them
        _stopped()
    except (KeyboardInterrupt, typer.Abort):
        _stopped()
    except OSError as error:
        _say(f"{error.strerror}: {error.filename}" if error.filename else str(error.strerror or error))
        _leave(2)
    except Exception as error:
        # a wrong option or command; typer brings its own copy of click's classes or not, by its version
        if not hasattr(error, "format_message"):
            if not _is_memory_full(error):
                raise
            _say("the memory is full; use a smaller model, smaller batches or fewer processes, or free some memory")
            _leave(2)
        where = getattr(getattr(error, "ctx", None), "command_path", "mtkit")
        _say(f"{cut_words(error.format_message())} (see `{where} --help`)")
        sys.exit(2)


def _is_memory_full(error: Exception) -> bool:
    if not isinstance(error, MemoryError | RuntimeError):
        return False
    from mtkit.memory import is_oom

    return is_oom(error)


def _stopped() -> NoReturn:
    _say("stopped")
    _leave(130)


def _leave(code: int) -> NoReturn:
    """Exit; output that nobody takes is let go of: the interpreter would try it again, complain, and exit with 120."""
    try:
        if sys.stdout is not None:  # as where the shell has closed it
            sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)


def _write_whole() -> None:
    """Put a buffer before a stdout that has none, as PYTHONUNBUFFERED leaves it.

    Such a file writes as much as there is room for, says how much in a number that nobody reads, and raises nothing.
    """
    raw = getattr(sys.stdout, "buffer", None)
    if isinstance(raw, io.RawIOBase):
        sys.stdout = io.TextIOWrapper(
            io.BufferedWriter(raw), encoding=sys.stdout.encoding, errors=sys.stdout.errors, line_buffering=True
        )


def _check_words(words: list[str]) -> None:
    """Raises: MtkitError for a word that records and messages could not hold."""
    for word in words:
        try:
            word.encode()
        except UnicodeEncodeError as error:
            shown = word.encode(errors="replace").decode()
            raise MtkitError(f"{shown} is not UTF-8; rename that file, or give a link to it") from error


def _say(message: str) -> None:
    message = re.sub(r"[^\s/]{256,}", lambda word: cut(word[0]), message)  # longer than the name of any file
    if sys.stderr is not None:  # print would take standard output then
        print(f"mtkit: {message}", file=sys.stderr)
