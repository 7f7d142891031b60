"""BP-Transformer: its limits, its closed form in the first layer, and what its state holds."""

from typing import Any

import pytest
import torch
from torch import Tensor

from mtkit.attention import build
from mtkit.attention.sparse import bp as bp_module
from mtkit.errors import MtkitError
from tests.contract.cases import valid_mask
from tests.contract.stack import Stack, apart
from tests.contract.test_naive import check_naive
from tests.contract.test_steps import check_steps

ROLES = ("encoder", "decoder")


def stack(role: str, layers: int = 1, d_model: int = 16, **options: Any) -> Stack:
    """Attentions whose parameters are all away from zero."""
    torch.manual_seed(1)
    site: dict[str, Any] = {"role": role, "d_model": d_model, "heads": 2, "layers": layers}
    made = Stack([build("bp", layer=layer, **site, **options) for layer in range(layers)])
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return made.eval()


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("k", [11, 12, 64])
@pytest.mark.parametrize("memory", ["carry", "local"])
@torch.no_grad()
def test_with_k_of_all_other_tokens_and_no_labels_it_is_full_attention(role: str, k: int, memory: str) -> None:
    bp = stack(role, bp_k=k, bp_labels=False, bp_memory=memory).layers[0]
    full = build("full", role=role, d_model=16, heads=2)
    full.load_state_dict({name: value for name, value in bp.state_dict().items() if "proj" in name})
    x, valid = torch.randn(3, 12, 16), valid_mask([12, 1, 7], 12)
    outputs = [each(x, query_valid=valid).output[valid] for each in (bp, full.eval())]
    assert apart(*outputs) < 1e-5


@pytest.mark.parametrize("role", ROLES)
@torch.no_grad()
def test_labels_start_at_zero_and_change_nothing_there(role: str) -> None:
    x, outputs = torch.randn(2, 40, 16), []
    for labels in (True, False):
        torch.manual_seed(1)
        outputs.append(build("bp", role=role, d_model=16, heads=2, bp_labels=labels).eval()(x).output)
    assert apart(*outputs) < 1e-6


def first_layers(role: str, k: int) -> tuple[Any, Tensor]:
    """The first of two attentions as they are initialised, and tokens."""
    return build("bp", role=role, d_model=16, heads=2, layers=2, bp_k=k).eval(), torch.randn(1, 13, 16)


@pytest.mark.parametrize("role", ROLES)
@torch.no_grad()
def test_spans_of_the_first_layer_read_the_mean_of_their_tokens(role: str) -> None:
    bp, x = first_layers(role, 1)
    values = bp.v_proj(x[0])
    starts = [(start, size) for size in (2, 4, 8) for start in range(0, 13, size)]
    if role == "decoder":  # without those that the end cuts
        starts = [(start, size) for start, size in starts if start + size <= 13]
    spans = [values[start : start + size] for start, size in starts]
    read = bp.out_proj(torch.stack([each.mean(0) for each in spans]))
    normed = torch.nn.functional.layer_norm(read, (16,))
    expected = torch.nn.functional.layer_norm(normed + bp.span_update.feed_forward(normed), (16,))
    assert apart(bp(x).carry[0], expected) < 1e-5


@pytest.mark.parametrize(
    ("position", "near", "spans"),
    # before 4: token 3, its left-over sibling 2, span 0-1; before 12: tokens 11 and 10, spans 8-9 and 0-7
    [(0, [], 0), (1, [0], 0), (4, [3, 2], 1), (12, [11, 10], 2)],
)
@torch.no_grad()
def test_tokens_of_the_first_layer_read_spans_of_zero(position: int, near: list[int], spans: int) -> None:
    bp, x = first_layers("decoder", 1)
    q, k, v = (each(x)[0].unflatten(-1, (2, 8)) for each in (bp.q_proj, bp.k_proj, bp.v_proj))
    tokens = [position, *near]
    scores = ((k[tokens] * q[position]).sum(-1) * 8**-0.5).exp()  # (tokens, H)
    heads = (scores.unsqueeze(-1) * v[tokens]).sum(0) / (scores.sum(0) + spans).unsqueeze(-1)
    assert apart(bp(x).output[0, position], bp.out_proj(heads.flatten())) < 1e-5


@pytest.mark.parametrize("memory", ["carry", "local"])
@pytest.mark.parametrize("k", [1, 3])
@torch.no_grad()
def test_spans_that_end_in_a_step_are_those_of_the_parallel_pass(k: int, memory: str) -> None:
    three = stack("decoder", layers=3, d_model=32, bp_k=k, bp_memory=memory)
    check_steps(three, torch.randn(2, 2, 33, 32), None, indices=[torch.tensor([[1, 1], [1, 0]])], more=34)


@torch.no_grad()
def test_what_is_carried_in_steps_is_what_forward_carries() -> None:
    layers = stack("decoder", layers=3, bp_k=2).layers
    x = torch.randn(1, 33, 16)
    states, carried = [layer.start(1)[0] for layer in layers], []
    for token in x.unbind(1):
        carry = None
        for i, layer in enumerate(layers[:2]):
            attended, states[i] = layer.step(token.unsqueeze(1), states[i], carry=carry)
            carry = attended.carry
        carried.append(carry)
    carry = layers[1](x, carry=layers[0](x).carry).carry
    assert apart(carried[1][:, 0, 0], carry[:, 0]) < 1e-5  # tokens 0 and 1
    assert apart(carried[31][:, 0, 1], carry[:, 16 + 7]) < 1e-5  # the last span of four
    assert carried[31].shape == (1, 1, 5, 16), "spans of 2, 4, 8, 16 and 32 end with the 32nd token"
    assert carried[30] is None


@pytest.mark.parametrize("role", ROLES)
@torch.no_grad()
def test_outputs_do_not_depend_on_the_padded_length_in_a_stack(role: str) -> None:
    three = stack(role, layers=3, bp_k=2)
    x = torch.randn(2, 21, 16)
    for pad in (1, 11, 43, 200):
        longer = torch.cat([x, 1e4 * torch.randn(2, pad, 16)], dim=1)
        output = three(longer, query_valid=valid_mask([21, 21], 21 + pad))[:, :21]
        assert apart(output, three(x)) < 1e-5


@torch.no_grad()
def test_a_distant_token_reaches_every_other_through_the_spans_of_the_second_layer() -> None:
    for role in ROLES:
        two = stack(role, layers=2, bp_k=1)
        x = torch.randn(1, 64, 16)
        changed = x.clone()
        changed[:, 5] += 5
        moved = (two(changed) - two(x)).abs().amax((0, 2)) > 1e-6
        assert moved[5:].all()
        assert moved[:5].all() == (role == "encoder")


@torch.no_grad()
def test_a_cache_holds_each_token_and_each_whole_span_once() -> None:
    (bp,) = stack("decoder").layers
    state, _ = bp.start(1)
    for token in torch.randn(64, 1, 1, 16):
        _, state = bp.step(token, state)
    assert state["count"] == 64 + 63
    assert state["tokens"] == 64


def test_the_last_layer_of_a_run_carries_nothing_and_has_no_parameters_for_spans() -> None:
    below, last = stack("encoder", layers=2).layers
    assert not any(name.startswith("span") for name, _ in last.named_parameters())
    x = torch.randn(1, 20, 16)
    assert last(x, carry=below(x).carry).carry is None


@pytest.mark.parametrize("wrong", [{"bp_memory": "kept"}, {"bp_k": 0}, {"bp_clip": -1}])
def test_a_wrong_option_is_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(MtkitError, match=next(iter(wrong))):
        build("bp", role="encoder", d_model=16, heads=2, **wrong)


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize(("k", "memory"), [(3, "carry"), (4, "carry"), (4, "local")])
def test_three_layers_are_the_equation(role: str, k: int, memory: str) -> None:
    three = stack(role, layers=3, bp_k=k, bp_memory=memory).double()
    check_naive(three, torch.randn(3, 37, 16, dtype=torch.float64), None, [37, 22, 9])


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("together", [1, 2, 3])
def test_levels_in_several_products_are_the_equation(monkeypatch: pytest.MonkeyPatch, role: str, together: int) -> None:
    monkeypatch.setattr(bp_module, "TOGETHER", together)
    two = stack(role, layers=2, bp_k=1).double()
    check_naive(two, torch.randn(2, 37, 16, dtype=torch.float64), None, [37, 18])
