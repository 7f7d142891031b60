"""Axial: its equations as loops over a grid, its exactness limits, what each form sees, and the cost of a step."""

import statistics
from typing import Any

import pytest
import torch
from torch import Tensor

from mtkit.attention import build
from mtkit.attention.contract import Site
from mtkit.attention.sparse.axial import _LineAttention
from tests.attention.small import maker
from tests.contract.counting import step_costs

FORMS = [
    ("encoder", {"axial_combine": "sequential"}),
    ("encoder", {"axial_combine": "sum"}),
    ("decoder", {"axial_causal": "shift"}),
    ("decoder", {"axial_causal": "shift", "axial_combine": "sum"}),
    ("decoder", {"axial_causal": "quadrant"}),
    ("decoder", {"axial_causal": "quadrant", "axial_combine": "sum"}),
]

make = maker("axial", d_model=8, heads=2, stir=0.1)


def softmax_over(part: Any, x: list[Tensor], queries: dict[int, list[int]]) -> list[Tensor]:
    """y_i = W_O of the heads' softmax over the listed keys, token by token; x holds (D,) for each position."""
    outputs = []
    for i, keys in queries.items():
        heads = []
        for head in range(2):
            some = slice(4 * head, 4 * head + 4)
            q = part.q_proj(x[i])[some]
            exponentials = [torch.exp(q @ part.k_proj(x[j])[some] / 2) for j in keys]
            values = [part.v_proj(x[j])[some] for j in keys]
            heads.append(sum(e * v for e, v in zip(exponentials, values, strict=True)) / sum(exponentials))
        outputs.append(part.out_proj(torch.cat(heads)))
    return outputs


def naive(attention: Any, x: Tensor, role: str, width: int, form: dict[str, str]) -> Tensor:
    """The catalogue's equations for one segment (T, D)."""
    at = {i: divmod(i, width) for i in range(len(x))}
    tokens, decoder = list(x), role == "decoder"
    shift, summed = form.get("axial_causal", "shift") == "shift" and decoder, form.get("axial_combine") == "sum"

    def row(before: bool) -> dict[int, list[int]]:
        return {i: [j for j in at if at[j][0] == r and (at[j][1] <= c or not before)] for i, (r, c) in at.items()}

    column = {i: [j for j in at if at[j][1] == c and (at[j][0] <= r or not decoder)] for i, (r, c) in at.items()}
    along = softmax_over(attention.above if shift else attention, tokens, row(before=decoder and not shift))
    down = softmax_over(attention.column, tokens if summed else along, column)
    both = [one + other for one, other in zip(along, down, strict=True)] if summed else down
    if shift:
        lower = [token + both[i - width] if i >= width else token for i, token in enumerate(tokens)]
        both = softmax_over(attention, lower, row(before=True))
    return torch.stack(both)


@pytest.mark.parametrize(("role", "form"), FORMS)
@pytest.mark.parametrize("width", [3, 4])
def test_the_equations_token_by_token(role: str, form: dict[str, str], width: int) -> None:
    """A ragged batch; outputs and the gradients of tokens and parameters, in float64."""
    attention = make(role, axial_width=width, **form).double()
    x, lengths = torch.randn(3, 11, 8, dtype=torch.float64, requires_grad=True), [11, 7, 1]
    valid = torch.arange(11) < torch.tensor(lengths).unsqueeze(1)
    output = attention(x, query_valid=valid).output[valid]
    expected = torch.cat([naive(attention, row[:n], role, width, form) for row, n in zip(x, lengths, strict=True)])
    torch.testing.assert_close(output, expected, rtol=1e-10, atol=1e-10)
    weight, inputs = torch.randn_like(output), [x, *attention.parameters()]
    ours, literal = (
        torch.autograd.grad((each * weight).sum(), inputs, allow_unused=True) for each in (output, expected)
    )
    torch.testing.assert_close(ours, literal, rtol=1e-9, atol=1e-9)
    stated = attention.naive(x, query_valid=valid).output[valid]
    torch.testing.assert_close(stated, expected, rtol=1e-10, atol=1e-10)


def test_a_decoder_of_one_row_is_full_attention() -> None:
    """C >= T: the context is zero, and the projections are those of the last pass along rows."""
    full, axial, x = make("decoder", "full"), make("decoder", axial_width=9), torch.randn(2, 9, 8)
    axial.adopt(full.state_dict())
    torch.testing.assert_close(axial(x).output, full(x).output, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(make("decoder", axial_width=8)(x).output, full(x).output, atol=1e-3)


def test_an_encoder_of_one_row_is_full_attention_through_the_values_of_the_column() -> None:
    """C >= T: y = W_O W_V full(x), with the column's matrices."""
    full, axial, x = make(name="full"), make(axial_width=20), torch.randn(2, 9, 8)
    axial.adopt(full.state_dict())
    expected = axial.column.out_proj(axial.column.v_proj(full(x).output))
    torch.testing.assert_close(axial(x).output, expected, rtol=1e-5, atol=1e-5)


def seen(attention: Any, i: int, length: int) -> list[int]:
    """The positions that move row i."""
    x = torch.randn(1, length, 8, requires_grad=True)
    (gradient,) = torch.autograd.grad(attention(x).output[0, i].sum(), x)
    return (gradient[0].abs().sum(-1) > 0).nonzero().flatten().tolist()


@pytest.mark.parametrize("combine", ["sequential", "sum"])
def test_what_a_token_sees(combine: str) -> None:
    """Position 9 of width 4 lies in row 2 and column 1."""
    cross = combine == "sum"
    assert seen(make(axial_width=4, axial_combine=combine), 9, 14) == (
        [1, 5, 8, 9, 10, 11, 13] if cross else list(range(14))
    )
    quadrant = make("decoder", axial_width=4, axial_causal="quadrant", axial_combine=combine)
    assert seen(quadrant, 9, 14) == ([1, 5, 8, 9] if cross else [0, 1, 4, 5, 8, 9])
    if not cross:
        assert seen(make("decoder", axial_width=4), 9, 14) == list(range(10)), "a decoder sees all that is before it"


@pytest.mark.parametrize("causal", ["shift", "quadrant"])
def test_a_step_reads_one_row_and_no_prefix(causal: str) -> None:
    """A step at position 180 costs what one at 20 does, and with quadrant a column more; the ends of rows aside."""
    touched = step_costs(make("decoder", axial_width=8, axial_causal=causal), 190, 8)
    steps = [cost for position, cost in enumerate(touched) if position % 8 < 7]  # 7 in a row
    early, late = (statistics.median(steps[some]) for some in (slice(14, 21), slice(154, 161)))  # some copy a cache
    rows = 160 // 8
    assert late - early <= (0 if causal == "shift" else 40 * rows)


def make_part(positions: str | None = None, role: str = "decoder") -> _LineAttention:
    return _LineAttention(Site(role, 32, 4, positions=positions)).eval()


@pytest.mark.parametrize("positions", [None, "rotary", "alibi", "shaw"])
@pytest.mark.parametrize("causal", [False, True])
@torch.no_grad()
def test_each_line_is_full_attention_of_its_own(positions: str | None, causal: bool) -> None:
    part = make_part(positions)
    full = build("full", role="decoder" if causal else "encoder", d_model=32, heads=4, positions=positions).eval()
    full.load_state_dict(part.state_dict())
    x, valid = torch.randn(2, 3, 5, 32), torch.arange(5) < torch.tensor([[5, 4, 1], [5, 2, 3]])[..., None]
    output, losses = part.along(x, valid, causal=causal)
    assert not losses
    for one in range(2):
        for line in range(3):
            real = valid[one, line]
            alone = full(x[one, line][real][None]).output[0]
            torch.testing.assert_close(output[one, line][real], alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("positions", [None, "rotary", "alibi", "shaw"])
@torch.no_grad()
def test_the_end_of_a_line_is_the_last_of_the_pass(positions: str | None) -> None:
    """Lines of 4 of one segment, as hypotheses are laid out in decoding."""
    part, x = make_part(positions), torch.randn(2, 3, 4, 32)
    expected, _ = part.along(x, None, causal=True)
    every = [part.newest(x[:, :, place], place) for place in range(4)]
    keys, values = (torch.stack([each[number] for each in every], dim=3) for number in (1, 2))
    output = part.at_the_end(x[:, :, -1], every[-1][0], keys, values)
    torch.testing.assert_close(output, expected[:, :, -1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
@torch.no_grad()
def test_all_pairs_of_the_sequence_give_the_same(causal: bool) -> None:
    part, x = make_part("rotary"), torch.randn(2, 12, 32)
    position = torch.arange(12)
    stated = part.naive_along(x, position // 4, position % 4, causal, None)
    expected, _ = part.along(x.unflatten(1, (3, 4)), None, causal=causal)
    torch.testing.assert_close(stated, expected.flatten(1, 2), rtol=1e-5, atol=1e-5)
