"""CTranslate2 as an engine: its search gives the hypotheses of mtkit's own, which decodes the segments where it cannot.

The rules of its beam search are those of `mtkit.decoding.search.beam` under the options given here:
- `return_end_token`: EOS counts in the length by which a score is normalised;
- `length_penalty` is never 0, for which a search would end with the best hypothesis; `LEAST_PENALTY` ranks alike;
- `min_decoding_length` 0: EOS is an ordinary piece from the beginning;
- pieces that never come (PAD, UNK, BOS) are not suppressed, because that would change the probabilities of the others.

Two rules it does not have: a limit of each segment, where EOS is forced, and the pieces that never come. Hypotheses
below the limit do not depend on it. A segment with a hypothesis that reaches its limit or has such a piece is therefore
decoded once more by mtkit's own search.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import ctranslate2
import torch
from torch import Tensor

from mtkit.decoding.engines.ctranslate2.conversion import COMPUTE_TYPES, Files, piece, token, vocabulary_map
from mtkit.decoding.engines.model_engine import ModelEngine
from mtkit.decoding.lexicon import Lexicon
from mtkit.decoding.parallel import at_once
from mtkit.decoding.search import Hypotheses, SourceBatch
from mtkit.decoding.search.choices import normalised
from mtkit.decoding.search.contract import NEVER_GENERATED
from mtkit.recipe import DecodingSettings
from mtkit.text.tokenizer import EOS, PAD

LEAST_PENALTY = 1e-6
"""Exponent in place of 0: it changes a score by less than float32 rounds off."""

LONGEST_UNSTOPPED = 1024
"""Target pieces of a segment, at most, that CTranslate2 decodes if the batch may be stopped."""

Found = list[tuple[list[int], float]]
"""The hypotheses of a segment, best first: pieces and log-probability."""


@dataclass(frozen=True)
class CTranslate2Engine:
    """An `Engine` over the converted model of `own`."""

    own: ModelEngine
    """mtkit's engine with the same model, settings and number type."""
    files: Files
    """The converted model."""
    lexicon: Lexicon | None = None
    """Where there is one, only pieces on its shortlist of a batch may come."""

    @property
    def settings(self) -> DecodingSettings:
        """The decoding settings."""
        return self.own.settings

    def with_settings(self, settings: DecodingSettings) -> "CTranslate2Engine":
        """The same with other settings, which share the loaded model."""
        other = replace(self, own=self.own.with_settings(settings))
        if "_program" in self.__dict__:
            other.__dict__["_program"] = self._program
        return other

    @property
    def most(self) -> int:
        """As many as mtkit's own computes in threads."""
        return self.own.most

    @property
    def longest_source(self) -> int | None:
        """The limit of the model."""
        return self.own.longest_source

    @property
    def longest_target(self) -> int | None:
        """The limit of the model."""
        return self.own.longest_target

    @property
    def identity(self) -> dict[str, Any]:
        """That of mtkit's own with the program and its version."""
        own = replace(self.own, lexicon=self.lexicon).identity
        return {**own, "engine": f"ctranslate2 {ctranslate2.__version__}"}

    def check(self) -> None:
        """What mtkit's own engine refuses; `why_not` has refused the rest."""
        self.own.check()

    @contextmanager
    def ready(self) -> Iterator[torch.device]:
        """The context of mtkit's own engine, with CTranslate2's model loaded. Raises: as `decoding_with`."""
        with self.own.ready() as device:
            assert self._program
            yield device

    @cached_property
    def _program(self) -> Any:
        """The loaded model: as many batches at a time as callers have, with the same shares of the threads."""
        device, threads = next(self.own.model.parameters()).device, torch.get_num_threads()
        workers = at_once(device)
        files = dict(self.files)
        if self.lexicon is not None:
            files["vmap.txt"] = vocabulary_map(self.lexicon).encode()
        program = ctranslate2.Translator(
            "converted",  # a name; the content is in memory, and stays as it is when the folder changes
            device=device.type,
            device_index=device.index or 0,
            compute_type=COMPUTE_TYPES[self.own.dtype],
            inter_threads=workers,
            intra_threads=threads // workers,
            files=files,
        )
        torch.set_num_threads(threads)  # the line above leaves this thread with one
        return program

    def translate(self, batch: SourceBatch) -> Hypotheses:
        """The hypotheses of CTranslate2, and of mtkit's own search for the segments that need its rules.

        CTranslate2 cannot be stopped, so that long batches that may be stopped are left to mtkit's own search.
        """
        if batch.stopped is not None and batch.longest > LONGEST_UNSTOPPED:
            return replace(self.own, lexicon=self.lexicon).translate(batch)
        beam = self.settings.beam if self.settings.method == "beam" else 1
        found = self._found(batch, beam)
        left = [row for row, each in enumerate(found) if not _as_own(each, beam, batch.limits[row])]
        nothing: Found = [([], -math.inf)]
        rows = [each + nothing * (beam - len(each)) for each in found]
        padded = [[its + [PAD] * (batch.longest - len(its)) for its, _ in each] for each in rows]
        device = batch.source.device
        pieces = torch.tensor(padded, device=device)
        log_probs = torch.tensor([[log_prob for _, log_prob in each] for each in rows], device=device)
        if left:
            again = self.own.translate(self._part(batch, left))
            pieces[left] = torch.nn.functional.pad(again.pieces, (0, batch.longest - again.pieces.shape[2]), value=PAD)
            log_probs[left] = again.log_probs
        lengths = (pieces != PAD).sum(-1)
        return Hypotheses(pieces, log_probs, normalised(log_probs, lengths, self.settings.length_penalty)).ranked()

    def log_probs(self, source: Tensor, target: Tensor, *, task: Tensor | None = None) -> Tensor:
        """The sums of CTranslate2's log-probabilities of the pieces, over all pieces."""
        scored = self._program.score_batch(_tokens(source), [each[:-1] for each in _tokens(target)], max_input_length=0)
        return torch.tensor([sum(each.log_probs) for each in scored], device=source.device)

    def _found(self, batch: SourceBatch, beam: int) -> list[Found]:
        """CTranslate2's hypotheses of each segment, `beam` of them, one piece below the longest limit at most."""
        alpha = self.settings.length_penalty or LEAST_PENALTY
        results = self._program.translate_batch(
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
                for names, score in zip(each.hypotheses, each.scores, strict=True)
            ]
            for each in results
        ]

    def _part(self, batch: SourceBatch, rows: Sequence[int]) -> SourceBatch:
        """These segments of a batch, with the shortlist of the whole."""
        pieces = batch.pieces if self.lexicon is None else self.lexicon.shortlist(batch.source)
        task = None if batch.task is None else batch.task[rows]
        limits = [batch.limits[row] for row in rows]
        return SourceBatch(batch.source[rows], limits, batch.keys[rows], task, pieces, batch.stopped)


def _as_own(found: Found, beam: int, limit: int) -> bool:
    """Whether mtkit's own search gives the same: all hypotheses end before the limit, with pieces that may come."""
    return len(found) == beam and all(
        pieces[-1:] == [EOS] and len(pieces) < limit and min(pieces) >= NEVER_GENERATED and math.isfinite(log_prob)
        for pieces, log_prob in found
    )


def _tokens(pieces: Tensor) -> list[list[str]]:
    """CTranslate2's names of the pieces (B, S) of each segment, without padding."""
    return [[token(piece) for piece in row if piece != PAD] for row in pieces.tolist()]
