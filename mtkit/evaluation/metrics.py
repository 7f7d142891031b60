"""Metrics by name: sacrebleu's BLEU, chrF and TER, and exact match as a sacrebleu metric."""

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
from sacrebleu.metrics import BLEU, CHRF, TER
from sacrebleu.metrics.base import Metric, Signature
from sacrebleu.metrics.base import Score as SacrebleuScore
from sacrebleu.tokenizers.tokenizer_char import TokenizerChar

from mtkit.errors import MtkitError, did_you_mean, shown
from mtkit.languages import bleu_tokenizer, has_spaces

METRICS = ("BLEU", "chrF", "TER")
"""Default metrics. TER counts edits: lower is better."""

ALL_METRICS = (*METRICS, "exact")


def metric_names(names: Sequence[str]) -> tuple[str, ...]:
    """Return the distinct names as ALL_METRICS spells them; case is ignored. Raises: MtkitError for an unknown name."""
    known = {name.lower(): name for name in ALL_METRICS}
    for name in names:
        if name.lower() not in known:
            hint = did_you_mean(name.lower(), list(known))
            raise MtkitError(f"no metric {shown(name)}{hint}; there are: {', '.join(ALL_METRICS)}")
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
        reason = str(error).strip().split("\n")[0]
        raise MtkitError(f"sacrebleu cannot use the tokenizer {shown(tokenize)} here: {reason}") from error


@cache
def installed_tokenizer(language: str | None) -> str:
    """Return BLEU's tokenizer for the language, or `char` if its dictionary is not installed."""
    tokenizer = bleu_tokenizer(language)
    try:
        BLEU(tokenize=tokenizer)
    except (ImportError, RuntimeError):
        return "char"
    return tokenizer


def missing_tokenizer(languages: Iterable[str | None], tokenize: str | None = None) -> str | None:
    """Return a note on the first language whose tokenizer is not installed; None if all are or `tokenize` is set."""
    for language in languages:
        tokenizer = bleu_tokenizer(language)
        if tokenize is None and installed_tokenizer(language) != tokenizer:
            extra = tokenizer.partition("-")[0]
            return (
                f"BLEU counts characters in {language}: its tokenizer {tokenizer} is not installed; "
                f"pip install 'sacrebleu[{extra}]'"
            )
    return None


def _ter(language: str | None) -> TER:
    """Return a TER that counts words, or characters in languages without spaces between words.

    sacrebleu's support for Asian scripts requires normalised text. It separates ideographs, but does not split Thai,
    Lao, Khmer and Burmese.
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


class _ExactSignature(Signature):  # type: ignore[misc]
    """sacrebleu's signature, plus whether the comparison ignores case."""

    def __init__(self, args: Mapping[str, Any]) -> None:
        super().__init__(args)
        self._abbr["case"] = "c"
        self.info["case"] = "lc" if args["lowercase"] else "mixed"


class ExactMatch(Metric):  # type: ignore[misc]
    """Percentage of segments that equal one of their references, ignoring spaces at the ends of lines."""

    _SIGNATURE_TYPE = _ExactSignature

    def __init__(self, *, lowercase: bool = False) -> None:
        super().__init__()
        self.lowercase = lowercase

    def _preprocess_segment(self, sent: str) -> str:
        return (sent.lower() if self.lowercase else sent).rstrip()

    def _extract_reference_info(self, refs: Sequence[str]) -> dict[str, Any]:
        return {"references": set(refs)}

    def _compute_segment_statistics(self, hypothesis: str, ref_kwargs: dict[str, Any]) -> list[int]:
        return [int(hypothesis in ref_kwargs["references"]), 1]

    def _compute_score_from_stats(self, stats: Any) -> Any:
        return SacrebleuScore("exact", 100 * stats[0] / stats[1])

    def _aggregate_and_compute(self, stats: Any) -> Any:
        return self._compute_score_from_stats(np.sum(stats, axis=0))
