import pytest
import torch
from torch.nn import functional as F

from mtkit.benchmark.cost import cost_of, free_bytes, predict_bytes

CPU = torch.device("cpu")


def test_the_peak_is_that_of_what_lives_at_one_time() -> None:
    x = torch.randn(1000)

    def compute() -> None:
        for _ in range(5):
            y = x * 2  # 4,000 bytes, and the one before until this one is there
        y += 1
        y.view(10, 100).sum()

    assert cost_of(compute, CPU).peak_bytes == 8000


def test_what_was_there_before_is_not_counted() -> None:
    x = torch.randn(1000)
    assert cost_of(lambda: x.view(10, 100).mul_(2), CPU).peak_bytes == 0
    assert cost_of(lambda: x[:3] + 1, CPU).peak_bytes == 12


def test_what_the_backward_needs_is_held_until_then() -> None:
    x = torch.randn(1000, requires_grad=True)

    def compute(depth: int) -> None:
        y = x
        for _ in range(depth):
            y = y.exp()  # saves its output
        y.backward(torch.ones(1000))

    peaks = [cost_of(lambda depth=depth: compute(depth), CPU).peak_bytes for depth in (10, 20)]
    assert peaks[1] - peaks[0] == 10 * 4000


def test_products_and_fused_attention_are_counted() -> None:
    a, b = torch.randn(3, 4), torch.randn(4, 5)
    assert cost_of(lambda: a @ b, CPU).flops == 2 * 3 * 4 * 5
    q = torch.randn(2, 4, 16, 8, requires_grad=True)
    k = torch.randn(2, 4, 32, 8)
    pairs = 2 * 4 * 16 * 32 * 8
    assert cost_of(lambda: F.scaled_dot_product_attention(q, k, k), CPU).flops == 2 * 2 * pairs
    # five products in the backward, the scores anew among them
    assert cost_of(lambda: F.scaled_dot_product_attention(q, k, k).sum().backward(), CPU).flops == 7 * 2 * pairs


def test_some_memory_is_free() -> None:
    assert free_bytes(CPU) > 2**20


@pytest.mark.parametrize("growth", [1, 1.5])
def test_memory_needed_grows_as_declared(growth: float) -> None:
    assert predict_bytes({128: 100, 256: 100 * 2**growth}, 1024, growth) == pytest.approx(100 * 8**growth)


def test_memory_of_all_pairs_is_linear_and_square() -> None:
    held = {length: 3 * length + 0.5 * length**2 for length in (128, 256)}
    assert predict_bytes(held, 4096, 2) == pytest.approx(3 * 4096 + 0.5 * 4096**2)
    assert predict_bytes({128: 128, 256: 256}, 4096, 2) == pytest.approx(4096)  # the fused kernel holds no scores
    assert predict_bytes({}, 64, 2) == 0
    assert predict_bytes({512: 9}, 64, 2) == 0
