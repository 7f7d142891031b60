"""Encoding by `mtkit prepare` beside sentencepiece alone: python -m tests.data.encoding SOURCE TARGET DATA/tokenizer

On one thread, best of 15 turns each, of the first 20,000 pairs in chunks of 10,000.
"""

import sys
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path

from mtkit.data.chunks import chunks
from mtkit.data.encode import encode_chunk
from mtkit.recipe.data import Corpus
from mtkit.text.corpora import read_corpus
from mtkit.text.tokenizer import Tokenizers


def seconds(work: Callable[[], object]) -> float:
    """Processor time."""
    began = time.process_time()
    work()
    return time.process_time() - began


if __name__ == "__main__":
    source, target, folder = map(Path, sys.argv[1:])
    tokenizers = Tokenizers.load(folder)
    pairs = list(islice(read_corpus(Corpus(source=source, target=target)), 20_000))
    text = list(each._replace(aligned=500) for each in chunks(pairs, 0, "en-de"))

    def alone() -> None:
        for chunk in text:
            tokenizers.source.processor.encode(chunk.sources, num_threads=1)
            tokenizers.target.processor.encode(chunk.targets, num_threads=1)

    def ours() -> None:
        for chunk in text:
            encode_chunk(chunk, tokenizers, threads=1)

    one, other = (min(each) for each in zip(*((seconds(alone), seconds(ours)) for _ in range(15)), strict=True))
    print(f"sentencepiece {len(pairs) / one:,.0f} pairs/s, mtkit {len(pairs) / other:,.0f}: {one / other:.0%}")
