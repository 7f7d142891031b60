"""Numbers of other implementations at copied weights, where they are installed and where what they compute is right.

    pip install --no-deps performer-pytorch reformer-pytorch routing-transformer fla-core einops local-attention \\
        axial-positional-embedding product-key-memory mixture-of-experts colt5-attention hyper-connections \\
        torch-einops-utils sinkhorn-transformer axial-attention x-transformers einx loguru mega-pytorch \\
        flash-pytorch rotary-embedding-torch
    pytest -m peer

Also of transformers; of its Reformer, see the tests of `reformer`.
"""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from mtkit.attention import build
from mtkit.attention.content._block_sorting import order_weights
from mtkit.attention.linear._decayed_sums import read_causal

pytestmark = pytest.mark.peer

HEADS, WIDTH = 4, 8


def make(name: str, role: str, **options: Any) -> Any:
    torch.manual_seed(1)
    return build(name, role=role, d_model=HEADS * WIDTH, heads=HEADS, **options).double().eval()


def heads_of(linear: Any, x: Tensor) -> Tensor:
    """(B, H, T, K)."""
    return linear(x).unflatten(-1, (HEADS, WIDTH)).transpose(1, 2)


def merge_heads(attention: Any, heads: Tensor) -> Tensor:
    return attention.out_proj(heads.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("role", ["encoder", "decoder"])
@pytest.mark.parametrize("feature_map", ["positive", "relu"])
def test_performer_agrees_with_performer_pytorch(role: str, feature_map: str) -> None:
    """Without its epsilon, which lets later keys move earlier outputs."""
    peer = pytest.importorskip("performer_pytorch.performer_pytorch")
    ours, x = make("performer", role, feature_map=feature_map, features=20), torch.randn(2, 37, 32).double()
    how = {"projection_matrix": ours.directions}
    q, k, v = (heads_of(linear, x) for linear in (ours.q_proj, ours.k_proj, ours.v_proj))
    if feature_map == "positive":
        q, k = (
            peer.softmax_kernel(q, is_query=True, eps=0.0, **how),
            peer.softmax_kernel(k, is_query=False, eps=0.0, **how),
        )
    else:
        q, k = (peer.generalized_kernel(each, **how) for each in (q, k))
        # there the map is scaled by nothing, here by 1 / sqrt(M), and its epsilon by nothing in both
        q, k = ((each - 1e-3) * 20**-0.5 + 1e-3 for each in (q, k))
    heads = (
        peer.linear_attention(q, k, v) if role == "encoder" else peer.causal_linear_attention_noncuda(q, k, v, eps=0.0)
    )
    torch.testing.assert_close(ours(x).output, merge_heads(ours, heads), rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("causal", [False, True])
def test_reformer_agrees_with_reformer_pytorch(causal: bool) -> None:
    """One round in two chunks: each sees the other there, so all pairs are seen, as here in one chunk.

    It divides products by the square root of K, which the paper does not where keys have length 1.
    """
    peer = pytest.importorskip("reformer_pytorch.reformer_pytorch")
    ours, x = (
        make("reformer", "decoder" if causal else "encoder", lsh_buckets=1, chunk=16),
        torch.randn(2, 16, 32).double(),
    )
    q, v = (heads_of(linear, x) for linear in (ours.q_proj, ours.v_proj))
    theirs = peer.LSHAttention(bucket_size=8, n_hashes=1, causal=causal).eval()
    heads = theirs(q.flatten(0, 1) * WIDTH**0.5, v.flatten(0, 1))[0].unflatten(0, (2, HEADS))
    torch.testing.assert_close(ours(x).output, merge_heads(ours, heads), rtol=1e-8, atol=1e-10)


def test_routing_agrees_with_routing_transformer() -> None:
    """In the encoder, queries and keys apart. Its vectors have length 1: at mean zero the order is the same."""
    peer = pytest.importorskip("routing_transformer.routing_transformer")
    options = {"assign": "balanced", "clusters": 3, "window": 5, "local_heads": 0}
    ours, x = make("routing", "encoder", **options), torch.randn(2, 21, 32).double()
    for linear in (ours.q_proj, ours.k_proj):
        with torch.no_grad():
            rows = linear.weight.view(HEADS, WIDTH, -1)
            rows -= rows.mean(1, keepdim=True)
    theirs = peer.KmeansAttention(3, 5, HEADS, WIDTH).double().eval()
    theirs.kmeans.means.copy_(ours.centroids.mean)
    theirs.kmeans.initted.fill_(True)
    heads, _ = theirs(*(heads_of(linear, x) for linear in (ours.q_proj, ours.k_proj, ours.v_proj)))
    torch.testing.assert_close(ours(x).output, merge_heads(ours, heads), rtol=1e-4, atol=1e-5)  # it divides by n + 1e-5


@pytest.mark.parametrize(
    ("name", "role", "options", "theirs"),
    [
        ("block-local", "encoder", {"block_size": 5}, {"look_backward": 0, "look_forward": 0}),
        ("block-local", "encoder", {"block_size": 5, "block_back": 1, "block_fwd": 2}, {"look_forward": 2}),
        ("block-local", "decoder", {"block_size": 5, "block_back": 1}, {"causal": True}),
        ("image-1d", "decoder", {"image_block": 5, "image_memory": 10}, {"causal": True, "look_backward": 2}),
        ("band", "decoder", {"window_radius": 5}, {"causal": True, "exact_windowsize": True}),
    ],
)
def test_windows_of_blocks_agree_with_local_attention(
    name: str, role: str, options: dict[str, int], theirs: dict[str, Any]
) -> None:
    """At a multiple of the block: what it appends up to one is seen. A band is its exact window of one block."""
    peer = pytest.importorskip("local_attention")
    ours, x = make(name, role, **options), torch.randn(2, 30, 32).double()
    q, k, v = (heads_of(linear, x) for linear in (ours.q_proj, ours.k_proj, ours.v_proj))
    heads = peer.LocalAttention(5, use_rotary_pos_emb=False, **theirs).double()(q, k, v)
    torch.testing.assert_close(ours(x).output, merge_heads(ours, heads), rtol=1e-8, atol=1e-10)


def fla(name: str) -> Any:
    """A naive form of flash-linear-attention, read from its file: the package itself needs a GPU's compiler."""
    found = importlib.util.find_spec("fla")
    pytest.importorskip("einops")
    if found is None or not found.submodule_search_locations:
        pytest.skip("fla-core is not installed")
    path = Path(found.submodule_search_locations[0]) / "ops" / name / "naive.py"
    spec = importlib.util.spec_from_file_location(f"naive_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    peer = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(peer)
    return peer


def test_native_sparse_agrees_with_flash_linear_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its naive branches, for compressed blocks that are the selected ones; keys are shared by pairs of heads."""
    for name in ("fla", "fla.ops", "fla.ops.utils", "fla.ops.utils.pooling"):  # these need a GPU's compiler
        stub = ModuleType(name)
        stub.mean_pooling = stub.prepare_chunk_offsets = None  # type: ignore[attr-defined]
        if name != "fla":
            monkeypatch.setitem(sys.modules, name, stub)
    peer = fla("nsa")
    sizes = {"block": 4, "stride": 4, "selected_block": 4, "selected": 4, "window": 3}
    ours = make("native-sparse", "decoder", projection={"name": "grouped-query", "kv_heads": 2}, **sizes)
    x = torch.randn(2, 36, 32).double()
    q, (k, v), (keys, values) = ours.queries(x), ours.keys_values(x), ours._compressed(x)
    rows = [each.transpose(1, 2) for each in (q, k, v, keys, values)]
    chosen = peer.naive_nsa_topk(rows[0], rows[3], 4, 4, ours.scale)
    outputs = [
        peer.naive_nsa_compression(rows[0], rows[3], rows[4], 4, ours.scale)[0],
        peer.naive_nsa_selection(rows[0], rows[1], rows[2], chosen, 4),
    ]
    for branch, heads in enumerate(outputs):
        ours.gate.bias.data = 40 * (torch.arange(12) // HEADS == branch).double().mul(2).sub(1)
        expected = merge_heads(ours, heads.transpose(1, 2))
        torch.testing.assert_close(ours(x).output, expected, rtol=1e-5, atol=1e-5)  # it computes in float32


def test_delta_agrees_with_flash_linear_attention() -> None:
    """Its naive recurrence."""
    ours, x = make("delta", "decoder", feature_map="elu1", chunk=4), torch.randn(2, 18, 32).double()
    features = [torch.nn.functional.elu(heads_of(linear, x)) + 1 for linear in (ours.q_proj, ours.k_proj)]
    q, k = (each / (each.sum(-1, keepdim=True) + 1e-3) for each in features)
    beta = ours.beta_proj(x).sigmoid().transpose(1, 2)
    heads, _ = fla("delta_rule").delta_rule_recurrence(q * WIDTH**0.5, k, heads_of(ours.v_proj, x), beta)
    # it computes in float32
    torch.testing.assert_close(ours(x).output, merge_heads(ours, heads.double()), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("feature_width", [None, 5])
def test_taylor_agrees_with_flash_linear_attention(feature_width: int | None) -> None:
    """Its kernel over all pairs, with the same epsilon."""
    ours = make("linear", "decoder", feature_map="taylor", feature_width=feature_width, chunk=8)
    x = torch.randn(2, 37, 32).double()
    q, k = (linear(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for linear in (ours.q_proj, ours.k_proj))
    heads = fla("based").naive_parallel_based(q, k, heads_of(ours.v_proj, x))
    torch.testing.assert_close(ours(x).output, merge_heads(ours, heads), rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("retention", {"rotary": False}),
        ("gla", {}),
        ("ssd", {}),
        ("gated-delta", {}),
        ("gated-delta", {"gate": "channel"}),
    ],
)
def test_decayed_sums_agree_with_flash_linear_attention(name: str, options: dict[str, Any]) -> None:
    """Its naive recurrences over the same queries, keys, values and decays; they compute in float32."""
    ours, x = make(name, "decoder", chunk=8, **options), torch.randn(2, 37, 32).double()
    projected = ours.projections(x, ours.q_proj, ours.k_proj, ours.v_proj)
    terms, _ = ours._terms(projected, x, None)
    heads = read_causal(terms, 8)
    q, k, v, decay = (each.transpose(1, 2) for each in terms[:4])
    scaled = q * q.shape[-1] ** 0.5  # it divides by this
    if name == "retention":
        theirs = fla("retention").naive_retention(*(each.transpose(1, 2) for each in (scaled, k, v))).transpose(1, 2)
    elif name == "gla":
        theirs, _ = fla("gla").naive_recurrent_gla(scaled, k, v, decay)
    elif name == "ssd":
        theirs, _ = fla("simple_gla").naive_recurrent_simple_gla(scaled, k, v, decay.squeeze(-1))
    else:
        beta = terms.beta.transpose(1, 2).squeeze(-1)
        if options:
            theirs, _ = fla("kda").naive_recurrent_kda(q, k, v, decay, beta, scale=1.0)
        else:
            peer = fla("gated_delta_rule").naive_recurrent_gated_delta_rule
            theirs, _ = peer(q, k, v, beta, decay.squeeze(-1), scale=1.0)
    torch.testing.assert_close(heads.transpose(1, 2), theirs.double(), rtol=1e-4, atol=1e-5)


def test_forgetting_agrees_with_flash_linear_attention() -> None:
    ours, x = make("forgetting", "decoder", gate_bias=1.0), torch.randn(2, 37, 32).double()
    q, k, v = (linear(x).unflatten(-1, (HEADS, WIDTH)) for linear in (ours.q_proj, ours.k_proj, ours.v_proj))
    heads = fla("forgetting_attn").naive_forgetting_attn(q, k, v, ours.log_gates(x))
    # it computes in float32
    torch.testing.assert_close(ours(x).output, ours.out_proj(heads.double().flatten(2)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("name", "options", "theirs"),
    [
        ("sink", {}, {"head_learned_sink": True}),
        ("topk", {"keys": 5}, {"sparse_topk": 5}),
        ("sigmoid", {"bias": 0.0}, {"sigmoid": True}),
    ],
)
def test_softmaxes_agree_with_x_transformers(
    name: str, options: dict[str, Any], theirs: dict[str, Any], causal: bool
) -> None:
    attend = pytest.importorskip("x_transformers.attend").Attend(heads=HEADS, causal=causal, **theirs).double().eval()
    ours, x = make(name, "decoder" if causal else "encoder", **options), torch.randn(2, 21, 32).double()
    if name == "sink":
        torch.nn.init.normal_(ours.sink)
        attend.head_attn_sink.data.copy_(ours.sink)
    heads, _ = attend(*(heads_of(linear, x) for linear in (ours.q_proj, ours.k_proj, ours.v_proj)))
    torch.testing.assert_close(ours(x).output, merge_heads(ours, heads), rtol=1e-6, atol=1e-7)


def test_differential_agrees_with_diffllama() -> None:
    """Its pairs are heads n and n + H / 2, and its norm has no weight; without its rotation."""
    peer = pytest.importorskip("transformers.models.diffllama.modeling_diffllama")
    config = peer.DiffLlamaConfig(hidden_size=32, num_attention_heads=HEADS, attention_bias=True, rms_norm_eps=1e-5)
    config._attn_implementation = "sdpa"
    ours, x = make("differential", "decoder", layer=1, layers=2), torch.randn(2, 21, 32).double()
    theirs = peer.DiffLlamaAttention(config, layer_idx=1).double().eval()
    state = {name.replace("out_proj", "o_proj"): value for name, value in ours.state_dict().items()}
    for name, value in state.items():
        if name.startswith(("q_proj", "k_proj", "v_proj")):
            state[name] = value.unflatten(0, (HEADS // 2, 2, WIDTH)).transpose(0, 1).flatten(0, 2)
    theirs.load_state_dict(state, strict=False)  # all but the norm's weight
    unturned = torch.ones(1, 21, WIDTH).double(), torch.zeros(1, 21, WIDTH).double()
    # its lambda is in float32
    torch.testing.assert_close(ours(x).output, theirs(x, unturned)[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("q_rank", [None, 12])
def test_latent_agrees_with_deepseek_v3(q_rank: int | None) -> None:
    """Without biases, with the rotation of neighbouring channels. Its norms are in float32."""
    peer = pytest.importorskip("transformers.models.deepseek_v3.modeling_deepseek_v3")
    config = peer.DeepseekV3Config(
        hidden_size=32, num_attention_heads=HEADS, num_key_value_heads=HEADS, kv_lora_rank=16, q_lora_rank=q_rank,
        qk_rope_head_dim=4, qk_nope_head_dim=WIDTH, v_head_dim=WIDTH, rope_interleave=True,
    )  # fmt: skip
    config._attn_implementation = "sdpa"
    ours, x = make("latent", "decoder", kv_rank=16, rope_width=4, q_rank=q_rank), torch.randn(2, 21, 32).double()
    theirs = peer.DeepseekV3Attention(config, layer_idx=0).double().eval()
    up = torch.cat([part.weight.unflatten(0, (HEADS, WIDTH)) for part in (ours.k_up_proj, ours.v_up_proj)], 1)
    q = [ours.q_proj if q_rank is None else ours.q_up_proj, ours.q_rope_proj]
    state = {
        "kv_a_proj_with_mqa.weight": torch.cat([ours.down_proj.weight, ours.k_rope_proj.weight]),
        "kv_a_layernorm.weight": ours.latent_norm.weight,
        "kv_b_proj.weight": up.flatten(0, 1),
        "o_proj.weight": ours.out_proj.weight,
        f"{'q_proj' if q_rank is None else 'q_b_proj'}.weight": torch.cat(
            [part.weight.unflatten(0, (HEADS, -1)) for part in q], 1
        ).flatten(0, 1),
    }
    if q_rank is not None:
        state |= {"q_a_proj.weight": ours.q_down_proj.weight, "q_a_layernorm.weight": ours.q_norm.weight}
        theirs.q_a_layernorm.variance_epsilon = 1e-5
    theirs.load_state_dict(state)
    theirs.kv_a_layernorm.variance_epsilon = 1e-5
    angle = torch.arange(21.0).double().unsqueeze(-1) * torch.tensor([1.0, 0.01]).double()
    angles = torch.cat([angle, angle], -1).unsqueeze(0)
    mask = torch.full((21, 21), -torch.inf).triu(1).double().view(1, 1, 21, 21)
    expected = theirs(x, (angles.cos(), angles.sin()), mask)[0]
    torch.testing.assert_close(ours(x).output, expected, rtol=1e-4, atol=1e-5)


def by_distance(table: Any, length: int) -> Tensor:
    """The biases j - i = -(length - 1), ..., length - 1 of a peer's module, which gives them as (T, T)."""
    biases = table(torch.zeros(length, length).double())
    return torch.cat([biases[1:, 0].flip(0), biases[0]])


@pytest.mark.parametrize("form", ["quadratic", "mixed"])
@pytest.mark.parametrize("role", ["encoder", "decoder"])
@torch.no_grad()
def test_gau_agrees_with_flash_pytorch(role: str, form: str) -> None:
    """Its quadratic form divides the bias too, and by the full length, also with a triangle.

    In the decoder role its linear part divides by one chunk's tokens, whatever the number of finished chunks.
    """
    peer = pytest.importorskip("flash_pytorch.flash_pytorch")
    length, causal = 10, role == "decoder"
    ours = make("gau", role, form=form, chunk=5, rotary=False, max_length=length)
    how = {"dim": 32, "query_key_dim": 8, "causal": causal, "norm_klass": torch.nn.Identity}
    theirs = peer.GAU(**how) if form == "quadratic" else peer.FLASH(**how, group_size=5)
    theirs = theirs.double().eval()
    x = torch.randn(2, length, 32).double()
    both = (
        torch.cat([getattr(linear, part) for linear in (ours.v_proj, ours.gate_proj)]) for part in ("weight", "bias")
    )
    for parameter, value in zip(theirs.to_hidden[0].parameters(), both, strict=True):
        parameter.copy_(value)
    theirs.to_qk[0].load_state_dict(ours.z_proj.state_dict())
    (theirs.to_out[0] if form == "quadratic" else theirs.to_out).load_state_dict(ours.out_proj.state_dict())
    torch.nn.init.normal_(ours.vectors.kappa)
    torch.nn.init.normal_(ours.vectors.mu)
    scale = theirs.offsetscale if form == "quadratic" else theirs.qk_offset_scale
    order = [0, 1] if form == "quadratic" else [0, 2, 1, 3]  # both queries, then both keys
    scale.gamma.copy_(ours.vectors.kappa[order])
    scale.beta.copy_(ours.vectors.mu[order])
    ours.table.copy_(by_distance(theirs.rel_pos_bias, ours.reach) / (length if form == "quadratic" else 1))
    if form == "quadratic":
        ours.counts = lambda pairs: float(length)
    torch.testing.assert_close(ours(x).output, theirs(x) - x)


class AverageOf(torch.nn.Module):
    """The moving average of an attention, in place of a peer's."""

    def __init__(self, attention: Any) -> None:
        super().__init__()
        self.average = attention.average

    def forward(self, x: Tensor) -> Tensor:
        return self.average(x)


@pytest.mark.parametrize("activation", ["softmax", "laplace"])
@torch.no_grad()
def test_mega_agrees_with_mega_pytorch(activation: str) -> None:
    """Except for the average, which it shares between channels. Its softmax divides by the root of the model's width.

    With Laplace weights, its decoder divides by the full length, so that encoders are compared.
    """
    peer = pytest.importorskip("mega_pytorch.mega_pytorch")
    ours, x = make("mega", "encoder", activation=activation, max_length=10), torch.randn(2, 10, 32).double()
    theirs = peer.MegaLayer(
        dim=32, attn_dim_qk=8, attn_dim_value=64, causal=False, laplacian_attn_fn=activation == "laplace"
    ).double()
    theirs.multi_headed_ema = AverageOf(ours)
    attention = theirs.single_headed_attn
    for linear, own in (
        (attention.to_qk[0], ours.z_proj), (attention.to_v[0], ours.v_proj),
        (theirs.to_reset_gate[0], ours.reset_proj), (theirs.to_update_gate[0], ours.update_proj),
    ):  # fmt: skip
        linear.load_state_dict(own.state_dict())
    torch.nn.init.normal_(ours.vectors.kappa)
    torch.nn.init.normal_(ours.vectors.mu)
    attention.offsetscale.gamma.copy_(ours.vectors.kappa)
    attention.offsetscale.beta.copy_(ours.vectors.mu)
    if activation == "softmax":
        attention.offsetscale.gamma[0] *= 2
        attention.offsetscale.beta[0] *= 2
    ours.table.copy_(by_distance(attention.rel_pos_bias, 10))
    theirs.Wh.copy_(ours.h_proj.weight.T)
    theirs.Uh.copy_(ours.out_proj.weight.T)
    theirs.bh.copy_(ours.h_proj.bias + ours.out_proj.bias)
    torch.testing.assert_close(ours(x).output, theirs(x) - x)


def test_the_order_of_sinkhorn_agrees_with_sinkhorn_transformer() -> None:
    """Its last step divides columns by their sums, ours divides rows then."""
    peer = pytest.importorskip("sinkhorn_transformer.sinkhorn_transformer")
    scores = torch.randn(6, 9, 9).double()
    theirs = peer.sinkhorn_sorting_operator(scores, 5)
    expected = (theirs / theirs.sum(-1, keepdim=True)).unflatten(0, (2, 3))
    torch.testing.assert_close(order_weights(scores.unflatten(0, (2, 3)), None, 5, causal=False), expected)


def test_sinkhorn_agrees_with_sinkhorn_transformer() -> None:
    """With values that are keys: it takes sorted values from the keys. Its weights are ours, without their noise."""
    peer = pytest.importorskip("sinkhorn_transformer.sinkhorn_transformer")
    ours, x = make("sinkhorn", "encoder", sinkhorn_block=5), torch.randn(2, 20, 32).double()
    ours.v_proj.load_state_dict(ours.k_proj.state_dict())
    q, k = (heads_of(linear, x) for linear in (ours.q_proj, ours.k_proj))
    theirs = peer.SinkhornAttention(5, HEADS * WIDTH, WIDTH, HEADS, 20).eval()
    theirs.sort_net = Given(ours.order(x, q, k, None, 5))
    torch.testing.assert_close(ours(x).output, merge_heads(ours, theirs(q, k, k)), rtol=1e-8, atol=1e-10)


def test_sortcut_agrees_with_sinkhorn_transformer() -> None:
    """With blocks of queries of another size than those of keys, so that it leaves a query's own block out."""
    peer = pytest.importorskip("sinkhorn_transformer.sinkhorn_transformer")
    ours, x = make("sinkhorn-sortcut", "encoder", sinkhorn_block=5, sortcut_blocks=2), torch.randn(2, 20, 32).double()
    q, k, v = (heads_of(linear, x) for linear in (ours.q_proj, ours.k_proj, ours.v_proj))
    theirs = peer.SinkhornAttention(10, HEADS * WIDTH, WIDTH, HEADS, 20, kv_bucket_size=5, n_sortcut=2).eval()
    theirs.sort_net = Given(ours.order(x, q, k, None, 5))
    torch.testing.assert_close(ours(x).output, merge_heads(ours, theirs(q, k, v)), rtol=1e-8, atol=1e-10)


class Given(torch.nn.Module):
    """A network that sorts as told."""

    def __init__(self, order: Tensor) -> None:
        super().__init__()
        self.order = order.flatten(0, 1)

    def forward(self, *_: Tensor, topk: int) -> Tensor:
        return self.order


@pytest.mark.parametrize("combine", ["sequential", "sum"])
def test_axial_agrees_with_axial_attention(combine: str) -> None:
    """Its passes have no biases but those of `out_proj`."""
    peer = pytest.importorskip("axial_attention")
    ours, x = make("axial", "encoder", axial_width=7, axial_combine=combine), torch.randn(2, 28, 32).double()
    theirs = peer.AxialAttention(HEADS * WIDTH, 2, HEADS, sum_axial_out=combine == "sum").double().eval()
    theirs.axial_attentions = theirs.axial_attentions[::-1]  # columns come first there
    for part, permuted in zip((ours, ours.column), theirs.axial_attentions, strict=True):
        permuted.fn.to_q.weight.data.copy_(part.q_proj.weight)
        permuted.fn.to_kv.weight.data.copy_(torch.cat([part.k_proj.weight, part.v_proj.weight]))
        permuted.fn.to_out.load_state_dict(part.out_proj.state_dict())
    torch.testing.assert_close(ours(x).output, theirs(x.unflatten(1, (4, 7))).flatten(1, 2), rtol=1e-8, atol=1e-10)
