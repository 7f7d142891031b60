"""Writing files so that a kill or a full disk never leaves half of one."""

import errno
import gzip
import hashlib
import json
import math
import os
import re
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from secrets import token_hex
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout

from mtkit.errors import MtkitError

if TYPE_CHECKING:
    from torch import Tensor


FILES_OF_RUNS = {
    *("recipe.yaml", "run.json", "best.json", "metrics.jsonl", "curves.png", "cost.json"),
    *("lexicon.safetensors", "heads.json", "tokenizer", "checkpoints", "ctranslate2", "tensorboard"),
}
"""Names in a run's folder that only mtkit writes."""


def inside(folder: Path, *names: str) -> Path:
    """The path of a file or folder that mtkit keeps at `names` below `folder`, which may itself be a link.

    All code that writes or removes files in a folder gets their paths here. Such a folder may come from anybody, so a
    link in it could point to any file of the user.

    Raises: MtkitError if one of the paths on the way is a link, or a name is not the name of a file.
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


def check_outputs(outputs: Sequence[Path], inputs: Iterable[Path] = ()) -> None:
    """Check, before long work, that files which a user named can be written and that they replace no needed file.

    An output must not be one of the `inputs`, another output, or a file that mtkit keeps in a run, in prepared data, or
    beside an output that is not complete yet. Links are followed. Devices and pipes pass.

    Raises: MtkitError for such an output, for a folder, and for a place that cannot be written.
    """
    written: dict[Path, Path] = {}
    for output in outputs:
        if is_device(output):
            continue
        _check_kept(output)
        check_writable(output)
        place = Path(os.path.realpath(output))
        for path in (place, *map(place.with_name, (f"{place.name}{end}" for end in UNFINISHED))):
            if path in written:
                raise MtkitError(f"{output} cannot hold two outputs; give each a file of its own")
            written[path] = output
    for path in inputs:
        for place, output in written.items():
            if _is_same(path, place):
                raise MtkitError(f"{output} would replace {path}, which is read; give the output another name")


UNFINISHED = (".partial", ".partial.jsonl", ".partial.lock")
"""Ends of the names of files that are kept beside an output until it is complete: its text, its record and its lock."""


def is_device(path: Path) -> bool:
    """Whether the path is a device or a pipe, which no file may replace; /dev/stdout always counts as one."""
    descriptor = str(path) in ("/dev/stdout", "/dev/stderr") or path.parts[:3] == ("/", "dev", "fd")
    return path.exists() and (descriptor or not (path.is_file() or path.is_dir()))


@contextmanager
def writing(path: Path) -> Iterator[Path]:
    """A temporary path, for a file or a folder, that replaces `path` when the block ends well.

    The new content is on the disk before it takes its place; when the block fails, nothing of it stays. An existing
    folder at `path` is replaced whole; a link stays one, so paths in a folder come from `inside`. Content for a device
    or a pipe is copied there. What processes that were killed here left is removed.

    Raises: MtkitError where the disk is full or the place cannot be written.
    """
    place = Path(os.path.realpath(path))
    try:
        if is_device(path):
            with TemporaryDirectory() as folder:
                yield (temporary := Path(folder) / place.name)
                with temporary.open("rb") as content, path.open("wb") as device:
                    shutil.copyfileobj(content, device)
            return
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


def check_regular(folder: Path) -> None:
    """Check that all files in a folder are regular: a reader could wait for a pipe or a device without end.

    Raises: MtkitError that names the first file that is not regular.
    """
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):  # a broken link, or a file that another process has removed
                if not stat.S_ISREG(os.stat(os.path.join(place, name)).st_mode):
                    raise MtkitError(f"{os.path.join(place, name)} is a pipe or a device, not a file; remove it")


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 text, whole or not at all; in gzip format if the name ends in .gz."""
    with writing(path) as temporary:
        temporary.write_bytes(packed(path, text.encode()))


def packed(path: Path, content: bytes) -> bytes:
    """The content, or part of it, as the file at `path` holds it: if the name ends in .gz, a member of a gzip file."""
    return gzip.compress(content, mtime=0) if path.suffix == ".gz" else content


def finish(partial: Path, path: Path) -> None:
    """Give a complete file, which is on the disk, its final name. Raises: OSError."""
    partial.replace(path)
    _to_disk(path.parent)


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
    inside(path.parent, path.name)
    with suppress(FileNotFoundError):
        found = path.stat()
        if found.st_size or not stat.S_ISREG(found.st_mode):
            raise MtkitError(f"{path} is no lock of mtkit, which would remove it; move it away")
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
        if not is_left_of(left, path):
            continue
        with ExitStack() as stack, suppress(FileNotFoundError):  # it was not left, and is done
            if _acquired(_lock_of(left, path), stack, without=False):
                clear(left, path)


def is_left_of(left: Path, path: Path) -> bool:
    """Whether `left` is the folder of a process that writes or wrote `path`: by its name and lock; it may be empty."""
    named = re.fullmatch(rf"\.{re.escape(path.name)}\.[0-9a-f]{{16}}\.tmp", left.name)
    if not named or left.is_symlink() or not left.is_dir():
        return False
    lock = left / f"{path.name}.lock"
    with suppress(FileNotFoundError):  # another process has just removed it
        return (lock.is_file() and not lock.is_symlink()) or not any(left.iterdir())
    return False


def _check_kept(output: Path) -> None:
    """Raises: MtkitError for a file that only mtkit writes, in a run or in prepared data."""
    place = Path(os.path.realpath(output))
    for folder in place.parents:
        top, *below = place.relative_to(folder).parts
        kept = (folder / "prepared.json").is_file() or ((folder / "run.json").is_file() and top in FILES_OF_RUNS)
        if (folder / "run.json").is_file() and top == "translations" and below:
            kept = any(f"{below[0]}.".startswith(f"{side.stem}.") for side in (folder / top).glob("*.json"))
        if kept:
            raise MtkitError(f"{output} is a file that mtkit keeps in {folder}; give the output another name")


def _is_same(one: Path, other: Path) -> bool:
    if is_device(one):
        return False
    try:
        return one.samefile(other)
    except OSError:  # one is missing
        return os.path.realpath(one) == os.path.realpath(other)


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
