"""Reformer: its limits, its chunks, and the noise of its hashes."""

from typing import Any

import pytest
import torch
from torch import Tensor

from mtkit.attention import reorder
from mtkit.attention.content import reformer as module
from mtkit.attention.content.reformer import SortedChunks, sorted_chunks
from mtkit.attention.kernels.tiled_softmax import NOTHING_SEEN
from mtkit.attention.kernels.windowed_rows import stream_rows
from mtkit.errors import MtkitError
from tests.attention.small import maker

ROLES = ["encoder", "decoder"]

make = maker("reformer", "decoder", max_length=64)


def shared_query_key(reformer: Any, x: Tensor, visible: Tensor) -> Tensor:
    """Softmax over `visible` (..., T, T) of q_i . q_j / |q_j|, oneself only where nothing else is seen."""
    q = reformer.q_proj(x).unflatten(-1, (4, 8)).transpose(1, 2)
    v = reformer.v_proj(x).unflatten(-1, (4, 8)).transpose(1, 2)
    scores = q @ (q / q.norm(dim=-1, keepdim=True)).transpose(-1, -2)
    oneself = torch.eye(x.shape[1], dtype=torch.bool)
    others = visible & ~oneself
    seen = torch.where(others.any(-1, keepdim=True), others, oneself)
    heads = scores.masked_fill(~seen, float("-inf")).softmax(-1) @ v
    return reformer.out_proj(heads.transpose(1, 2).flatten(2))


@pytest.mark.parametrize(
    ("role", "options"),
    [
        ("decoder", {"lsh_buckets": 1, "chunk": 9}),
        ("decoder", {"lsh_buckets": 1, "chunk": 20, "rounds": 1}),
        ("encoder", {"lsh_buckets": 1, "chunk": 9}),
        ("encoder", {"lsh_buckets": 8, "chunk": 9, "rounds": 3}),  # one chunk runs across all buckets
        ("encoder", {"lsh_buckets": 1, "chunk": 20, "across_buckets": False}),
    ],
)
def test_one_chunk_gives_shared_query_key_full_attention(role: str, options: dict[str, Any]) -> None:
    reformer, x = make(role, **options), torch.randn(2, 9, 32)
    visible = torch.ones(9, 9, dtype=torch.bool)
    expected = shared_query_key(reformer, x, visible.tril() if role == "decoder" else visible)
    torch.testing.assert_close(reformer(x).output, expected, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_a_bucket_is_the_place_of_the_largest_rotated_number_or_its_opposite() -> None:
    """argmax [x R; -x R], in each head and round; half of the buckets are those of the opposites."""
    reformer, x = make("encoder", lsh_buckets=6, rounds=3), torch.randn(2, 50, 32)
    q, _, buckets = reformer._hashed(x, None)
    rotated = torch.einsum("bhtk,hrkn->bhrtn", q, reformer.rotations)
    assert torch.equal(buckets, torch.cat([rotated, -rotated], -1).argmax(-1))
    assert buckets.unique().tolist() == list(range(6))


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("rounds", [1, 2, 5])
def test_rounds_give_the_softmax_over_the_union_of_what_each_sees(role: str, rounds: int) -> None:
    """The correction by log N_ij; the sets are found by hand, token by token."""
    reformer, x = make(role, lsh_buckets=4, chunk=3, rounds=rounds), torch.randn(1, 31, 32)
    buckets = reformer._hashed(x, None)[2][0]  # (H, rounds, T)
    visible = torch.zeros(1, 4, 31, 31, dtype=torch.bool)
    for head in range(4):
        for hashed in buckets[head].tolist():
            order = sorted(range(31), key=lambda token: (hashed[token], token))
            for i in range(31):
                if role == "encoder":
                    chunk = order.index(i) // 3
                    keys = order[max(0, chunk - 1) * 3 : (chunk + 1) * 3]
                else:
                    own = [token for token in range(i + 1) if hashed[token] == hashed[i]]
                    keys = own[max(0, (len(own) - 1) // 3 - 1) * 3 :]
                visible[0, head, i, keys] = True
    assert not visible.all()
    torch.testing.assert_close(reformer(x).output, shared_query_key(reformer, x, visible), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("role", ROLES)
def test_a_token_alone_sees_itself(role: str) -> None:
    reformer, x = make(role), torch.randn(2, 1, 32)
    torch.testing.assert_close(reformer(x).output, reformer.out_proj(reformer.v_proj(x)))


def test_the_chunks_of_a_prefix_do_not_depend_on_what_follows() -> None:
    """Published chunks moved in most trials of this kind; ranks within a bucket never do."""
    reformer = make(lsh_buckets=4, chunk=3, rounds=2)
    with torch.no_grad():
        x = torch.randn(1, 20, 32).expand(50, -1, -1)
        whole = reformer(torch.cat([x, 10 * torch.randn(50, 17, 32)], dim=1)).output[:, :20]
        torch.testing.assert_close(whole, reformer(x).output, rtol=1e-5, atol=1e-5)
    with pytest.raises(MtkitError, match="across_buckets"):
        make(across_buckets=True)


def test_an_update_turns_the_rotations_of_training_alone() -> None:
    reformer, x = make("encoder", lsh_buckets=8, chunk=4), torch.randn(2, 40, 32)
    evaluated, trained = reformer(x).output, reformer.train()(x).output
    reformer.after_update(1, 10)
    again = reformer(x).output
    assert not torch.allclose(again, trained, atol=1e-3)
    assert torch.equal(again, reformer(x).output), "one noise an update"
    assert torch.equal(reformer.eval()(x).output, evaluated)
    other = make("encoder", lsh_buckets=8, chunk=4)
    other.load_state_dict(reformer.state_dict())
    assert torch.equal(other.train()(x).output, again), "noise is saved"


def test_rotations_are_a_function_of_seed_role_layer_and_update() -> None:
    def rotations(update: int = 0, role: str = "decoder", **site: Any) -> Tensor:
        reformer = make(role, **site)
        if update:
            reformer.after_update(update, 10)
        return reformer.training_rotations

    torch.testing.assert_close(rotations(3, seed=2), rotations(3, seed=2), rtol=0, atol=0)
    drawn = [rotations(), rotations(1), rotations(2), rotations(seed=2), rotations(layer=1), rotations(role="encoder")]
    drawn += list(rotations().flatten(0, 1))  # heads and rounds
    assert all(not torch.equal(a[..., :1, :1], b[..., :1, :1]) for n, a in enumerate(drawn) for b in drawn[:n])


def test_hashes_come_from_float32_under_autocast() -> None:
    reformer, x = make("encoder"), torch.randn(2, 60, 32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = reformer._hashed(x, None)
    assert low[0].dtype == torch.bfloat16
    assert torch.equal(low[2], reformer._hashed(x, None)[2])


@torch.no_grad()
def test_a_step_reads_two_chunks_a_round_and_keeps_lists_of_that_length() -> None:
    reformer = make(lsh_buckets=2, chunk=20, rounds=3)
    state, _ = reformer.start(2, hypotheses=3)
    assert state["lists"]["members"].shape == (2, 3, 12, 2, 8), "short at first"
    for _ in range(100):
        _, state = reformer.step(torch.randn(2, 3, 32), state)
    assert state["lists"]["members"].shape == (2, 3, 12, 2, 40)
    assert (state["lists"]["count"].sum(-1) == 100).all()
    lists = reorder(state, torch.tensor([1, 0]))["lists"]
    members, seen, _ = reformer._listed(torch.zeros(2, 3, 4, 3, dtype=torch.long), lists, 100)
    assert members.shape == seen.shape == (2, 3, 4, 3 * 40)
    assert members[seen].max() < 100
    rounds = members.masked_fill(~seen, -1).unflatten(-1, (3, 40)).flatten(0, -2).tolist()
    listed = [[place for place in row if place >= 0] for row in rounds]
    assert all(20 <= len(row) < 40 and len(row) == len(set(row)) for row in listed), "each key once a round"


def test_lists_that_grow_lose_nothing() -> None:
    reformer, x = make(lsh_buckets=2, chunk=20, rounds=2), torch.randn(1, 90, 32)
    state, _ = reformer.start(1)
    outputs = []
    with torch.no_grad():
        for token in x.split(1, dim=1):
            attended, state = reformer.step(token, state)
            outputs.append(attended.output)
        torch.testing.assert_close(torch.cat(outputs, dim=1), reformer(x).output, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_a_loop_and_operations_give_the_same_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    reformer, walk, outputs = make(lsh_buckets=2, chunk=5, rounds=3), torch.randn(60, 2, 3, 32), []
    for by_loop in (True, False):
        monkeypatch.setattr(module, "supports_cached", lambda *_, by_loop=by_loop: by_loop)
        state, _ = reformer.start(2, hypotheses=3)
        for token in walk:
            attended, state = reformer.step(token, reorder(state, torch.tensor([[0, 2, 2], [1, 0, 1]])))
            outputs.append(attended.output)
        outputs += [state["lists"]["members"].float(), state["lists"]["count"].float()]
    half = len(outputs) // 2
    for found, expected in zip(outputs[:half], outputs[half:], strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_what_it_cannot_be_is_refused() -> None:
    for options, message in (
        ({"lsh_buckets": 3}, "even"),
        ({"lsh_buckets": 0}, "lsh_buckets"),
        ({"chunk": 0}, "chunk = 0 must"),
        ({"rounds": 0}, "rounds = 0 must"),
        ({"role": "cross"}, "encoder, decoder"),
        ({"projection": "multi-query"}, "cannot combine"),
        ({"positions": "alibi"}, "cannot combine"),
    ):
        with pytest.raises(MtkitError, match=message):
            make(**options)  # type: ignore[arg-type]
    assert not any("k_proj" in name for name, _ in make().named_parameters())


def test_the_weights_of_full_give_queries_values_and_outputs() -> None:
    full, reformer = make(name="full"), make()
    reformer.adopt(full.state_dict())
    for name in ("q_proj", "v_proj", "out_proj"):
        assert torch.equal(getattr(reformer, name).weight, getattr(full, name).weight)


def peer(reformer: Any, **config: Any) -> Any:
    """The attention of transformers' Reformer with the same weights."""
    modeling = pytest.importorskip("transformers.models.reformer.modeling_reformer")
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "attention_head_size": 8, "num_hashes": 1, "num_buckets": 4}
    chunks = {"lsh_attn_chunk_length": reformer.chunk, "lsh_num_chunks_before": 1, "lsh_num_chunks_after": 0}
    other = modeling.LSHSelfAttention(modeling.ReformerConfig(**sizes, **chunks, **config)).eval()
    with torch.no_grad():
        reformer.q_proj.weight.copy_(other.query_key.weight)
        reformer.v_proj.weight.copy_(other.value.weight)
    return other


@pytest.mark.peer
@pytest.mark.parametrize("role", ROLES)
def test_one_chunk_agrees_with_transformers(role: str) -> None:
    reformer, x = make(role, lsh_buckets=1, chunk=16), torch.randn(2, 13, 32)
    other = peer(reformer, is_decoder=role == "decoder")
    torch.testing.assert_close(reformer(x).output, reformer.out_proj(other(x).hidden_states), rtol=1e-5, atol=1e-5)


@pytest.mark.peer
def test_later_chunks_of_one_round_agree_with_transformers() -> None:
    """Without the first chunk, which there looks back at the last."""
    reformer, x = make("encoder", lsh_buckets=4, chunk=8, rounds=1), torch.randn(2, 40, 32)
    other = peer(reformer, is_decoder=False)
    with torch.no_grad():
        q, v, buckets = reformer._hashed(x, None)
        theirs = other(x, buckets=buckets.flatten(2)).hidden_states.unflatten(-1, (4, 8)).transpose(1, 2)
        ours = reformer._attend(q, v, buckets, None)
    later = buckets.squeeze(2).argsort(dim=-1, stable=True)[..., 8:].unsqueeze(-1)
    torch.testing.assert_close(ours.take_along_dim(later, 2), theirs.take_along_dim(later, 2), rtol=1e-5, atol=1e-5)


LENGTH, ROUNDS = 23, 3


def shown_pairs(layout: SortedChunks, rows: int) -> list[tuple[int, int]]:
    """The rows of each query and key that it sees, in order of places."""
    count = (len(layout.keys) - layout.width) // layout.block + 1
    scores = torch.randn(count, layout.block, layout.width)
    hidden = scores.clone()
    layout.hide(hidden, slice(0, count))
    assert ((hidden == scores) | (hidden < NOTHING_SEEN)).all()
    windows = layout.keys.unfold(0, layout.width, layout.block)
    seen = (hidden == scores).nonzero().tolist()
    pairs = [(int(windows[block, layout.positions_before + i]), int(windows[block, j])) for block, i, j in seen]
    return [pair for pair in pairs if pair[0] < rows]


@pytest.mark.parametrize("chunk", [3, 4, 40])
@pytest.mark.parametrize(("across", "causal"), [(True, False), (False, False), (False, True)])
def test_each_pair_is_shown_once_and_only_near_ones(across: bool, causal: bool, chunk: int) -> None:
    buckets = torch.randint(3, (2, 1, ROUNDS, LENGTH))
    valid = torch.arange(LENGTH) < torch.tensor([[LENGTH], [17]])
    buckets = buckets.masked_fill(~valid[:, None, None], 3)
    shown = torch.zeros(2, LENGTH, LENGTH, dtype=torch.long)
    near = torch.zeros(2, LENGTH, LENGTH, dtype=torch.bool)
    for each, layout in enumerate(sorted_chunks(buckets, valid, chunk, across, causal)):
        for i, j in shown_pairs(layout, 2 * LENGTH):
            assert i // LENGTH == j // LENGTH, "of the same stream"
            shown[i // LENGTH, i % LENGTH, j % LENGTH] += 1
        for n in range(2):
            near[n] |= pairs(buckets[n, 0, each], valid[n], across, causal, chunk)
    real = valid.unsqueeze(-1).expand_as(near)
    assert torch.equal(shown[real], near.long()[real])


def pairs(buckets: torch.Tensor, valid: torch.Tensor, across: bool, causal: bool, chunk: int) -> torch.Tensor:
    """(T, T): the same, from each token's rank."""
    i, j = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)
    same = buckets[:, None] == buckets
    rank = (same & (j < i)).sum(-1)
    if across:
        rank = rank + (buckets[:, None] > buckets).sum(-1)
    back = rank[:, None] // chunk - rank // chunk
    seen = ((back == 0) | (back == 1)) & (same | across) & valid
    return seen & (j < i if causal else j != i)


def test_every_row_is_found_at_its_place() -> None:
    buckets = torch.randint(4, (2, 3, 2, LENGTH))
    for layout in sorted_chunks(buckets, None, 4, False, True):
        rows = stream_rows((2, LENGTH, 3), buckets.device)
        assert torch.equal(layout.keys[layout.positions_before + layout.place], rows)
        assert (layout.keys == rows.numel()).sum() == len(layout.keys) - rows.numel()
