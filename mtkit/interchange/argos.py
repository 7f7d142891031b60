"""Packages of Argos Translate (https://github.com/argosopentech/argos-translate), which LibreTranslate installs.

A package FILE.argosmodel is a zip archive with one folder:

translate-en_de-1_0/metadata.json         languages by their codes and names, versions
translate-en_de-1_0/sentencepiece.model   the tokenizer of both sides
translate-en_de-1_0/model/                CTranslate2's files
translate-en_de-1_0/README.md             the model card
"""

import zipfile
from contextlib import suppress
from pathlib import Path

from mtkit.errors import MtkitError
from mtkit.runs import Run
from mtkit.storage.files import json_text
from mtkit.text.languages import languages_of

ARGOS = "1.9"
"""The first version of Argos Translate whose tokenizer reads such a package."""

AT_TOP = {"source.spm": "sentencepiece.model", "README.md": "README.md"}
"""{file of a CTranslate2 export: its name in the package}; other files belong to the model."""


READ, WRITTEN = 1024, 256
"""Maximum pieces of a sentence and of its translation in Argos Translate, end mark counted: CTranslate2's defaults."""


def caution(run: Run) -> str:
    """A warning if the model takes fewer pieces than Argos Translate gives it; usually empty."""
    longest = run.recipe.model.max_length
    if longest >= READ:
        return ""
    most = f"of more than {longest - 1:,} pieces"  # the model counts the end mark
    also = f", and on translations {most}" if longest < WRITTEN else ""
    return f"Argos Translate fails on sentences {most} (model.max_length without the end mark){also}"


def check(run: Run) -> None:
    """Raises: MtkitError for a run with two vocabularies or several directions, which a package cannot contain."""
    if not run.tokenizers.joint:
        raise MtkitError(
            "Argos Translate has one vocabulary for both languages; prepare the data with tokenizer.joint: true"
        )
    if run.tokenizers.source.tags(run.directions):
        raise MtkitError("Argos Translate has no tag for the target language; train a run with one direction")


def pack(run: Run, folder: Path, path: Path) -> None:
    """Write the package of a run whose CTranslate2 export is in `folder`."""
    source, target = languages_of(run.directions[0])
    top = f"translate-{source}_{target}-1_0"
    metadata = {
        "package_version": "1.0",
        "argos_version": ARGOS,
        "from_code": source,
        "from_name": _name(source),
        "to_code": target,
        "to_name": _name(target),
    }
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as package:
        package.writestr(f"{top}/metadata.json", json_text(metadata))
        for file in sorted(folder.iterdir()):
            if file.name != "target.spm":
                package.write(file, f"{top}/{AT_TOP.get(file.name, f'model/{file.name}')}")


def _name(code: str) -> str:
    """The English name of a language; the code if it has none, or if babel is not installed."""
    with suppress(ModuleNotFoundError):
        from babel import Locale

        return str(Locale("en").languages.get(code, code))
    return code
