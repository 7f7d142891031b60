"""The run folder: create it for a new run, check the settings of a resumed one, record where its weights come from."""

import json
import platform
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mtkit.data.lengths import lengths_of
from mtkit.data.prepared import Prepared
from mtkit.data.vocabulary import copy_tokenizers, vocabulary_of
from mtkit.decoding.lines.source import source_budget
from mtkit.errors import DiffersError, MtkitError, RecipeError, RunError
from mtkit.model.adaptation import trained_names
from mtkit.model.build import attention_packages
from mtkit.model.initial_embeddings import InitialEmbeddings, load_embeddings
from mtkit.model.network import Network
from mtkit.recipe import Recipe, differences
from mtkit.recipe.settings import LIMITS
from mtkit.runs import FORMAT, Origin, Run, can_resume, checkpoint_folders
from mtkit.storage.files import WriteError, inside, locked, write_json, write_text, writing
from mtkit.storage.outputs import FILES_OF_RUNS
from mtkit.storage.records import read_stored
from mtkit.storage.yaml_text import dump_yaml
from mtkit.terminal import ProgressBar, Say
from mtkit.version import __version__


def imported_from(run: Run) -> str | None:
    """Return the model of another library that the run was converted from: its hub name, or its folder's name."""
    place = run.about.get("imported_from")
    return Path(place).name if place is not None and Path(place).is_absolute() else place


def ancestors(run: Run) -> list[Origin]:
    """List the run that initialised the training, then the run that initialised that run, and so on."""
    return run.about.get("origins", [])


def trained_on(run: Run) -> list[str]:
    """Return the names of the training corpora, word vectors and the pairs per direction, for people."""
    data = run.recipe.data
    corpora = [corpus.label for corpus in data.train]
    if not corpora and run.about.get("data") is not None:
        corpora = [
            f"the built-in corpus of mtkit, seed {data.builtin.seed}"
            if data.task is None
            else f"the task {data.task.name} of mtkit, seed {data.task.seed}"
        ]
    lengths = run.about.get("lengths") or {}
    pairs = {direction: sum(bin_.pairs for bin_ in stored.bins) for direction, stored in lengths.items()}
    vectors = [f"word vectors of initial embeddings: {table['file']}" for table in run.about.get("embeddings", [])]
    return [*corpora, *vectors, *(f"{direction}: {count:,} training pairs" for direction, count in pairs.items())]


_MAY_CHANGE = (
    *(*LIMITS, "patience", "init_from", "best_by", "least_improvement"),
    *(
        "keep_last",
        "keep_best",
        "average_last",
        "validate_every",
        "log_every",
        "deterministic",
        "shard",
        "checkpoint_activations",
        "attention_entropy",
    ),
)
MAY_CHANGE = ("decoding.", "scoring.", "promises:", *(f"training.{name}:" for name in _MAY_CHANGE))
"""Prefixes of settings that may change when a run is resumed: how long to train, how often to validate, and how to
translate and score. Of these, only the limits affect the weights, and only with settings that depend on the end of
training: a falling learning rate (cosine, cooldown), guided attention. On a GPU the others may change last digits. A
changed init_from is compared by the run's name in run.json, because runs may be moved."""


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Lock the run folder. Raises: RunError if another training has locked it."""
    with ExitStack() as stack:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            message = f"another training is at work in {folder}; wait for it, or choose another --name"
            stack.enter_context(locked(inside(folder, ".lock"), message))
        except MtkitError as error:
            raise RunError(str(error)) from error
        except OSError as error:
            raise RunError(str(WriteError([folder], error))) from error
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
    """Create the run folder, or check that the run in it has these settings and this data.

    run.json records `too_long`, each side's number of segments with more than the `longest` pieces that the model
    accepts, and the lengths of the training pairs.

    Raises: RunError listing what differs from the existing run, or if run.json is missing next to checkpoints.
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
            direction: bins.model_dump(mode="json") for direction, bins in lengths_of(prepared, longest).items()
        },
        "init_from": None if init_from is None else init_from.folder.name,
        "origins": [],
        "packages": attention_packages(recipe),
        "vocabularies": {"source": prepared.tokenizers.source.size, "target": prepared.tokenizers.target.size},
        "tokenizer": vocabulary_of(prepared.folder / "tokenizer"),
    }
    if can_resume(folder):
        begun = Run(folder)
        _check_unchanged(begun, recipe, about)
        about["origins"] = ancestors(begun)
        about |= {name: begun.about.get(name) for name in MEASURED if name in begun.about}
        commands = [*begun.about.get("commands", []), shlex.join(command)]
    elif checkpoint_folders(folder):
        raise RunError(
            f"{folder} has checkpoints, but no run.json; put it back, "
            f"choose another --name, or remove {folder / 'checkpoints'}"
        )
    elif (average := folder / "checkpoints" / "average").is_dir():
        raise RunError(f"{average} is left from an earlier training; choose another --name, or remove it")
    else:
        _check_free(folder, recipe)
        if init_from is not None:
            about["origins"] = [
                Origin(run=init_from.folder.name, imported_from=imported_from(init_from), data=trained_on(init_from)),
                *ancestors(init_from),
            ]
        commands = [shlex.join(command)]
    if vocabulary_of(folder / "tokenizer") != about["tokenizer"]:  # of a resumed run: it was lost or damaged
        with writing(inside(folder, "tokenizer")) as temporary:
            temporary.mkdir()
            copy_tokenizers(prepared.folder / "tokenizer", temporary)
    write_text(inside(folder, "recipe.yaml"), dump_yaml(_dumped(recipe)))
    write_json(inside(folder, "run.json"), about | {"commands": commands})  # last: it makes the folder a run


def _check_free(folder: Path, recipe: Recipe) -> None:
    """Raises: RunError if the folder is not a run, but holds a user's files with names of run files.

    Files that a killed process wrote before run.json are accepted.
    """
    if (folder / "run.json").exists():
        return
    for name in sorted(FILES_OF_RUNS):
        path = folder / name
        if name == "recipe.yaml" and path.is_file():
            free = path.read_bytes() == dump_yaml(_dumped(recipe)).encode()
        elif name == "tokenizer" and path.is_dir():
            free = all(file.suffix == ".model" for file in path.iterdir())
        else:
            free = not path.exists()
        if not free:
            raise RunError(
                f"{path} exists, but {folder} is not a run, as it has no run.json; move {path.name} away, or choose "
                "another --name"
            )


def init_from_run(model: Network, run: Run, prepared: Prepared, say: Say) -> set[str]:
    """Load the best weights of another run into a model, and print which weights do not fit or begin at random.

    Returns the names of the parameters that the run has no weights for. Of attentions, these are only the random ones.

    Raises: RunError if the run's vocabulary differs from the data's, or it has no checkpoint; RecipeError if the
    embeddings do not fit.
    """
    run.checkpoint()
    if run.vocabulary != vocabulary_of(prepared.folder / "tokenizer"):
        raise RunError(
            f"{run.folder} has another vocabulary than {prepared.folder}, so its embeddings belong "
            f"to other pieces; prepare the data with --tokenizer-from {run.folder}, or leave out --init-from"
        )
    weights = run.load_model().state_dict()
    adopted = model.adopt(weights)
    for side in ("source", "target"):
        if (name := f"{side}_embedding.tokens.weight") in adopted.unfit:
            raise RecipeError(
                f"the {side} embeddings have {model.settings.d_model} numbers per piece, and in {run.folder} they "
                f"have {weights[name].shape[1]}; leave out preset and model.d_model, or leave out --init-from"
            )
    if adopted.unfit:
        say(f"of {run.folder} do not fit and are not copied: {_first_names(adopted.unfit)}")
    drawn = {name for name, parameter in model.named_parameters() if name in adopted.unset and _is_drawn(parameter)}
    if drawn:
        names = _first_names(_parts(model, drawn), 8)
        say(f"these parts begin at random, because {run.folder} has no weights for them: {names}")
    attentions = tuple(f"{name}." for name, _ in model.attentions())
    return drawn | {name for name in adopted.unset if not name.startswith(attentions)}


def _is_drawn(parameter: Tensor) -> bool:
    """Return whether the values seem random. Values that are set, as of norms, gates and identities, repeat."""
    values = parameter.detach().flatten()[:4096]  # sorting a large matrix would take seconds
    return len(values) > 1 and 2 * len(values.unique()) > len(values)


def _parts(model: Network, drawn: set[str]) -> list[str]:
    """Name the modules in which all matrices are drawn, or else the parameters; once for parts of several layers."""
    named = model.named_parameters(remove_duplicate=False)
    matrices = [name for name, parameter in named if parameter.dim() > 1]
    outermost = list[str]()
    for name in sorted(drawn):
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            part = ".".join(parts[:end])
            inside = [other for other in matrices if other.startswith(f"{part}.")]
            if (inside and drawn.issuperset(inside)) or end == len(parts):
                outermost.append(part)
                break
    layers: dict[str, list[str]] = {}
    for part in dict.fromkeys(outermost):
        layers.setdefault(re.sub(r"\.\d+\.", ".*.", part), []).append(part)
    return [parts[0] if len(parts) == 1 else f"{name} ({len(parts)} layers)" for name, parts in layers.items()]


def check_trained(model: Network, random: set[str], run: Run) -> None:
    """Raises: RecipeError if parameters that do not begin with the run's weights are frozen.

    These are the parameters `random`, which would keep random values, and zeros in the slot `nearby`.
    """
    trained = trained_names(model)
    if stuck := sorted(random - trained):
        raise RecipeError(
            f"training.lora or training.freeze keeps {_first_names(stuck)} at random values, because {run.folder} has "
            "no weights for them; leave out preset and model, keep the attention of the run, or train them"
        )
    zero = sorted(name for name, weight in model.named_parameters() if ".nearby." in name and not weight.any())
    if stuck := [name for name in zero if name not in trained]:
        raise RecipeError(
            f"training.lora or training.freeze keeps {_first_names(stuck)} at zero, because {run.folder} has no such "
            "weights; leave out nearby (or nystrom's conv_kernel), or train them"
        )


def _first_names(names: Sequence[str], count: int = 3) -> str:
    return ", ".join(names[:count]) + (f" and {len(names) - count:,} more" if len(names) > count else "")


def embed_word_vectors(
    model: Network, recipe: Recipe, prepared: Prepared, init_from: Run | None, say: Say, progress: ProgressBar
) -> list[InitialEmbeddings]:
    """Set a new model's embeddings from the files in `model.embeddings`; print the share of pieces with a vector.

    Raises: RecipeError for a model that also begins with the weights of a run; as `load_embeddings`.
    """
    if recipe.model.embeddings is None:
        return []
    if init_from is not None:
        raise RecipeError(
            f"the embeddings of a new run come either from the run {init_from.folder} (training.init_from) or from "
            "word vectors (model.embeddings); leave one out"
        )
    records = load_embeddings(model, recipe.model, prepared.tokenizers, progress=progress)
    for table, notes in records:
        for line in (table.describe(), *(f"note: {table.file}: {note}" for note in notes)):
            say(line)
    return [table for table, _ in records]


MEASURED = ("precision", "kernels", "graphs", "flops_per_token", "embeddings")
"""Keys of run.json that are measured before the first update, and kept by a resumed run."""


def record(folder: Path, name: str, value: Any) -> None:
    """Record a measurement in run.json, for resumed runs. Raises: RunError if the file cannot be read."""
    path = inside(folder, "run.json")
    about = read_stored(path, dict[str, Any], "repeat the command", error=RunError)
    write_json(path, about | {name: value})


def _check_unchanged(begun: Run, recipe: Recipe, about: dict[str, Any]) -> None:
    earlier, now = _dumped(begun.recipe), _dumped(recipe)
    for settings in (earlier, now):
        del settings["data"]  # compared by its fingerprint: a moved folder is the same data
    changed = [line for line in differences(earlier, now) if not line.startswith(MAY_CHANGE)]
    names = ("init_from", "vocabularies")
    changed += differences({name: begun.about.get(name) for name in names}, {name: about[name] for name in names})
    if begun.about.get("data") != about["data"]:
        changed.append("the prepared data is another")
    if changed:
        raise DiffersError(
            f"the run in {begun.folder} was started with other settings ({'; '.join(changed)})",
            "repeat its settings to resume it, or choose another --name",
        )


def _dumped(recipe: Recipe) -> dict[str, Any]:
    dumped: dict[str, Any] = json.loads(recipe.model_dump_json())
    return dumped
