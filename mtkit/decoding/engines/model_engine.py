"""mtkit's own engine: the searches of mtkit over a model or an ensemble."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mtkit.decoding.engines.arithmetic import decoding_with
from mtkit.decoding.engines.likelihood import forced_log_probs
from mtkit.decoding.engines.workers import Workers
from mtkit.decoding.lexicon import Lexicon
from mtkit.decoding.search import Hypotheses, SourceBatch
from mtkit.decoding.search.beam import beam_search
from mtkit.decoding.search.greedy import greedy_search
from mtkit.decoding.search.sampling import sample
from mtkit.decoding.side_by_side import MOST
from mtkit.errors import MtkitError
from mtkit.model.network import Model
from mtkit.recipe import DecodingSettings

SEARCHES = {"greedy": greedy_search, "beam": beam_search, "sample": sample}


@dataclass(frozen=True)
class ModelEngine:
    """An `Engine` over a model, which serves one call of `ready` at a time."""

    model: Model
    settings: DecodingSettings
    dtype: torch.dtype | None = None
    """The arithmetic of the matrix products; None stands for float32, whose results do not depend on the batch."""
    lexicon: Lexicon | None = None
    """Where there is one, only pieces on its shortlist of a batch may come, so that a result depends on its batch."""
    workers: Workers | None = None
    """Processes that compute the batches to which one thread each would be given; the model must stay as it is."""

    def with_settings(self, settings: DecodingSettings) -> "ModelEngine":
        """The same with other settings."""
        return replace(self, settings=settings)

    @property
    def most(self) -> int:
        """As many batches as there are processes, or as threads should share."""
        return MOST if self.workers is None else self.workers.count

    @property
    def longest_source(self) -> int | None:
        """The limit of the model."""
        return self.model.longest_source

    @property
    def longest_target(self) -> int | None:
        """The limit of the model."""
        return self.model.longest_target

    @property
    def identity(self) -> dict[str, Any]:
        """Settings, number type and shortlists.

        What a segment is batched with, which differs between machines, decides last digits, and with shortlists which
        pieces may come. It does not count: each result is one of these settings.
        """
        return {
            "device": next(self.model.parameters()).device.type,
            "dtype": str(self.dtype or torch.float32).removeprefix("torch."),
            "lexicon": self.lexicon and self.lexicon.fingerprint,
            "settings": self.settings.model_dump(exclude={"batch_tokens"}),
        }

    def check(self) -> None:
        """Raises: MtkitError for a coverage penalty that the search or the attention of the model does not support."""
        settings = self.settings
        if settings.coverage_penalty and settings.method != "beam":
            raise MtkitError(
                f"decoding.coverage_penalty = {settings.coverage_penalty} ranks the hypotheses of beam search; "
                f"set it to 0 with method {settings.method}"
            )
        if settings.coverage_penalty and not self.model.has_weights:
            raise MtkitError(
                f"decoding.coverage_penalty = {settings.coverage_penalty} needs attention weights, and this model's "
                "cross attention mechanism has none; set it to 0, or train with a cross attention that has "
                "(cross: full)"
            )

    @contextmanager
    def ready(self) -> Iterator[torch.device]:
        """The context of `decoding_with` for the model, in `dtype`. Raises: as `decoding_with`."""
        with decoding_with(self.model, self.dtype) as device:
            if self.workers is not None:
                # once here, not once in each process; only they need compiled loops
                import mtkit.compiled.continuations
                import mtkit.compiled.step_attention  # noqa: F401

                self.workers.start(partial(_answer, self.model, self.dtype))
            yield device

    def translate(self, batch: SourceBatch) -> Hypotheses:
        """The hypotheses of the search `settings.method`; log-probabilities are over the allowed pieces."""
        if self.lexicon is not None:
            batch = replace(batch, pieces=self.lexicon.shortlist(batch.source))
        if self.workers is not None and torch.get_num_threads() == 1:
            job = (self.settings, replace(batch, stopped=None), batch.stopped is not None)
            found: Hypotheses | None = self.workers.answer(job, batch.stopped)
            if found is not None:
                return found.named(batch.pieces)
            batch.check()
        return SEARCHES[self.settings.method](self.model, batch, self.settings).named(batch.pieces)

    def log_probs(self, source: Tensor, target: Tensor, *, task: Tensor | None = None) -> Tensor:
        """The result of `forced_log_probs`, over all pieces."""
        return forced_log_probs(self.model, source, target, task=task)


def _answer(
    model: Model,
    dtype: torch.dtype | None,
    job: tuple[DecodingSettings, SourceBatch, bool],
    stopped: Callable[[], bool],
) -> Hypotheses:
    """The hypotheses that a process computes for a batch; the last value of the job is whether it can be stopped."""
    settings, batch, can_stop = job
    if can_stop:
        batch = replace(batch, stopped=stopped)
    with decoding_with(model, dtype):
        return SEARCHES[settings.method](model, batch, settings)
