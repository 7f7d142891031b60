"""Score attention: each thing that a mechanism can state, by a tiny one of the test's own, against loops in float64."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mtkit.attention import Site, State, build, reorder
from mtkit.attention.bases.score_attention import Pairs, ScoreAttention
from mtkit.attention.slots import Projection

LENGTHS = torch.tensor([7, 4])
VALID = torch.arange(7) < LENGTHS[:, None]
ROLES = ["encoder", "decoder", "cross"]


class Plain(ScoreAttention):
    """Scaled products; `score`, `change` and `mixed_row` say for the loops below what a subclass states for all."""

    def score(self, q: Tensor, k: Tensor, i: int, j: int) -> Tensor:
        """(H,) of q and k (H, K)."""
        return (q * k).sum(-1) * self.scale

    def change(self, scores: Tensor, i: int, below: Tensor | None) -> Tensor:
        """The logits (H, S) of a query's scores."""
        return scores

    def mixed_row(self, weights: Tensor) -> Tensor:
        """(H, S)."""
        return weights


class Narrow(Projection):
    """Queries and keys of a width of their own."""

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        self.key_width = 3


class Additive(Plain):
    """Own scores, of a width of their own."""

    def __init__(self, site: Site) -> None:
        super().__init__(site, Narrow(site))
        self.v = nn.Parameter(torch.randn(site.heads, 1, 3))

    def scores(self, pairs: Pairs) -> Tensor:
        rows = [(q + pairs.keys).tanh() @ self.v.transpose(1, 2) for q in pairs.q.split(1, 2)]
        return torch.cat(rows, 3).transpose(2, 3)

    def score(self, q: Tensor, k: Tensor, i: int, j: int) -> Tensor:
        return ((q + k).tanh() * self.v[:, 0]).sum(-1)


class Normed(Plain):
    """A column more: the norms of the keys."""

    def columns(self, memory: Tensor, position: Tensor | None = None) -> dict[str, Tensor]:
        columns = super().columns(memory, position)
        return {**columns, "norms": columns["keys"].square().sum(-1, keepdim=True)}

    def scores(self, pairs: Pairs) -> Tensor:
        return super().scores(pairs) - pairs.columns["norms"].transpose(2, 3) / 2

    def score(self, q: Tensor, k: Tensor, i: int, j: int) -> Tensor:
        return super().score(q, k, i, j) - k.square().sum(-1) / 2


class Keyless(Plain):
    """Scores by position alone, the same in all segments: values are the only column."""

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        del self.q_proj, self.k_proj
        self.table = nn.Parameter(torch.randn(site.heads, 9, 9))

    def queries(self, query: Tensor, position: Tensor | None = None) -> Tensor:
        return query.unsqueeze(1)

    def columns(self, memory: Tensor, position: Tensor | None = None) -> dict[str, Tensor]:
        return {"values": self.projection.values(self.v_proj(memory))}

    def scores(self, pairs: Pairs) -> Tensor:
        return self.table[None, :, pairs.query_position][..., pairs.key_position]

    def score(self, q: Tensor, k: Tensor, i: int, j: int) -> Tensor:
        return self.table[:, i, j]


class Biased(Plain):
    """A bias by distance and by what the query predicts."""

    def logits(self, pairs: Pairs, carry: Any) -> tuple[Tensor, Any]:
        centre = pairs.q.sum(-1, keepdim=True).sigmoid() * 5
        bias = (pairs.key_position - centre).square() + (pairs.query_position[:, None] - pairs.key_position).abs()
        return self.scores(pairs) - bias, None

    def change(self, scores: Tensor, i: int, below: Tensor | None) -> Tensor:
        j = torch.arange(scores.shape[1])
        return scores - (j - self.centre).square() - (i - j).abs()

    def score(self, q: Tensor, k: Tensor, i: int, j: int) -> Tensor:
        self.centre = q.sum(-1, keepdim=True).sigmoid() * 5
        return super().score(q, k, i, j)


class Talking(Plain):
    """A mix over heads before and after the softmax."""

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        self.before, self.after = (nn.Parameter(torch.randn(site.heads, site.heads)) for _ in range(2))

    def logits(self, pairs: Pairs, carry: Any) -> tuple[Tensor, Any]:
        return torch.einsum("bhts,hg->bgts", self.scores(pairs), self.before), None

    def mixed(self, weights: Tensor) -> Tensor:
        return torch.einsum("bhts,hg->bgts", weights, self.after)

    def change(self, scores: Tensor, i: int, below: Tensor | None) -> Tensor:
        return self.before.T @ scores

    def mixed_row(self, weights: Tensor) -> Tensor:
        return self.after.T @ weights


class Carrying(Plain):
    """Half the scores of the layer below are added; twice the sum is carried."""

    def logits(self, pairs: Pairs, carry: Tensor | None) -> tuple[Tensor, Tensor]:
        scores = self.scores(pairs) if carry is None else self.scores(pairs) + carry / 2
        return scores, 2 * scores

    def change(self, scores: Tensor, i: int, below: Tensor | None) -> Tensor:
        return scores if below is None else scores + below


class Lazy(Plain):
    """The first layer carries its weights; the one above has no queries and keys, and takes them."""

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        if site.layer:
            del self.q_proj, self.k_proj

    def queries(self, query: Tensor, position: Tensor | None = None) -> Tensor:
        return query.unsqueeze(1) if self.site.layer else super().queries(query, position)

    def columns(self, memory: Tensor, position: Tensor | None = None) -> dict[str, Tensor]:
        columns = {"values": self.projection.values(self.v_proj(memory))}
        return columns if self.site.layer else super().columns(memory, position)

    def weighed(self, pairs: Pairs, carry: Tensor | None) -> tuple[Tensor, Tensor]:
        weights = super().weighed(pairs, None)[0] if carry is None else carry
        return weights, weights


KINDS = [Plain, Additive, Normed, Keyless, Biased, Talking, Carrying, Lazy]
each_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)


def stack(kind: type, role: str) -> list[Any]:
    layers = [kind(Site(role, 8, 2, layer=layer, layers=2)).double().eval() for layer in range(2)]
    for layer in layers:
        for parameter in layer.parameters():
            nn.init.normal_(parameter, std=0.5)
    return layers


def through(layers: list[Any], x: Tensor, memory: Tensor | None, valid: Tensor | None) -> list[Any]:
    """What each layer gives; foreign is the carry of what stands below the first."""
    found, carry = [], torch.randn(2, 3)
    masks = {"query_valid" if memory is None else "memory_valid": valid}
    for layer in layers:
        found.append(layer(x, memory, carry=carry, need_weights=True, **masks))
        carry, x = found[-1].carry, x + found[-1].output
    return found


def loops(layers: list[Any], x: Tensor, memory: Tensor | None, valid: Tensor) -> tuple[Tensor, Tensor]:
    """The output and the weights of the last layer, query by query and key by key."""
    below: dict[tuple[int, int], Tensor] = {}
    weights_below: dict[tuple[int, int], Tensor] = {}
    for layer in layers:
        source = x if memory is None else memory
        has_keys = hasattr(layer, "k_proj")
        q, k = ((p(y) if has_keys else y) for p, y in zip(projections(layer), (x, source), strict=True))
        q, k, v = (y.unflatten(-1, (2, -1)) for y in (q, k, layer.v_proj(source)))
        outputs, maps = torch.zeros_like(x), torch.zeros(2, 2, x.shape[1], source.shape[1], dtype=x.dtype)
        for b in range(2):
            for i in range(x.shape[1]):
                count = int(valid[b].sum()) if layer.site.role != "decoder" else i + 1
                scores = torch.stack([layer.score(q[b, i], k[b, j], i, j) for j in range(count)], 1)
                logits = layer.change(scores, i, below.get((b, i)))
                weights = logits.softmax(-1)
                if isinstance(layer, Lazy):
                    weights = weights_below.setdefault((b, i), weights)
                below[b, i] = logits
                heads = torch.einsum("hs,shv->hv", layer.mixed_row(weights), v[b, :count])
                outputs[b, i] = layer.out_proj(heads.flatten())
                maps[b, :, i, :count] = weights
        x = x + outputs
    return outputs, maps


def projections(layer: Any) -> list[Any]:
    return [getattr(layer, name, None) for name in ("q_proj", "k_proj")]


def inputs(role: str, length: int = 7) -> tuple[Tensor, Tensor | None]:
    memory = torch.randn(2, 7, 8).double().requires_grad_() if role == "cross" else None
    return torch.randn(2, length, 8).double().requires_grad_(), memory


@pytest.mark.parametrize("role", ROLES)
@each_kind
def test_forward_and_gradients_are_those_of_loops(kind: type, role: str) -> None:
    layers, (x, memory) = stack(kind, role), inputs(role)
    real = torch.ones_like(VALID) if role == "cross" else VALID
    attended = through(layers, x, memory, VALID)[-1]
    output, weights = loops(layers, x, memory, VALID)
    torch.testing.assert_close(attended.output[real], output[real])
    torch.testing.assert_close(attended.weights.transpose(1, 2)[real], weights.transpose(1, 2)[real])
    wanted = [x, *([] if memory is None else [memory]), *(p for layer in layers for p in layer.parameters())]
    factor = torch.randn_like(output[real])
    sums = ((y[real] * factor).sum() for y in (attended.output, output))
    gradients = (torch.autograd.grad(each, wanted, allow_unused=True, materialize_grads=True) for each in sums)
    for got, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("hypotheses", [1, 3])
@pytest.mark.parametrize("role", ["decoder", "cross"])
@each_kind
@torch.no_grad()
def test_steps_are_forward_before_and_after_reorder(kind: type, role: str, hypotheses: int) -> None:
    layers, (_, memory) = stack(kind, role), inputs(role)
    x = torch.randn(2, hypotheses, 9, 8).double()
    valid = VALID if role == "cross" else None
    states: list[State] = [layer.start(2, memory, valid, hypotheses=hypotheses)[0] for layer in layers]
    index = torch.randint(hypotheses, (2, hypotheses))
    given = (memory, valid) if memory is None else tuple(y.repeat_interleave(hypotheses, 0) for y in (memory, VALID))
    for t in range(9):
        if t == 5:
            states = [reorder(state, index) for state in states]
            x = torch.cat([x[:, :, :5].take_along_dim(index[:, :, None, None], 1), x[:, :, 5:]], 2)
        y, carry = x[:, :, t], None
        for number, layer in enumerate(layers):
            attended, states[number] = layer.step(y, states[number], carry=carry, need_weights=True)
            y, carry = y + attended.output, attended.carry
        whole = through(layers, x[:, :, : t + 1].flatten(0, 1), *given)[-1]
        torch.testing.assert_close(attended.output.flatten(0, 1), whole.output[:, -1])
        torch.testing.assert_close(attended.weights.transpose(1, 2).flatten(0, 1), whole.weights[:, :, -1])


@pytest.mark.parametrize("role", ROLES)
@each_kind
@torch.no_grad()
def test_nothing_visible_gives_nothing(kind: type, role: str) -> None:
    layers, (x, memory) = stack(kind, role), inputs(role)
    attended = through(layers[:1], x, memory, torch.zeros_like(VALID))[0]
    assert attended.output.isfinite().all()
    if role != "decoder":
        torch.testing.assert_close(attended.output, layers[0].out_proj.bias.expand_as(x))


def test_dropout_of_weights_that_segments_share_is_drawn_for_each() -> None:
    layer = Keyless(Site("encoder", 8, 2, dropout=0.5)).train()
    same = torch.randn(1, 7, 8).expand(2, -1, -1)
    output = layer(same).output
    assert not torch.allclose(output[0], output[1])


@torch.no_grad()
def test_the_cache_holds_the_columns_of_each_hypothesis() -> None:
    attention = build("realformer", role="decoder", d_model=32, heads=4, positions="rotary", projection="multi-query")
    assert isinstance(attention, ScoreAttention)
    x = torch.randn(2, 3, 5, 32)
    state, _ = attention.start(2, hypotheses=3)
    for t in range(5):
        pairs, state = attention.newest(x[:, :, t], state)
    for name, column in attention.columns(x.flatten(0, 1)).items():
        torch.testing.assert_close(pairs.columns[name], column)
    torch.testing.assert_close(pairs.q, attention.queries(x.flatten(0, 1))[:, :, 4:])
    assert pairs.visible is None
    assert pairs.query_position.tolist() == [4]
    assert pairs.key_position.tolist() == list(range(5))


@torch.no_grad()
def test_hypotheses_read_the_source_without_a_copy() -> None:
    attention = build("realformer", role="cross", d_model=32, heads=4, memory_width=12)
    assert isinstance(attention, ScoreAttention)
    state, _ = attention.start(2, torch.randn(2, 7, 12), VALID, hypotheses=3)
    for t in range(2):
        pairs, after = attention.newest(torch.randn(2, 3, 32), state)
        assert state["shared"]["keys"] is after["shared"]["keys"]
        assert pairs.keys.data_ptr() == state["shared"]["keys"].data_ptr()  # the same numbers, turned
        assert pairs.q.shape == (2, 4, 3, 8)
        assert pairs.query_position.tolist() == [t]
        assert pairs.visible is not None
        assert torch.equal(pairs.visible[:, 0, 0], VALID)
        state = after


@torch.no_grad()
@pytest.mark.parametrize("role", ["decoder", "cross"])
def test_a_step_drops_nothing_whatever_the_mode(role: str) -> None:
    attention = Normed(Site(role, d_model=8, heads=2, dropout=0.9))
    memory, query = torch.randn(2, 4, 8) if role == "cross" else None, torch.randn(2, 1, 8)
    outputs = []
    for training in (False, True):
        attention.train(training)
        outputs.append(attention.step(query, attention.start(2, memory)[0])[0].output)
    assert torch.equal(*outputs)
