"""Writing files so that a kill or a full disk never leaves half of one."""

import errno
import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout

from mtkit.errors import MtkitError

if TYPE_CHECKING:
    from torch import Tensor


@contextmanager
def writing(path: Path) -> Iterator[Path]:
    """A temporary path, for a file or a folder, that replaces `path` when the block ends well.

    The new content is on the disk before it takes its place; when the block fails, nothing of it stays. An existing
    folder at `path` is replaced whole; a link stays one. What processes that were killed here left is removed.

    Raises: MtkitError where the disk is full or the place cannot be written.
    """
    place = Path(os.path.realpath(path))
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        _clear_after_kills(place)
        with _own_folder(place) as own:
            temporary = own / place.name
            yield temporary
            for file in sorted(temporary.rglob("*")) if temporary.is_dir() else [temporary]:
                if file.is_file():
                    _to_disk(file)
            if place.is_dir() and temporary.is_dir():
                place.rename(own / f"{place.name}.replaced")
                temporary.rename(place)
            else:
                temporary.replace(place)
            _to_disk(place.parent)
    except BrokenPipeError:
        raise  # the block's, whose reader has left: nothing is wrong with this file
    except IsADirectoryError as error:
        raise MtkitError(f"{path} is a folder; give the name of a file to write") from error
    except OSError as error:
        raise MtkitError(
            f"cannot write {path}: {error.strerror or error}; free some space or choose another place"
        ) from (error)


def check_writable(path: Path) -> None:
    """Tries the place of a file that long work will write, and leaves nothing there.

    Raises: MtkitError for a folder, and where the place cannot be written.
    """
    if path.is_dir():
        raise MtkitError(f"{path} is a folder; give the name of a file to write")
    place = Path(os.path.realpath(path))
    try:
        there = next(each for each in place.parents if each.exists())
        with _own_folder(there / place.name):
            pass
    except OSError as error:
        raise MtkitError(f"cannot write {path}: {error.strerror or error}; choose another place") from error


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 text, whole or not at all."""
    with writing(path) as temporary:
        temporary.write_text(text, encoding="utf-8", newline="")


def write_json(path: Path, content: Any) -> None:
    """Write JSON for people and programs, whole or not at all."""
    write_text(path, json_text(content, indent=2, ensure_ascii=False) + "\n")


def write_tensors(path: Path, tensors: "Mapping[str, Tensor]") -> None:
    """Write a safetensors file that those may read who may read the other files here.

    Raises: OSError where the disk is full or the place cannot be written, as other files do.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    path.touch()
    mode = path.stat().st_mode
    try:
        save_file(dict(tensors), path)
    except SafetensorError as error:
        raise OSError(str(error)) from error
    path.chmod(mode)  # save_file replaces the file by one that its owner alone may read


def json_text(content: Any, **style: Any) -> str:
    """The content as JSON, which has no NaN and no infinities: such a number is null. `style` is that of json.dumps."""
    return json.dumps(_finite(content), allow_nan=False, default=str, **style)


def _finite(content: Any) -> Any:
    if isinstance(content, Mapping):
        return {key: _finite(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_finite(each) for each in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content


def digest(path: Path) -> str:
    """SHA-256 of a file's content, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def locked(path: Path, held: str) -> Iterator[None]:
    """Keep the lock file `path` to this process inside the block, and remove it then.

    A file system over a network that has no locks is used without them.

    Raises: MtkitError with the message `held` where another process has it; OSError where it cannot be written.
    """
    with ExitStack() as stack:
        if not _acquired(FileLock(path), stack):
            raise MtkitError(held)
        stack.callback(path.unlink, missing_ok=True)  # before its release: who waits for it sees that it is gone
        yield


def clear(left: Path, path: Path) -> None:
    """Remove the folder `left` of a process that is gone and was writing `path`; put back what it had moved away."""
    replaced = left / f"{path.name}.replaced"
    if replaced.exists() and not path.exists():
        replaced.rename(path)
    shutil.rmtree(left, ignore_errors=True)


@contextmanager
def _own_folder(path: Path) -> Iterator[Path]:
    """A folder beside `path` that this block alone has, locked, so that others can tell that it is at work."""
    with ExitStack() as stack:
        while True:
            folder = path.with_name(f".{path.name}.{token_hex(8)}.tmp")
            folder.mkdir()
            with suppress(FileNotFoundError):
                if _acquired(_lock_of(folder, path), stack):
                    break
            # another process took it for a leftover before it was locked
        stack.callback(clear, folder, path)
        yield folder


def _clear_after_kills(path: Path) -> None:
    """Remove what processes that are gone left of writing `path`: a folder that nobody has locked."""
    for left in path.parent.iterdir():
        if re.fullmatch(rf"\.{re.escape(path.name)}\.[0-9a-f]{{16}}\.tmp", left.name) and left.is_dir():
            with ExitStack() as stack, suppress(FileNotFoundError):  # it was not left, and is done
                if _acquired(_lock_of(left, path), stack, without=False):
                    clear(left, path)


def _lock_of(folder: Path, path: Path) -> FileLock:
    return FileLock(folder / f"{path.name}.lock")


def _acquired(lock: FileLock, stack: ExitStack, *, without: bool = True) -> bool:
    """Acquire the lock until the stack ends; False where another process has it.

    `without` is the answer of a file system without locks. Raises: OSError where the lock file cannot be written.
    """
    try:
        lock.acquire(blocking=False)
    except Timeout:
        return False
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP):
            raise
        return without
    stack.callback(lock.release)
    return True


def _to_disk(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
