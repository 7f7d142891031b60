"""The origin of a run: its training data, the runs that it began with, and the model that it was imported from.

The run folder: made for a new run, checked against the settings when the same run goes on.
"""

import json
import platform
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from mtkit.data.lengths import lengths_of
from mtkit.data.prepared import Prepared
from mtkit.data.vocabulary import copy_tokenizers, vocabulary_of
from mtkit.decoding.lines.source import source_budget
from mtkit.errors import DiffersError, MtkitError, RunError
from mtkit.model.build import attention_packages
from mtkit.model.network import Network
from mtkit.recipe import Recipe, differences
from mtkit.runs import FORMAT, Origin, Run, can_resume
from mtkit.storage.files import FILES_OF_RUNS, inside, locked, write_json, write_text, writing
from mtkit.storage.records import read_object
from mtkit.storage.yaml_text import dump_yaml
from mtkit.training.metrics import Say
from mtkit.version import __version__


def imported_from(run: Run) -> str | None:
    """The model of another library that the run was made of: its name on the hub, or its folder's name."""
    place = run.about.get("imported_from")
    return Path(place).name if place is not None and Path(place).is_absolute() else place


def origins(run: Run) -> list[Origin]:
    """The run whose weights the training began with, then the run that this one began with, and so on."""
    named = run.about.get("init_from")
    unknown = [Origin(run=named, imported_from=None, data=[])] if named else []
    return run.about.get("origins", unknown)


def origin(run: Run) -> Origin:
    """The run as an origin of others."""
    return Origin(run=run.folder.name, imported_from=imported_from(run), data=trained_on(run))


def trained_on(run: Run) -> list[str]:
    """Return the names of the training corpora and the pairs per direction, for people; empty if unknown."""
    data = run.recipe.data
    corpora = [corpus.label for corpus in data.train]
    if not corpora and run.about.get("data") is not None:
        corpora = [f"the built-in corpus of mtkit, seed {data.builtin.seed}"]
    pairs = {way: sum(bin_.pairs for bin_ in its.bins) for way, its in (run.about.get("lengths") or {}).items()}
    return [*corpora, *(f"{way}: {count:,} training pairs" for way, count in pairs.items())]


_ENDS = ("max_updates", "max_epochs", "max_minutes", "patience")
_LOOKS = (
    "init_from",
    "best_by",
    "least_improvement",
    "keep_last",
    "keep_best",
    "average_last",
    "validate_every",
    "log_every",
    "deterministic",
    "shard",
)
MAY_CHANGE = ("decoding.", "scoring.", "promises:", *(f"training.{name}:" for name in (*_ENDS, *_LOOKS)))
"""How settings begin that say how long to train, how often to look, and how to translate and score then: they may
change while a run goes on. Of these the weights' course depends on the limits alone, and only where something ends with
them: a learning rate that falls (cosine, cooldown), guided attention. It then goes on by the new ones. On a GPU last
digits may differ with the others. What the run began with is known by the name in run.json, wherever that lies now."""


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Keeps other trainings out of the run folder inside the block. Raises: RunError where one is at it."""
    with ExitStack() as stack:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            held = f"another training is at work in {folder}; wait for it, or choose another --name"
            stack.enter_context(locked(inside(folder, ".lock"), held))
        except MtkitError as error:
            raise RunError(str(error)) from error
        except OSError as error:
            raise RunError(f"cannot write {folder}: {error.strerror or error}; choose another place") from error
        yield


def open_folder(
    folder: Path,
    recipe: Recipe,
    prepared: Prepared,
    *,
    too_long: Mapping[str, int],
    longest: int,
    command: Sequence[str],
    init_from: Run | None,
) -> None:
    """Make the run folder, or check that the run in it has these settings and this data.

    Without a checkpoint there is nothing to go on with, and the folder is made anew.

    `too_long` is kept there, the segments of each side that have over the `longest` pieces that the model takes, and
    the lengths of the training pairs.

    Raises: RunError listing what differs from the run that is there, and where checkpoints lack its run.json.
    """
    about: dict[str, Any] = {
        "format": FORMAT,
        "mtkit": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "data": prepared.fingerprint,
        "directions": prepared.directions,
        "document_pieces": source_budget(prepared),
        "too_long": dict(too_long),
        "lengths": {
            direction: each.model_dump(mode="json") for direction, each in lengths_of(prepared, longest).items()
        },
        "init_from": None if init_from is None else init_from.folder.name,
        "origins": [],
        "packages": attention_packages(recipe),
        "vocabularies": {
            "source": prepared.tokenizers.source.size,
            "target": prepared.tokenizers.target.size,
        },
    }
    if can_resume(folder):
        before = Run(folder)
        _check(before, recipe, about)
        about["origins"] = origins(before)
        if "precision" in before.about:
            about["precision"] = before.about["precision"]
        commands = [*before.about.get("commands", []), shlex.join(command)]
    elif any((folder / "checkpoints").glob("update-*")):
        raise RunError(
            f"{folder} has checkpoints, but no run.json with what they were trained on; put it back, "
            f"choose another --name, or remove {folder / 'checkpoints'}"
        )
    elif (average := folder / "checkpoints" / "average").is_dir():
        raise RunError(f"{average} is all that is left of an earlier training; choose another --name, or remove it")
    else:
        _check_free(folder, recipe)
        if init_from is not None:
            about["origins"] = [origin(init_from), *origins(init_from)]
        commands = [shlex.join(command)]
        with writing(inside(folder, "tokenizer")) as temporary:
            temporary.mkdir()
            copy_tokenizers(prepared.folder / "tokenizer", temporary)
    write_text(inside(folder, "recipe.yaml"), dump_yaml(_dumped(recipe)))
    write_json(inside(folder, "run.json"), about | {"commands": commands})  # last: with it, a folder is a run


def _check_free(folder: Path, recipe: Recipe) -> None:
    """Raises: RunError if the folder is no run, but holds files named like those of one, as a user's own recipe.

    What a killed process wrote before run.json does not count.
    """
    if (folder / "run.json").exists():
        return
    for name in sorted(FILES_OF_RUNS):
        path = folder / name
        if name == "recipe.yaml" and path.is_file():
            own = path.read_bytes() == dump_yaml(_dumped(recipe)).encode()
        elif name == "tokenizer" and path.is_dir():
            own = all(each.suffix == ".model" for each in path.iterdir())
        else:
            own = not path.exists()
        if not own:
            raise RunError(
                f"{path} exists, but {folder} is not a run, as it has no run.json; move {path.name} away, or choose "
                "another --name"
            )


def begin(model: Network, run: Run, prepared: Prepared, say: Say) -> None:
    """Give a model the best weights of another run, and say what of them does not fit.

    Raises: RunError where these stand for other pieces than those of the data, or are not there.
    """
    run.checkpoint()
    if run.vocabulary != vocabulary_of(prepared.folder / "tokenizer"):
        raise RunError(
            f"{run.folder} has another vocabulary than {prepared.folder}, so its embeddings stand "
            f"for other pieces; prepare the data with --tokenizer-from {run.folder}, or leave out --init-from"
        )
    if left := model.adopt(run.load_model().state_dict()):
        more = f" and {len(left) - 3:,} more" if len(left) > 3 else ""
        say(f"of {run.folder} do not fit and are not copied: {', '.join(left[:3])}{more}")


def keep_precision(folder: Path, name: str) -> None:
    """Note in run.json which precision was chosen, for when the run is resumed."""
    path = inside(folder, "run.json")
    write_json(path, read_object(path) | {"precision": name})


def _check(before: Run, recipe: Recipe, about: dict[str, Any]) -> None:
    there, here = _dumped(before.recipe), _dumped(recipe)
    for each in (there, here):
        del each["data"]  # its fingerprint says more: it stays when the folder is moved and changes with the text
    changed = [line for line in differences(there, here) if not line.startswith(MAY_CHANGE)]
    changed += differences(
        {key: before.about.get(key) for key in ("init_from", "vocabularies")},
        {key: about[key] for key in ("init_from", "vocabularies")},
    )
    if before.about.get("data") != about["data"]:
        changed.append("the prepared data is another")
    if changed:
        raise DiffersError(
            f"the run in {before.folder} was started with other settings ({'; '.join(changed)})",
            "repeat its settings to resume it, or choose another --name",
        )


def _dumped(recipe: Recipe) -> dict[str, Any]:
    dumped: dict[str, Any] = json.loads(recipe.model_dump_json())
    return dumped
