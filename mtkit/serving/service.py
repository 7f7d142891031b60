"""What a server does with text: strings to lines and back, batches of several requests, attention for the page."""

import re
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from math import isfinite
from typing import Any

from babel import Locale
from babel.core import get_global

from mtkit.decoding.alignment import align
from mtkit.decoding.lines.segments import Directions
from mtkit.decoding.translate import hypotheses_of
from mtkit.decoding.translator import Translator
from mtkit.errors import MtkitError, did_you_mean
from mtkit.languages import languages_of

MOST_WEIGHTS = 1_000_000
"""Attention weights in an answer; a role of attention that would exceed it is left out."""

LANGUAGE_NAMES = Locale("en")

LINE_END = re.compile(r"(\r\n|\n|\r)")


@dataclass(frozen=True)
class Strings:
    """Strings of one request, to be translated."""

    strings: tuple[str, ...]
    direction: str
    n_best: int
    size: int

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
        wanted = f"{source}-{target}"
        hint = did_you_mean(wanted, self.directions)
        why = f"several source languages translate to {target}" if found else f"no direction {wanted}{hint}"
        raise MtkitError(f"{why}; this server has: {', '.join(self.directions)}")

    def size(self, strings: Sequence[str]) -> int:
        """Source pieces of the strings, the end mark of each line counted."""
        lines = [line for each in strings for line in LINE_END.split(each)[::2]]
        return sum(len(pieces) + 1 for pieces in self._translator.tokenizers.source.encode_lines(lines, threads=1))

    def work(self, jobs: Sequence[Strings | Look]) -> list[Any]:
        """The result of each job of a batch: of `Strings` the hypotheses of each string, of a `Look` what it shows."""
        looks = [job for job in jobs if isinstance(job, Look)]
        return [self._shown(job) for job in looks] or self._translated(
            [job for job in jobs if isinstance(job, Strings)]
        )

    def _translated(self, jobs: Sequence[Strings]) -> list[list[list[str]]]:
        """For each job and string the best hypotheses, as many as asked for; line ends stay as they are."""
        strings = [(string, self.directions.index(job.direction)) for job in jobs for string in job.strings]
        split = [LINE_END.split(string) for string, _ in strings]
        lines = [line for parts in split for line in parts[::2]]
        tasks = [task for (_, task), parts in zip(strings, split, strict=True) for _ in parts[::2]]
        owner = [number for number, parts in enumerate(split) for _ in parts[::2]]
        translator = self._with(jobs[0].n_best)
        joined = translator.document_pieces is not None and jobs[0].n_best == 1
        directions = Directions(self.directions, tasks)
        found = iter(translator.lines(lines, direction=directions, documents=owner if joined else None))
        whole = (
            [_ended((row[k].text for row in rows), parts[1::2]) for k in range(jobs[0].n_best)]
            for parts in split
            for rows in [[next(found) for _ in parts[::2]]]
        )
        return [[next(whole) for _ in job.strings] for job in jobs]

    def _shown(self, look: Look) -> dict[str, Any]:
        """The hypotheses with scores; pieces and attention weights of one of them, by role, layer and head."""
        translator = self._with(look.n_best)
        (found,) = translator.lines([look.line], direction=look.direction)
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
