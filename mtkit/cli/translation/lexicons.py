"""What is learned from prepared data at first use: the lexicon of `--shortlist`, the heads of `--alignments`."""

from pathlib import Path
from typing import TYPE_CHECKING

from mtkit.cli.translation.notes import note
from mtkit.errors import MtkitError

if TYPE_CHECKING:
    from mtkit.decoding.lexicon import Lexicon
    from mtkit.decoding.links.heads import Heads
    from mtkit.decoding.translator import Translator
    from mtkit.runs import Run


def lexicon_for(run: "Run", data: Path, each: int) -> "Lexicon":
    """The run's lexicon with `each` translations of a source piece; learned from prepared data where it has none.

    Raises: MtkitError as `learn_lexicon`; RunError for a damaged lexicon.
    """
    from mtkit.cli.progress import through
    from mtkit.decoding.lexicon import FILE, learn_lexicon, load_lexicon, save_lexicon

    lexicon = load_lexicon(run)
    if lexicon is None:
        lexicon = learn_lexicon(run, data, through)
        try:
            save_lexicon(run, lexicon)
            note(f"learned the lexicon from {data}; it is kept in {run.folder / FILE}")
        except MtkitError as error:
            note(f"{error}; the lexicon will be learned again next time")
    return lexicon.cut(each)


def heads_for(translator: "Translator", data: Path) -> "Heads":
    """The attention heads that align words for the translator's run. Raises: RunError for a damaged file of them."""
    from mtkit.cli.progress import through
    from mtkit.decoding.links import heads

    (run,), checkpoint = translator.runs, translator.about["checkpoint"]
    return heads.heads_for(run, translator.network, checkpoint, data, say=note, progress=through)
