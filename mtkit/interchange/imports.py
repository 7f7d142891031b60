"""Runs made of models that were trained elsewhere: Hugging Face's Marian, as OPUS-MT and its children have it."""

import json
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mtkit.errors import DataError, MtkitError, RunError
from mtkit.interchange.marian import (
    MARKS,
    Configuration,
    Numbering,
    decoding_settings,
    is_tag,
    model_settings,
    number,
    own_weights,
    positions_of,
    read_configuration,
    read_generation,
    renumbered,
    unheeded,
    without_probability,
)
from mtkit.model.build import build_model
from mtkit.recipe import Recipe, make_recipe
from mtkit.runs import FORMAT, Run
from mtkit.storage.files import write_json, write_text, writing
from mtkit.storage.records import read_stored
from mtkit.storage.weights import PICKLES, load_weights, read_tensors
from mtkit.storage.yaml_text import dump_yaml
from mtkit.text.model_file import ModelFile
from mtkit.text.tokenizer import UNK
from mtkit.training.checkpoint import write_checkpoint
from mtkit.training.progress import Progress
from mtkit.version import __version__

FILES = ["*.json", "*.safetensors", "*.spm"]
"""File patterns that are downloaded: no pickles, and no code."""


def find_folder(place: str) -> Path:
    """Return the local folder `place`, or else download the model of that name, as Helsinki-NLP/opus-mt-en-de.

    Raises: MtkitError if neither exists; RunError for a model without safetensors, with the command that converts it.
    """
    path = Path(place)
    if path.is_dir():
        return path
    if path.is_absolute() or place.startswith(".") or place.count("/") != 1:
        raise MtkitError(f"no folder {place}; give one, or a name on the hub such as Helsinki-NLP/opus-mt-en-de")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        folder = Path(snapshot_download(place, allow_patterns=FILES))
    except (HfHubHTTPError, HFValidationError, OSError, ValueError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise MtkitError(f"no folder {place}, and it cannot be downloaded from the hub ({reason})") from error
    if not any(folder.glob("*.safetensors")):
        own = place.rpartition("/")[2]
        convert = "; ".join(f"{each}.from_pretrained('{place}').save_pretrained('{own}')" for each in "MT")
        raise RunError(
            f"{place} has no weights as safetensors; a pickle can run code when loaded. Convert it with transformers: "
            f'python -c "from transformers import MarianMTModel as M, MarianTokenizer as T; {convert}", '
            f"then import {own}"
        )
    return folder


VOCABULARY = dict[str, int]
"""Content of vocab.json: the id of each piece."""


@dataclass(frozen=True)
class Imported:
    """A run that was made of another library's model."""

    run: Run
    notes: list[str]
    """What translates otherwise than there, for people."""


def import_marian(
    folder: Path,
    into: Path,
    *,
    source_language: str | None = None,
    target_language: str | None = None,
    named: str | None = None,
    command: Sequence[str] = (),
) -> Imported:
    """Make the run folder `into` of the Marian model in `folder`.

    It translates as Hugging Face's class does in float32. The languages are those that tokenizer_config.json names,
    unless given. `command` is recorded, and `named`, the model's name on the hub, if it was downloaded from there.

    Raises: RunError or DataError, naming the file and what in it mtkit cannot hold; nothing is then written.
    """
    if into.exists():
        raise RunError(f"{into} exists; choose another --name, or remove it")
    found, generation = read_configuration(folder), read_generation(folder)
    theirs = _weights(folder)  # before the rest: a pickle is said first
    _check_sizes(found, theirs, folder / "config.json")
    sides = _sides(folder, found)
    languages = _languages(folder, source_language, target_language)
    tags = sides.source.languages
    recipe = make_recipe(
        {
            "data": {
                "source_language": languages[0],
                "target_language": tags[0] if len(tags) > 1 else languages[1],
                "tokenizer": sides.settings,
            },
            "model": {**model_settings(found), "positions": _positions(theirs, folder)},
            "decoding": decoding_settings(generation, found["max_position_embeddings"]),
        },
        origin=str(folder / "config.json"),
    )
    sizes = {"source": len(sides.source.rows), "target": len(sides.target.rows)}
    try:
        without = without_probability(generation)
        weights = own_weights(theirs, recipe.model, sides.source, sides.target, without)
    except RunError as error:
        raise RunError(f"{folder}: {error}") from error
    model = build_model(recipe, source_vocabulary=sizes["source"], target_vocabulary=sizes["target"])
    load_weights(model, weights, folder)
    directions = [f"{languages[0]}-{each}" for each in tags] if len(tags) > 1 else recipe.data.directions
    about: dict[str, Any] = {
        "format": FORMAT,
        "mtkit": __version__,
        "torch": torch.__version__,
        "imported_from": named or str(folder.resolve()),
        "directions": directions,
        "document_pieces": None,
        "init_from": None,
        "vocabularies": sizes,
        "commands": [shlex.join(command)] if command else [],
    }
    _write(into, recipe, about, sides.models, model.state_dict())
    never = {found["pad_token_id"], sides.target.rows[UNK]}
    others = unheeded(generation, {row for row in (*without, *never) if row is not None})
    notes = [f"{folder} searches with {each}, which mtkit's search does not follow" for each in others]
    if whole := _added_tokens(folder):
        notes.append(f"{folder} adds {', '.join(whole)} to its tokenizer, which mtkit cuts like other text")
    return Imported(Run(into), notes)


def _check_sizes(found: Configuration, theirs: dict[str, Tensor], path: Path) -> None:
    """Raises: RunError for a size that no weight has, before anything of that size is made."""
    largest = max((max(each.shape, default=1) for each in theirs.values()), default=1)
    sizes = {
        "vocab_size": found["vocab_size"],
        "decoder_vocab_size": found.get("decoder_vocab_size") or 0,
        "d_model": found["d_model"],
        "encoder_ffn_dim": found["encoder_ffn_dim"],
        "decoder_ffn_dim": found["decoder_ffn_dim"],
    }
    for key, size in sizes.items():
        if size > largest:
            raise RunError(f"{path}: {key} = {size:,}, and the weights have at most {largest:,} rows or columns")


def _positions(theirs: dict[str, Tensor], folder: Path) -> str:
    try:
        return positions_of(theirs)
    except RunError as error:
        raise RunError(f"{folder}: {error}") from error


@dataclass(frozen=True)
class _Sides:
    """The vocabularies of both sides, and the tokenizers by file name."""

    source: Numbering
    target: Numbering
    models: dict[str, bytes]
    settings: dict[str, Any]
    """The recipe's `data.tokenizer`."""


def _sides(folder: Path, found: Configuration) -> _Sides:
    """Raises: DataError naming the file where pieces, ids and models do not go together."""
    paths = {side: folder / f"{side}.spm" for side in ("source", "target")}
    models = {side: _model(path) for side, path in paths.items()}
    # a folder may hold a target_vocab.json that is not in use
    separate = _said(folder).get("separate_vocabs") is True
    size = found["vocab_size"]
    ids = {"pad": found["pad_token_id"], "eos": found["eos_token_id"], "start": found["decoder_start_token_id"]}
    if separate:
        size_of_target = found.get("decoder_vocab_size") or size
        # no source begins with a mark: what stands for it there is any row
        source = _numbered(folder / "vocab.json", [models["source"]], size=size, **{**ids, "start": ids["pad"]})
        target = _numbered(folder / "target_vocab.json", [models["target"]], size=size_of_target, **ids)
    else:
        source = target = _numbered(folder / "vocab.json", list(models.values()), size=size, **ids)
    written = {}
    for (side, model), numbering in zip(models.items(), (source, target), strict=True):
        try:
            written[f"{side}.model"] = renumbered(model, numbering.pieces, numbering.marks).written()
        except ValueError as error:
            raise DataError(f"{paths[side]}: {error}") from error
    if written["source.model"] == written["target.model"]:
        written = {"joint.model": written["source.model"]}
    kinds = {model.kind for model in models.values()}
    if len(kinds) > 1:
        raise DataError(f"{paths['source']} and {paths['target']} cut text by different algorithms")
    settings = {
        "kind": kinds.pop(),
        "joint": not separate,
        "vocabulary": max(len(source.rows), len(target.rows)),
        "normalization": "identity",  # theirs is part of the sentencepiece models
        "byte_fallback": all(model.byte_fallback for model in models.values()),
    }
    return _Sides(source, target, written, settings)


def _numbered(path: Path, models: Sequence[ModelFile], **ids: int) -> Numbering:
    vocabulary = read_stored(path, VOCABULARY, "give the folder of a Marian model", error=DataError)
    try:
        return number(vocabulary, models, **ids)
    except DataError as error:
        raise DataError(f"{path}: {error}") from error


def _model(path: Path) -> ModelFile:
    try:
        return ModelFile.read(path.read_bytes())
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}; give the folder of a Marian model") from error
    except ValueError as error:
        raise DataError(f"{path} is not a readable sentencepiece model") from error


def _weights(folder: Path) -> dict[str, Tensor]:
    """All tensors of the folder's safetensors files. Raises: RunError where there are none but a pickle."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        pickles = sorted(each.name for each in folder.glob("*") if each.suffix in PICKLES)
        if pickles:
            convert = f"M.from_pretrained('{folder}').save_pretrained('{folder}')"
            raise RunError(
                f"{folder} holds its weights as the pickle {pickles[0]}, which can run code when loaded; convert it "
                f'with transformers: python -c "from transformers import MarianMTModel as M; {convert}"'
            )
        raise RunError(f"{folder} holds no weights: no .safetensors file")
    return {name: tensor for file in files for name, tensor in read_tensors(file).items()}


def _said(folder: Path) -> dict[str, Any]:
    """The content of tokenizer_config.json; nothing where there is none, as Hugging Face takes its defaults then."""
    path = folder / "tokenizer_config.json"
    return read_stored(path, dict[str, Any], "mend it or remove it", error=DataError) if path.exists() else {}


def _added_tokens(folder: Path) -> list[str]:
    """Tokens that a fine-tuned model's tokenizer never cuts, but for the special ones and language tags."""
    path = folder / "added_tokens.json"
    listed = read_stored(path, VOCABULARY, "mend it or remove it", error=DataError) if path.exists() else {}
    said = _said(folder).get("added_tokens_decoder")
    entries = said.values() if isinstance(said, dict) else ()
    contents = [str(each.get("content")) for each in entries if isinstance(each, dict) and "content" in each]
    return [each for each in dict.fromkeys([*listed, *contents]) if each not in MARKS.values() and not is_tag(each)]


def _languages(folder: Path, source: str | None, target: str | None) -> tuple[str, str]:
    """Raises: MtkitError where neither the caller nor tokenizer_config.json names them."""
    path = folder / "tokenizer_config.json"
    said = _said(folder)
    found = source or said.get("source_lang"), target or said.get("target_lang")
    for language, name in zip(found, ("source", "target"), strict=True):
        if not language or not isinstance(language, str):
            raise MtkitError(f"{path} does not say the {name} language; give --{name}-language, as in en or de")
    return str(found[0]), str(found[1])


def _write(
    folder: Path, recipe: Recipe, about: dict[str, Any], models: dict[str, bytes], weights: dict[str, Tensor]
) -> None:
    with writing(folder) as temporary:
        temporary.mkdir()
        (temporary / "tokenizer").mkdir()
        for name, content in models.items():
            (temporary / "tokenizer" / name).write_bytes(content)
        path = temporary / "checkpoints" / "update-00000000"
        write_checkpoint(path, {"model": weights}, asdict(Progress()))
        write_text(temporary / "recipe.yaml", dump_yaml(json.loads(recipe.model_dump_json())))
        write_json(temporary / "run.json", about)
