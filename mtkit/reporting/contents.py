"""Contents of a report, read from run folders: settings, segments and attention."""

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import TYPE_CHECKING, Any

from mtkit.decoding.alignment_heads import Heads, heads_of
from mtkit.decoding.translator import Translator
from mtkit.decoding.word_alignment import pharaoh
from mtkit.errors import MtkitError
from mtkit.evaluation.metrics import make_metric
from mtkit.evaluation.systems import Translated, read_texts
from mtkit.runs import Run
from mtkit.storage.files import json_text
from mtkit.text.text_files import Lines
from mtkit.text.words import words
from mtkit.training.run_folder import imported_from

if TYPE_CHECKING:
    from mtkit.decoding.alignment import Alignment

SHOWN = 5
"""Number of segments per kind in a report."""
WORDS = (8, 14)
"""Preferred minimum and maximum words of the segment whose attention is shown."""
COMPARED = 2_000
"""Maximum words of a segment whose differences are marked: time is quadratic in them."""


@dataclass(frozen=True)
class ShownSegment:
    """A segment with its translations by all systems, and their chrF scores."""

    number: int
    """Line number, from 1."""
    source: str | None
    reference: str
    translations: list[str]
    scores: list[float]


@dataclass(frozen=True)
class ShownAttention:
    """Cross attention of one run in one segment."""

    aligned: "Alignment"
    heads: Heads
    links: str
    """Word alignment in Pharaoh format."""
    translation: str
    left_out: str
    """Note on the pieces that are not shown, or ""."""

    @property
    def mean(self) -> list[list[float]]:
        """Mean weights (T, S) of the alignment's heads."""
        return self.heads.rows(self.aligned.layers["cross"]).tolist()

    @property
    def maps(self) -> list[tuple[str, list[list[float]]]]:
        """Title and weights (T, S) of each head in each layer that has weights."""
        return [
            (f"layer {layer} head {head}", weights.tolist())
            for layer, of_layer in enumerate(self.aligned.layers["cross"], start=1)
            if of_layer is not None
            for head, weights in enumerate(of_layer, start=1)
        ]


def differing_settings(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """Return the settings that differ between runs, as (dotted name, values by run); all settings of a single run.

    An imported run has no training settings, because mtkit did not train it.
    """
    flat = [
        _flat(run.recipe.model_dump(mode="json", exclude={"training"} if imported_from(run) else None)) for run in runs
    ]
    names = list(dict.fromkeys(name for settings in flat for name in settings))
    rows = [(name, [settings.get(name, "") for settings in flat]) for name in names]
    return [(name, values) for name, values in rows if len(runs) == 1 or len(set(values)) > 1]


def shown_segments(files: Sequence[Translated]) -> dict[str, list[ShownSegment]]:
    """Return the worst and best segments by chrF and, of several systems, those whose chrF differs most."""
    texts = read_texts(files, sources=files[0].source is not None)
    (references,) = texts.references
    metric = make_metric("chrF")
    segments = []
    for number, (reference, *translations) in enumerate(zip(references, *texts.hypotheses, strict=True)):
        if reference.strip():
            scores = [float(metric.sentence_score(translation, [reference]).score) for translation in translations]
            source = None if texts.sources is None else texts.sources[number]
            segments.append(ShownSegment(number + 1, source, reference, translations, scores))
    by_mean = sorted(segments, key=lambda each: sum(each.scores))
    kinds = {"Worst segments": by_mean[:SHOWN], "Best segments": by_mean[::-1][:SHOWN]}
    if len(files) > 1:
        by_difference = sorted(segments, key=lambda each: min(each.scores) - max(each.scores))
        kinds = {"Segments with the largest difference between runs": by_difference[:SHOWN], **kinds}
    return kinds


def differing(text: str, other: str) -> set[int]:
    """Return the indices of the words in `text` that have no match in `other`, among the first `COMPARED` of each."""
    ours, theirs = words(text)[:COMPARED], words(other)[:COMPARED]
    matches = SequenceMatcher(None, ours, theirs, autojunk=False).get_matching_blocks()
    return set(range(len(ours))) - {place for block in matches for place in range(block.a, block.a + block.size)}


def sample_source(files: Translated) -> tuple[str, str | None] | None:
    """Return the first source of a preferred length, else the shortest, and its direction; None without sources."""
    if files.source is None:
        return None
    lines = [*Lines(files.source)]
    directions = None if files.direction is None else [*Lines(files.direction)]
    real = [number for number, line in enumerate(lines) if line.strip()]
    fitting = [number for number in real if WORDS[0] <= len(words(lines[number])) <= WORDS[1]]
    if not real:
        return None
    number = (fitting or sorted(real, key=lambda each: len(lines[each])))[0]
    return lines[number], None if directions is None else directions[number]


def shown_attention(run: Run, source: str, direction: str | None) -> ShownAttention | str:
    """Return the attention of a run in its translation of a source, or the reason why there is none."""
    try:
        one = run.recipe.decoding.model_copy(update={"n_best": 1})
        translator = Translator([run], one)
        translator.check_links()
        heads = heads_of(run, translator.identity["weights"][0]) or Heads()
        lines = translator.source([source], direction=direction)
        ((best, *_),) = translator.translate(lines)
        (links,) = translator.links(lines, [best], heads)
        aligned = translator.align(source, best, direction=direction, roles=("cross",))
    except MtkitError as error:
        return str(error)
    return ShownAttention(aligned.first(), heads, pharaoh(links), best.text, aligned.left_out())


def _flat(value: Any, name: str = "") -> dict[str, str]:
    if isinstance(value, dict) and value:
        return {
            key: each
            for part, inner in value.items()
            for key, each in _flat(inner, f"{name}.{part}" if name else str(part)).items()
        }
    return {name: value if isinstance(value, str) else json_text(value)}
