"""Atomic files: a kill or a full disk never leaves a part of one."""

import errno
import gzip
import hashlib
import json
import math
import os
import re
import shutil
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from secrets import token_hex
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, BinaryIO

from filelock import FileLock, Timeout

from mtkit.errors import REMEDIES, MtkitError

if TYPE_CHECKING:
    from torch import Tensor


class WriteError(MtkitError):
    """Files or folders that cannot be written, with the system's error."""

    def __init__(self, paths: Sequence[Path], error: OSError) -> None:
        above = [place for path in paths for place in (path, *path.parents)]
        link = next((place for place in above if place.is_symlink() and not place.exists()), None)
        reason, remedy = str(error.strerror or error), REMEDIES[errno.ENOSPC]
        if file := next(filter(None, map(file_above, paths)), None):
            reason, remedy = f"{file} is a file, not a folder", "choose another place"
        elif link is not None and isinstance(error, FileExistsError | FileNotFoundError):
            reason, remedy = f"{link} is a link to {link.readlink()}, which does not exist", "choose another place"
        elif os.strerror(errno.EFBIG) in reason:
            remedy = REMEDIES[errno.EFBIG]
        elif error.errno == errno.ENAMETOOLONG:
            remedy = REMEDIES[errno.ENAMETOOLONG]
        super().__init__(f"cannot write {' and '.join(map(str, paths))}: {reason}; {remedy}")
        self.paths = paths
        self.error = error


def inside(folder: Path, *names: str) -> Path:
    """Return the path of a file or folder of mtkit at `names` below `folder`, which may itself be a link.

    All code that writes or removes files in a folder calls this. The folder may come from another person, so a link in
    it could point to any file of the user.

    Raises: MtkitError if a path below `folder` is a link, or a name is not a file name.
    """
    path = folder
    for name in names:
        if name in ("", "..") or Path(name).name != name:
            raise MtkitError(f"'{name}' is not a file name, so mtkit cannot write it in {folder}; choose another name")
        path /= name
        if path.is_symlink():
            raise MtkitError(
                f"{path} is a link, and mtkit writes only real files in {folder}; replace it with what it points to, "
                "or remove it"
            )
    return path


def is_device(path: Path) -> bool:
    """Return whether the path is a device or a pipe, which no file may replace; /dev/stdout always counts as one."""
    return path.exists() and (_descriptor(path) is not None or not (path.is_file() or path.is_dir()))


def open_device(path: Path) -> BinaryIO:
    """Open a device or a pipe to write; the file of /dev/stdout continues, which opening by name would empty."""
    descriptor = _descriptor(path)
    return path.open("wb") if descriptor is None else os.fdopen(os.dup(descriptor), "wb")


def _descriptor(path: Path) -> int | None:
    """Return the file descriptor that /dev/stdout, /dev/stderr or /dev/fd/N names; None for another path."""
    name = {"/dev/stdout": "/dev/fd/1", "/dev/stderr": "/dev/fd/2"}.get(str(path), str(path))
    match = re.fullmatch(r"/dev/fd/([0-9]+)", name)
    return None if match is None else int(match[1])


@contextmanager
def writing(path: Path) -> Iterator[Path]:
    """Yield a temporary path, for a file or a folder, that replaces `path` if the block raises no error.

    The content is synced to disk before it replaces the old content; after an error, it is removed. An existing folder
    is replaced as a unit. The target of a link is replaced, so paths in a folder come from `inside`. Content for a
    device or a pipe is copied there. Temporary files of killed processes are removed.

    Raises: MtkitError if the disk is full or the path cannot be written.
    """
    place = Path(os.path.realpath(path))
    try:
        if is_device(path):
            with TemporaryDirectory() as folder:
                yield (temporary := Path(folder) / place.name)
                with temporary.open("rb") as content, open_device(path) as device:
                    shutil.copyfileobj(content, device)
            return
        place.parent.mkdir(parents=True, exist_ok=True)
        _clear_after_kills(place)
        with _locked_folder(place) as folder_of_temporary:
            temporary = folder_of_temporary / place.name
            try:
                yield temporary
            except WriteError as error:
                if all(inner.is_relative_to(folder_of_temporary) for inner in error.paths):
                    raise error.error from error  # the message below names `path`, which the user knows
                raise
            for file in sorted(temporary.rglob("*")) if temporary.is_dir() else [temporary]:
                if file.is_file():
                    _sync(file)
            if place.is_dir() and temporary.is_dir():
                place.rename(folder_of_temporary / f"{place.name}.replaced")
            finish(temporary, place)
    except BrokenPipeError:
        raise  # raised in the block, not for this file
    except IsADirectoryError as error:
        raise MtkitError(f"{path} is a folder; give the name of a file to write") from error
    except OSError as error:
        raise WriteError([path], error) from error


def file_above(path: Path) -> Path | None:
    """Return the parent of `path` that exists and is not a folder, so that `path` cannot be written; None if none."""
    return next((folder for folder in path.parents if os.path.exists(folder) and not os.path.isdir(folder)), None)


def check_writable(path: Path) -> None:
    """Check, before long work, that a file can be written; nothing is left there.

    Raises: MtkitError for a folder, and for a path that cannot be written.
    """
    if path.is_dir():
        raise MtkitError(f"{path} is a folder; give the name of a file to write")
    place = Path(os.path.realpath(path))
    try:
        existing = next(folder for folder in place.parents if folder.exists())
        with _locked_folder(existing / place.name):
            pass
    except OSError as error:
        raise WriteError([path], error) from error


def check_regular(folder: Path) -> None:
    """Check that all files in a folder are regular: reading a pipe or a device could block forever.

    Raises: MtkitError for the first file that is not regular.
    """
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):  # a broken link, or a file that another process has removed
                if not stat.S_ISREG(os.stat(os.path.join(place, name)).st_mode):
                    raise MtkitError(f"{os.path.join(place, name)} is a pipe or a device, not a file; remove it")


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 text atomically, in gzip format if the name ends in .gz."""
    with writing(path) as temporary:
        temporary.write_bytes(packed(path, text.encode()))


def packed(path: Path, content: bytes) -> bytes:
    """Return the bytes of a part of a file: if the name ends in .gz, a gzip member, else the content itself."""
    return gzip.compress(content, mtime=0) if path.suffix == ".gz" else content


def finish(partial: Path, path: Path) -> None:
    """Rename a complete, synced file or folder to its final name; a file keeps the mode of the old one.

    Raises: OSError.
    """
    if path.is_file() and partial.is_file():
        shutil.copymode(path, partial)
    partial.replace(path)
    _sync(path.parent)


def write_json(path: Path, content: Any) -> None:
    """Write indented JSON atomically."""
    write_text(path, json_text(content, indent=2, ensure_ascii=False) + "\n")


def write_tensors(path: Path, tensors: "Mapping[str, Tensor]") -> None:
    """Write a safetensors file with the default permissions of new files.

    Raises: OSError if the disk is full or the path cannot be written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    path.touch()
    mode = path.stat().st_mode
    try:
        save_file(dict(tensors), path)
    except SafetensorError as error:
        raise OSError(str(error)) from error
    path.chmod(mode)  # save_file makes a file that only its owner may read


def json_text(content: Any, **style: Any) -> str:
    """Format JSON; NaN and infinities, which JSON lacks, become null. `style` has options of json.dumps."""
    return json.dumps(finite(content), allow_nan=False, default=str, **style)


def finite(content: Any) -> Any:
    """Replace NaN and infinities, also in lists and mappings, by None."""
    if isinstance(content, Mapping):
        return {key: finite(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content


SETTLED = 2.0
"""Seconds after which another change of a file certainly has another time."""

_DIGESTS: dict[Path, tuple[tuple[int, ...], str]] = {}
"""Device, inode, size and times of files that `digest` has read, and their digests."""


def digest(path: Path) -> str:
    """Return the SHA-256 of a file's content, in hexadecimal. A file that has not changed since is not read again."""
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        state = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        known, content = _DIGESTS.get(path, ((), ""))
        if state == known:
            return content
        content = hashlib.file_digest(file, "sha256").hexdigest()
    if time.time() - status.st_ctime > SETTLED:
        _DIGESTS[path] = state, content
    return content


@contextmanager
def locked(path: Path, held: str) -> Iterator[None]:
    """Hold the lock file `path` in the block, and remove it afterwards.

    On a network file system without locks, nothing is locked.

    Raises: MtkitError with the message `held` if another process has the lock; OSError if it cannot be written.
    """
    inside(path.parent, path.name)
    with suppress(FileNotFoundError):
        status = path.stat()
        if status.st_size or not stat.S_ISREG(status.st_mode):
            raise MtkitError(f"{path} is not a lock of mtkit, which would remove it; move it away")
    with ExitStack() as stack:
        if not _acquired(FileLock(path), stack):
            raise MtkitError(held)
        stack.callback(path.unlink, missing_ok=True)  # before the release, so that a waiting process sees it
        yield


def remove_leftover(leftover: Path, path: Path) -> None:
    """Remove the temporary folder of a dead process that was writing `path`, and restore what it had moved."""
    replaced = leftover / f"{path.name}.replaced"
    if replaced.exists() and not path.exists():
        replaced.rename(path)
    with suppress(OSError):  # the lock goes last: without it, what a kill leaves would not be a leftover
        for content in leftover.iterdir():
            if content.name != f"{path.name}.lock":
                shutil.rmtree(content) if content.is_dir() else content.unlink()
    shutil.rmtree(leftover, ignore_errors=True)


@contextmanager
def _locked_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder next to `path`, locked so that other processes do not remove it."""
    with ExitStack() as stack:
        while True:
            folder = path.with_name(f".{path.name}.{token_hex(8)}.tmp")
            folder.mkdir()
            with suppress(FileNotFoundError, FileExistsError):  # the latter if it is removed while it is made again
                if _acquired(_lock_of(folder, path), stack):
                    break
            # another process removed the folder before it was locked
        stack.callback(remove_leftover, folder, path)
        yield folder


def _clear_after_kills(path: Path) -> None:
    """Remove the temporary folders of dead processes that were writing `path`: folders without a held lock."""
    for leftover in path.parent.iterdir():
        if not is_leftover(leftover, path):
            continue
        with ExitStack() as stack, suppress(FileNotFoundError, FileExistsError):  # a live process has just finished
            if _acquired(_lock_of(leftover, path), stack, without=False):
                remove_leftover(leftover, path)


def is_leftover(leftover: Path, path: Path) -> bool:
    """Return whether `leftover` is the temporary folder of a process that writes or wrote `path`; it may be empty."""
    named = re.fullmatch(rf"\.{re.escape(path.name)}\.[0-9a-f]{{16}}\.tmp", leftover.name)
    if not named or leftover.is_symlink() or not leftover.is_dir():
        return False
    lock = leftover / f"{path.name}.lock"
    with suppress(FileNotFoundError):  # another process has just removed it
        return (lock.is_file() and not lock.is_symlink()) or not any(leftover.iterdir())
    return False


def _lock_of(folder: Path, path: Path) -> FileLock:
    return FileLock(folder / f"{path.name}.lock")


def _acquired(lock: FileLock, stack: ExitStack, *, without: bool = True) -> bool:
    """Acquire the lock until the stack closes; return False if another process has it.

    `without` is the result on file systems without locks. Raises: OSError if the lock file cannot be written.
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


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
