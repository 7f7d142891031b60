"""The engine contract of decoding: source batches in, hypotheses out, independent of the program that computes them."""

from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

from mtkit.decoding.search import Hypotheses, SourceBatch
from mtkit.recipe import DecodingSettings


class Engine(Protocol):
    """A model with decoding settings; mtkit's own is `ModelEngine`, and another program can take its place.

    Callers handle text, documents, directions and resuming. An engine gets batches of segments of source pieces, each
    segment with its own limit. Batches on a CPU may come from several threads at once. Shortlists and the number type
    are the engine's.
    """

    @property
    def settings(self) -> DecodingSettings:
        """The decoding settings."""

    @property
    def most(self) -> int:
        """The maximum number of batches that are computed at a time, on a CPU."""

    @property
    def longest_source(self) -> int | None:
        """The maximum number of source pieces, EOS counted; None: no limit."""

    @property
    def longest_target(self) -> int | None:
        """The maximum number of target pieces, EOS counted; None: no limit."""

    @property
    def identity(self) -> dict[str, Any]:
        """The JSON values that determine its hypotheses besides weights and batch.

        Engines that may give different hypotheses have different identities, which a resumed translation compares.
        """

    def check(self) -> None:
        """Raises: MtkitError that names the first setting by which the engine cannot decode."""

    def ready(self) -> AbstractContextManager[torch.device]:
        """The context of all calls of `translate` and `log_probs`; gives the device on which batches must lie."""

    def translate(self, batch: SourceBatch) -> Hypotheses:
        """The hypotheses of each segment, best first, at least `settings.n_best`."""

    def log_probs(self, source: Tensor, target: Tensor, *, task: Tensor | None = None) -> Tensor:
        """The log-probability of each target, EOS included, given its source: (B,) float32.

        source (B, S) and target (B, T) pieces, EOS at the end, padded on the right; task (B,).
        Raises: MtkitError where the engine cannot score given translations.
        """
