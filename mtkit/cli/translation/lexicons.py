"""The lexicon that `--shortlist` needs: the run's, or learned at first."""

from pathlib import Path
from typing import TYPE_CHECKING

from mtkit.cli.translation.notes import note
from mtkit.errors import MtkitError

if TYPE_CHECKING:
    from mtkit.decoding.lexicon import Lexicon
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
