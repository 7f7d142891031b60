"""Writing files so that a kill or a full disk never leaves half of one."""

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from mtkit.errors import MtkitError


@contextmanager
def writing(path: Path) -> Iterator[Path]:
    """A temporary path beside `path`, for a file or a folder, that replaces it when the block ends well.

    The new content is on the disk before the rename; when the block fails, nothing of it stays.
    An existing folder at `path` is replaced whole.

    Raises: MtkitError where the disk is full or the place cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _clear_after_kills(path)
        yield temporary
        for file in sorted(temporary.rglob("*")) if temporary.is_dir() else [temporary]:
            if file.is_file():
                _to_disk(file)
        if path.is_dir() and temporary.is_dir():
            replaced = path.with_name(f".{path.name}.{os.getpid()}.old")
            path.rename(replaced)
            temporary.rename(path)
            shutil.rmtree(replaced)
        else:
            temporary.replace(path)
        _to_disk(path.parent)
    except OSError as error:
        raise MtkitError(
            f"cannot write {path}: {error.strerror or error}; free some space or choose another place"
        ) from (error)
    finally:
        if temporary.is_dir():
            shutil.rmtree(temporary, ignore_errors=True)
        else:
            temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 text, whole or not at all."""
    with writing(path) as temporary:
        temporary.write_text(text, encoding="utf-8", newline="")


def write_json(path: Path, content: Any) -> None:
    """Write JSON for people and programs, whole or not at all."""
    write_text(path, json.dumps(content, indent=2, ensure_ascii=False, default=str) + "\n")


def digest(path: Path) -> str:
    """SHA-256 of a file's content, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def lock(file: IO[Any], held: str) -> None:
    """Lock an open file until it is closed. Raises: MtkitError with the message `held` where another process has it."""
    try:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise MtkitError(held) from error
    except OSError:
        pass  # a file system over a network that has no locks


def _clear_after_kills(path: Path) -> None:
    """Remove what processes that are gone left beside `path`; put back a folder that one had just moved away."""
    for left in path.parent.glob(f".{path.name}.*"):
        owner = left.name.removeprefix(f".{path.name}.").partition(".")[0]
        if not owner.isdigit() or _runs(int(owner)):
            continue
        if left.suffix == ".old" and not path.exists():
            left.rename(path)
        elif left.is_dir():
            shutil.rmtree(left, ignore_errors=True)
        else:
            left.unlink(missing_ok=True)


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _to_disk(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
