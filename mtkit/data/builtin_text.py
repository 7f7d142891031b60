"""The built-in corpus or task as text files, which are prepared like a user's text."""

from contextlib import ExitStack
from pathlib import Path

from mtkit.data.builtin.registry import builtin_sides
from mtkit.data.place import CONTRASTIVE, Corpora
from mtkit.errors import RecipeError
from mtkit.recipe.data import Corpus, DataSettings
from mtkit.storage.files import json_text, write_text
from mtkit.terminal import ProgressBar


def write_builtin_text(settings: DataSettings, folder: Path, progress: ProgressBar) -> Corpora:
    """Draw the built-in corpus or task into plain text files, which are prepared like other text.

    The contrastive pairs of the test sides, if there are any, become a file next to `folder`.

    Raises: RecipeError if both languages have one name.
    """
    ends = (settings.source_language, settings.target_language, "ids")
    if len(set(ends)) < len(ends):
        raise RecipeError(
            f"built-in text cannot have the languages {ends[0]} and {ends[1]}, which name its files; give two names "
            "other than ids (--source-language, --target-language)"
        )
    folder.mkdir()
    sides: Corpora = {}
    contrastive: list[str] = []
    for name, side in builtin_sides(settings).items():
        source, target, ids = (folder / f"{name}.{end}" for end in ends)
        with ExitStack() as stack:
            files = [
                stack.enter_context(path.open("w", encoding="utf-8", newline="")) for path in (source, target, ids)
            ]
            for pair in progress(side.draw(), f"drawing {name}", side.size):
                for file, text in zip(files, pair, strict=True):
                    if text is not None:
                        file.write(text + "\n")
        documents = ids if ids.stat().st_size else None
        if documents is None:
            ids.unlink()
        sides[name] = (Corpus(source=source, target=target, documents=documents),)
        contrastive += [json_text(pair, ensure_ascii=False) + "\n" for pair in side.contrastive()]
    if contrastive:
        write_text(folder.parent / CONTRASTIVE, "".join(contrastive))
    return sides
