"""Spans of keys step by step against those of whole sequences."""

import pytest
import torch
from torch import Tensor

from mtkit.attention.bases.caches import written
from mtkit.attention.compressed._spans import Spans, append_row, convolution, kept_spans, mean, pooled, start_spans
from mtkit.attention.contract import State, reorder


@pytest.mark.parametrize("spans", [Spans(1, 1), Spans(3, 3), Spans(5, 4), Spans(4, 1), Spans(2, 3)], ids=str)
@pytest.mark.parametrize("window", [None, 3])
@torch.no_grad()
def test_steps_make_the_summaries_of_spans_that_have_ended(spans: Spans, window: int | None) -> None:
    keys, values = torch.randn(2, 3, 2, 21, 4, dtype=torch.float64), torch.randn(2, 3, 2, 21, 5, dtype=torch.float64)
    weight, bias = torch.randn(2, spans.size, 4, 6, dtype=torch.float64), torch.randn(2, 6, dtype=torch.float64)
    pools = {"keys": convolution(weight, bias), "values": mean}
    shapes = {"rows": {"keys": (2, 4), "values": (2, 5)}, "summaries": {"keys": (2, 6), "values": (2, 5)}}
    state = start_spans(2, 3, keys, **shapes)
    order = torch.tensor([[2, 0, 0], [1, 1, 2]])
    for t in range(21):
        if t == 10:
            state = reorder(state, order)
            keys, values = (x.take_along_dim(order[:, :, None, None, None], 1) for x in (keys, values))
        state = append_row(state, spans, pools, window=window, keys=keys[:, :, :, t], values=values[:, :, :, t])
        ended, kept = spans.closed(t + 1), kept_spans(state, window)
        assert sorted(kept) == list(range(max(ended - (window or ended), 0), ended))
        for name, x in (("keys", keys), ("values", values)):
            whole = pooled(x.flatten(0, 1), spans, pools[name]).unflatten(0, (2, 3))
            torch.testing.assert_close(written(state["spans"], name, window=window), whole[:, :, :, kept])


@torch.no_grad()
def test_a_state_holds_one_span_of_rows_and_the_spans_that_may_be_seen() -> None:
    def sizes(state: State) -> list[torch.Size]:
        return [x.shape for part in state.values() for x in part.values() if isinstance(x, Tensor)]

    spans, x = Spans(9, 4), torch.randn(1, 2, 1, 200, 4)
    state, seen = start_spans(1, 2, x, rows={"keys": (1, 4)}), []
    for t in range(200):
        state = append_row(state, spans, {"keys": mean}, window=11, keys=x[:, :, :, t])
        seen.append(sizes(state))
    assert seen[-1] == seen[100] == [(1, 2, 1, 9, 4), (1, 2, 1, 11, 4)]
