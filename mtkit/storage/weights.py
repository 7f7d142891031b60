"""Weights: reading safetensors files with checksums, and loading them into a model. Pickles are refused."""

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
    """Load weights into a model. Raises: RunError, naming a weight, if names, shapes or types do not match."""
    state = model.state_dict()
    for name in sorted(state.keys() ^ weights.keys()):
        where = "the file" if name in weights else "the recipe's model"
        raise RunError(f"{origin} holds another model: only {where} has {name}")
    for name, value in weights.items():
        if state[name].shape != value.shape:
            shapes = f"{tuple(value.shape)} in the file and {tuple(state[name].shape)} in the recipe's model"
            raise RunError(f"{origin} holds another model: {name} is {shapes}")
        if value.is_complex() or value.is_floating_point() != state[name].is_floating_point():
            types = f"{value.dtype} in the file and {state[name].dtype} in the recipe's model"
            raise RunError(f"{origin} holds another model: {name} is {types}")
    model.load_state_dict(dict(weights))


@stored
class Checksums(TypedDict):
    """The checksums in a checkpoint's state.json."""

    sha256: dict[str, str]


def check_sum(file: Path, advice: str) -> bool:
    """Compare a file of a checkpoint with its checksum in state.json. Return False if there is no state.json.

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
    """Read a safetensors file.

    Raises: RunError for a missing, unreadable, truncated or other file, and for a pickle, which could run code.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if path.suffix in PICKLES:
        raise RunError(f"{path} is a pickle, which can run code when loaded; mtkit reads only .safetensors")
    if not path.exists():
        pickles = [file.name for file in path.parent.glob("*") if file.suffix in PICKLES]
        if pickles:
            raise RunError(
                f"{path.parent} holds the pickle {pickles[0]} instead of {path.name}: a pickle can run code when "
                "loaded, so mtkit reads only .safetensors; save the weights as safetensors"
            )
        raise RunError(f"{path} is missing; choose another --checkpoint or train again")
    try:
        path.open("rb").close()  # load_file reports a file without read permission as missing
        return load_file(path)
    except OSError as error:
        raise RunError(f"cannot read {path}: {error.strerror or error}; make it readable and try again") from error
    except MemoryError as error:
        raise RunError(f"the memory is too small for {path}; free some memory") from error
    except SafetensorError as error:
        raise RunError(
            f"{path} is truncated or not a safetensors file; copy it again (or, for a run, choose another --checkpoint)"
        ) from error
