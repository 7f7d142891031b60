"""Finds or downloads models by their name on the Hugging Face hub.

Exports runs to folders that Hugging Face transformers or CTranslate2 loads without mtkit.
"""

from dataclasses import dataclass
from pathlib import Path

from mtkit.decoding.translator import Translator
from mtkit.errors import MtkitError, RunError, did_you_mean, shown
from mtkit.interchange import ctranslate2, huggingface
from mtkit.interchange.agreement import Agreement, compare
from mtkit.interchange.card import card
from mtkit.interchange.huggingface import CTRANSLATE2, HUGGINGFACE, spelled, tag_of
from mtkit.runs import Run
from mtkit.storage.files import write_text, writing

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


FORMATS = {"huggingface": huggingface, "ctranslate2": ctranslate2}
"""{format: module that writes it}."""

MARKS = {"huggingface": HUGGINGFACE, "ctranslate2": CTRANSLATE2}
"""{format: its library's spelling of the special pieces}."""


@dataclass(frozen=True)
class Exported:
    """Result of an export."""

    folder: Path
    checkpoint: str
    agreement: Agreement | None
    """None if the library that reads the folder is not installed."""
    caution: str
    """Warning of what is lost if the library saves the model again; usually empty."""

    @property
    def compared(self) -> str:
        """Result of the token comparison, as text for users."""
        return "its tokens were not compared" if self.agreement is None else str(self.agreement)


def export_run(run: Run, to: str, folder: Path, *, checkpoint: str = "best") -> Exported:
    """Write the new folder in the format "huggingface" or "ctranslate2", in float32, and compare its tokens.

    Raises: MtkitError if the format does not support a part of the model, or if the folder exists; nothing is written.
    """
    if to not in FORMATS:
        raise MtkitError(f"no format {shown(to)}{did_you_mean(to, list(FORMATS))}; there are: {', '.join(FORMATS)}")
    if folder.exists():
        raise MtkitError(f"{folder} exists; choose another folder, or remove it")
    form = FORMATS[to]
    run.check_packages()
    form.check(run.recipe)
    name = run.checkpoint(checkpoint).name
    translator = Translator([run], checkpoint=name, device="cpu", dtype="float32")
    with writing(folder) as temporary:
        temporary.mkdir()
        form.write(run, translator.network, temporary)
        caution = huggingface.caution(run.recipe) if to == "huggingface" else ""
        made = Exported(folder, name, compare(run, translator, temporary, to), caution)
        tag = tag_of(run, spelled(run.tokenizers.source, MARKS[to]))
        write_text(temporary / "README.md", card(run, name, to, made.compared, tag, caution))
    return made
