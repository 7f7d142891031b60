"""The seam of decoding: source batches in, hypotheses out, whatever program computes them."""

from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

from mtkit.decoding.search import Hypotheses, SourceBatch
from mtkit.recipe import DecodingSettings


class Engine(Protocol):
    """A model with the settings to decode by: mtkit's own is `ModelEngine`; another program can stand in its place.

    Text, documents, directions and resuming are done by its callers. It gets segments of source pieces in batches,
    several at a time from several threads where they lie on a CPU; each segment has a limit of its own. Shortlists and
    arithmetic are the engine's.
    """

    @property
    def settings(self) -> DecodingSettings:
        """What it decodes by."""

    @property
    def longest_source(self) -> int | None:
        """Source pieces that it takes at most, EOS counted; None where there is no limit."""

    @property
    def longest_target(self) -> int | None:
        """Target pieces, likewise."""

    @property
    def identity(self) -> dict[str, Any]:
        """What decides its hypotheses besides weights and batch, as JSON can hold it.

        Two engines that may give different hypotheses have different ones: a resumed translation goes by it.
        """

    def check(self) -> None:
        """Raises: MtkitError for settings that it cannot decode by; it names the first."""

    def ready(self) -> AbstractContextManager[torch.device]:
        """Around all calls of the two below: gives the device that batches are to lie on."""

    def translate(self, batch: SourceBatch) -> Hypotheses:
        """The hypotheses of each segment, best first, `settings.n_best` at least."""

    def log_probs(self, source: Tensor, target: Tensor, *, task: Tensor | None = None) -> Tensor:
        """The log-probability of each target, EOS included, given its source: (B,) float32.

        source (B, S) and target (B, T) pieces, EOS at the end, padded on the right; task (B,).
        Raises: MtkitError where the engine cannot score given translations.
        """
