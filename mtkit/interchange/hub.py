"""Finds or downloads models by their name on the Hugging Face hub."""

from pathlib import Path

from mtkit.errors import MtkitError, RunError

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
