"""Decoding settings of the recipe."""

from collections.abc import Collection, Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from mtkit.recipe.settings import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Seed, Settings

MOST_HYPOTHESES = 1_000
Hypotheses = Annotated[int, Field(gt=0, le=MOST_HYPOTHESES)]

ONLY_WITH = {
    "beam": ("beam", "coverage_penalty"),
    "sample": ("temperature", "top_k", "top_p", "seed"),
}
"""Settings by the only method that uses them."""


def with_method(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a user's settings; a beam size without a method selects beam search."""
    implied = {"method": "beam"} if "beam" in given and "method" not in given else {}
    return {**given, **implied}


class DecodingSettings(Settings):
    """Decoding, in validation and in `translate`."""

    method: Literal["greedy", "beam", "sample"] = "beam"
    """Search algorithm."""
    beam: Hypotheses = 5
    """Beam size."""
    length_penalty: NonNegativeFloat = 1.0
    """Exponent of the length normalisation log-probability / length ^ exponent; 0 disables it."""
    coverage_penalty: NonNegativeFloat = 0.0
    """Weight of the penalty for unattended source pieces. Requires a cross attention with weights; 0 disables it."""
    max_pieces: PositiveInt | None = None
    """Maximum pieces of a translation, including the end mark. Default: slightly more than the longest target
    of training pairs with a similar source length, at least 2 x the source's pieces, and at least 20."""
    no_repeat_ngram: NonNegativeInt = 0
    """Forbid repeated n-grams of this many pieces; 0 disables this."""
    n_best: Hypotheses = 1
    """Translations per segment, best first."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature: divisor of the logits."""
    top_k: NonNegativeInt = 0
    """Sample from the k most probable pieces; 0 means all."""
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    """Sample from the most probable pieces whose cumulative probability reaches this value."""
    seed: Seed = 1
    """Random seed of sampling."""
    batch_tokens: PositiveInt = 8_192
    """Maximum padded source pieces per batch, counted once per hypothesis. On a CPU, the commands decode one batch per
    thread in parallel."""

    @model_validator(mode="after")
    def _n_best_fits_the_beam(self) -> Self:
        if self.method != "sample" and self.n_best > (self.beam if self.method == "beam" else 1):
            raise ValueError(
                f"decoding.n_best = {self.n_best} exceeds the number of hypotheses of {self.method} search"
            )
        return self

    def without_effect(self, given: Collection[str]) -> tuple[str, str] | None:
        """Return the first given setting that this method ignores, and the method that uses it.

        A coverage penalty of 0 is valid with every method: it disables the penalty.
        """
        pairs = (
            (setting, method)
            for method, settings in ONLY_WITH.items()
            for setting in settings
            if setting != "coverage_penalty" or self.coverage_penalty
        )
        return next((pair for pair in pairs if pair[0] in given and pair[1] != self.method), None)
