"""Everything that `mtkit score` says of one side: scores by system, direction and source length, and differences."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mtkit.data.progress import Progress, silent
from mtkit.evaluation.by_length import LengthRow, by_length
from mtkit.evaluation.metrics import METRICS
from mtkit.evaluation.scores import named_metrics
from mtkit.evaluation.significance import TESTS, Comparison, compare_systems
from mtkit.evaluation.statistics import gather
from mtkit.evaluation.systems import Translated, read_texts

TOKENISED = 0.5
"""From this share of lines on that end in " ." a text looks tokenised."""


@dataclass(frozen=True)
class SideScores:
    """One side by all systems, the first of which is the baseline."""

    name: str | None
    """None for files that belong to no run."""
    files: list[Translated]
    segments: int
    overall: Comparison
    directions: dict[str, tuple[int, Comparison]]
    """Segments and scores of each, where there are several."""
    lengths: list[list[LengthRow]]
    """Of every system, where they were asked for."""
    tokenised: list[str]
    """Files whose lines end in " .", as text that was not put together again does: BLEU expects whole text."""


def score_side(
    name: str | None,
    files: Sequence[Translated],
    *,
    metrics: Sequence[str] = METRICS,
    tests: Sequence[str] = TESTS,
    lengths: bool = False,
    tokenize: str | None = None,
    lowercase: bool = False,
    progress: Progress = silent,
) -> SideScores:
    """Scores of the side's translations; `lengths` asks for scores by source length, which need the sources.

    Raises: DataError and MtkitError as `read_texts`, `named_metrics` and `compare_systems` do.
    """
    chosen = named_metrics(metrics, tokenize=tokenize, lowercase=lowercase)
    bleu = named_metrics(["BLEU"], tokenize=tokenize, lowercase=lowercase) if lengths else []
    texts = read_texts(files, sources=lengths)
    systems = [gather(chosen, each, texts.references, progress=progress) for each in texts.hypotheses]
    rows = []
    if texts.sources is not None:
        for hypotheses, system in zip(texts.hypotheses, systems, strict=True):
            known = [each for each in system if each.name == "BLEU"]
            (ratio,) = known or gather(bleu, hypotheses, texts.references, progress=progress)
            rows.append(by_length(texts.sources, system, ratio))
    by_direction = {}
    if texts.directions is not None and len(set(texts.directions)) > 1:
        all_directions = np.array(texts.directions)
        for direction in dict.fromkeys(texts.directions):
            picked = all_directions == direction
            part = [[each.of(picked) for each in system] for system in systems]
            by_direction[direction] = int(picked.sum()), compare_systems(part, tests=tests, progress=progress)
    written = {str(each.hypothesis): lines for each, lines in zip(files, texts.hypotheses, strict=True)}
    written |= {str(path): lines for path, lines in zip(files[0].references, texts.references, strict=True)}
    return SideScores(
        name,
        list(files),
        len(texts.hypotheses[0]),
        compare_systems(systems, tests=tests, progress=progress),
        by_direction,
        rows,
        [path for path, lines in written.items() if _looks_tokenised(lines)],
    )


def _looks_tokenised(lines: Sequence[str]) -> bool:
    return sum(line.rstrip().endswith(" .") for line in lines) > TOKENISED * len(lines)
