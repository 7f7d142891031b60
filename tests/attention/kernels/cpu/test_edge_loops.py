"""Edges that a loop chooses against those that PyTorch's operations choose."""

import pytest
import torch

from mtkit.attention.content._edge_predictor import Candidates, EdgePredictor, free_candidates
from mtkit.attention.kernels.cpu.edge_loops import ROWS
from mtkit.attention.kernels.cpu.product_tiles import FLOATS, has

pytestmark = pytest.mark.skipif(not has(FLOATS), reason="needs AVX2")


@pytest.mark.parametrize("role", ["decoder", "cross"])
@pytest.mark.parametrize(("segments", "sources"), [(1, 1), (3, 5), (ROWS, 3)])
@pytest.mark.parametrize(
    ("graphs", "hidden", "edges", "count"), [(1, 64, 10, 20), (4, 8, 3, 5), (2, 5, 1, 2), (1, 1, 2, 9)]
)
def test_edges_are_the_best_ones(
    graphs: int, hidden: int, edges: int, count: int, segments: int, sources: int, role: str
) -> None:
    predictor = EdgePredictor(16, 12, hidden=hidden, edges=edges, graphs=graphs).requires_grad_(False)
    torch.nn.init.normal_(predictor.distance)
    opened = predictor.opened(torch.randn(segments, sources, 16))
    keys, inputs = predictor.candidates(torch.randn(segments, count + 3, 12))
    candidates = Candidates(keys[:, :, :count], inputs)  # a cache may have room for more inputs
    lengths = 1 + torch.arange(segments) % count
    valid = torch.arange(count) < lengths[:, None] if role == "cross" else None
    here = torch.tensor([count - 1])
    free = free_candidates(here, count, role, valid)
    expected, _ = predictor.newest(opened, here, candidates, free)
    with torch.inference_mode():
        found, _ = predictor.newest(opened, here, candidates, free)
    assert torch.equal(found, expected)


def test_a_score_without_a_number_is_the_best_and_stays_alone() -> None:
    predictor = EdgePredictor(16, 16, hidden=8, edges=3).requires_grad_(False)
    opened, (keys, inputs) = predictor.opened(torch.randn(2, 4, 16)), predictor.candidates(torch.randn(2, 7, 16))
    here, free = torch.tensor([6]), torch.ones(1, 1, 1, 7, dtype=torch.bool)
    expected, _ = predictor.newest(opened, here, Candidates(keys, inputs), free)
    keys[0, 0, 5] = torch.nan
    with torch.inference_mode():
        found, _ = predictor.newest(opened, here, Candidates(keys, inputs), free)
    assert (found[0, 0, :, 0] == 5).all()
    assert torch.equal(found[1], expected[1])
