"""mtkit's own engine: the searches of mtkit over a model or an ensemble.

An ensemble: several models that translate as one, by the mean of their probabilities at each step.

The likelihood of given translations under a model, with all pieces in one pass.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from mtkit.decoding.engines.weights import decoding_with
from mtkit.decoding.engines.workers import Workers
from mtkit.decoding.lexicon import Lexicon
from mtkit.decoding.parallel import MOST
from mtkit.decoding.search import Hypotheses, SourceBatch
from mtkit.decoding.search.beam import beam_search
from mtkit.decoding.search.walk import greedy_search, sample
from mtkit.errors import MtkitError
from mtkit.model.network import Logits, Model, Network
from mtkit.recipe import DecodingSettings
from mtkit.text.tokenizer import BOS, EOS, PAD

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


class Ensemble(nn.Module):
    """One model for every search, made of models with the same pieces on both sides, of any size and attention."""

    def __init__(self, networks: Sequence[Network]) -> None:
        super().__init__()
        self._networks = nn.ModuleList(cast(Sequence[nn.Module], networks))
        self.has_weights = all(each.has_weights for each in networks)
        self.longest_source = _least(each.longest_source for each in networks)
        self.longest_target = _least(each.longest_target for each in networks)

    @property
    def networks(self) -> list[Network]:
        """The networks of the ensemble."""
        return [cast(Network, each) for each in self._networks]

    def encode(self, source: Tensor, source_valid: Tensor | None = None, *, task: Tensor | None = None) -> list[Any]:
        """The encodings of source (B, S), source_valid (B, S) and task (B,) by each model."""
        return [each.encode(source, source_valid, task=task) for each in self.networks]

    def start(self, encoded: list[Any], *, hypotheses: int = 1, pieces: Tensor | None = None) -> dict[str, Any]:
        """The states of all models as one state, which `mtkit.attention.reorder` accepts."""
        pairs = zip(self.networks, encoded, strict=True)
        states = [each.start(one, hypotheses=hypotheses, pieces=pieces) for each, one in pairs]
        return {str(number): state for number, state in enumerate(states)}

    def step(
        self, token: Tensor, state: dict[str, Any], *, need_weights: bool = False
    ) -> tuple[Logits, dict[str, Any], Tensor | None]:
        """Logarithms of the mean probabilities (B, N, V) of the piece after `token` (B, N), and the next state.

        With `need_weights`, also the mean of the models' attention to the source, (B, N, S).
        """
        log_probs, after, weights = [], {}, []
        for number, each in enumerate(self.networks):
            logits, after[str(number)], one = each.step(token, state[str(number)], need_weights=need_weights)
            log_probs.append(logits.whole().log_softmax(-1))
            if one is not None:
                weights.append(one)
        return Logits.known(mean_of(log_probs)), after, torch.stack(weights).mean(0) if weights else None


def mean_of(log_probs: Sequence[Tensor]) -> Tensor:
    """The logarithm of the mean of probabilities, from their logarithms, which have the same shape."""
    if len(log_probs) == 1:
        return log_probs[0]
    return torch.stack(list(log_probs)).logsumexp(0) - math.log(len(log_probs))


def networks_of(model: Model) -> list[Network]:
    """The networks of a model: those of an ensemble, or the model itself."""
    return model.networks if isinstance(model, Ensemble) else [cast(Network, model)]


def _least(limits: Any) -> int | None:
    return min((limit for limit in limits if limit is not None), default=None)


ROWS = 1024
"""Positions whose logits over the vocabulary are in memory at the same time, for each batch that is worked on."""


def forced_log_probs(model: Model, source: Tensor, target: Tensor, *, task: Tensor | None = None) -> Tensor:
    """The log-probability of each target, EOS included, given its source: (B,) float32.

    source (B, S) and target (B, T) pieces, EOS at the end, padded on the right; task (B,).
    """
    valid = target != PAD
    log_probs = torch.zeros(target.shape, device=target.device)
    log_probs[valid] = mean_of([_of_network(each, source, target, valid, task) for each in networks_of(model)])
    return log_probs.sum(1)


def _of_network(network: Network, source: Tensor, target: Tensor, valid: Tensor, task: Tensor | None) -> Tensor:
    """The log-probability of each real piece of the targets, (M,), those before it given."""
    begin = torch.full_like(target[:, :1], BOS)
    target_in = torch.cat([begin, target[:, :-1].masked_fill(target[:, :-1] == EOS, PAD)], 1)
    output = network.forward(source, target_in, source_valid=source != PAD, target_valid=valid, task=task)
    parts = zip(output.hidden[valid].split(ROWS), target[valid].split(ROWS), strict=True)
    return torch.cat([_log_probs(network.logits(part), pieces) for part, pieces in parts])


def _log_probs(logits: Tensor, pieces: Tensor) -> Tensor:
    """The log-probabilities (M,) of pieces (M,) under logits (M, V)."""
    logits = logits.float()
    return logits.gather(1, pieces[:, None]).squeeze(1) - logits.logsumexp(1)
