"""Compiled loops of attention to compressed blocks, in float32, against PyTorch's operations in float64."""

import pytest
import torch

from mtkit.attention.compressed import _looped_choice
from mtkit.attention.compressed._block_choice import BlockChoice, attend_and_choose
from mtkit.attention.compressed._spans import Spans


@pytest.mark.parametrize(("causal", "self_role"), [(False, True), (False, False), (True, True)])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(("size", "stride", "block"), [(8, 4, 16), (4, 4, 8), (6, 2, 8)])
@pytest.mark.parametrize("at_once", [1, 1 << 21])
def test_outputs_choices_and_gradients(
    causal: bool,
    self_role: bool,
    padded: bool,
    size: int,
    stride: int,
    block: int,
    at_once: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    monkeypatch.setattr(_looped_choice, "NUMBERS_AT_ONCE", at_once)
    length, queries = 150, 150 if self_role else 70
    choice = BlockChoice(Spans(size, stride), block, 5, causal)
    keys = choice.spans.closed(length)
    widths = ((3, 4, queries, 16), (3, 2, keys, 16), (3, 2, keys, 12))
    exact = [torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in widths]
    terms = [x.detach().float().requires_grad_() for x in exact]
    assert _looped_choice.loops_choose(*terms)
    valid = torch.arange(length) < torch.tensor([[length], [length - 37], [5]]) if padded else None
    results = []
    for given in (exact, terms):
        outputs, chosen = attend_and_choose(*given, choice, length, scale=0.3, self_role=self_role, valid=valid)
        d_outputs = torch.linspace(-1, 1, outputs.numel()).sin().view(outputs.shape).type_as(outputs)
        results.append((chosen, outputs, *torch.autograd.grad(outputs, given, d_outputs)))
    (wanted_choice, *wanted), (chosen, *found) = results
    assert (chosen == wanted_choice).float().mean() > 0.999  # two blocks may be equally important but for rounding
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=2e-4, atol=2e-5)
