"""Text pairs to Arrow files of token ids, chunk by chunk, counting on the way."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from mtkit.data.readers import read_pairs
from mtkit.data.tokenizer import UNK, Tokenizers
from mtkit.data_settings import TextPair

_CHUNK = 10_000
"""Segments encoded, and written as one record batch, at a time."""


class Progress(Protocol):
    """Goes through `items` and shows how far it is; `total` may be unknown."""

    def __call__(self, items: Iterable[Any], what: str, total: int | None) -> Iterable[Any]: ...


def silent(items: Iterable[Any], what: str, total: int | None) -> Iterable[Any]:
    """No progress shown."""
    return items


@dataclass
class Count:
    """What was counted while a side was written."""

    lines: int = 0
    rows: int = 0
    empty: int = 0
    words: dict[str, int] = field(default_factory=lambda: {"source": 0, "target": 0})
    pieces: dict[str, int] = field(default_factory=lambda: {"source": 0, "target": 0})
    unknown: dict[str, int] = field(default_factory=lambda: {"source": 0, "target": 0})
    bytes: dict[str, int] = field(default_factory=lambda: {"source": 0, "target": 0})
    longest: dict[str, int] = field(default_factory=lambda: {"source": 0, "target": 0})


def write_side(
    folder: Path, name: str, pair: TextPair, tokenizers: Tokenizers, lines: int, progress: Progress
) -> Count:
    """Encode and write one side in chunks; returns what was counted."""
    from datasets.arrow_writer import ArrowWriter

    with_text = name != "train"
    columns = {"source": pa.list_(pa.int32()), "target": pa.list_(pa.int32()), "line": pa.int64()}
    if with_text:
        columns |= {"source_text": pa.string(), "target_text": pa.string()}
    count = Count()
    with ArrowWriter(schema=pa.schema(columns), path=str(folder / f"{name}.arrow")) as writer:
        numbered = enumerate(progress(read_pairs(pair), f"encoding {name}", lines), start=1)
        while chunk := list(islice(numbered, _CHUNK)):
            writer.write_table(_encoded(chunk, tokenizers, count, with_text))
        writer.finalize()
    return count


def _encoded(
    chunk: Sequence[tuple[int, tuple[str, str]]], tokenizers: Tokenizers, count: Count, with_text: bool
) -> pa.Table:
    """A chunk of numbered pairs as rows; without the raw text, those with an empty side are left out."""
    lines = np.array([number for number, _ in chunk], dtype=np.int64)
    texts = {side: [pair[index] for _, pair in chunk] for index, side in enumerate(("source", "target"))}
    pieces = {side: getattr(tokenizers, side).encode_lines(texts[side]) for side in texts}
    full = np.array([bool(source and target) for source, target in zip(*pieces.values(), strict=True)])
    keep = np.ones(len(chunk), dtype=bool) if with_text else full
    count.lines += len(chunk)
    count.rows += int(keep.sum())
    count.empty += int((~full).sum())
    table = {}
    for side, raw in texts.items():
        kept = [each for each, stays in zip(pieces[side], keep, strict=True) if stays]
        offsets = np.zeros(len(kept) + 1, dtype=np.int32)
        np.cumsum([len(each) for each in kept], out=offsets[1:])
        flat = np.fromiter(chain.from_iterable(kept), dtype=np.int32, count=int(offsets[-1]))
        table[side] = pa.ListArray.from_arrays(pa.array(offsets), pa.array(flat))
        count.words[side] += sum(len(text.split()) for text, stays in zip(raw, keep, strict=True) if stays)
        count.pieces[side] += len(flat)
        count.unknown[side] += int((flat == UNK).sum())
        count.bytes[side] += int(getattr(tokenizers, side).is_byte[flat].sum())
        count.longest[side] = max(count.longest[side], int(np.diff(offsets).max(initial=0)))
    table["line"] = pa.array(lines[keep])
    if with_text:
        table |= {f"{side}_text": pa.array(texts[side], pa.string()) for side in texts}
    return pa.table(table)
