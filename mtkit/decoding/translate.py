"""Translation of lines by an engine: N lines in, N lines out, in order, for any text."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch

from mtkit.decoding.contract import Engine, Hypotheses
from mtkit.decoding.glossary import Glossary
from mtkit.decoding.lines.batches import make_batch
from mtkit.decoding.lines.joined import Translate, separate_lines, translate_joined
from mtkit.decoding.lines.required import fewest_missed_first, translate_with_terms
from mtkit.decoding.lines.segments import Segment, Source
from mtkit.decoding.lines.source import SourceLines
from mtkit.decoding.mbr import Metric, rank
from mtkit.decoding.parallel import map_batches
from mtkit.decoding.translation import BLANK, OnProgress, Translation, join_parts
from mtkit.errors import DataError, MtkitError
from mtkit.recipe import DecodingSettings
from mtkit.text.languages import seam
from mtkit.text.tokenizer import UNK, Tokenizer, Tokenizers


def translate_lines(
    engine: Engine,
    tokenizers: Tokenizers,
    lines: SourceLines | Sequence[str],
    *,
    on_progress: OnProgress = lambda lines: None,
    stopped: Callable[[], bool] | None = None,
) -> list[list[Translation]]:
    """Translate the lines; return the translations of each, best first: one, or `n_best` of the engine's settings.

    Blank lines never reach the engine. A line too long for the engine, or longer than the lines it was `trained_on`, is
    split at sentence ends (see `mtkit.decoding.lines.splitting.split_sentences`), and the translations of its parts are
    joined as the target language joins sentences (`Translation.parts` is their number). With a glossary, translations
    of a line that lack the fewest terms come first.

    The result of a line is independent of other lines if the hypotheses of the engine are independent of the batch.
    Lines of `documents` that are not split are the exception: they are translated together. If a joint translation does
    not separate into its lines, each half of them is translated, down to single lines (`Translation.fell_back`).

    Translations begin with the `prefixes` of the lines; if a line is too long for the engine, its first part does.

    `stopped`, called from any thread, returns whether the translations are no longer wanted.

    Raises: MtkitError for settings that the engine does not support, and for several translations of lines that are
    translated together, or prefixes of them; DataError for a prefix that the model cannot make; StoppedError if the
    translations are no longer wanted.
    """
    engine.check()
    lines, settings = SourceLines.of(lines), engine.settings
    _check_settings(lines, settings)
    prefixes = _encode_prefixes(lines, tokenizers.target, settings, engine.longest_target)
    source = Source(lines, tokenizers.source, engine.longest_source)
    done = {number: [BLANK] * settings.n_best for number, pieces in enumerate(source.encoded) if not pieces}
    on_progress(len(done))
    targets = lines.targets()
    separate = partial(separate_lines, tokenizers.target, lines.trained_on, settings.max_pieces)
    with engine.ready() as device:
        translate = partial(_translate_segments, engine, tokenizers.target, lines, targets, stopped, device=device)
        if lines.glossary is not None:
            translate = partial(translate_with_terms, translate, lines.glossary)
        joined, fell_back = translate_joined(source, translate, separate, on_progress)
        done |= {number: [translation] for number, translation in joined.items()}
        rest = [number for number in range(len(lines.lines)) if number not in done]
        parts = _translate_parts(source, translate, rest, prefixes, on_progress)
    for number in rest:
        done[number] = join_parts(parts[number], settings, seam(targets[number]))
        if number in fell_back:
            done[number] = [replace(line, together=fell_back[number], fell_back=True) for line in done[number]]
    for number, line in enumerate(lines.lines):
        if source.encoded[number] and tokenizers.source.cleans(line):
            done[number] = [replace(translation, cleaned=True) for translation in done[number]]
        if lines.glossary is not None:
            with_terms = [_with_terms(translation, line, lines.glossary) for translation in done[number]]
            done[number] = sorted(with_terms, key=lambda one: one.missed if math.isfinite(one.score) else math.inf)
    return [done[number] for number in range(len(lines.lines))]


def _check_settings(lines: SourceLines, settings: DecodingSettings) -> None:
    if lines.glossary is not None and settings.method != "beam":
        raise MtkitError(f"a glossary needs beam search, and decoding.method = {settings.method}; set it to beam")
    if lines.documents is not None and (settings.n_best > 1 or lines.glossary is not None):
        reason = "a glossary" if lines.glossary is not None else f"decoding.n_best = {settings.n_best}"
        raise MtkitError(
            f"{reason} is for lines that are translated one by one; leave it out, or translate without documents "
            "(--sentences)"
        )


def _translate_parts(
    source: Source,
    translate: Translate,
    numbers: Sequence[int],
    prefixes: Sequence[tuple[int, ...]] | None,
    on_progress: OnProgress,
) -> dict[int, list[list[Translation]]]:
    """Translate the parts of these lines, in order; the first part begins with the pieces of its line's prefix."""
    segments = [
        segment if segment.part or prefixes is None else replace(segment, prefix=prefixes[segment.line])
        for segment in source.segments(numbers)
    ]
    translated: dict[int, list[Translation]] = {}
    for batch in translate(segments):
        translated |= batch
        on_progress(sum(segments[index].part == 0 for index, _ in batch))
    parts: dict[int, list[list[Translation]]] = {number: [] for number in numbers}
    for index, segment in enumerate(segments):
        parts[segment.line].append(translated[index])
    return parts


def _encode_prefixes(
    lines: SourceLines, tokenizer: Tokenizer, settings: DecodingSettings, longest: int | None
) -> list[tuple[int, ...]] | None:
    """Encode the prefix of each line. Raises: MtkitError as `translate_lines`; DataError for a bad prefix."""
    if lines.prefixes is None:
        return None
    if lines.documents is not None or settings.no_repeat_ngram:
        other = "lines of documents are translated together (give --sentences)"
        if settings.no_repeat_ngram:
            other = f"decoding.no_repeat_ngram = {settings.no_repeat_ngram} (set it to 0)"
        raise MtkitError(f"translations cannot begin with given text if {other}")
    encoded = tokenizer.encode_lines(lines.prefixes)
    for number, pieces in enumerate(encoded):
        line = 1 + (number if lines.numbers is None else lines.numbers[number])
        if UNK in pieces:
            raise DataError(f"the prefix of line {line:,} has a character that the run's vocabulary does not have")
        if longest is not None and len(pieces) >= longest:
            raise DataError(
                f"the prefix of line {line:,} has {len(pieces):,} pieces, and a translation has at most {longest - 1:,}"
            )
    return list(map(tuple, encoded))


def _with_terms(translation: Translation, line: str, glossary: Glossary) -> Translation:
    terms, missed = glossary.count(line, translation.text)
    return replace(translation, terms=terms, missed=missed)


def _translate_segments(
    engine: Engine,
    tokenizer: Tokenizer,
    lines: SourceLines,
    targets: Sequence[str | None],
    stopped: Callable[[], bool] | None,
    segments: Sequence[Segment],
    device: torch.device,
) -> Iterator[list[tuple[int, list[Translation]]]]:
    """Yield, batch by batch, the indices of the segments, each with its `n_best` translations.

    `targets` are the target languages of all lines: a long document has thousands of calls.
    """
    settings = engine.settings

    def translate(indices: Sequence[int]) -> list[list[Translation]]:
        chosen = [segments[index] for index in indices]
        of_lines = [lines.trained_on.limits(segment.pieces, segment.task, settings.max_pieces) for segment in chosen]
        limits = list(map(sum, of_lines))
        if lines.prefixes is not None:
            limits = [limit + len(segment.prefix) for limit, segment in zip(limits, chosen, strict=True)]
        limits = [min(limit, engine.longest_target or limit) for limit in limits]
        batch = make_batch(chosen, limits, device, lines.numbers, of_lines, stopped, lines.glossary)
        batch.check()
        if settings.mbr is None:
            return _texts(engine.translate(batch), limits, tokenizer, settings.n_best)
        candidates = _texts(engine.translate(batch), limits, tokenizer, settings.hypotheses)
        of_segments = [targets[segment.line] for segment in chosen]
        ranked = [
            _rerank(translations, settings.mbr, language)
            for translations, language in zip(candidates, of_segments, strict=True)
        ]
        if lines.glossary is not None:
            ranked = [
                fewest_missed_first(translations, segment.terms, lines.glossary)
                for translations, segment in zip(ranked, chosen, strict=True)
            ]
        return [translations[: settings.n_best] for translations in ranked]

    return map_batches(
        translate,
        [len(segment.pieces) for segment in segments],
        settings.batch_tokens,
        device,
        hypotheses=settings.hypotheses
        + max((sum(term.size for term in segment.terms) for segment in segments), default=0),
        most=engine.max_parallel,
    )


def _texts(hypotheses: Hypotheses, limits: Sequence[int], tokenizer: Tokenizer, n_best: int) -> list[list[Translation]]:
    """Return the `n_best` translations of each segment in a batch."""
    astray = torch.zeros_like(hypotheses.scores) if hypotheses.astray is None else hypotheses.astray
    columns = (hypotheses.pieces, hypotheses.lengths, hypotheses.log_probs, hypotheses.scores, astray)
    return [
        [
            Translation(
                tokenizer.decode(ids[:length]),
                score,
                log_prob,
                tuple(ids[:length]),
                cut=length >= limit,
                astray=bool(lost),
            )
            for ids, length, log_prob, score, lost in zip(*segment, strict=True)
        ]
        for limit, *segment in zip(limits, *(column[:, :n_best].tolist() for column in columns), strict=True)
    ]


def _rerank(translations: Sequence[Translation], metric: Metric, language: str | None) -> list[Translation]:
    """Sort the hypotheses of a segment by their expected utilities, which become their scores.

    Hypotheses that do not exist, with a score of -inf, are compared with none, and come last.
    """
    known = [translation for translation in translations if math.isfinite(translation.score)]
    ranked = rank([translation.text for translation in known], metric, language)
    absent = [translation for translation in translations if not math.isfinite(translation.score)]
    return [*(replace(known[place], score=utility) for place, utility in ranked), *absent]
