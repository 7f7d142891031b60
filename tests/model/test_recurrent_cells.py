"""Recurrent units against the equations of their papers, written out; `nn.LSTMCell` beside ours."""

import torch
from torch import Tensor, nn

from mtkit.model.recurrent import GatedUnit, LongShortTerm


def rows(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + (-x).exp())


def test_the_gated_unit_is_that_of_the_paper() -> None:
    torch.manual_seed(3)
    unit, inputs, before = GatedUnit(5).double(), rows(2, 3, 15), rows(2, 3, 5)
    (after,) = unit(inputs, (before,))
    u_z, u_r = unit.gates.weight.split(5)
    for b in range(2):
        for n in range(3):
            x_z, x_r, x = inputs[b, n].split(5)
            s = before[b, n]
            z, r = sigmoid(x_z + u_z @ s), sigmoid(x_r + u_r @ s)
            new = torch.tanh(x + unit.candidate.weight @ (r * s))
            torch.testing.assert_close(after[b, n], (1 - z) * s + z * new, atol=1e-12, rtol=0)


def test_the_long_short_term_unit_is_pytorchs() -> None:
    torch.manual_seed(4)
    unit, peer = LongShortTerm(5), nn.LSTMCell(7, 5, bias=False)
    # PyTorch's parts are input, forget, cell, output; ours input, forget, output, cell
    order = torch.cat([torch.arange(10), torch.arange(15, 20), torch.arange(10, 15)])
    peer.weight_hh.data[order] = unit.gates.weight.data
    token, hidden, cell = torch.randn(4, 7), torch.randn(4, 5), torch.randn(4, 5)
    inputs = token @ peer.weight_ih[order].T
    found, wanted = unit(inputs, (hidden, cell)), peer(token, (hidden, cell))
    torch.testing.assert_close(found, wanted, atol=1e-6, rtol=0)


def test_square_parts_of_recurrent_matrices_start_orthogonal() -> None:
    for unit in (GatedUnit(6), LongShortTerm(6)):
        for matrix in unit.parameters():
            for part in matrix.detach().split(6):
                torch.testing.assert_close(part @ part.T, torch.eye(6), atol=1e-5, rtol=0)


def test_a_forget_gate_starts_open() -> None:
    bias = torch.full((12,), 7.0)
    LongShortTerm.start_bias(bias)
    assert bias.tolist() == [0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 0, 0]
