"""Recurrent units of a decoder: what a step does with its state and with what has been computed of its inputs.

Products with inputs that are known beforehand are made for all positions at once; a unit holds what depends on the
state before. Gates and states are float32 in every precision.
"""

import torch
from torch import Tensor, nn

from mtkit.attention.engines.softmax.dot_product import widened

CellState = tuple[Tensor, ...]
"""(B, N, D) each; the first is what the unit gives out."""


class GatedUnit(nn.Module):
    """The gated recurrent unit of Bahdanau et al., 2015, appendix A.1.1: the reset gate stands before the product.

    z and r are sigmoids of their inputs + U s; s' = (1 - z) s + z tanh(input + U_c (r s)). (PyTorch's `nn.GRU` calls
    z what is 1 - z here, and applies r after the product.)
    """

    parts = 3
    """Vectors of width D that an input is mapped to."""
    states = 1
    """Tensors of its state."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gates = nn.Linear(width, 2 * width, bias=False)
        self.candidate = nn.Linear(width, width, bias=False)
        _orthogonal(self.gates.weight)
        _orthogonal(self.candidate.weight)

    def forward(self, inputs: Tensor, state: CellState) -> CellState:
        """inputs (..., 3D), its update, reset and candidate parts with their biases; state of (..., D)."""
        (before,) = state
        width = before.shape[-1]
        gates = widened(inputs[..., : 2 * width] + self.gates(before)).sigmoid()
        update, reset = gates.chunk(2, -1)
        candidate = widened(inputs[..., 2 * width :] + self.candidate(reset * before)).tanh()
        return (torch.lerp(before, candidate, update),)

    @staticmethod
    def start_bias(bias: Tensor) -> None:
        """Set the bias of an input (3D,): zero."""
        nn.init.zeros_(bias)


class LongShortTerm(nn.Module):
    """The LSTM unit (Hochreiter and Schmidhuber, 1997) with a forget gate, whose bias starts at 1."""

    parts = 4
    states = 2

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gates = nn.Linear(width, 4 * width, bias=False)
        _orthogonal(self.gates.weight)

    def forward(self, inputs: Tensor, state: CellState) -> CellState:
        """inputs (..., 4D), its input, forget, output and candidate parts; state (output, cell) of (..., D)."""
        before, cell = state
        width = cell.shape[-1]
        sums = widened(inputs + self.gates(before))
        enter, forget, leave = sums[..., : 3 * width].sigmoid().chunk(3, -1)
        cell = forget * cell + enter * sums[..., 3 * width :].tanh()
        return leave * cell.tanh(), cell

    @staticmethod
    def start_bias(bias: Tensor) -> None:
        """Set the bias of an input (4D,): one for the forget gate, else zero."""
        nn.init.zeros_(bias)
        width = len(bias) // 4
        nn.init.ones_(bias[width : 2 * width])


CELLS: dict[str, type[GatedUnit] | type[LongShortTerm]] = {"gru": GatedUnit, "lstm": LongShortTerm}
"""By the name of `model.cell`."""


def _orthogonal(weight: Tensor) -> None:
    """Each square part of a recurrent matrix (P*D, D) orthogonal (Bahdanau et al., 2015, appendix B.1)."""
    for part in weight.split(weight.shape[1]):
        nn.init.orthogonal_(part)
