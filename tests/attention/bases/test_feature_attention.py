"""Feature maps with parameters of each head, and gates, in a mechanism of the test's own."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mtkit.attention.bases.feature_attention import FeatureAttention
from mtkit.attention.contract import Site
from mtkit.attention.kernels.feature_sums import Gates, Keys, elu1
from mtkit.attention.states import reorder
from tests.contract.counting import saved_tensors


class Own(FeatureAttention):
    """Each head stretches its keys by learned factors, and looks in learned directions; decoders may forget."""

    def __init__(self, site: Site, *, gated: bool = False, scaled: bool = False) -> None:
        super().__init__(site, floor=1e-20, chunk=4)
        p, self.scaled, self.gated = self.projection, scaled, gated
        self.stretch = nn.Parameter(1 + 0.3 * torch.randn(p.key_heads, 1, p.key_width))
        self.directions = nn.Parameter(torch.randn(p.key_heads, 5, p.key_width))
        self.gate = nn.Linear(site.d_model, max(p.key_heads, p.value_heads)) if gated else None

    @property
    def feature_parameters(self) -> Sequence[Tensor]:
        return self.stretch, self.directions

    @property
    def state_features(self) -> tuple[int, bool]:
        return 5, self.scaled

    def features_of(self, x: Tensor, *parameters: Tensor) -> Keys:
        stretch, directions = parameters
        seen = (x * stretch) @ directions.mT
        if not self.scaled:
            return Keys(elu1(seen))
        top = seen.amax(-1, keepdim=True)  # with its gradient
        return Keys((seen - top).exp(), 3 * top)

    def gates_of(self, query: Tensor) -> Gates | None:
        if self.gate is None:
            return None
        logits = self.gate(query).transpose(1, 2).unsqueeze(-1)
        return Gates(nn.functional.logsigmoid(logits), (-logits).sigmoid())


def make(role: str, *, projection: Any = None, **options: Any) -> Own:
    return Own(Site(role, 16, 4, projection=projection), **options).double()


def inputs(role: str, lengths: tuple[int, int]) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Query, memory in the cross role, and the masks of two segments."""
    longest, shapes = max(lengths), [(2, max(lengths), 16)]
    masks = {"query_valid": torch.arange(longest) < torch.tensor(lengths).unsqueeze(1)}
    if role == "cross":
        shapes.append((2, 5, 16))
        masks["memory_valid"] = torch.arange(5) < torch.tensor([[5], [2]])
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes], masks


ENCODERS = [("encoder", False, False), ("encoder", True, False)]
DECODERS = [("decoder", False, False), ("decoder", True, False), ("decoder", False, True), ("decoder", True, True)]
CROSSES = [("cross", False, False), ("cross", True, False)]
each_kind = pytest.mark.parametrize(("role", "scaled", "gated"), [*ENCODERS, *DECODERS, *CROSSES])
each_that_steps = pytest.mark.parametrize(("role", "scaled", "gated"), [*DECODERS, *CROSSES])


@each_kind
@pytest.mark.parametrize("projection", [None, {"name": "grouped-query", "kv_heads": 2}, "multi-query"])
@pytest.mark.parametrize("lengths", [(1, 1), (2, 1), (9, 4)])
def test_forward_is_the_matrix_of_similarities_with_gradients(
    role: str, scaled: bool, gated: bool, projection: Any, lengths: tuple[int, int]
) -> None:
    attention = make(role, projection=projection, scaled=scaled, gated=gated)
    given, masks = inputs(role, lengths)
    wanted = [*given, *attention.parameters()]
    outputs = [form(*given, **masks).output[masks["query_valid"]] for form in (attention, attention.naive)]
    torch.testing.assert_close(*outputs)
    weight = torch.randn_like(outputs[0])
    gradients = [torch.autograd.grad((each * weight).sum(), wanted, allow_unused=True) for each in outputs]
    for got, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(got, expected)
    learned = dict(zip([name for name, _ in attention.named_parameters()], gradients[0][len(given) :], strict=True))
    assert all(learned[name] is not None for name in ("stretch", "directions"))
    assert not gated or max(lengths) == 1 or learned["gate.weight"].any()


@each_that_steps
@pytest.mark.parametrize("projection", [None, {"name": "grouped-query", "kv_heads": 2}])
@torch.no_grad()
def test_steps_are_forward_also_after_reorder(role: str, scaled: bool, gated: bool, projection: Any) -> None:
    attention, order = make(role, projection=projection, scaled=scaled, gated=gated), torch.tensor([[2, 0], [1, 1]])
    x, memory = torch.randn(2, 3, 9, 16, dtype=torch.float64), None
    if role == "cross":
        memory = torch.randn(2, 5, 16, dtype=torch.float64)
    state, _ = attention.start(2, memory, hypotheses=3)
    for t in range(9):
        if t == 5:
            state, x = reorder(state, order), x.take_along_dim(order[:, :, None, None], 1)
        attended, state = attention.step(x[:, :, t], state)
        for n in range(x.shape[1]):
            whole = attention(x[:, n], memory).output
            torch.testing.assert_close(attended.output[:, n], whole[:, t], msg=f"step {t}, hypothesis {n}")


@each_kind
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoints_change_no_gradient(role: str, scaled: bool, gated: bool, use_reentrant: bool) -> None:
    attention = make(role, scaled=scaled, gated=gated)
    given, masks = inputs(role, (9, 4))
    found = []
    for run in (
        lambda *x: attention(*x, **masks).output,
        lambda *x: checkpoint(lambda *y: attention(*y, **masks).output, *x, use_reentrant=use_reentrant),
    ):
        attention.zero_grad()
        for x in given:
            x.grad = None
        run(*given).square().sum().backward()
        found.append([x.grad for x in (*given, *attention.parameters())])
    for plain, again in zip(*found, strict=True):
        torch.testing.assert_close(again, plain)


def test_what_backward_keeps_grows_with_the_length_and_no_faster() -> None:
    def kept(length: int) -> int:
        attention, x = make("decoder", gated=True, scaled=True), torch.randn(1, length, 16, dtype=torch.float64)
        return sum(saved.numel() for saved in saved_tensors(lambda: attention(x)))

    assert kept(512) < 4.1 * kept(128)
