"""CTranslate2 as an engine: its search gives mtkit's hypotheses; segments that it cannot decode are left to mtkit.

Under these options, its beam search has the rules of `mtkit.decoding.search.beam`:
- `return_end_token`: EOS counts in the length by which a score is normalised;
- `length_penalty` is never 0, because a search would then end with the best hypothesis; `LEAST_PENALTY` ranks alike;
- `min_decoding_length` 0: EOS is an ordinary piece from the beginning;
- pieces that are never generated (PAD, UNK, BOS) are not suppressed, because that would change the probabilities of the
  others.

It lacks two rules: a limit of each segment, at which EOS is forced, and the pieces that are never generated. Hypotheses
below the limit do not depend on it. A segment with a hypothesis that reaches its limit or has such a piece is therefore
decoded again by mtkit's own search.
"""

import ctypes
import math
import operator
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import ctranslate2
import torch
from torch import Tensor

from mtkit.decoding.contract import Hypotheses, SourceBatch
from mtkit.decoding.engines.ctranslate2_conversion import Files, piece, token, vocabulary_map
from mtkit.decoding.engines.model_engine import ModelEngine, dtype_name
from mtkit.decoding.parallel import at_once
from mtkit.decoding.search.continuations import NEVER_GENERATED, normalised
from mtkit.recipe import DecodingSettings
from mtkit.text.tokenizer import BREAK, EOS, PAD

LEAST_PENALTY = 1e-6
"""The exponent that replaces 0; it changes a score by less than float32's rounding."""

LONGEST_UNSTOPPED = 1024
"""Maximum target pieces of a segment that CTranslate2 decodes if the batch may be stopped."""

Found = list[tuple[list[int], float]]
"""The hypotheses of a segment, best first: pieces and log-probability."""


@dataclass(frozen=True)
class CTranslate2Engine(ModelEngine):
    """mtkit's engine, except that CTranslate2 decodes with the converted model."""

    files: Files = field(default_factory=dict, repr=False)
    """The converted model."""
    _loaded: dict[int, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    """The loaded model, by the id of the process that loaded it; engines of `with_settings` share it."""

    @property
    def own(self) -> ModelEngine:
        """mtkit's own engine with the same model, settings, number type and lexicon."""
        return ModelEngine(self.model, self.settings, self.dtype, self.lexicon)

    @property
    def program(self) -> str:
        """The name and version of CTranslate2."""
        return f"ctranslate2 {ctranslate2.__version__}"

    @property
    def identity(self) -> dict[str, Any]:
        """The identity of mtkit's own engine, and the program."""
        return {**super().identity, "engine": self.program}

    def with_settings(self, settings: DecodingSettings) -> "CTranslate2Engine":
        """Return the same engine with other settings; both share the loaded model."""
        other = replace(self, settings=settings)
        other.__dict__["_loaded"] = self._loaded
        return other

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_loaded": {}}  # a copy loads its own

    @contextmanager
    def ready(self) -> Iterator[torch.device]:
        """The context of mtkit's own engine, with CTranslate2's model loaded. Raises: as `decoding_with`."""
        with super().ready() as device:
            assert self._translator
            yield device

    @property
    def _translator(self) -> Any:
        """The loaded model; a forked process, which has none of its threads, loads its own."""
        process = os.getpid()
        if process not in self._loaded:
            for program in self._loaded.values():
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(program))  # its destructor would wait for those threads
            self._loaded.clear()
            self._loaded[process] = self._load()
        return self._loaded[process]

    def _load(self) -> Any:
        """Load the model: as many batches at a time as callers have, with the same shares of the threads."""
        device, threads = next(self.model.parameters()).device, torch.get_num_threads()
        workers = at_once(device)
        files = dict(self.files)
        if self.lexicon is not None:
            files["vmap.txt"] = vocabulary_map(self.lexicon).encode()
        program = ctranslate2.Translator(
            "converted",  # a name; the content is in memory, and does not change with the folder
            device=device.type,
            device_index=device.index or 0,
            compute_type=dtype_name(self.dtype),
            inter_threads=workers,
            intra_threads=threads // workers,
            files=files,
        )
        torch.set_num_threads(threads)  # ctranslate2.Translator sets this thread's number to one
        return program

    def translate(self, batch: SourceBatch) -> Hypotheses:
        """CTranslate2's hypotheses, and mtkit's own for the segments that need its rules.

        CTranslate2 cannot be stopped, so long batches that may be stopped are decoded by mtkit's own search, and so are
        batches with given beginnings: lines of a document after its previous lines (`Documents.context`), or prefixes.
        """
        if batch.prefixes is not None or (batch.stopped is not None and batch.longest > LONGEST_UNSTOPPED):
            return self.own.translate(batch)
        beam = self.settings.beam if self.settings.method == "beam" else 1
        searched = self._search(batch, beam)
        rows = [hypotheses + [([], -math.inf)] * (beam - len(hypotheses)) for hypotheses in searched]
        padded = [[pieces + [PAD] * (batch.longest - len(pieces)) for pieces, _ in row] for row in rows]
        device = batch.source.device
        pieces = torch.tensor(padded, device=device)
        log_probs = torch.tensor([[log_prob for _, log_prob in row] for row in rows], device=device)
        astray = torch.zeros_like(log_probs, dtype=torch.bool)
        lines: Sequence[list[int] | None] = batch.lines or [None] * len(batch.limits)
        checked = enumerate(zip(searched, batch.limits, lines, strict=True))
        again = [k for k, (hypotheses, limit, count) in checked if not _follows_rules(hypotheses, beam, limit, count)]
        if again:
            decoded = replace(self.own, lexicon=None).translate(
                SourceBatch(
                    batch.source[again],
                    [batch.limits[k] for k in again],
                    batch.keys[again],
                    None if batch.task is None else batch.task[again],
                    batch.pieces
                    if self.lexicon is None
                    else self.lexicon.shortlist(batch.source),  # of the whole batch
                    None if batch.lines is None else [batch.lines[k] for k in again],
                    stopped=batch.stopped,
                )
            )
            pieces[again] = torch.nn.functional.pad(
                decoded.pieces, (0, batch.longest - decoded.pieces.shape[2]), value=PAD
            )
            log_probs[again] = decoded.log_probs
            if decoded.astray is not None:
                astray[again] = decoded.astray
        scores = normalised(log_probs, (pieces != PAD).sum(-1), self.settings.length_penalty)
        return Hypotheses(pieces, log_probs, scores, astray).ranked()

    def log_probs(self, source: Tensor, target: Tensor, *, task: Tensor | None = None) -> Tensor:
        """CTranslate2's log-probabilities of the pieces, over all pieces."""
        targets = [names[:-1] for names in _tokens(target)]
        scored = self._translator.score_batch(_tokens(source), targets, max_input_length=0)
        rows = [torch.tensor(result.log_probs) for result in scored]
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).to(source.device)

    def _search(self, batch: SourceBatch, beam: int) -> list[Found]:
        """CTranslate2's `beam` hypotheses of each segment, at most one piece shorter than the longest limit."""
        alpha = self.settings.length_penalty or LEAST_PENALTY
        results = self._translator.translate_batch(
            _tokens(batch.source),
            beam_size=beam,
            num_hypotheses=beam,
            length_penalty=alpha,
            min_decoding_length=0,
            max_decoding_length=max(1, batch.longest - 1),
            max_input_length=0,
            return_end_token=True,
            return_scores=True,
            use_vmap=self.lexicon is not None,
        )
        return [
            [
                (list(map(piece, names)), score * len(names) ** alpha)
                for names, score in zip(result.hypotheses, result.scores, strict=True)
            ]
            for result in results
        ]


def _follows_rules(hypotheses: Found, beam: int, limit: int, lines: list[int] | None) -> bool:
    """Return whether mtkit's search gives the same: all hypotheses end before the limit, without forbidden pieces."""
    return len(hypotheses) == beam and all(
        pieces[-1:] == [EOS]
        and len(pieces) < limit
        and min(pieces) >= NEVER_GENERATED
        and math.isfinite(log_prob)
        and (lines is None or _has_lines(pieces, lines))
        for pieces, log_prob in hypotheses
    )


def _has_lines(pieces: list[int], limits: list[int]) -> bool:
    """Return whether the pieces, EOS included, are lines below these limits, and none of several is empty."""
    ends = [place for place, piece in enumerate(pieces) if piece in (BREAK, EOS)]
    sizes = [*map(operator.sub, ends, [-1, *ends])]
    several = len(limits) > 1
    return len(sizes) == len(limits) and all(several < size < limit for size, limit in zip(sizes, limits, strict=True))


def _tokens(pieces: Tensor) -> list[list[str]]:
    """CTranslate2's names of the pieces (B, S) of each segment, without padding."""
    return [[token(piece) for piece in row if piece != PAD] for row in pieces.tolist()]
