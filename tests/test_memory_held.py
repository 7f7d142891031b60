import torch

from mtkit.memory import held_bytes


def test_a_storage_is_held_once() -> None:
    x = torch.randn(10, 10)
    assert held_bytes({"a": x, "shared": {"b": x[:2], "c": [torch.ones(3)]}, "count": 4}) == 400 + 12


def test_what_others_hold_too_is_left_out() -> None:
    x, y = torch.randn(10, 10), torch.randn(5)
    assert held_bytes([x[3], y], without=[x.t(), torch.ones(2)]) == 20
