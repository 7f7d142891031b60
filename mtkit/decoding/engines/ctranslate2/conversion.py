"""The very weights of a model in CTranslate2's format; pieces are named by their numbers.

Absolute positions are written as explicit encodings. The format has one number of key-value heads for all attentions of
a side; where they differ in it, keys and values are repeated for each head that reads them.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from ctranslate2.specs import TransformerSpec
from ctranslate2.specs.attention_spec import MultiHeadAttentionSpec
from ctranslate2.specs.common_spec import Activation
from ctranslate2.specs.transformer_spec import TransformerDecoderSpec, TransformerEncoderSpec
from torch import Tensor, nn

from mtkit.attention.positions import BASE, Rotary
from mtkit.data.tokenizer import BREAK, PAD
from mtkit.decoding.engines.weights import Weights
from mtkit.decoding.lexicon import Lexicon
from mtkit.model.network import Network

ACTIVATIONS = {"relu": Activation.RELU, "gelu": Activation.GELU} | dict.fromkeys(("swish", "swiglu"), Activation.SWISH)

SPECIALS = ("<blank>", "<unk>", "<s>", "</s>")
"""CTranslate2's names of PAD, UNK, BOS and EOS."""

SIDES = {"encoder": ("attention",), "decoder": ("self_attention", "cross_attention")}
"""The names of the attentions in a layer of each side, the self-attention first."""


def token(piece: int) -> str:
    """CTranslate2's name of a piece."""
    return SPECIALS[piece] if piece < len(SPECIALS) else str(piece)


def piece(name: str) -> int:
    """The piece that CTranslate2 calls so."""
    return SPECIALS.index(name) if name in SPECIALS else int(name)


def convert(model: Network, folder: Path, spelled: tuple[Sequence[str], Sequence[str]] | None = None) -> None:
    """Write a model whose attentions are plain, or share keys and values, into a new folder.

    `spelled`: the names of the pieces of source and target, where they are not to be numbers; sources then get their
    end from CTranslate2.
    """
    settings, weights = model.settings, Weights(model)
    layers = {"encoder": settings.encoder_layers, "decoder": settings.decoder_layers}
    shared = {side: _shared_heads(weights, side, layers[side]) for side in SIDES}
    how: dict[str, Any] = {
        "pre_norm": settings.norm == "pre",
        "activation": ACTIVATIONS[settings.activation],
        "ffn_glu": settings.activation == "swiglu",
    }
    spec: Any = TransformerSpec(
        TransformerEncoderSpec(layers["encoder"], settings.heads, num_heads_kv=shared["encoder"], **how),
        TransformerDecoderSpec(layers["decoder"], settings.heads, num_heads_kv=shared["decoder"], **how),
    )
    _linear(spec.decoder.projection, weights.output, weights.output_bias)
    for side, its in zip(SIDES, (spec.encoder, spec.decoder), strict=True):
        embeddings = its.embeddings[0] if side == "encoder" else its.embeddings
        embeddings.weight = weights.tokens(side).numpy()
        its.position_encodings.encodings = weights.positions(side).numpy()
        if settings.norm == "pre":
            _norm(its.layer_norm, weights.module(f"{side}_norm"))
        for number, layer in enumerate(its.layer):
            _layer(layer, weights, f"{side}.{number}", side, shared[side])
    names = [[token(piece) for piece in range(len(weights.tokens(side)))] for side in SIDES]
    source, target = names if spelled is None else spelled
    spec.register_source_vocabulary(list(source))
    spec.register_target_vocabulary(list(target))
    spec.config.unk_token, spec.config.bos_token, spec.config.eos_token = SPECIALS[1:]
    spec.config.decoder_start_token = spec.config.bos_token
    spec.config.add_source_bos, spec.config.add_source_eos = False, spelled is not None
    # the layers' epsilon is CTranslate2's default, 1e-5, as PyTorch's
    spec.validate()
    spec.optimize(quantization=None)
    folder.mkdir()
    spec.save(str(folder))


def vocabulary_map(lexicon: Lexicon) -> str:
    """A line for each source piece, a tab between it and what translates it; that of no piece holds for all."""
    every = [*range(BREAK + 1), *lexicon.frequent.tolist()]
    lines = ["\t" + " ".join(map(token, every))]
    for source, targets in enumerate(lexicon.translations.tolist()):
        lines.append(f"{token(source)}\t" + " ".join(token(piece) for piece in targets if piece != PAD))
    return "\n".join(lines) + "\n"


def _shared_heads(weights: Weights, side: str, layers: int) -> int | None:
    """The key-value heads of all attentions of a side, where they are as many and fewer than the heads."""
    names = [f"{side}.{number}.{each}" for number in range(layers) for each in SIDES[side]]
    (heads, keys), *others = {(each.heads, each.key_heads) for each in map(weights.projection, names)}
    return None if others or keys == heads else keys


def _layer(layer: Any, weights: Weights, name: str, side: str, shared: int | None) -> None:
    """`shared`: the key-value heads of its attentions; None: keys and values are repeated for each head."""
    (own, *others), repeated = SIDES[side], shared is None
    q, k, v, out = _projections(weights, f"{name}.{own}", repeated=repeated)
    rotary = weights.relative_positions(f"{name}.{own}")
    if isinstance(rotary, Rotary):
        layer.self_attention = MultiHeadAttentionSpec(
            self_attention=True,
            num_heads_kv=shared,
            rotary_dim=2 * rotary.pairs,
            rotary_interleave=not rotary.in_halves,
            rotary_base=BASE,
        )
    _linear(layer.self_attention.linear[0], *_joined(q, k, v))
    _linear(layer.self_attention.linear[1], *out)
    _norm(layer.self_attention.layer_norm, weights.norm_around(f"{name}.{own}"))
    for cross in others:
        q, k, v, out = _projections(weights, f"{name}.{cross}", repeated=repeated)
        _linear(layer.attention.linear[0], *q)
        _linear(layer.attention.linear[1], *_joined(k, v))
        _linear(layer.attention.linear[2], *out)
        _norm(layer.attention.layer_norm, weights.norm_around(f"{name}.{cross}"))
    feed_forward = weights.module(f"{name}.feed_forward")
    # of a gated layer CTranslate2 activates the first map, which mtkit calls the gate
    first = feed_forward.inner if feed_forward.gate is None else feed_forward.gate
    _linear(layer.ffn.linear_0, first.weight, first.bias)
    if feed_forward.gate is not None:
        _linear(layer.ffn.linear_0_noact, feed_forward.inner.weight, feed_forward.inner.bias)
    _linear(layer.ffn.linear_1, feed_forward.outer.weight, feed_forward.outer.bias)
    _norm(layer.ffn.layer_norm, weights.module(f"{name}.feed_forward_residual.norm"))


Map = tuple[Tensor, Tensor]
"""Weight (O, I) and bias (O,) of a linear map."""


def _projections(weights: Weights, name: str, *, repeated: bool) -> list[Map]:
    """Those of queries, keys, values and output; keys and values `repeated` for each head that reads them."""
    q, k, v, out = [(each.weight, each.bias) for each in weights.projections(name)]
    projection = weights.projection(name)
    group = projection.heads // projection.key_heads
    return [q, _repeated(k, group, projection), _repeated(v, group, projection), out] if repeated else [q, k, v, out]


def _repeated(linear: Map, group: int, projection: Any) -> Map:
    weight, bias = (each.unflatten(0, (projection.key_heads, -1)).repeat_interleave(group, 0) for each in linear)
    return weight.flatten(0, 1), bias.flatten(0, 1)


def _joined(*linears: Map) -> Map:
    return torch.cat([weight for weight, _ in linears]), torch.cat([bias for _, bias in linears])


def _linear(spec: Any, weight: Tensor, bias: Tensor | None) -> None:
    spec.weight = weight.detach().float().cpu().numpy()
    if bias is not None:
        spec.bias = bias.detach().float().cpu().numpy()


def _norm(spec: Any, norm: nn.LayerNorm) -> None:
    spec.gamma, spec.beta = norm.weight.detach().float().cpu().numpy(), norm.bias.detach().float().cpu().numpy()
