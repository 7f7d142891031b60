"""Peak memory of `mtkit prepare` for so many generated pairs: python -m tests.data.memory PAIRS DATA

The tokenizer is that of DATA, prepared data of English to German. No two pairs are the same, so each keeps its hash.
"""

import resource
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from mtkit.data.prepare import prepare
from mtkit.recipe.data import Cleaning, Corpus, DataSettings

WORDS = 8
BLOCK = 10_000


def write(folder: Path, name: str, pairs: int) -> Corpus:
    """Pairs of drawn words of three to six letters."""
    draw = np.random.default_rng(len(name))
    drawn = draw.integers(97, 123, (5000, 6)).astype(np.uint8)
    words = np.array([row.tobytes()[: 3 + number % 4].decode() for number, row in enumerate(drawn)])
    paths = folder / f"{name}.en", folder / f"{name}.de"
    for path in paths:
        with path.open("w", encoding="utf-8") as file:
            for start in range(0, pairs, BLOCK):
                rows = words[draw.integers(0, len(words), (min(BLOCK, pairs - start), WORDS))].tolist()
                file.writelines(f"{' '.join(row)}\n" for row in rows)
    return Corpus(source=paths[0], target=paths[1])


def peak() -> int:
    """Most memory that this process has had, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    pairs, borrowed = int(sys.argv[1]), Path(sys.argv[2])
    with TemporaryDirectory() as place:
        folder = Path(place)
        settings = DataSettings(
            folder=folder / "data",
            train=(write(folder, "train", pairs),),
            valid=(write(folder, "valid", 100),),
            cleaning=Cleaning(misaligned=True),
            tokenizer_from=borrowed,
        )
        before = peak()
        kept = prepare(settings).record["sides"]["train"]["segments"]
    print(f"{kept:,} of {pairs:,} pairs kept; peak memory {before / 1e6:,.0f} MB before, {peak() / 1e6:,.0f} MB in all")
