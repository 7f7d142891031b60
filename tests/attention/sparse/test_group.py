"""Group attention: a document is its sentences apart, context layers mix them, each hypothesis has its own sentence."""

from typing import Any

import pytest
import torch
from torch import Tensor

from mtkit.attention import Inputs, build, reorder
from mtkit.attention.bases.product_attention import MAX_SHARING
from mtkit.attention.bases.shared_rows import COMPACTED
from mtkit.attention.kernels.sentence_rows import attend_within
from mtkit.attention.marks import marks_from
from mtkit.attention.sparse import group
from mtkit.errors import MtkitError

WIDTH = 16
LENGTHS, SOURCES = [4, 1, 7, 2], [3, 6, 1, 5]
"""Tokens of a document's sentences on both sides."""


def make(role: str, **options: Any) -> Any:
    given = {"layers": 1, "context_layers": 0} | options
    return build("group", role=role, d_model=WIDTH, heads=2, **given).eval()


def document(lengths: list[int]) -> tuple[Tensor, Tensor, list[slice]]:
    """Tokens (1, T, D), their marks, and where the sentences lie."""
    breaks = torch.zeros(1, sum(lengths), dtype=torch.bool)
    ends = torch.tensor(lengths).cumsum(0).tolist()
    breaks[0, ends[:-1]] = True
    places = [slice(end - length, end) for end, length in zip(ends, lengths, strict=True)]
    return torch.randn(1, sum(lengths), WIDTH), marks_from(breaks), places


def full_of(attention: Any, role: str, weights: dict[str, Tensor] | None = None) -> Any:
    full = build("full", role=role, d_model=WIDTH, heads=2).eval()
    full.load_state_dict(attention.state_dict() if weights is None else weights)
    return full


@pytest.mark.parametrize("role", ["encoder", "decoder", "cross"])
@torch.no_grad()
def test_a_document_is_its_sentences_apart(role: str) -> None:
    attention = make(role)
    full = full_of(attention, role)
    (x, marks, places), (memory, memory_marks, sources) = document(LENGTHS), document(SOURCES)
    cross = role == "cross"
    together = attention(x, memory if cross else None, query_marks=marks, memory_marks=memory_marks if cross else None)
    for place, source in zip(places, sources, strict=True):
        alone = full(x[:, place], memory[:, source] if cross else None).output
        torch.testing.assert_close(together.output[:, place], alone, atol=1e-5, rtol=0)


@pytest.mark.parametrize("role", ["encoder", "decoder", "cross"])
@pytest.mark.parametrize("regularizer", [None, "disagreement"])
def test_a_long_context_in_rows_of_sentences_is_the_same(
    role: str, regularizer: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    attention = make(role, context_layers=1, regularizer=regularizer).train()
    (x, marks, _), (memory, memory_marks, _) = document(LENGTHS), document(SOURCES)
    source = {"memory": memory, "memory_marks": memory_marks} if role == "cross" else {}
    valid = torch.arange(x.shape[1]) < 12
    whole = attention(x, query_marks=marks, query_valid=valid[None], **source)
    calls = []
    monkeypatch.setattr(group, "LONG", 2)
    monkeypatch.setattr(
        group, "attend_within", lambda *args, **options: calls.append(0) or attend_within(*args, **options)
    )
    rows = attention(x, query_marks=marks, query_valid=valid[None], **source)
    assert calls == [0]
    torch.testing.assert_close(rows.output[:, :12], whole.output[:, :12], atol=1e-5, rtol=0)
    torch.testing.assert_close(rows.losses, whole.losses)


@pytest.mark.parametrize("long", [2, group.LONG])
@torch.no_grad()
def test_a_source_of_padding_alone_gives_zero_before_out_proj(long: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "LONG", long)
    attention, (x, marks, _), (memory, memory_marks, _) = make("cross"), document(LENGTHS), document(SOURCES)
    x, marks, memory, memory_marks = (each.expand(2, *each.shape[1:]) for each in (x, marks, memory, memory_marks))
    given = {"query_marks": marks, "memory_marks": memory_marks}
    valid = torch.arange(memory.shape[1]) < torch.tensor([[0], [9]])
    output = attention(x, memory, memory_valid=valid, **given).output
    torch.testing.assert_close(output[0], attention.out_proj.bias.expand_as(output[0]))
    assert (output[1] - attention.out_proj.bias).abs().amax(-1).min() > 1e-3


@pytest.mark.parametrize("role", ["encoder", "decoder", "cross"])
@torch.no_grad()
def test_one_sentence_is_full_attention(role: str) -> None:
    attention, x = make(role), torch.randn(2, 9, WIDTH)
    memory, same = (torch.randn(2, 5, WIDTH) if role == "cross" else None), torch.full((2, 9), 6)
    expected = full_of(attention, role)(x, memory).output
    for marks in (None, same):
        source = None if memory is None or marks is None else marks[:, :5]
        output = attention(x, memory, query_marks=marks, memory_marks=source).output
        torch.testing.assert_close(output, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("role", ["encoder", "decoder", "cross"])
@torch.no_grad()
def test_the_gate_decides_between_the_own_sentence_and_all(role: str) -> None:
    (x, marks, _), (memory, memory_marks, _) = document(LENGTHS), document(SOURCES)
    inputs = {"query": x, "query_marks": marks}
    inputs |= {"memory": memory, "memory_marks": memory_marks} if role == "cross" else {}
    for bias in (30.0, -30.0):
        attention = make(role, context_layers=1, gate_bias=bias)
        attention.gate.weight.zero_()
        local = make(role)
        local.load_state_dict({name: attention.state_dict()[name] for name in local.state_dict()})
        wide = full_of(attention, role, attention.context.state_dict())
        expected = (local if bias > 0 else wide)(**inputs).output
        torch.testing.assert_close(attention(**inputs).output, expected, atol=1e-5, rtol=0)


@torch.no_grad()
def test_a_target_sentence_beyond_the_source_reads_its_last_real_one() -> None:
    attention, (memory, memory_marks, _) = make("cross"), document(SOURCES)
    query, marks = torch.randn(1, 6, WIDTH), torch.tensor([[0, 3, 5, 7, 9, 11]])
    valid = torch.arange(memory.shape[1])[None] < sum(SOURCES[:3])  # the last sentence is padding
    output = attention(query, memory, memory_valid=valid, query_marks=marks, memory_marks=memory_marks).output
    last = full_of(attention, "cross")(query, memory[:, sum(SOURCES[:2]) : sum(SOURCES[:3])]).output
    torch.testing.assert_close(output[:, 2:], last[:, 2:], atol=1e-5, rtol=0)
    assert (output[:, :2] - last[:, :2]).abs().amax(-1).min() > 1e-3


@torch.no_grad()
def test_layers_from_the_top_have_a_context() -> None:
    assert [make("encoder", layer=n, layers=6, context_layers=2).context is not None for n in range(6)] == [
        *[False] * 4,
        *[True] * 2,
    ]
    assert all(make("encoder", layer=n, layers=3, context_layers=9).context is not None for n in range(3))
    for options, message in (({"context_layers": -1}, "context_layers"), ({"gate_bias": 31.0}, "gate_bias")):
        with pytest.raises(MtkitError, match=message):
            make("encoder", **options)


@torch.no_grad()
def test_weights_are_the_groups_below_and_all_pairs_in_a_context_layer() -> None:
    (x, marks, _), layers = document(LENGTHS), [make("decoder"), make("decoder", context_layers=1)]
    below, above = (layer(x, query_marks=marks, need_weights=True).weights for layer in layers)
    sentence = marks[0] // 2
    apart = sentence[:, None] != sentence
    assert not below[..., apart].any()
    assert above[..., apart.tril()].min() > 0
    torch.testing.assert_close(below.sum(-1), torch.ones(1, 2, x.shape[1]))


def test_a_context_layer_starts_from_two_copies_of_full() -> None:
    attention, full = make("cross", context_layers=1), build("full", role="cross", d_model=WIDTH, heads=2)
    attention.adopt(full.state_dict())
    for name, value in full.state_dict().items():
        assert torch.equal(attention.state_dict()[name], value)
        assert torch.equal(attention.context.state_dict()[name], value)
    again = make("cross", context_layers=1)
    with torch.no_grad():
        attention.context.q_proj.weight.add_(1.0)
    again.adopt(attention.state_dict())
    assert torch.equal(again.context.q_proj.weight, attention.context.q_proj.weight)


@pytest.mark.parametrize("long", [2, group.LONG])
@pytest.mark.parametrize("hypotheses", [4, MAX_SHARING + 3])
@torch.no_grad()
def test_many_steps_of_beams_give_what_forward_gives(
    hypotheses: int, long: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond the sizes at which caches are compacted, and at which hypotheses get caches of their own.

    `long`: number of keys from which only those around the hypotheses' sentences are read.
    """
    monkeypatch.setattr(group, "LONG", long)
    attention, segments, length = make("decoder", context_layers=1), 2, COMPACTED // 2
    query = torch.empty(segments, hypotheses, 0, WIDTH)
    breaks = torch.empty(segments, hypotheses, 0, dtype=torch.bool)
    state, _ = attention.start(segments, hypotheses=hypotheses)
    sentence = torch.zeros(segments, hypotheses, dtype=torch.long)
    for step in range(length):
        token, new = torch.randn(segments, hypotheses, WIDTH), torch.rand(segments, hypotheses) < 0.1 * bool(step)
        query, breaks = torch.cat([query, token[:, :, None]], 2), torch.cat([breaks, new[..., None]], 2)
        sentence = sentence + new
        attended, state = attention.step(token, state, query_marks=2 * sentence + new)
        marks = marks_from(breaks).flatten(0, 1)
        whole = attention(query.flatten(0, 1), query_marks=marks, need_weights=True).output[:, -1]  # under a mask
        torch.testing.assert_close(attended.output.flatten(0, 1), whole, atol=1e-4, rtol=0)
        index = torch.randint(hypotheses, (segments, hypotheses))
        state, sentence = reorder(state, index), sentence.gather(1, index)
        query, breaks = query.take_along_dim(index[..., None, None], 1), breaks.take_along_dim(index[..., None], 1)


@torch.no_grad()
def test_steps_read_the_source_sentence_of_each_hypothesis() -> None:
    attention, (memory, marks, _) = make("cross"), document(SOURCES)
    memory, marks = memory.repeat(2, 1, 1), marks.repeat(2, 1)
    marks[1] -= 2 * (marks[1] > 1)  # the second document has one sentence less
    valid = torch.arange(memory.shape[1]) < torch.tensor([[15], [9]])
    query, own = torch.randn(2, 3, WIDTH), torch.tensor([[0, 6, 3], [1, 0, 8]])
    state, _ = attention.start(2, memory, valid, hypotheses=3, memory_marks=marks)
    attended, _ = attention.step(query, state, query_marks=own)
    whole = [
        attention(
            query[:, n : n + 1],
            memory,
            query_marks=own[:, n : n + 1],
            memory_marks=marks,
            memory_valid=valid,
        ).output
        for n in range(3)
    ]
    torch.testing.assert_close(attended.output, torch.cat(whole, 1), atol=1e-5, rtol=0)


@torch.no_grad()
def test_the_learned_number_is_the_mean_share_of_the_own_sentence() -> None:
    attention, (x, marks, _) = make("encoder", context_layers=1, gate_bias=1.0), document(LENGTHS)
    attention.gate.weight.zero_()
    numbers = attention.learned_numbers(Inputs(x, query_marks=marks))
    torch.testing.assert_close(numbers["own sentence"], torch.tensor(1.0).sigmoid().view(1))
    assert "own sentence" not in make("encoder").learned_numbers(Inputs(x))
