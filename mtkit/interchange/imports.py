"""Import of Hugging Face's Marian models: OPUS-MT, and models that were fine-tuned from it."""

import json
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mtkit.data.vocabulary import vocabulary_of
from mtkit.errors import DataError, MtkitError, RunError, first_line
from mtkit.interchange.marian import (
    Configuration,
    decoding_settings,
    excluded_rows,
    model_settings,
    read_configuration,
    read_generation,
    unsupported_search,
)
from mtkit.interchange.marian_vocabulary import MARKS, Numbering, is_tag, number, renumbered
from mtkit.interchange.marian_weights import converted_weights, positions_of
from mtkit.model.build import build_model
from mtkit.recipe import Recipe, make_recipe
from mtkit.runs import FORMAT, Run
from mtkit.storage.files import write_json, write_text, writing
from mtkit.storage.records import read_stored
from mtkit.storage.weights import PICKLES, load_weights, read_tensors
from mtkit.storage.yaml_text import dump_yaml
from mtkit.text.model_file import ModelFile
from mtkit.text.tokenizer import BOS, BREAK, PAD, UNK
from mtkit.training.checkpoint import write_checkpoint
from mtkit.training.progress import Progress
from mtkit.version import __version__

FILES = ["*.json", "*.safetensors", "*.spm"]
"""File patterns that are downloaded: no pickles, and no code."""

VOCABULARY = dict[str, int]
"""Content of vocab.json: {piece: id}."""


@dataclass(frozen=True)
class Imported:
    """A run that was made from another library's model."""

    run: Run
    notes: list[str]
    """Differences from that library's translations, for people."""


def find_folder(place: str) -> Path:
    """Return the local folder `place`, or else download the model of that name, e.g. Helsinki-NLP/opus-mt-en-de.

    Raises: MtkitError if neither exists; RunError for a model without safetensors, with the command that converts it.
    """
    path = Path(place)
    if path.is_dir():
        return path
    if path.exists() or path.is_absolute() or place.startswith(".") or place.count("/") != 1:
        raise MtkitError(f"no folder {place}; give one, or a name on the hub such as Helsinki-NLP/opus-mt-en-de")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        folder = Path(snapshot_download(place, allow_patterns=FILES))
    except (HfHubHTTPError, HFValidationError, OSError, ValueError) as error:
        raise MtkitError(
            f"no folder {place}, and it cannot be downloaded from the hub ({first_line(error)})"
        ) from error
    if not any(folder.glob("*.safetensors")):
        copy = place.rpartition("/")[2]
        convert = "; ".join(f"{name}.from_pretrained('{place}').save_pretrained('{copy}')" for name in "MT")
        raise RunError(
            f"{place} has no weights as safetensors; a pickle can run code when loaded. Convert it with transformers: "
            f'python -c "from transformers import MarianMTModel as M, MarianTokenizer as T; {convert}", '
            f"then import {copy}"
        )
    return folder


def import_marian(
    folder: Path,
    into: Path,
    *,
    source_language: str | None = None,
    target_language: str | None = None,
    named: str | None = None,
    command: Sequence[str] = (),
) -> Imported:
    """Make the run folder `into` from the Marian model in `folder`.

    It translates as Hugging Face's class does in float32. The languages default to those in tokenizer_config.json.
    run.json records `command`, and `named`, the model's name on the hub, if it was downloaded from there.

    Raises: RunError or DataError for a file or setting that mtkit does not support; nothing is then written.
    """
    if into.exists():
        raise RunError(f"{into} exists; choose another --name, or remove it")
    config, generation = read_configuration(folder), read_generation(folder)
    theirs = _weights(folder)
    _check_sizes(config, theirs, folder / "config.json")
    sides = _sides(folder, config)
    source, target = _languages(folder, source_language, target_language)
    tags = sides.source.languages
    with _located(folder):
        positions = positions_of(theirs, config["max_position_embeddings"], config["d_model"])
    recipe = make_recipe(
        {
            "data": {
                "source_language": source,
                "target_language": tags[0] if len(tags) > 1 else target,
                "tokenizer": sides.settings,
            },
            "model": {**model_settings(config), "positions": positions},
            "decoding": decoding_settings(generation, config["max_position_embeddings"]),
        },
        origin=str(folder),
    )
    excluded = excluded_rows(generation)
    with _located(folder):
        weights = converted_weights(theirs, recipe.model, sides.source, sides.target, excluded)
    sizes = {"source": len(sides.source.rows), "target": len(sides.target.rows)}
    model = build_model(recipe, source_vocabulary=sizes["source"], target_vocabulary=sizes["target"])
    load_weights(model, weights, folder)
    about = {
        "format": FORMAT,
        "mtkit": __version__,
        "torch": torch.__version__,
        "imported_from": named or str(folder.resolve()),
        "directions": [f"{source}-{tag}" for tag in tags] if len(tags) > 1 else recipe.data.directions,
        "document_pieces": None,
        "init_from": None,
        "vocabularies": sizes,
        "commands": [shlex.join(command)] if command else [],
    }
    marks = {PAD, UNK, BOS, BREAK} - sides.target.added  # the search predicts none of them in single lines
    never = {*excluded, *(sides.target.rows[mark] for mark in marks)}
    ignored = unsupported_search(generation, never)
    notes = [f"{folder} searches with {setting}, which mtkit's search does not follow" for setting in ignored]
    if added := _added_tokens(folder):
        notes.append(f"{folder} adds {', '.join(added)} to its tokenizer, which mtkit cuts like other text")
    _write(into, recipe, about, sides.models, model.state_dict())
    return Imported(Run(into), notes)


@contextmanager
def _located(path: Path) -> Iterator[None]:
    """Put the path before the message of a RunError, DataError or ValueError; the last becomes a DataError."""
    try:
        yield
    except RunError as error:
        raise RunError(f"{path}: {error}") from error
    except (DataError, ValueError) as error:
        raise DataError(f"{path}: {error}") from error


def _check_sizes(config: Configuration, theirs: dict[str, Tensor], path: Path) -> None:
    """Raises: RunError for a size that no weight has, before anything of that size is allocated."""
    largest = max((max(tensor.shape, default=1) for tensor in theirs.values()), default=1)
    sizes = {
        "vocab_size": config["vocab_size"],
        "decoder_vocab_size": config.get("decoder_vocab_size") or 0,
        "d_model": config["d_model"],
        "encoder_ffn_dim": config["encoder_ffn_dim"],
        "decoder_ffn_dim": config["decoder_ffn_dim"],
    }
    for key, size in sizes.items():
        if size > largest:
            raise RunError(f"{path}: {key} = {size:,}, and the weights have at most {largest:,} rows or columns")


@dataclass(frozen=True)
class _Sides:
    """The vocabularies of both sides, and the tokenizers' {file name: content}."""

    source: Numbering
    target: Numbering
    models: dict[str, bytes]
    settings: dict[str, Any]
    """The recipe's `data.tokenizer`."""


def _sides(folder: Path, config: Configuration) -> _Sides:
    """Read both vocabularies. Raises: DataError with the file if pieces, ids and models do not match."""
    paths = {side: folder / f"{side}.spm" for side in ("source", "target")}
    models = {side: _model(path) for side, path in paths.items()}
    # a folder may have a target_vocab.json that is not used
    separate = _tokenizer_config(folder).get("separate_vocabs") is True
    size = config["vocab_size"]
    ids = {"pad": config["pad_token_id"], "eos": config["eos_token_id"], "start": config["decoder_start_token_id"]}
    if separate:
        target_size = config.get("decoder_vocab_size") or size
        # no source begins with a start mark, so its row does not matter
        source = _numbered(folder / "vocab.json", [models["source"]], size=size, **{**ids, "start": ids["pad"]})
        target = _numbered(folder / "target_vocab.json", [models["target"]], size=target_size, **ids)
    else:
        source = target = _numbered(folder / "vocab.json", list(models.values()), size=size, **ids)
    written = {}
    for (side, model), numbering in zip(models.items(), (source, target), strict=True):
        with _located(paths[side]):
            written[f"{side}.model"] = renumbered(model, numbering.pieces, numbering.marks).written()
    if written["source.model"] == written["target.model"]:
        written = {"joint.model": written["source.model"]}
    kinds = {model.kind for model in models.values()}
    if len(kinds) > 1:
        raise DataError(f"{paths['source']} and {paths['target']} cut text by different algorithms")
    settings = {
        "kind": kinds.pop(),
        "joint": not separate,
        "vocabulary": max(len(source.rows), len(target.rows)),
        "normalization": "identity",  # the sentencepiece models include Marian's normalisation
        "byte_fallback": all(model.byte_fallback for model in models.values()),
    }
    return _Sides(source, target, written, settings)


def _numbered(path: Path, models: Sequence[ModelFile], **ids: int) -> Numbering:
    vocabulary = read_stored(path, VOCABULARY, "give the folder of a Marian model", error=DataError)
    with _located(path):
        return number(vocabulary, models, **ids)


def _model(path: Path) -> ModelFile:
    try:
        return ModelFile.read(path.read_bytes())
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}; give the folder of a Marian model") from error
    except ValueError as error:
        raise DataError(f"{path} is not a readable sentencepiece model; copy it again") from error


def _weights(folder: Path) -> dict[str, Tensor]:
    """Read all safetensors files of the folder. Raises: RunError if it has none, with the conversion of a pickle."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        pickles = sorted(path.name for path in folder.glob("*") if path.suffix in PICKLES)
        if pickles:
            convert = f"M.from_pretrained('{folder}').save_pretrained('{folder}')"
            raise RunError(
                f"{folder} holds its weights as the pickle {pickles[0]}, which can run code when loaded; convert it "
                f'with transformers: python -c "from transformers import MarianMTModel as M; {convert}"'
            )
        raise RunError(f"{folder} has no weights: no .safetensors file")
    return {name: tensor for file in files for name, tensor in read_tensors(file).items()}


def _tokenizer_config(folder: Path) -> dict[str, Any]:
    """Read tokenizer_config.json; {} if it is missing, because Hugging Face then uses its defaults."""
    path = folder / "tokenizer_config.json"
    return read_stored(path, dict[str, Any], "mend it or remove it", error=DataError) if path.exists() else {}


def _added_tokens(folder: Path) -> list[str]:
    """List the tokens that a fine-tuned model's tokenizer never splits, except special tokens and language tags."""
    path = folder / "added_tokens.json"
    listed = read_stored(path, VOCABULARY, "mend it or remove it", error=DataError) if path.exists() else {}
    decoder = _tokenizer_config(folder).get("added_tokens_decoder")
    entries = decoder.values() if isinstance(decoder, dict) else ()
    contents = [str(entry.get("content")) for entry in entries if isinstance(entry, dict) and "content" in entry]
    tokens = dict.fromkeys([*listed, *contents])
    return [token for token in tokens if token not in MARKS.values() and not is_tag(token)]


def _languages(folder: Path, source: str | None, target: str | None) -> tuple[str, str]:
    """Return both languages. Raises: MtkitError if neither the caller nor tokenizer_config.json names one."""
    config = _tokenizer_config(folder)
    languages = source or config.get("source_lang"), target or config.get("target_lang")
    for language, name in zip(languages, ("source", "target"), strict=True):
        if not language or not isinstance(language, str):
            path = folder / "tokenizer_config.json"
            raise MtkitError(f"{path} does not name the {name} language; give --{name}-language, as in en or de")
    return str(languages[0]), str(languages[1])


def _write(
    folder: Path, recipe: Recipe, about: dict[str, Any], models: dict[str, bytes], weights: dict[str, Tensor]
) -> None:
    with writing(folder) as temporary:
        (temporary / "tokenizer").mkdir(parents=True)
        for name, content in models.items():
            (temporary / "tokenizer" / name).write_bytes(content)
        path = temporary / "checkpoints" / "update-00000000"
        write_checkpoint(path, {"model": weights}, asdict(Progress()))
        write_text(temporary / "recipe.yaml", dump_yaml(json.loads(recipe.model_dump_json())))
        write_json(temporary / "run.json", about | {"tokenizer": vocabulary_of(temporary / "tokenizer")})
