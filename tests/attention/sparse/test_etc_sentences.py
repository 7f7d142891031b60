"""ETC with a node for each sentence of a document."""

from typing import Any

import pytest
import torch
from torch import Tensor

from mtkit.attention.marks import marks_from
from tests.attention.sparse.test_etc import SHARES, make


def marks_of_lengths(*documents: list[int]) -> Tensor:
    """Marks (B, T) of documents of equal length with sentences of these lengths."""
    breaks = torch.zeros(len(documents), sum(documents[0]), dtype=torch.bool)
    for row, lengths in zip(breaks, documents, strict=True):
        row[torch.tensor(lengths).cumsum(0)[:-1]] = True
    return marks_from(breaks)


def by_sentence(**options: Any) -> Any:
    return make(nodes="sentences", **options)


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("hard", [False, True])
@torch.no_grad()
def test_sentences_as_long_as_blocks_give_what_blocks_give(share: str, hard: bool) -> None:
    x, valid = torch.randn(2, 100, 16), torch.arange(100) < torch.tensor([[100], [37]])
    marks = marks_of_lengths([8] * 12 + [4], [8] * 12 + [4])
    carries: list[Any] = [None, None]
    for layer in range(2):
        options = {"layer": layer, "layers": 3, "share": share, "hard_g2l": hard, "hard_l2g": hard, "global_tokens": 9}
        blocks, sentences = make(**options), by_sentence(**options)
        sentences.load_state_dict(blocks.state_dict())
        one = blocks(x, query_valid=valid, carry=carries[0])
        other = sentences(x, query_valid=valid, carry=carries[1], query_marks=marks)
        torch.testing.assert_close(one.output[valid], other.output[valid], atol=1e-5, rtol=1e-5)
        carries = [one.carry, other.carry]
        torch.testing.assert_close(carries[0][0], carries[1][0], atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_a_token_reads_its_window_and_the_node_of_its_sentence() -> None:
    """Hard masks, no labels: one softmax of each token over its own node and its window, in loops."""
    attention = by_sentence(rel_clip=0, hard_l2g=True, window_radius=2)
    lengths = [[5, 1, 9, 3], [2, 2, 2, 12]]
    x = torch.randn(2, 18, 16)
    attended = attention(x, query_marks=marks_of_lengths(*lengths))
    assert attended.carry.shape[1] == 4
    for b in range(2):
        for i in range(18):
            keys = [attention.first_node, *x[b, max(i - 2, 0) : i + 3]]
            q = attention.q_proj(x[b, i]).view(2, 8)
            k, v = (linear(torch.stack(keys)).view(-1, 2, 8) for linear in (attention.k_proj, attention.v_proj))
            weights = (torch.einsum("hk,shk->hs", q, k) * 8**-0.5).softmax(-1)
            expected = attention.out_proj(torch.einsum("hs,shk->hk", weights, v).flatten())
            torch.testing.assert_close(attended.output[b, i], expected, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_hard_masks_keep_sentences_apart() -> None:
    """A token that changes reaches its own sentence only, if windows hold one token."""
    options = {"rel_clip": 0, "hard_g2l": True, "hard_l2g": True, "window_radius": 0, "global_memory": "local"}
    attention, counts = by_sentence(**options), [6, 1, 4]
    x, marks = torch.randn(1, 11, 16), marks_of_lengths(counts)
    whole = attention(x, query_marks=marks).output
    changed = x.clone()
    changed[:, 6:7] += 1
    other = attention(changed, query_marks=marks).output
    differs = ((whole - other).abs().amax((0, 2)) > 1e-6).tolist()
    assert differs == [False] * 6 + [True] + [False] * 4


@torch.no_grad()
def test_the_last_node_has_the_rest_of_the_sentences() -> None:
    attention, x = by_sentence(global_tokens=3), torch.randn(1, 20, 16)
    many = attention(x, query_marks=marks_of_lengths([4, 3, 5, 2, 6]))
    few = attention(x, query_marks=marks_of_lengths([4, 3, 13]))
    assert many.carry.shape[1] == 3
    torch.testing.assert_close(many.output, few.output)
    torch.testing.assert_close(many.carry, few.carry)


@torch.no_grad()
def test_without_marks_a_text_is_one_sentence() -> None:
    attention, x = by_sentence(), torch.randn(2, 20, 16)
    one, other = attention(x), attention(x, query_marks=torch.full((2, 20), 14))
    assert torch.equal(one.output, other.output)
    assert one.carry.shape == (2, 1, 16)


def test_only_sentences_and_nodes_read_marks() -> None:
    assert by_sentence().reads_marks
    assert not make().reads_marks
    assert not by_sentence(global_tokens=0).reads_marks
