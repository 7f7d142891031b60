"""The lexicon that `--shortlist` needs: the run's, or learned at first."""

from pathlib import Path
from typing import TYPE_CHECKING

from mtkit.cli.translation_notes import note

if TYPE_CHECKING:
    from mtkit.decoding.lexicon import Lexicon
    from mtkit.runs import Run


def lexicon_for(run: "Run", data: Path, shortlist: int) -> "Lexicon | None":
    """The run's lexicon, learned from prepared data where it has none; None where no shortlist is asked for."""
    if not shortlist:
        return None
    from tqdm import tqdm

    from mtkit.decoding.lexicon import FILE, lexicon_of

    there = (run.folder / FILE).exists()
    with tqdm(desc="learning the lexicon", delay=2, leave=False, disable=None, bar_format="{l_bar}{bar}") as bar:

        def on_progress(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        lexicon = lexicon_of(run, data, on_progress)
    if not there:
        note(f"learned which pieces translate which from {data}, once; kept in {run.folder / FILE}")
    return lexicon
