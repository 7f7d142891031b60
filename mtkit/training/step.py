"""The training step: forward, loss, backward, clip, step. All else is wrapped around it.

`mtkit.training.update` seeds dropout, halves batches that the memory does not hold, and averages weights; `Objective`
adds R-Drop and the attentions' losses; `GradientReduction` sums gradients over processes and shards the model;
`Precision` holds autocast and loss scaling; `LowWeights` holds bfloat16 copies of the weights; `RecordedPasses` repeats
passes on a GPU.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from torch import Tensor

from mtkit.model.network import Network
from mtkit.model.recomputed_norms import norms_recomputed
from mtkit.training.device_batch import DeviceBatch, DeviceBatches
from mtkit.training.objective import Objective
from mtkit.training.optimization.gradient_reduction import GradientReduction
from mtkit.training.optimization.optimizer import Optimizer, clip_gradients, take_step
from mtkit.training.optimization.recorded_passes import RecordedPasses
from mtkit.training.precision import Precision


@dataclass(frozen=True)
class StepResult:
    """Measurements of one training step, all on the device."""

    totals: Tensor
    """The sums of `Objective`, over the batches of all processes."""
    gradient_norm: Tensor
    """Scalar: the norm of all gradients before clipping."""
    applied: Tensor
    """Boolean scalar: False if the loss or, except in float16, a gradient was not finite; then no weight changed."""


def training_step(
    model: Network,
    batches: DeviceBatches,
    tokens: float,
    *,
    objective: Objective,
    optimizer: Optimizer,
    reduction: GradientReduction,
    precision: Precision,
    low_weights: Callable[[], AbstractContextManager[object]],
    recorded: RecordedPasses | None,
    clip_norm: float,
    rate: float | None,
) -> StepResult | None:
    """Make an update by this process's batches; each token weighs one of the `tokens` of all batches and processes.

    Without a `rate` it only computes gradients: a dry run. `low_weights` is the context of each batch's passes.
    `recorded` repeats passes from CUDA graphs.
    """

    def passes(batch: DeviceBatch, tokens: Tensor | float, totals: Tensor, *, last: bool = False) -> None:
        """A forward and backward pass; `last`: no other follows."""
        batch = objective.prepare(batch)
        with low_weights():
            with precision.autocast(), norms_recomputed(precision.device):
                loss = objective(model, model(**batch.inputs), batch, totals)
            reduction.backward(precision.scaled(loss / tokens), last=last)

    totals = objective.new_totals()
    optimizer.zero_grad(set_to_none=True)
    for number, batch in enumerate(batches, start=1):
        if recorded is not None:
            recorded(passes, batch, tokens, totals)
        else:
            passes(batch, tokens, totals, last=rate is not None and number == len(batches))
    if rate is None:
        return None
    if not batches:
        reduction.backward(None, last=True)
    reduction.finish(totals)
    norm = clip_gradients(optimizer, precision, clip_norm)
    applied = take_step(optimizer, precision, rate=rate, norm=norm, finite=totals.isfinite().all())
    return StepResult(totals, norm, applied)
