"""mtkit's own engine: its searches over a model or an ensemble, and the likelihood of given translations."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from mtkit.decoding.contract import Hypotheses, SourceBatch
from mtkit.decoding.lexicon import Lexicon
from mtkit.decoding.parallel import MOST, Workers
from mtkit.decoding.search.beam import beam_search
from mtkit.decoding.search.sampling import greedy_search, sample
from mtkit.decoding.step_graphs import StepGraphs, forget_graphs
from mtkit.device import autocast, check_default_type, varied_shapes
from mtkit.errors import MtkitError, shown
from mtkit.memory import OOM_ERRORS, is_oom
from mtkit.model.decoding_products import is_low, products
from mtkit.model.layers import Weights
from mtkit.model.network import Logits, Model, Network, Output
from mtkit.recipe import DecodingSettings
from mtkit.text.tokenizer import BOS, PAD

SEARCHES = {"greedy": greedy_search, "beam": beam_search, "sample": sample}

DTYPES = {
    "auto": None,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int8": torch.int8,
}
"""The number types by name; auto is float32, whose results do not depend on the batch. In int8, and in bfloat16 on the
CPU, only linear layers compute (`mtkit.model.decoding_products`); the rest is in float32."""

ROWS = 1024
"""Positions whose logits over the vocabulary are in memory at the same time, per batch in work."""


def find_dtype(name: str) -> torch.dtype | None:
    """Return the number type of that name, None for auto. Raises: MtkitError for an unknown name."""
    if name not in DTYPES:
        raise MtkitError(f"no dtype {shown(name)}; choose one of {', '.join(DTYPES)}")
    return DTYPES[name]


def dtype_name(dtype: torch.dtype | None) -> str:
    """Return the name of a number type; None is float32."""
    return str(dtype or torch.float32).removeprefix("torch.")


@contextmanager
def decoding_with(model: Model, dtype: torch.dtype | None) -> Iterator[torch.device]:
    """A context with the model in evaluation mode, inference mode and computation in `dtype`; gives its device.

    The model is restored on exit and serves one call at a time. None is float32. On a GPU, types below float32
    apply to all operations that autocast supports, elsewhere to linear layers.

    Raises: MtkitError for int8 on a GPU, if memory runs out although batches have been halved (`Halving`), and as
    `mtkit.device.check_default_type`.
    """
    check_default_type()
    training, device = model.training, next(model.parameters()).device
    dtype = dtype or torch.float32
    by_autocast = dtype not in (torch.float32, torch.int8) and not is_low(dtype, device)
    model.train(False)
    try:
        with (
            varied_shapes(),
            products(cast(nn.Module, model), dtype),  # rounds weights outside inference mode, as normal tensors
            autocast(device, dtype if by_autocast else None),
            torch.inference_mode(),
        ):
            yield device
    except OOM_ERRORS as error:
        if not is_oom(error):
            raise
        raise MtkitError(
            f"the memory of {device} does not hold the model and a single segment to translate; lower decoding.beam "
            "or decoding.max_pieces, or take another --device"
        ) from error
    finally:
        model.train(training)
        forget_graphs(model)


@dataclass(frozen=True)
class ModelEngine:
    """An `Engine` over a model, which serves one call of `ready` at a time."""

    model: Model
    settings: DecodingSettings
    dtype: torch.dtype | None = None
    """The number type of matrix products; None is float32, whose results do not depend on the batch."""
    lexicon: Lexicon | None = None
    """If given, only pieces on its shortlist of a batch may be generated, so that a result depends on its batch."""
    workers: Workers | None = None
    """Processes that compute the batches which would get one thread each; the model must not change afterwards."""

    def with_settings(self, settings: DecodingSettings) -> "ModelEngine":
        """Return the same engine with other settings."""
        return replace(self, settings=settings)

    @property
    def own(self) -> "ModelEngine":
        """mtkit's own engine, which decodes what another program cannot."""
        return self

    @property
    def program(self) -> str:
        """The program that decodes."""
        return "mtkit"

    @property
    def max_parallel(self) -> int:
        """The number of processes, or the maximum number of threads."""
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

        The batch of a segment differs between machines. It changes last digits, and with shortlists the pieces that may
        be generated. It is no part of the identity, because each result is one of these settings.
        """
        return {
            "device": next(self.model.parameters()).device.type,
            "dtype": dtype_name(self.dtype),
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
                # import compiled loops once here, not in each process; without processes they are imported when used
                import mtkit.attention.kernels.cpu.decoding_loops  # noqa: F401

                self.workers.start(partial(_search_in_process, self.model, self.dtype))
            yield device

    def translate(self, batch: SourceBatch) -> Hypotheses:
        """Return the hypotheses of the search `settings.method`; log-probabilities are over the allowed pieces."""
        if self.lexicon is not None:
            batch = batch.restricted(self.lexicon.shortlist(batch.source))
        if self.workers is not None and torch.get_num_threads() == 1:
            job = (self.settings, replace(batch, stopped=None), batch.stopped is not None)
            hypotheses: Hypotheses | None = self.workers.answer(job, batch.stopped)
            if hypotheses is not None:
                return hypotheses.with_ids(batch.pieces)
            batch.check()
        model = StepGraphs(self.model) if batch.source.is_cuda else self.model
        return SEARCHES[self.settings.method](model, batch, self.settings).with_ids(batch.pieces)

    def log_probs(self, source: Tensor, target: Tensor, *, task: Tensor | None = None) -> Tensor:
        """Return the result of `forced_log_probs`, over all pieces."""
        return forced_log_probs(self.model, source, target, task=task)


def _search_in_process(
    model: Model,
    dtype: torch.dtype | None,
    job: tuple[DecodingSettings, SourceBatch, bool],
    stopped: Callable[[], bool],
) -> Hypotheses:
    """Compute a batch's hypotheses in a process; the last value of the job is whether it can be stopped."""
    settings, batch, can_stop = job
    if can_stop:
        batch = replace(batch, stopped=stopped)
    with decoding_with(model, dtype):
        return SEARCHES[settings.method](model, batch, settings)


class Ensemble(nn.Module):
    """Several models that decode as one, by the mean of their probabilities at each step.

    They have the same pieces on both sides; sizes and attention may differ.
    """

    def __init__(self, networks: Sequence[Network]) -> None:
        super().__init__()
        self._networks = nn.ModuleList(cast(Sequence[nn.Module], networks))
        self.has_weights = all(network.has_weights for network in networks)
        sources = (network.longest_source for network in networks)
        targets = (network.longest_target for network in networks)
        self.longest_source = min((limit for limit in sources if limit is not None), default=None)
        self.longest_target = min((limit for limit in targets if limit is not None), default=None)

    @property
    def networks(self) -> list[Network]:
        """The networks of the ensemble."""
        return [cast(Network, network) for network in self._networks]

    def encode(self, source: Tensor, source_valid: Tensor | None = None, *, task: Tensor | None = None) -> list[Any]:
        """Return the encodings of source (B, S), source_valid (B, S) and task (B,) by each model."""
        return [network.encode(source, source_valid, task=task) for network in self.networks]

    def start(self, encoded: list[Any], *, hypotheses: int = 1, pieces: Tensor | None = None) -> dict[str, Any]:
        """Return the states of all models as one state, which `mtkit.attention.reorder` accepts."""
        pairs = enumerate(zip(self.networks, encoded, strict=True))
        return {str(n): network.start(one, hypotheses=hypotheses, pieces=pieces) for n, (network, one) in pairs}

    def fixed_state(self, state: dict[str, Any], segments: int, hypotheses: int, steps: int) -> dict[str, Any] | None:
        """Return the states of all models after a step in the form of `Network.fixed_state`; None if one has none."""
        fixed = {}
        for number, network in enumerate(self.networks):
            fixed[str(number)] = network.fixed_state(state[str(number)], segments, hypotheses, steps)
        return None if None in fixed.values() else fixed

    def step(
        self, token: Tensor, state: dict[str, Any], *, need_weights: bool = False
    ) -> tuple[Logits, dict[str, Any], Tensor | None]:
        """Logarithms of the mean probabilities (B, N, V) of the piece after `token` (B, N), and the next state.

        With `need_weights`, also the mean of the models' attention to the source, (B, N, S).
        """
        log_probs, next_state, weights = [], {}, []
        for number, network in enumerate(self.networks):
            logits, next_state[str(number)], one = network.step(token, state[str(number)], need_weights=need_weights)
            log_probs.append(logits.whole().log_softmax(-1))
            if one is not None:
                weights.append(one)
        return Logits.known(mean_of(log_probs)), next_state, torch.stack(weights).mean(0) if weights else None


def mean_of(log_probs: Sequence[Tensor]) -> Tensor:
    """Return the logarithm of the mean probabilities, from log-probabilities of equal shape."""
    if len(log_probs) == 1:
        return log_probs[0]
    return torch.stack(list(log_probs)).logsumexp(0) - math.log(len(log_probs))


def networks_of(model: Model) -> list[Network]:
    """Return the networks of an ensemble, or the model itself."""
    return model.networks if isinstance(model, Ensemble) else [cast(Network, model)]


def forced_log_probs(model: Model, source: Tensor, target: Tensor, *, task: Tensor | None = None) -> Tensor:
    """Return the log-probability of each target piece, given its source and the pieces before it, in one pass.

    source (B, S) and target (B, T) pieces, EOS at the end, padded on the right; task (B,). The result is (B, T)
    float32, 0 at padding; the sum over T is the log-probability of the target.
    """
    valid = target != PAD
    log_probs = torch.zeros(target.shape, device=target.device)
    log_probs[valid] = mean_of(
        [
            piece_log_probs(network, forced_output(network, source, target, task).hidden[valid], target[valid])
            for network in networks_of(model)
        ]
    )
    return log_probs


def forced_output(
    network: Network, source: Tensor, target: Tensor, task: Tensor | None, weights: Weights | None = None
) -> Output:
    """Return the decoder's output for given targets; arguments as in `forced_log_probs`, `weights` as in `forward`."""
    valid = target != PAD
    target_in = torch.cat([torch.full_like(target[:, :1], BOS), target[:, :-1]], 1).masked_fill(~valid, PAD)
    return network.forward(
        source, target_in, source_valid=source != PAD, target_valid=valid, task=task, weights=weights
    )


def piece_log_probs(network: Network, hidden: Tensor, pieces: Tensor) -> Tensor:
    """Return the log-probability (N,) float32 of each piece (N,) by the vector (N, D) that predicts it."""
    log_probs = []
    for rows, numbers in zip(hidden.split(ROWS), pieces.split(ROWS), strict=True):
        logits = network.logits(rows).float()
        log_probs.append(logits.gather(1, numbers[:, None]).squeeze(1) - logits.logsumexp(1))
    return torch.cat(log_probs)
