"""Contrastive evaluation: the share of segments whose right translation has a higher score than each wrong one.

The score of a translation is its log-probability, as in LingEval97 (Sennrich, EACL 2017) and ContraPro (Müller et al.,
WMT 2018), or divided by a power of its length. A tie counts as wrong. Shares have Wilson's 95% intervals (1927).
Systems are compared with the first by McNemar's exact test (1947) on the segments that only one of the two gets right;
the p-values of a label are adjusted by Holm's method (1979).
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic_core import from_json

from mtkit.decoding.contexts import ContextCounts, ContextLimits
from mtkit.decoding.lines.chunks import chunks_of
from mtkit.decoding.translation import OnProgress
from mtkit.decoding.translator import Translator
from mtkit.errors import DataError, MtkitError
from mtkit.evaluation.contrastive.files import ContrastiveFile, Item, Label
from mtkit.evaluation.distributions import coin_tail
from mtkit.evaluation.scores import wilson
from mtkit.evaluation.seeds import holm
from mtkit.runs import Run
from mtkit.storage.files import inside, json_text
from mtkit.storage.jobs import open_job
from mtkit.terminal import Say, quiet

FOLDER = "contrastive"
"""The folder of a run that holds the scores of each segment."""

CHUNK = 1_000
"""Maximum segments that are scored together; a kill loses the work on them."""

ALL = "all"
"""The name of the group with all segments."""


@dataclass(frozen=True)
class ContrastiveScores:
    """A system's segment scores for a file, in order."""

    path: Path
    """JSON Lines with the `log_probs` and numbers of `pieces` of the translations of a segment, the right one first."""
    margins: NDArray[np.float64]
    """The score of the right translation minus the highest score of a wrong one (segments,)."""
    chances: NDArray[np.float64]
    """1 / the number of translations: the probability that a random choice is right (segments,)."""
    labels: list[dict[str, Label]]
    repeated: int
    """Segments with a wrong translation that equals the right one."""

    @property
    def right(self) -> NDArray[np.bool_]:
        """Whether the right translation has the highest score (segments,)."""
        return self.margins > 0


def scores_path(run: Run, file: Path) -> Path:
    """Return the path of a run's segment scores for a file. Raises: MtkitError as `inside`."""
    name = file.name.removesuffix(".gz")
    return inside(run.folder, FOLDER, f"{Path(name).stem}.jsonl")


def score_contrastive(
    translator: Translator,
    file: ContrastiveFile,
    *,
    direction: str | None = None,
    documents: bool | None = None,
    length_penalty: float = 0.0,
    say: Say = quiet,
    on_progress: OnProgress = lambda segments: None,
) -> ContrastiveScores:
    """Score all translations of a file by the first run of the translator; a repeated call resumes.

    The context of a segment precedes it if the run was trained on several sentences at once; `documents` requires this,
    or rules it out. A context that is too long is cut to its nearest sentences. `say` gets messages on both, and if the
    scores of another file of the same name are replaced. Scores are divided by the number of pieces, the end included,
    to the power `length_penalty`.

    Raises: DataError for a damaged file, and for text that is too long for the model; MtkitError for documents that the
    run does not support, an unknown direction, and a folder that cannot be written.
    """
    (direction,) = translator.directions(direction, 1).names_of_lines()
    limits = None if documents is False else translator.context_limits(direction)
    if documents and limits is None:
        raise MtkitError(
            "--documents needs a run trained on documents (data.documents, or lines of several sentences); leave it out"
        )
    path = scores_path(translator.runs[0], file.path)
    earlier = _segments_of(path)
    about = {**translator.identity, "contrastive": True, "direction": direction, "limits": limits and asdict(limits)}
    with open_job([path], about, ContextCounts(), say=say) as job:
        items = ((json_text(asdict(item)),) for item in file)
        for chunk in job.todo(chunks_of(items, size=CHUNK), on_progress):
            segments = [Item(**from_json(text)) for (text,) in chunk.items]
            try:
                rows = _score_items(translator, segments, direction, limits, on_progress)
            except DataError as error:
                raise DataError(f"{file.path}: {error}") from error
            job.write(chunk, [map(json_text, rows)], ContextCounts())
    if earlier is not None and earlier != _segments_of(path):
        say(f"replaced the scores of other segments in {path}; to keep both, give files of different names")
    return _read_scores(path, length_penalty, limits, asked=documents is not False, say=say)


def _segments_of(path: Path) -> str | None:
    """Return a fingerprint of the labels and numbers of pieces in a file of scores; None if there is no file.

    The fingerprint is empty if mtkit did not write the file.
    """
    if not path.exists():
        return None
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            for row in map(from_json, file):
                digest.update(json_text([row["labels"], row["pieces"]]).encode())
    except (ValueError, KeyError, TypeError):
        return ""
    return digest.hexdigest()


def _score_items(
    translator: Translator, items: Sequence[Item], direction: str, limits: ContextLimits | None, on_progress: OnProgress
) -> list[dict[str, Any]]:
    """Score each distinct translation of a source in its context once; return a row for each item."""
    places: dict[tuple[Any, ...], int] = {}
    numbers: list[int] = []
    of_items = []
    for item in items:
        context = tuple(map(tuple, item.context))
        keys = [(item.source, context, target) for target in (item.right, *item.wrong)]
        for key in keys:
            if places.setdefault(key, len(places)) == len(numbers):
                numbers.append(item.number - 1)
        of_items.append([places[key] for key in keys])
    sources, contexts, targets = zip(*places, strict=True)
    lines = replace(translator.source(sources, direction=direction), numbers=numbers)
    done = reported = 0

    def advance(count: int) -> None:
        nonlocal done, reported
        done += count
        segments = done * len(items) // len(places)
        on_progress(segments - reported)
        reported = segments

    alike = list(zip(sources, contexts, strict=True))
    forced = translator.force_pieces(lines, targets, contexts, limits, alike=alike, on_progress=advance)
    rows = []
    for item, indices in zip(items, of_items, strict=True):
        scored = [forced[index] for index in indices]
        rows.append(
            {
                "log_probs": [line.log_prob for line in scored],
                "pieces": [len(line.pieces) for line in scored],
                "context": scored[0].context,
                "context_given": len(item.context),
                "repeated": item.right in item.wrong,
                "labels": item.labels,
            }
        )
    return rows


def _read_scores(path: Path, alpha: float, limits: ContextLimits | None, *, asked: bool, say: Say) -> ContrastiveScores:
    margins, chances, labels = list[float](), list[float](), list[dict[str, Label]]()
    repeated = with_context = 0
    counts = ContextCounts()
    with path.open("rb") as file:
        for row in map(from_json, file):
            log_probs = [-math.inf if value is None else value for value in row["log_probs"]]
            right, *wrong = (value / pieces**alpha for value, pieces in zip(log_probs, row["pieces"], strict=True))
            best = max(wrong)
            margins.append(-math.inf if right == -math.inf else right - best)
            chances.append(1 / len(log_probs))
            labels.append(row["labels"])
            repeated += row["repeated"]
            with_context += row["context_given"] > 0
            cut = limits is not None and row["context"] < row["context_given"]
            counts += ContextCounts(row["context"] > 0, row["context"], cut)
    if limits is None and asked and with_context:
        say(
            f"the run was trained on single sentences, so the contexts of {with_context:,} segments are left out "
            f"({path.parent.parent})"
        )
    if limits is not None and (message := counts.message(limits)):
        say(message)
    return ContrastiveScores(path, np.array(margins), np.array(chances), labels, repeated)


@dataclass(frozen=True)
class Accuracy:
    """The share of right segments of a system in a group, in per cent, with its 95% interval."""

    right: int
    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Paired:
    """Comparison of a system with the first on the same segments."""

    value: float
    """The system's accuracy minus the first's."""
    only_first: int
    """Segments that only the first system gets right."""
    only_this: int
    p: float
    """The two-sided p-value of McNemar's exact test."""
    p_holm: float
    """p adjusted for all tests of the label."""


@dataclass(frozen=True)
class Group:
    """The segments that have a value of a label."""

    label: str
    value: Label | None
    """None for all segments."""
    segments: int
    chance: float
    """The accuracy of a random choice, in per cent."""
    accuracies: list[Accuracy]
    """One for each system."""
    paired: list[Paired]
    """One for each system except the first."""


def compare_contrastive(systems: Sequence[ContrastiveScores]) -> list[Group]:
    """Return the accuracies of systems on the same segments: of all, then by label and value.

    Raises: DataError if the systems have different numbers of segments.
    """
    first = systems[0]
    for system in systems[1:]:
        if len(system.labels) != len(first.labels):
            raise DataError(
                f"{first.path} has {len(first.labels):,} segments and {system.path} has {len(system.labels):,}; "
                "the file changed in between, so score again"
            )
    groups = _of_label(systems, ALL, [None] * len(first.labels))
    for name in dict.fromkeys(name for labels in first.labels for name in labels):
        groups += _of_label(systems, name, [labels.get(name) for labels in first.labels], missing=True)
    return groups


def _of_label(
    systems: Sequence[ContrastiveScores], name: str, values: Sequence[Label | None], *, missing: bool = False
) -> list[Group]:
    """Return a group for each value of a label; with `missing`, None is no value."""
    # True equals 1 in Python, and each is a value of its own
    keys = [(type(value) is bool, value) for value in values]
    present = dict.fromkeys(key for key in keys if not (missing and key[1] is None))
    known = sorted(present, key=lambda key: _order(key[1]))
    places = {key: place for place, key in enumerate(known)}
    of_segments = np.array([places.get(key, -1) for key in keys])
    groups = []
    for place, (_, value) in enumerate(known):
        picked = of_segments == place
        rights = [system.right[picked] for system in systems]
        chance = 100 * float(systems[0].chances[picked].mean())
        paired = [_paired(rights[0], right) for right in rights[1:]]
        groups.append(Group(name, value, int(picked.sum()), chance, list(map(_accuracy, rights)), paired))
    adjusted = iter(holm([test.p for group in groups for test in group.paired]))
    return [replace(group, paired=[replace(test, p_holm=next(adjusted)) for test in group.paired]) for group in groups]


def _order(value: Label | None) -> tuple[int, float, str]:
    """Sort key of label values: numbers, with bins such as ">5k" after their number, then texts."""
    if isinstance(value, int | float):
        return 0, float(value), ""
    text = str(value)
    number = text.removeprefix(">")
    scale, digits = (1000, number[:-1]) if number.endswith("k") else (1, number)
    if digits.isascii() and digits.isdigit():
        return 0, float(digits) * scale, text
    return 1, 0.0, text


def _accuracy(right: NDArray[np.bool_]) -> Accuracy:
    count, segments = int(right.sum()), len(right)
    return Accuracy(count, 100 * count / segments, *wilson(count, segments))


def _paired(first: NDArray[np.bool_], other: NDArray[np.bool_]) -> Paired:
    only_first, only_other = int((first & ~other).sum()), int((other & ~first).sum())
    p = mcnemar(only_first, only_other)
    return Paired(100 * (only_other - only_first) / len(first), only_first, only_other, p, p)


def mcnemar(only_first: int, only_other: int) -> float:
    """Return the two-sided p-value of McNemar's exact test.

    Under the null hypothesis, each segment that exactly one of two systems gets right is equally likely to be either's:
    twice the probability that a fair coin shows its rarer side at most as often, but at most 1.
    """
    tosses, fewer = only_first + only_other, min(only_first, only_other)
    return 1.0 if 2 * fewer == tosses else min(1.0, 2 * coin_tail(fewer, tosses))
