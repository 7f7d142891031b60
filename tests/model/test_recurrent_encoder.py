"""The recurrent encoder's start values."""

import pytest
import torch

from mtkit.model.recurrent import RecurrentEncoder


@pytest.mark.parametrize("both_ways", [False, True])
def test_forget_gates_start_open_and_all_other_biases_at_zero(both_ways: bool) -> None:
    lstm = RecurrentEncoder("lstm", 3, 2, 0.0, both_ways=both_ways).layers
    biases = {name: value.tolist() for name, value in lstm.named_parameters() if name.startswith("bias")}
    forget = [0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 0, 0]  # PyTorch's parts: input, forget, cell, output
    assert len(biases) == 2 * 2 * (1 + both_ways)
    assert all(value == (forget if name.startswith("bias_ih") else [0] * 12) for name, value in biases.items())
    gru = RecurrentEncoder("gru", 3, 1, 0.0, both_ways=both_ways).layers
    assert all(not torch.any(value) for name, value in gru.named_parameters() if name.startswith("bias"))
