"""What decides whether data must be prepared anew: its settings, and the content of what it is made from."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from mtkit.data.borrowed import vocabulary_of
from mtkit.data.grammar.corpus import corpus as builtin_corpus
from mtkit.data.progress import ProgressBar
from mtkit.data.readers import Facts, measure_corpus
from mtkit.recipe.data import Corpus, DataSettings

Corpora = dict[str, Sequence[Corpus]]
"""The corpora of each side."""


def measured(sides: Corpora, progress: ProgressBar) -> dict[str, list[Facts]]:
    """The facts of all corpora. Raises: DataError where one cannot be read to the end, or is empty."""
    return {side: [measure_corpus(corpus, progress) for corpus in corpora] for side, corpora in sides.items()}


def identified(
    settings: DataSettings, facts: Mapping[str, Sequence[Facts]]
) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """What was read, by the facts of each side's corpora, and what decides whether data must be prepared anew."""
    inputs = _inputs(settings, facts)
    return inputs, {
        "settings": prepared_by(settings),
        "inputs": {name: each["sha256"] for name, each in inputs.items()},
    }


def _inputs(settings: DataSettings, facts: Mapping[str, Sequence[Facts]]) -> dict[str, dict[str, Any]]:
    """What identifies each input by its content, with where it lies."""
    borrowed = settings.tokenizer_from
    tokenizer = {} if borrowed is None else {"the tokenizer": {"sha256": vocabulary_of(borrowed / "tokenizer")}}
    if not settings.train:
        # its held-out sides stand for the whole corpus: they change when the grammar or a seed does
        drawn = builtin_corpus(settings.builtin)
        texts = (f"{each.source}\n{each.target}\n" for name in ("valid", "test") for each in drawn[name]())
        digest = hashlib.sha256("".join(texts).encode()).hexdigest()
        return {"built-in corpus": {"sha256": digest}, **tokenizer}
    named = (pair for side, each in facts.items() for pair in zip(_names(side, each), each, strict=True))
    return {**{name: asdict(each) for name, each in named}, **tokenizer}


def prepared_by(settings: DataSettings) -> dict[str, Any]:
    """The settings that decide what is prepared: text counts by content, so not by where it lies."""
    unused = {"folder", "train", "valid", "test", "tokenizer_from"} | ({"builtin"} if settings.train else set())
    sides = {"train": settings.train, "valid": settings.valid, **settings.test}
    corpora = {
        name: {
            "direction": settings.direction_of(corpus),
            "weight": corpus.weight,
            "documents": corpus.documents is not None,
        }
        for side, each in sides.items()
        for name, corpus in zip(_names(side, each), each, strict=True)
    }
    dumped = settings.model_dump(mode="json", exclude=unused)
    del dumped["cleaning"]["misaligned"]  # says whether, not what
    return {**dumped, "corpora": corpora}


def _names(side: str, corpora: Sequence[object]) -> list[str]:
    """What the corpora of a side are called in prepared.json."""
    return [side] if len(corpora) == 1 else [f"{side} {number}" for number in range(1, len(corpora) + 1)]
