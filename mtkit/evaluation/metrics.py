"""Metrics by name: sacrebleu's BLEU, chrF and TER, and exact and token match as sacrebleu metrics."""

from collections.abc import Iterable, Mapping, Sequence
from operator import eq
from typing import Any

import numpy as np
from sacrebleu.metrics import BLEU, CHRF, TER
from sacrebleu.metrics.base import Metric, Signature
from sacrebleu.metrics.base import Score as SacrebleuScore
from sacrebleu.tokenizers.tokenizer_char import TokenizerChar

from mtkit.errors import MtkitError, did_you_mean, first_line, shown
from mtkit.text.languages import bleu_tokenizer, has_spaces, installed_tokenizer
from mtkit.text.words import words

METRICS = ("BLEU", "chrF", "TER")
"""Default metrics. TER counts edits: lower is better."""

ALL_METRICS = (*METRICS, "exact", "token")


def metric_names(names: Sequence[str]) -> tuple[str, ...]:
    """Return the distinct names as ALL_METRICS spells them; case is ignored. Raises: MtkitError for an unknown name."""
    known = {name.lower(): name for name in ALL_METRICS}
    for name in names:
        if name.lower() not in known:
            hint = did_you_mean(name.lower(), list(known))
            raise MtkitError(f"no metric {shown(name)}{hint}; there are: {', '.join(ALL_METRICS)}; mtkit score: comet")
    return tuple(dict.fromkeys(known[name.lower()] for name in names))


def make_metric(name: str, *, language: str | None = None, tokenize: str | None = None, lowercase: bool = False) -> Any:
    """Return a sacrebleu `Metric` that tokenises text for the language; None means a language with spaces.

    `tokenize` replaces the language's BLEU tokenizer. Raises: MtkitError for an unknown name, or an unknown or missing
    tokenizer.
    """
    (name,) = metric_names([name])
    if name == "chrF":
        return CHRF(lowercase=lowercase)
    if name == "TER":
        return _ter(language)
    if name == "exact":
        return ExactMatch(lowercase=lowercase)
    if name == "token":
        return TokenMatch(lowercase=lowercase)
    if tokenize is None:
        tokenize = installed_tokenizer(language)
    elif tokenize not in BLEU.TOKENIZERS:
        known = sorted(BLEU.TOKENIZERS)
        hint = did_you_mean(tokenize, known)
        raise MtkitError(f"no tokenizer {shown(tokenize)}{hint}; sacrebleu has: {', '.join(known)}")
    try:
        # force suppresses a warning of sacrebleu about tokenised text
        return BLEU(tokenize=tokenize, lowercase=lowercase, force=True)
    except (ImportError, RuntimeError, OSError) as error:  # sacrebleu downloads some tokenizers at first use
        extra, _, mecab = tokenize.partition("-")
        remedy = f"; {_install(extra)}" if mecab == "mecab" else ""
        raise MtkitError(
            f"sacrebleu cannot use the tokenizer {shown(tokenize)} here: {first_line(error)}{remedy}"
        ) from error


def _install(extra: str) -> str:
    return f"pip install 'sacrebleu[{extra}]'"


def missing_tokenizer(languages: Iterable[str | None], tokenize: str | None = None) -> str | None:
    """Return a note on the first language whose tokenizer is not installed; None if all are or `tokenize` is set."""
    for language in languages:
        tokenizer = bleu_tokenizer(language)
        if tokenize is None and installed_tokenizer(language) != tokenizer:
            remedy = _install(tokenizer.partition("-")[0])
            return f"BLEU counts characters in {language}: its tokenizer {tokenizer} is not installed; {remedy}"
    return None


def _ter(language: str | None) -> TER:
    """Return a TER that counts words, or smaller units in languages without spaces between words.

    Chinese and Japanese use sacrebleu's support for Asian scripts, which requires normalised text. It separates
    ideographs and punctuation only: Chinese is counted in characters, but a run of kana in Japanese is one word. For
    Thai, Lao, Khmer and Burmese, which it does not split, characters are counted.
    """
    if has_spaces(language):
        return TER()
    return _CharacterTER() if bleu_tokenizer(language) == "char" else TER(normalized=True, asian_support=True)


class _CharacterTER(TER):  # type: ignore[misc]
    """TER that counts characters."""

    def __init__(self) -> None:
        super().__init__()
        self._characters = TokenizerChar()
        self.tokenizer_signature = self._characters.signature()

    def _preprocess_segment(self, sent: str) -> str:
        return str(self._characters(sent.rstrip().lower()))


class _MatchSignature(Signature):  # type: ignore[misc]
    """sacrebleu's signature, plus whether the comparison ignores case."""

    def __init__(self, args: Mapping[str, Any]) -> None:
        super().__init__(args)
        self._abbr["case"] = "c"
        self.info["case"] = "lc" if args["lowercase"] else "mixed"


class CountedMetric(Metric):  # type: ignore[misc]
    """A sacrebleu metric of sums over segments or documents; they are counted elsewhere, or by a subclass."""

    _SIGNATURE_TYPE = Signature

    def _aggregate_and_compute(self, stats: Any) -> Any:
        return self._compute_score_from_stats(np.sum(stats, axis=0))

    def _compute_segment_statistics(self, hypothesis: str, ref_kwargs: dict[str, Any]) -> list[int]:
        raise NotImplementedError

    def _preprocess_segment(self, sent: str) -> str:
        raise NotImplementedError

    def _extract_reference_info(self, refs: Sequence[str]) -> dict[str, Any]:
        raise NotImplementedError


class _MatchMetric(CountedMetric):
    """A metric that compares texts without spaces at the ends of lines, and ignores case if `lowercase`."""

    _SIGNATURE_TYPE = _MatchSignature

    def __init__(self, *, lowercase: bool = False) -> None:
        super().__init__()
        self.lowercase = lowercase

    def _preprocess_segment(self, sent: str) -> str:
        return (sent.lower() if self.lowercase else sent).rstrip()


class ExactMatch(_MatchMetric):
    """Percentage of segments that equal one of their references, ignoring spaces at the ends of lines."""

    def _extract_reference_info(self, refs: Sequence[str]) -> dict[str, Any]:
        return {"references": set(refs)}

    def _compute_segment_statistics(self, hypothesis: str, ref_kwargs: dict[str, Any]) -> list[int]:
        return [int(hypothesis in ref_kwargs["references"]), 1]

    def _compute_score_from_stats(self, stats: Any) -> Any:
        return SacrebleuScore("exact", 100 * stats[0] / stats[1])


class TokenMatch(_MatchMetric):
    """Percentage of positions with the right word: the i-th word of the hypothesis equals the i-th of the reference.

    A segment has as many positions as the longer of hypothesis and reference has words, so that missing and superfluous
    words are wrong. The corpus's score is the sum of the right words divided by the sum of the positions; 100 without
    any word. Of several references, the one with the largest share counts. `mtkit.text.words` splits words.
    """

    def _extract_reference_info(self, refs: Sequence[str]) -> dict[str, Any]:
        return {"references": [words(reference) for reference in refs]}

    def _compute_segment_statistics(self, hypothesis: str, ref_kwargs: dict[str, Any]) -> list[int]:
        spoken = words(hypothesis)
        counts = [
            (sum(map(eq, spoken, reference)), max(len(spoken), len(reference)))
            for reference in ref_kwargs["references"]
        ]
        right, positions = max(counts, key=lambda count: count[0] / count[1] if count[1] else 1.0)
        return [right, positions]

    def _compute_score_from_stats(self, stats: Any) -> Any:
        return SacrebleuScore("token", 100 * stats[0] / stats[1] if stats[1] else 100.0)
