"""The text work of a server: strings and HTML to lines and back, batches of requests, attention for the page."""

import re
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain, groupby
from math import isfinite
from typing import Any

from babel import Locale
from babel.core import get_global

from mtkit.decoding.alignment_heads import Heads
from mtkit.decoding.lines.source import Directions
from mtkit.decoding.lines.splitting import split_to_fit
from mtkit.decoding.translator import Translator
from mtkit.errors import MtkitError, did_you_mean
from mtkit.text.html_page import Page, parse_page
from mtkit.text.languages import languages_of, seam

MOST_WEIGHTS = 1_000_000
"""Maximum attention weights in an answer; a role of attention that would exceed it is left out, with a note."""

SHOWN_CHARACTERS = 40
"""Characters of a language that an error repeats."""

LANGUAGE_NAMES = Locale("en")

LINE_END = re.compile(r"(\r\n|\n|\r)")
LINE = re.compile(r"[^\r\n]*(?:\r\n|\n|\r)|[^\r\n]+")
"""A line with its end; the last line of a text may have none."""


@dataclass(frozen=True)
class TextPart:
    """A string of a request, or a part of it."""

    text: str
    number: int
    """Index of the string in the request."""
    first: int = 0
    """Number of the string's lines, or parts of lines, before it; the draws of sampling depend on it."""
    seam: str = ""
    """Text between the translations of the previous part and of this one."""
    page: Page | None = None
    """The HTML; `text` has a line per segment of it."""


@dataclass(frozen=True)
class TranslationJob:
    """Strings of one request, or a part of them, to be translated."""

    parts: tuple[TextPart, ...]
    direction: str
    n_best: int
    size: int

    @property
    def kind(self) -> Hashable:
        """Jobs with the same number of hypotheses may share a batch, whatever their direction; HTML with HTML."""
        return self.n_best, self.parts[0].page is not None


@dataclass(frozen=True, eq=False)
class AttentionJob:
    """A line for the page, with hypotheses and the attention to one of them; no other job shares its batch."""

    line: str
    direction: str
    n_best: int
    which: int
    size: int

    @property
    def kind(self) -> Hashable:
        """Equal to no other job's."""
        return self


class Service:
    """The translator of a server; one thread at a time calls `work`, and any thread the other methods."""

    def __init__(self, translator: Translator, heads: Callable[[], Heads] = Heads) -> None:
        """`heads` is called once, when they are needed: the attention heads that align the words of HTML."""
        self._translator, self._heads = translator, cache(heads)
        self._with_n_best = cache(
            lambda n_best: translator.with_settings(translator.settings.model_copy(update={"n_best": n_best}))
        )

    @property
    def most(self) -> int:
        """The maximum number of hypotheses per string."""
        return self._translator.settings.hypotheses

    @property
    def directions(self) -> list[str]:
        """The directions of the run."""
        return self._translator.runs[0].directions

    def languages(self) -> list[dict[str, Any]]:
        """Each source language with its targets, as LibreTranslate lists them."""
        targets: dict[str, list[str]] = {}
        for source, target in map(languages_of, self.directions):
            targets.setdefault(source, []).append(target)
        return [{"code": source, "name": language_name(source), "targets": codes} for source, codes in targets.items()]

    def direction(self, source: str, target: str) -> str:
        """The direction between two languages; the source "auto" is the only one that has this target.

        Raises: MtkitError if there is none, or several.
        """
        pairs = {name: languages_of(name) for name in self.directions}
        matching = [name for name, (one, other) in pairs.items() if other == target and source in (one, "auto")]
        if len(matching) == 1:
            return matching[0]
        target = target[:SHOWN_CHARACTERS]
        wanted = f"{source[:SHOWN_CHARACTERS]}-{target}"
        hint = did_you_mean(wanted, self.directions)
        why = f"several source languages translate to {target}" if matching else f"no direction {wanted}{hint}"
        raise MtkitError(f"{why}; this server has: {', '.join(self.directions)}")

    def sizes(self, strings: Sequence[str]) -> list[int]:
        """Source pieces of each string, with one for the end of each line."""
        lines = [(number, line) for number, string in enumerate(strings) for line in _lines(string)]
        encoded = self._translator.tokenizers.source.encode_lines([line for _, line in lines], threads=1)
        sizes = [0] * len(strings)
        for (number, _), pieces in zip(lines, encoded, strict=True):
            sizes[number] += len(pieces) + 1
        return sizes

    def jobs(
        self, strings: Sequence[str], direction: str, n_best: int, most: int, *, html: bool = False
    ) -> list[TranslationJob]:
        """The strings in jobs of at most `most` source pieces; lines that are translated together stay together.

        The strings may be `html`, whose segments are not split. Raises: MtkitError if its words cannot be aligned.
        """
        parts: list[TextPart] = []
        if html:
            self._translator.check_links()
            pages = [parse_page(string) for string in strings]
            strings = [page.text for page in pages]
        for number, (string, size) in enumerate(zip(strings, self.sizes(strings), strict=True)):
            if size <= most or (html and self._joins_lines(n_best)):
                parts.append(TextPart(string, number, page=pages[number] if html else None))
            elif html:
                split_pages = enumerate(pages[number].split())
                parts += [TextPart(page.text, number, first, page=page) for first, page in split_pages]
            else:
                parts += self._split(string, number, direction, n_best, most)
        jobs: list[TranslationJob] = []
        group: list[TextPart] = []
        total = 0
        for part, size in zip(parts, self.sizes([part.text for part in parts]), strict=True):
            if group and total + size > most:
                jobs.append(TranslationJob(tuple(group), direction, n_best, total))
                group, total = [], 0
            group.append(part)
            total += size
        return [*jobs, TranslationJob(tuple(group), direction, n_best, total)] if group else jobs

    def _split(self, string: str, number: int, direction: str, n_best: int, most: int) -> Iterator[TextPart]:
        """The lines of a string; adjacent lines that are translated together are one part.

        A line of more than `most` pieces is split at sentence ends, or else within them.
        """

        def count(texts: Sequence[str]) -> list[int]:
            return [size - 1 for size in self.sizes(texts)]

        source, target = languages_of(direction)
        lines, first = LINE.findall(string), 0
        long = {line for line, size in zip(lines, self.sizes(lines), strict=True) if size > most}
        if self._joins_lines(n_best):
            runs = groupby(lines, long.__contains__)
            lines = [line for is_long, run in runs for line in (run if is_long else ["".join(run)])]
        for line in lines:
            text = line.rstrip("\r\n")
            texts = split_to_fit(text, max(1, most - 1), count, source) if line in long else []
            *others, last = texts or [text]
            for k, part in enumerate([*others, last + line[len(text) :]]):
                yield TextPart(part, number, first, seam=seam(target) if k else "")
                first += len(_lines(part))

    def work(
        self, jobs: Sequence[TranslationJob | AttentionJob], stopped: Callable[[], bool] | None = None
    ) -> list[Any]:
        """The results of a batch's jobs: the hypotheses of each string, or the page's view of a line.

        Raises: StoppedError if `stopped` returns that the results are no longer wanted.
        """
        shown = [self._attention(job, stopped) for job in jobs if isinstance(job, AttentionJob)]
        return shown or self._translate([job for job in jobs if isinstance(job, TranslationJob)], stopped)

    def _joins_lines(self, n_best: int) -> bool:
        """Whether the lines of a string are translated together."""
        return self._translator.document_pieces is not None and n_best == 1

    def _translate(self, jobs: Sequence[TranslationJob], stopped: Callable[[], bool] | None) -> list[list[list[str]]]:
        """The `n_best` hypotheses for all strings of the jobs; line ends stay as they are."""
        n_best = jobs[0].n_best
        parts = [(part, self.directions.index(job.direction)) for job in jobs for part in job.parts]
        split_parts = [LINE_END.split(part.text) for part, _ in parts]  # lines, and line ends between them
        lines = [line for pieces in split_parts for line in pieces[::2]]
        tasks = [task for (_, task), pieces in zip(parts, split_parts, strict=True) for _ in pieces[::2]]
        owner = [number for number, pieces in enumerate(split_parts) for _ in pieces[::2]]
        translator = self._with_n_best(n_best)
        source = translator.source(
            lines,
            direction=Directions(self.directions, tasks),
            documents=owner if self._joins_lines(n_best) else None,
        )
        # the draws of sampling depend on a line's place in its string, not on the other requests
        places = [
            range(part.first, part.first + len(pieces[::2]))
            for (part, _), pieces in zip(parts, split_parts, strict=True)
        ]
        source = replace(source, numbers=[*chain.from_iterable(places)])
        hypotheses = translator.translate(source, stopped=stopped)
        ranks = list(zip(*hypotheses, strict=True))
        is_html = jobs[0].parts[0].page is not None
        links = [translator.links(source, row, self._heads()) if is_html else [] for row in ranks]
        translated, first = [], 0
        for (part, _), pieces in zip(parts, split_parts, strict=True):
            its_lines = slice(first, first := first + len(pieces[::2]))
            texts = [[translation.text for translation in row[its_lines]] for row in ranks]
            if part.page is not None:
                its_links = [row[its_lines] for row in links]
                translated.append(list(map(part.page.restore, texts, its_links)))
            else:
                ends = [*pieces[1::2], ""]
                translated.append(["".join(chain.from_iterable(zip(row, ends, strict=True))) for row in texts])
        results = iter(translated)
        return [[next(results) for _ in job.parts] for job in jobs]

    def _attention(self, job: AttentionJob, stopped: Callable[[], bool] | None) -> dict[str, Any]:
        """The hypotheses with scores; pieces and attention weights of one of them, by role, layer and head."""
        translator = self._with_n_best(job.n_best)
        (hypotheses,) = translator.translate([job.line], direction=job.direction, stopped=stopped)
        shown: dict[str, Any] = {
            "hypotheses": [
                {"text": line.text, "score": line.score if isfinite(line.score) else None} for line in hypotheses
            ]
        }
        try:
            aligned = translator.align(job.line, hypotheses[job.which], direction=job.direction)
        except MtkitError as error:
            return {**shown, "note": str(error)}
        roles, room = {}, MOST_WEIGHTS
        for role in ("cross", "encoder", "decoder"):
            layers = [(number, layer) for number, layer in enumerate(aligned.layers.get(role, [])) if layer is not None]
            count = sum(layer.numel() for _, layer in layers)
            if count > room:
                shown["note"] = f"some attention is left out; an answer has at most {MOST_WEIGHTS:,} weights"
            elif layers:
                room -= count
                roles[role] = [
                    {
                        "layer": number,
                        "heads": [[[round(w, 4) for w in row] for row in head] for head in layer.tolist()],
                    }
                    for number, layer in layers
                ]
        return {**shown, "source": aligned.source, "target": aligned.target, "read": aligned.read, "roles": roles}


def _lines(string: str) -> list[str]:
    """The lines of a string; a line end at its end begins no further line."""
    lines = LINE_END.split(string)[::2]
    return lines if len(lines) == 1 or lines[-1] else lines[:-1]


def join_parts(jobs: Sequence[TranslationJob], results: Sequence[list[list[str]]]) -> list[list[str]]:
    """The hypotheses of a request's strings, from the results of its jobs."""
    strings: list[list[str]] = []
    for job, result in zip(jobs, results, strict=True):
        for part, hypotheses in zip(job.parts, result, strict=True):
            if part.number == len(strings):
                strings.append(hypotheses)
                continue
            strings[-1] = [
                part.seam.join(filter(None, (first, second)))
                for first, second in zip(strings[-1], hypotheses, strict=True)
            ]
    return strings


def language_name(code: str) -> str:
    """The English name of a language, as "Chinese (China)" of zh-CN; the code itself if it has none."""
    main, *subtags = re.split("[-_]", code)
    main = get_global("language_aliases").get(main.lower(), main.lower())  # the two-letter code of a three-letter one
    if main not in LANGUAGE_NAMES.languages:
        return code
    known: dict[str, str] = {**LANGUAGE_NAMES.scripts, **LANGUAGE_NAMES.territories}
    details = ", ".join(known.get(tag.title(), known.get(tag.upper(), tag)) for tag in subtags)
    name = LANGUAGE_NAMES.languages[main]
    return f"{name} ({details})" if details else name
