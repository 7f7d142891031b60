"""The converted model of a checkpoint, kept in the run's folder and made where it is missing.

ctranslate2/<checkpoint>-<key>/  CTranslate2's files; the key is a hash of the weights, the settings and the conversion
ctranslate2/<checkpoint>-<key>/sha256.json  their checksums; a model whose files do not match them is converted anew
"""

import hashlib
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from mtkit.decoding.engines.ctranslate2.conversion import convert
from mtkit.errors import MtkitError
from mtkit.files import digest, inside, write_json, writing
from mtkit.model.network import Network
from mtkit.runs import Run
from mtkit.stored import read_object

FOLDER = "ctranslate2"
"""Its name in a run's folder."""

CHECKSUMS = "sha256.json"

VERSION = 1
"""Of the conversion; a model converted by another is converted anew."""

_CONVERSION = re.compile(r"(average|update-[0-9]+)-[0-9a-f]{16}")
"""Name of the folder of a converted checkpoint."""

Files = dict[str, bytes]
"""The content of each file of a converted model, by its name."""


def converted(
    run: Run, checkpoint: str, model: Network, *, say: Callable[[str], object] = lambda message: None
) -> Files:
    """The model of this checkpoint in CTranslate2's format, from the run's folder or written there.

    What was converted from other weights of the checkpoint, or from checkpoints that are gone, is removed. `say` gets a
    message where the folder cannot be written or its files are damaged.
    """
    key = hashlib.sha256(f"{VERSION} {digest(run.weights(checkpoint))} {model.settings.model_dump_json()}".encode())
    name = f"{checkpoint}-{key.hexdigest()[:16]}"
    folder = run.folder / FOLDER / name
    with suppress(OSError):  # it is not there, or another process removes it, for which it is stale
        files = _read(folder)
        record = read_object(folder / CHECKSUMS)
        files.pop(CHECKSUMS, None)
        if _checksums(files) == record:
            return files
        if (folder / CHECKSUMS).exists():  # earlier versions wrote none
            say(f"{folder} is damaged; the model is converted again")
    with TemporaryDirectory() as elsewhere:
        made = Path(elsewhere) / "model"
        convert(model, made)
        files = _read(made)
    try:
        folder = inside(run.folder, FOLDER, name)
        with writing(folder) as temporary:
            temporary.mkdir()
            for name, content in files.items():
                (temporary / name).write_bytes(content)
            write_json(temporary / CHECKSUMS, _checksums(files))
        _remove_stale(run, checkpoint, folder, {*files, CHECKSUMS})
    except MtkitError as error:
        say(f"{error}; the model will be converted again next time")
    return files


def _read(folder: Path) -> Files:
    files = {file.name: file.read_bytes() for file in sorted(folder.iterdir())}
    if "model.bin" not in files:
        raise FileNotFoundError(folder)
    return files


def _checksums(files: Files) -> dict[str, str]:
    return {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}


def _remove_stale(run: Run, checkpoint: str, kept: Path, names: set[str]) -> None:
    """Removes folders that are named as other conversions are and hold only files of these names."""
    for other in kept.parent.iterdir():
        if other == kept or other.is_symlink() or not (found := _CONVERSION.fullmatch(other.name)):
            continue
        stale = found[1] == checkpoint or not (run.folder / "checkpoints" / found[1]).is_dir()
        with suppress(OSError):  # it is no folder, or another process removes it too
            if stale and {each.name for each in other.iterdir()} <= names:
                shutil.rmtree(other)
