"""Output files that a user names: checked before long work, so that they replace no file that is needed."""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from mtkit.errors import MtkitError
from mtkit.storage.files import check_writable, is_device
from mtkit.storage.jobs import UNFINISHED

FILES_OF_RUNS = {
    *("recipe.yaml", "run.json", "best.json", "metrics.jsonl", "curves.png", "cost.json"),
    *("lexicon.safetensors", "heads.json", "tokenizer", "checkpoints", "ctranslate2", "tensorboard"),
}
"""Names in a run's folder that only mtkit writes."""

OTHER_COMPRESSION = (".xz", ".bz2", ".zst", ".zip")
"""Suffixes of compressed files that mtkit does not write."""


def check_outputs(outputs: Sequence[Path], inputs: Iterable[Path] = ()) -> None:
    """Check, before long work, that output files named by a user can be written and replace no file that is needed.

    An output must not be an input, another output, a file that mtkit keeps in a run or in prepared data, or an
    unfinished file of another output. Links are followed. Devices and pipes are valid outputs.

    Raises: MtkitError for such an output, for a folder, for a name of another compression than gzip, for -, and for a
    path that cannot be written.
    """
    written: dict[Path, Path] = {}
    for output in outputs:
        if output == Path("-"):
            raise MtkitError("- is no name of an output file here; give another one, or /dev/stdout")
        if is_device(output):
            continue
        if output.suffix in OTHER_COMPRESSION:
            raise MtkitError(f"{output} would not be compressed: mtkit writes plain files and .gz; give it such a name")
        _check_not_kept(output)
        check_writable(output)
        place = Path(os.path.realpath(output))
        for path in (place, *map(place.with_name, (f"{place.name}{end}" for end in UNFINISHED))):
            if path in written:
                raise MtkitError(f"{output} cannot hold two outputs; give each output its own file")
            written[path] = output
    for path in inputs:
        for place, output in written.items():
            if _is_same(path, place):
                raise MtkitError(f"{output} would replace {path}, which is read; give the output another name")


def _check_not_kept(output: Path) -> None:
    """Raises: MtkitError for a file that only mtkit writes, in a run or in prepared data."""
    place = Path(os.path.realpath(output))
    for folder in place.parents:
        top, *below = place.relative_to(folder).parts
        is_run = (folder / "run.json").is_file()
        is_kept = (folder / "prepared.json").is_file() or (is_run and top in FILES_OF_RUNS)
        if is_run and top == "translations" and below:
            is_kept = any(f"{below[0]}.".startswith(f"{side.stem}.") for side in (folder / top).glob("*.json"))
        if is_kept:
            raise MtkitError(f"{output} is a file that mtkit keeps in {folder}; give the output another name")


def _is_same(one: Path, other: Path) -> bool:
    if is_device(one):
        return False
    try:
        return one.samefile(other)
    except OSError:  # one of them does not exist
        return os.path.realpath(one) == os.path.realpath(other)
