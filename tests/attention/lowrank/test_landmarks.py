"""The landmarks that mechanisms share: their segments, and what those give where they are exact."""

from typing import Any

import pytest
import torch

from mtkit.attention import build
from mtkit.attention.lowrank._landmarks import means_of
from mtkit.errors import MtkitError

NAMES = ["nystrom", "csalr"]


def make(name: str, **arguments: Any) -> Any:
    torch.manual_seed(3)
    plain: dict[str, Any] = {"conv_kernel": 0} if name == "nystrom" else {}
    return build(name, **{"role": "encoder", "d_model": 32, "heads": 4, **plain} | arguments).eval()


def test_segments_are_of_real_tokens_and_of_nearly_one_size() -> None:
    means = means_of(torch.tensor([7, 10, 2, 0]), torch.empty(10, 4), 3)
    sizes = [[[round(share * 60) for share in row] for row in shares] for shares in means.shares.tolist()]
    assert sizes[0] == [
        [20, 20, 20, 0, 0, 0, 0, 0, 0, 0],
        [0, 0, 0, 30, 30, 0, 0, 0, 0, 0],
        [0, 0, 0, 0, 0, 30, 30, 0, 0, 0],
    ]
    assert [sum(map(bool, row)) for row in sizes[1]] == [4, 3, 3]
    assert sizes[2] == [[60] + [0] * 9, [0, 60] + [0] * 8, [0] * 10]
    assert not any(any(row) for row in sizes[3])
    assert means.used.tolist() == [[True] * 3, [True] * 3, [True, True, False], [False] * 3]
    assert means.few.tolist() == [False, False, True, True]


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_no_more_tokens_than_landmarks_see_all_pairs(name: str) -> None:
    """Alone, and beside a segment that goes through landmarks."""
    full, ours = make("full"), make(name, landmarks=6)
    ours.adopt(full.state_dict())
    x, valid = torch.randn(3, 13, 32), torch.arange(13) < torch.tensor([[13], [6], [3]])
    output, expected = ours(x, query_valid=valid).output, full(x, query_valid=valid).output
    for row, length in ((1, 6), (2, 3)):
        torch.testing.assert_close(output[row, :length], expected[row, :length], atol=1e-5, rtol=0)
        alone = ours(x[row : row + 1, :length]).output
        torch.testing.assert_close(alone[0], expected[row, :length], atol=1e-5, rtol=0)
    assert (output[0] - expected[0]).abs().max() > 1e-3


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("projection", ["multi-query", "grouped-query"])
@torch.no_grad()
def test_heads_that_share_keys_and_values_share_landmarks(name: str, projection: str) -> None:
    """As many heads of their own with the same weights give the same."""
    slot = {"name": projection, "kv_heads": 2} if projection == "grouped-query" else projection
    ours, plain = make(name, landmarks=4, projection=slot), make(name, landmarks=4)
    own = ours.state_dict()
    plain.load_state_dict({key: own[key] for key in own if key[:2] not in ("k_", "v_")}, strict=False)
    groups = ours.projection.key_heads
    for one, other in ((plain.k_proj, ours.k_proj), (plain.v_proj, ours.v_proj)):
        one.weight.copy_(other.weight.unflatten(0, (groups, 1, 8)).expand(-1, 4 // groups, -1, -1).flatten(0, 2))
        one.bias.copy_(other.bias.unflatten(0, (groups, 1, 8)).expand(-1, 4 // groups, -1).flatten())
    x = torch.randn(2, 11, 32)
    torch.testing.assert_close(ours(x).output, plain(x).output, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_padding_of_any_size_enters_no_mean(name: str) -> None:
    ours = make(name, landmarks=4)
    x, valid = torch.randn(2, 20, 32), torch.arange(20) < torch.tensor([[20], [9]])
    before = ours(x, query_valid=valid).output[1, :9]
    x[1, 9:] = 1e6
    torch.testing.assert_close(ours(x, query_valid=valid).output[1, :9], before, atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", NAMES)
def test_dropout_acts_on_the_heads_outputs(name: str) -> None:
    ours, x = make(name, landmarks=4, dropout=0.5).train(), torch.randn(1, 12, 32)
    inputs: list[torch.Tensor] = []
    ours.out_proj.register_forward_pre_hook(lambda _, given: inputs.append(given[0]))
    ours(x)
    ours.eval()(x)
    kept = inputs[0] != 0
    assert 0.3 < kept.float().mean() < 0.7
    torch.testing.assert_close(inputs[0][kept], 2 * inputs[1][kept])


@pytest.mark.parametrize("name", NAMES)
def test_other_roles_are_refused_by_name(name: str) -> None:
    for role in ("decoder", "cross"):
        with pytest.raises(MtkitError, match=f"'{name}' cannot play the role '{role}'; it can play: encoder"):
            make(name, role=role)
    with pytest.raises(MtkitError, match="landmarks = 0 must be a whole number from 1"):
        make(name, landmarks=0)
