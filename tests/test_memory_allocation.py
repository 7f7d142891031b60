"""What memory cannot hold is refused before it is allocated, in words."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from mtkit.errors import MtkitError
from mtkit.memory import WithinMemory, in_words, machine_bytes


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Linear(10**6, 10**9),
        lambda: nn.Embedding(10**12, 64),
        lambda: torch.randn(10**9, 10**9, generator=torch.Generator()),
        lambda: torch.zeros((10**18, 10**18)),
        lambda: torch.arange(10**15),
        lambda: torch.zeros(1).new_zeros(10**15, dtype=torch.uint8),
    ],
)
def test_too_large_a_tensor_is_refused_saying_what_it_would_take(make: Callable[[], object]) -> None:
    with (
        pytest.raises(MtkitError, match=r"^a model would take .* [TP]iB of memory or more, and this machine has "),
        WithinMemory("a model"),
    ):
        make()


def test_many_tensors_count_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mtkit.memory.machine_bytes", lambda: 10_000.0)
    with pytest.raises(MtkitError, match=r"a model would take 11\.7 KiB"), WithinMemory("a model"):
        _ = [torch.zeros(1000) for _ in range(3)]
    with WithinMemory("a model"):
        assert nn.Linear(32, 32).weight.std() > 0


def test_sizes_in_words() -> None:
    assert in_words(1536 * 2**30) == "1.5 TiB"
    assert in_words(1010 * 2**20) == "1010 MiB"
    assert in_words(float("inf")) == "more than 1024 PiB"
    assert machine_bytes() > 2**28
