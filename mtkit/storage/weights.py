"""Weights in files: read from safetensors and checked, never from a pickle, and put into a model."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from typing_extensions import TypedDict

from mtkit.errors import RunError
from mtkit.storage.files import digest
from mtkit.storage.records import read_stored, stored

if TYPE_CHECKING:
    from torch import Tensor, nn

PICKLES = (".pt", ".pth", ".bin", ".pkl", ".pickle", ".ckpt")


def load_weights(model: "nn.Module", weights: "Mapping[str, Tensor]", origin: Path) -> None:
    """Put weights into a model of the same shape. Raises: RunError, naming a weight, where it is another model's."""
    own = model.state_dict()
    for name in sorted(own.keys() ^ weights.keys()):
        raise RunError(f"{origin} holds another model: {name} is in {'it' if name in weights else 'the recipe'} alone")
    for name, value in weights.items():
        if own[name].shape != value.shape:
            shapes = f"{tuple(value.shape)} there and {tuple(own[name].shape)} by the recipe"
            raise RunError(f"{origin} holds another model: {name} is {shapes}")
        if value.is_complex() or value.is_floating_point() != own[name].is_floating_point():
            types = f"{value.dtype} there and {own[name].dtype} by the recipe"
            raise RunError(f"{origin} holds another model: {name} is {types}")
    model.load_state_dict(dict(weights))


@stored
class Checksums(TypedDict):
    """Content of a checkpoint's state.json, as far as it concerns whether the checkpoint's files are damaged."""

    sha256: dict[str, str]


def check_sum(file: Path, advice: str) -> bool:
    """Compare a file of a checkpoint with its checksum in state.json; False if there is no state.json.

    Raises: RunError, which ends with `advice`, for a file that was altered or has no checksum.
    """
    record = file.with_name("state.json")
    if not record.exists():
        return False
    sums = read_stored(record, Checksums, advice, error=RunError)["sha256"]
    if file.is_file() and sums.get(file.name) != digest(file):
        raise RunError(f"{file} is damaged: its checksum is not the one in state.json; {advice}")
    return True


def read_tensors(path: Path) -> "dict[str, Tensor]":
    """The tensors of a safetensors file.

    Raises: RunError for a missing, unreadable, truncated or foreign file, and for anything that could run code when
    loaded.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if path.suffix in PICKLES:
        raise RunError(f"{path} is a pickle, which can run code when loaded; mtkit reads only .safetensors")
    if not path.exists():
        pickles = [each.name for each in path.parent.glob("*") if each.suffix in PICKLES]
        if pickles:
            raise RunError(
                f"{path.parent} holds the pickle {pickles[0]} in place of {path.name}: a pickle can run code when "
                "loaded, so mtkit reads only .safetensors; save the weights as safetensors"
            )
        raise RunError(f"{path} is missing; choose another --checkpoint or train again")
    try:
        path.open("rb").close()  # load_file calls a file missing that it may not open
        return load_file(path)
    except OSError as error:
        raise RunError(f"cannot read {path}: {error.strerror or error}; make it readable and try again") from error
    except MemoryError as error:
        raise RunError(f"the memory is too small for {path}; free some memory") from error
    except SafetensorError as error:
        raise RunError(f"{path} is truncated or not a safetensors file; choose another --checkpoint") from error
