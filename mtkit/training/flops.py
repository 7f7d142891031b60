"""Floating-point operations of products, and how many of them a training does per target token.

An operation is a multiplication or an addition: a product of matrices N x K and K x M has 2 N K M. Softmaxes, norms,
activations and the optimiser's step do not count.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode, conv_flop_count, sdpa_backward_flop_count, sdpa_flop_count

from mtkit.data.batches import make_batch
from mtkit.data.prepared import Prepared, Side
from mtkit.model.adaptation import train_in_part
from mtkit.model.build import build_model
from mtkit.model.network import Network
from mtkit.recipe import Recipe
from mtkit.training.data_loader import DataLoader, evenly_spaced
from mtkit.training.device_batch import DeviceBatch
from mtkit.training.objective import Objective
from mtkit.training.world import World

aten = torch.ops.aten


def _convolution_backward(
    gradient: list[int], x: list[int], weight: list[int], *rest: Any, out_shape: Any = None
) -> int:
    """Count the forward operations for each gradient that is computed; torch's own formula ignores groups."""
    *_, transposed, _, _, wanted = rest
    return conv_flop_count(x, weight, gradient, transposed) * sum(wanted[:2])


def _solve(matrix: list[int], right: list[int], **_: Any) -> int:
    """By an LU decomposition of matrices (..., N, N)."""
    return math.prod(matrix) * 2 * matrix[-1] // 3 + _lu_solve(matrix, right)


def _lu_solve(matrix: list[int], right: list[int]) -> int:
    """Both triangles of matrices (..., N, N), against right sides (..., N, M)."""
    return 2 * math.prod(right) * matrix[-1]


FORMULAS = {  # of operations that torch's own counter leaves out, from the shapes of their arguments
    aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *_, **__: sdpa_flop_count(q, k, v),
    aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        lambda gradient, q, k, v, *_, **__: sdpa_backward_flop_count(gradient, q, k, v)
    ),
    aten.convolution_backward: _convolution_backward,
    aten._linalg_solve_ex: _solve,
    aten.linalg_lu_solve: lambda matrix, pivots, right, **_: _lu_solve(matrix, right),
    aten.linalg_solve_triangular: lambda matrix, right, *_, **__: _lu_solve(matrix, right) // 2,
    aten.addmm_: lambda total, left, right, **_: 2 * math.prod(left) * right[1],
    aten.baddbmm_: lambda total, left, right, **_: 2 * math.prod(left) * right[2],
    aten.mv: lambda matrix, vector, **_: 2 * math.prod(matrix),
}

BATCHES = 8
"""Batches of a sample."""

MOST_TOKENS = 2_048
"""Padded tokens of a counted batch, of the longer side: of a larger one, some rows are counted."""

SEGMENTS = 24
"""Segments, of all lengths, in a sample without padding."""

SEED = 1
"""Seed of the sample and of the model, instead of the recipe's: trainings that differ in the seed cost the same."""


class _NoModules:
    """Replacement of the FLOP counter's module tracker, which counts only the total.

    The tracker needs gradients of each module's inputs, and fails for a view of a parameter under `no_grad`.
    """

    parents = ("Global",)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        pass


def flop_counter() -> FlopCounterMode:
    """Return a context that counts the operations of products inside, backward passes included.

    Fused attention counts all pairs, also masked ones, and its backward pass computes the scores again.
    """
    counter: Any = FlopCounterMode(display=False, custom_mapping=FORMULAS)
    counter.mod_tracker = _NoModules()
    return cast("FlopCounterMode", counter)


def flops_of(compute: Callable[[], Any]) -> int:
    """Run `compute()` once and return its operations."""
    with flop_counter() as counter:
        compute()
    return int(counter.get_total_flops())


@contextmanager
def without_onednn() -> Iterator[None]:
    """Context without the library that computes the layers of an LSTM in one operation, whose products are hidden."""
    backend: Any = torch.backends.mkldnn  # its own context warns about Intel's GPUs
    enabled, backend.enabled = backend.enabled, False
    try:
        yield
    finally:
        backend.enabled = enabled


def flops_per_token(recipe: Recipe, prepared: Prepared) -> float:
    """Count the training FLOPs per target token: forward pass, loss and backward pass of the first epoch's batches.

    The sample is `BATCHES` batches whose widths are evenly spaced. Padding counts as operations, and not as tokens;
    so does what reversible or checkpointed layers and kernels compute again. Everything runs in float32 on the CPU by
    the operations of PyTorch, so the number depends neither on the machine, nor on the threads, nor on
    `training.precision`.

    Raises: RecipeError and MtkitError if the model cannot be built; DataError without training pairs.
    """
    recipe = prepared.applied_to(recipe).model_copy(update={"seed": SEED})
    model = build_model(recipe, **prepared.model_sizes)
    train_in_part(model, recipe.training, recipe.seed)
    model.checkpoints_activations = recipe.training.checkpoint_activations
    longest, cpu = min(model.longest_source, model.longest_target), torch.device("cpu")
    loader, objective = DataLoader(recipe, prepared, longest, World("cpu")), Objective(recipe.training, cpu)
    side, operations, tokens = loader.side(0), 0, 0
    for rows in loader.spread(BATCHES):
        width = 1 + max(int(pieces.lengths[rows].max()) for pieces in (side.source, side.target))
        batch = make_batch(side, rows[:: -(-len(rows) * width // MOST_TOKENS)], longest)
        with torch.random.fork_rng(devices=[]), without_onednn():
            operations += flops_of(partial(_backward, model, objective, DeviceBatch.of(batch, cpu)))
        tokens += batch.target_tokens
        model.zero_grad(set_to_none=True)
    return operations / tokens


@torch.no_grad()
def training_operations(model: Network, side: Side, rows: np.ndarray) -> float:
    """Return the mean forward and backward operations per target token, over a sample of these rows."""
    training, device = model.training, model.output_weight.device
    model.eval()
    operations, tokens = 0, 0
    try:
        for row in evenly_spaced(rows[np.argsort(side.target.lengths[rows], kind="stable")].tolist(), SEGMENTS):
            batch = make_batch(side, np.array([row]))
            source, target_in = batch.source.to(device), batch.target_in.to(device)
            task = None if batch.task is None else batch.task.to(device)
            logits = 2 * target_in.numel() * model.output_weight.numel()
            operations += 3 * (flops_of(partial(model, source, target_in, task=task)) + logits)
            tokens += batch.target_tokens
    finally:
        model.train(training)
    return operations / tokens


def _backward(model: Network, objective: Objective, batch: DeviceBatch) -> None:
    """Compute the gradients of a batch as an update does."""
    batch = objective.prepare(batch)
    objective(model, model(**batch.inputs), batch, objective.new_totals()).backward()
