"""What a server does with text: strings to lines and back, batches of several requests, attention for the page."""

import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from math import isfinite
from typing import Any

from babel import Locale
from babel.core import get_global

from mtkit.decoding.alignment import align
from mtkit.decoding.lines.source import Directions
from mtkit.decoding.lines.splitting import split
from mtkit.decoding.translate import hypotheses_of
from mtkit.decoding.translator import Translator
from mtkit.errors import MtkitError, did_you_mean
from mtkit.text.languages import languages_of, seam

MOST_WEIGHTS = 1_000_000
"""Attention weights in an answer; a role of attention that would exceed it is left out."""

SHOWN_CHARACTERS = 40
"""Characters of a language that an error repeats."""

LANGUAGE_NAMES = Locale("en")

LINE_END = re.compile(r"(\r\n|\n|\r)")
LINE = re.compile(r"[^\r\n]*(?:\r\n|\n|\r)|[^\r\n]+")
"""A line with its end; the last line of a text may have none."""


@dataclass(frozen=True)
class Unit:
    """A string of a request, or a part of it."""

    text: str
    number: int
    """Index of the string in the request."""
    joint: str = ""
    """Text between the translation of the part before and of this one."""


@dataclass(frozen=True)
class Strings:
    """Strings of one request, or a part of them, to be translated."""

    units: tuple[Unit, ...]
    direction: str
    n_best: int
    size: int

    @property
    def strings(self) -> list[str]:
        """The texts."""
        return [unit.text for unit in self.units]

    @property
    def kind(self) -> Hashable:
        """Requests for as many hypotheses go together, whatever their direction."""
        return self.n_best


@dataclass(frozen=True, eq=False)
class Look:
    """A line of which the page shows hypotheses and the attention to one of them; it is done alone."""

    line: str
    direction: str
    n_best: int
    which: int
    size: int

    @property
    def kind(self) -> Hashable:
        """None other's."""
        return self


class Service:
    """The translator of a server, called by one thread at a time."""

    def __init__(self, translator: Translator) -> None:
        self._translator = translator
        self._with = cache(
            lambda n_best: translator.with_settings(translator.settings.model_copy(update={"n_best": n_best}))
        )

    @property
    def most(self) -> int:
        """Hypotheses of a string, at most."""
        return hypotheses_of(self._translator.settings)

    @property
    def directions(self) -> list[str]:
        """The directions of the run."""
        return self._translator.runs[0].directions

    def languages(self) -> list[dict[str, Any]]:
        """Each source language with its targets, as LibreTranslate lists them."""
        targets: dict[str, list[str]] = {}
        for source, target in map(languages_of, self.directions):
            targets.setdefault(source, []).append(target)
        return [{"code": source, "name": language_name(source), "targets": those} for source, those in targets.items()]

    def direction(self, source: str, target: str) -> str:
        """The direction between two languages; the source "auto" stands for the only one with that target.

        Raises: MtkitError where there is none, or several.
        """
        pairs = {name: languages_of(name) for name in self.directions}
        found = [name for name, (one, other) in pairs.items() if other == target and source in (one, "auto")]
        if len(found) == 1:
            return found[0]
        target = target[:SHOWN_CHARACTERS]
        wanted = f"{source[:SHOWN_CHARACTERS]}-{target}"
        hint = did_you_mean(wanted, self.directions)
        why = f"several source languages translate to {target}" if found else f"no direction {wanted}{hint}"
        raise MtkitError(f"{why}; this server has: {', '.join(self.directions)}")

    def sizes(self, strings: Sequence[str]) -> list[int]:
        """Source pieces of each string, the end mark of each line counted."""
        lines = [(number, line) for number, string in enumerate(strings) for line in _lines(string)]
        encoded = self._translator.tokenizers.source.encode_lines([line for _, line in lines], threads=1)
        sizes = [0] * len(strings)
        for (number, _), pieces in zip(lines, encoded, strict=True):
            sizes[number] += len(pieces) + 1
        return sizes

    def parts(self, strings: Sequence[str], direction: str, n_best: int, most: int) -> list[Strings]:
        """The strings in parts of at most `most` source pieces; lines that are translated together stay together."""
        units: list[Unit] = []
        for number, (string, size) in enumerate(zip(strings, self.sizes(strings), strict=True)):
            if size <= most or (self._joins_lines(n_best) and max(self.sizes(LINE.findall(string))) <= most):
                units.append(Unit(string, number))
            else:
                units += self._units(string, number, direction, most)
        parts: list[Strings] = []
        group: list[Unit] = []
        total = 0
        for unit, size in zip(units, self.sizes([unit.text for unit in units]), strict=True):
            if group and total + size > most:
                parts.append(Strings(tuple(group), direction, n_best, total))
                group, total = [], 0
            group.append(unit)
            total += size
        return [*parts, Strings(tuple(group), direction, n_best, total)] if group else parts

    def _units(self, string: str, number: int, direction: str, most: int) -> Iterator[Unit]:
        """The lines of a string; a line of more than `most` pieces is split at sentence ends, or else within them."""

        def count(texts: Sequence[str]) -> list[int]:
            return [size - 1 for size in self.sizes(texts)]

        source, target = languages_of(direction)
        lines = LINE.findall(string)
        for line, size in zip(lines, self.sizes(lines), strict=True):
            text = line.rstrip("\r\n")
            texts = split(text, max(1, most - 1), count, source) if size > most else []
            *others, last = texts or [text]
            for k, part in enumerate([*others, last + line[len(text) :]]):
                yield Unit(part, number, seam(target) if k else "")

    def work(self, jobs: Sequence[Strings | Look], stopped: Callable[[], bool] | None = None) -> list[Any]:
        """The result of each job of a batch: of `Strings` the hypotheses of each string, of a `Look` what it shows.

        Raises: StoppedError if `stopped` returns that nobody wants the results.
        """
        looks = [job for job in jobs if isinstance(job, Look)]
        return [self._shown(job, stopped) for job in looks] or self._translated(
            [job for job in jobs if isinstance(job, Strings)], stopped
        )

    def _joins_lines(self, n_best: int) -> bool:
        """Whether the lines of a string are translated together."""
        return self._translator.document_pieces is not None and n_best == 1

    def _translated(self, jobs: Sequence[Strings], stopped: Callable[[], bool] | None) -> list[list[list[str]]]:
        """For each job and string the best hypotheses, as many as asked for; line ends stay as they are."""
        strings = [(string, self.directions.index(job.direction)) for job in jobs for string in job.strings]
        cut = [LINE_END.split(string) for string, _ in strings]
        lines = [line for parts in cut for line in parts[::2]]
        tasks = [task for (_, task), parts in zip(strings, cut, strict=True) for _ in parts[::2]]
        owner = [number for number, parts in enumerate(cut) for _ in parts[::2]]
        translator = self._with(jobs[0].n_best)
        documents = owner if self._joins_lines(jobs[0].n_best) else None
        directions = Directions(self.directions, tasks)
        found = iter(translator.lines(lines, direction=directions, documents=documents, stopped=stopped))
        whole = (
            [_ended((row[k].text for row in rows), parts[1::2]) for k in range(jobs[0].n_best)]
            for parts in cut
            for rows in [[next(found) for _ in parts[::2]]]
        )
        return [[next(whole) for _ in job.strings] for job in jobs]

    def _shown(self, look: Look, stopped: Callable[[], bool] | None) -> dict[str, Any]:
        """The hypotheses with scores; pieces and attention weights of one of them, by role, layer and head."""
        translator = self._with(look.n_best)
        (found,) = translator.lines([look.line], direction=look.direction, stopped=stopped)
        shown: dict[str, Any] = {
            "hypotheses": [{"text": each.text, "score": each.score if isfinite(each.score) else None} for each in found]
        }
        try:
            directions = translator.directions(look.direction, 1)
            aligned = align(
                translator.network, translator.tokenizers, look.line, found[look.which].text, directions=directions
            )
        except MtkitError as error:
            return {**shown, "note": str(error)}
        roles, room = {}, MOST_WEIGHTS
        for role in ("cross", "encoder", "decoder"):
            layers = [(number, each) for number, each in enumerate(aligned.layers.get(role, [])) if each is not None]
            room -= sum(each.numel() for _, each in layers)
            if layers and room >= 0:
                roles[role] = [
                    {"layer": number, "heads": [[[round(w, 4) for w in row] for row in head] for head in each.tolist()]}
                    for number, each in layers
                ]
        return {**shown, "source": aligned.source, "target": aligned.target, "read": aligned.read, "roles": roles}


def _lines(string: str) -> list[str]:
    """The lines of a string; a line end at its end begins no further line."""
    lines = LINE_END.split(string)[::2]
    return lines if len(lines) == 1 or lines[-1] else lines[:-1]


def joined(parts: Sequence[Strings], results: Sequence[list[list[str]]]) -> list[list[str]]:
    """The hypotheses of each string of a request from the results of its parts."""
    found: list[list[str]] = []
    for part, result in zip(parts, results, strict=True):
        for unit, hypotheses in zip(part.units, result, strict=True):
            if unit.number == len(found):
                found.append(hypotheses)
                continue
            found[-1] = [
                unit.joint.join(filter(None, (before, after)))
                for before, after in zip(found[-1], hypotheses, strict=True)
            ]
    return found


def language_name(code: str) -> str:
    """The English name of a language, as "Chinese (China)" of zh-CN; the code itself if it has none."""
    main, *subtags = re.split("[-_]", code)
    main = get_global("language_aliases").get(main.lower(), main.lower())  # two letters of three
    if main not in LANGUAGE_NAMES.languages:
        return code
    known: dict[str, str] = {**LANGUAGE_NAMES.scripts, **LANGUAGE_NAMES.territories}
    details = ", ".join(known.get(tag.title(), known.get(tag.upper(), tag)) for tag in subtags)
    name = LANGUAGE_NAMES.languages[main]
    return f"{name} ({details})" if details else name


def _ended(lines: Iterable[str], ends: Sequence[str]) -> str:
    """The lines with these line ends between them."""
    return "".join(chain.from_iterable(zip(lines, [*ends, ""], strict=True)))
