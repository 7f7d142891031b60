"""A model in CTranslate2's format, kept in the run's folder: the same weights, and pieces named by their numbers.

Absolute positions are written as explicit encodings. The format has one number of key-value heads for all attentions of
a side; if they differ in it, keys and values are repeated for each head that reads them.

ctranslate2/<checkpoint>-<key>/  CTranslate2's files; the key is a hash of the weights, the settings and the conversion
ctranslate2/<checkpoint>-<key>/sha256.json  their checksums; a model whose files do not match them is converted again
"""

import hashlib
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from ctranslate2.specs import TransformerSpec
from ctranslate2.specs.attention_spec import MultiHeadAttentionSpec
from ctranslate2.specs.common_spec import Activation
from ctranslate2.specs.transformer_spec import TransformerDecoderSpec, TransformerEncoderSpec
from torch import Tensor, nn

from mtkit.attention.positions import BASE, Rotary
from mtkit.decoding.engines.plain import Weights, for_each_head
from mtkit.decoding.lexicon import Lexicon
from mtkit.errors import MtkitError
from mtkit.model.network import Network
from mtkit.runs import Run
from mtkit.storage.files import digest, inside, write_json, writing
from mtkit.storage.records import read_object
from mtkit.terminal import Say, quiet
from mtkit.text.tokenizer import BREAK, PAD

ACTIVATIONS = {"relu": Activation.RELU, "gelu": Activation.GELU} | dict.fromkeys(("swish", "swiglu"), Activation.SWISH)

SPECIALS = ("<blank>", "<unk>", "<s>", "</s>")
"""CTranslate2's names of PAD, UNK, BOS and EOS."""

SIDES = {"encoder": ("attention",), "decoder": ("self_attention", "cross_attention")}
"""The names of the attentions in a layer of each side, self-attention first."""

FOLDER = "ctranslate2"
"""Its name in a run's folder."""

CHECKSUMS = "sha256.json"

VERSION = 1
"""Version of the conversion; a model converted by another version is converted again."""

_CONVERSION = re.compile(r"(average|update-[0-9]+)-[0-9a-f]{16}")
"""Name of the folder of a converted checkpoint."""

Files = dict[str, bytes]
"""The content of each file in a converted model, by its name."""

Map = tuple[Tensor, Tensor]
"""Weight (O, I) and bias (O,) of a linear map."""


def token(piece: int) -> str:
    """CTranslate2's name of a piece."""
    return SPECIALS[piece] if piece < len(SPECIALS) else str(piece)


def piece(name: str) -> int:
    """Return the piece with this name in CTranslate2."""
    return SPECIALS.index(name) if name in SPECIALS else int(name)


def vocabulary_map(lexicon: Lexicon) -> str:
    """Return a line for each source piece: the piece, a tab, its translations; the line without a piece is for all."""
    always = [*range(BREAK + 1), *lexicon.frequent.tolist()]
    lines = ["\t" + " ".join(map(token, always))]
    for source, targets in enumerate(lexicon.translations.tolist()):
        lines.append(f"{token(source)}\t" + " ".join(token(piece) for piece in targets if piece != PAD))
    return "\n".join(lines) + "\n"


def converted(run: Run, checkpoint: str, model: Network, *, say: Say = quiet) -> Files:
    """Return the checkpoint's model in CTranslate2's format, from the run's folder or written there.

    Conversions of the checkpoint's other weights, and of checkpoints that no longer exist, are removed. `say` gets a
    message if the folder cannot be written or its files are damaged.
    """
    key = hashlib.sha256(f"{VERSION} {digest(run.weights(checkpoint))} {model.settings.model_dump_json()}".encode())
    name = f"{checkpoint}-{key.hexdigest()[:16]}"
    folder = run.folder / FOLDER / name
    with suppress(OSError):  # it does not exist, or another process removes it as stale
        files = _read(folder)
        record = read_object(folder / CHECKSUMS)
        files.pop(CHECKSUMS, None)
        if _checksums(files) == record:
            return files
        say(f"{folder} is damaged; the model is converted again")
    with TemporaryDirectory() as scratch:
        convert(model, Path(scratch) / "model")
        files = _read(Path(scratch) / "model")
    try:
        folder = inside(run.folder, FOLDER, name)
        with writing(folder) as temporary:
            temporary.mkdir()
            for name, content in files.items():
                (temporary / name).write_bytes(content)
            write_json(temporary / CHECKSUMS, _checksums(files))
        _remove_stale(run, checkpoint, folder, {*files, CHECKSUMS})
    except MtkitError as error:
        say(f"{error}; the model will be converted again next time")
    return files


def _read(folder: Path) -> Files:
    files = {file.name: file.read_bytes() for file in sorted(folder.iterdir())}
    if "model.bin" not in files:
        raise FileNotFoundError(folder)
    return files


def _checksums(files: Files) -> dict[str, str]:
    return {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}


def _remove_stale(run: Run, checkpoint: str, current: Path, names: set[str]) -> None:
    """Removes the other folders with names of conversions that hold only files of these names."""
    for other in current.parent.iterdir():
        if other == current or other.is_symlink() or not (match := _CONVERSION.fullmatch(other.name)):
            continue
        stale = match[1] == checkpoint or not (run.folder / "checkpoints" / match[1]).is_dir()
        with suppress(OSError):  # it is no folder, or another process removes it too
            if stale and {file.name for file in other.iterdir()} <= names:
                shutil.rmtree(other)


def convert(model: Network, folder: Path, spelled: tuple[Sequence[str], Sequence[str]] | None = None) -> None:
    """Writes a model whose attentions are plain, or share keys and values, into a new folder.

    `spelled`: the names of source and target pieces, instead of numbers; CTranslate2 then adds the end of sources.
    """
    settings, weights = model.settings, Weights(model)
    layers = {"encoder": settings.encoder_layers, "decoder": settings.decoder_layers}
    shared = {side: _shared_heads(weights, side, layers[side]) for side in SIDES}
    options: dict[str, Any] = {
        "pre_norm": settings.norm == "pre",
        "activation": ACTIVATIONS[settings.activation],
        "ffn_glu": settings.activation == "swiglu",
    }
    spec: Any = TransformerSpec(
        TransformerEncoderSpec(layers["encoder"], settings.heads, num_heads_kv=shared["encoder"], **options),
        TransformerDecoderSpec(layers["decoder"], settings.heads, num_heads_kv=shared["decoder"], **options),
    )
    _set_linear(spec.decoder.projection, weights.output, weights.output_bias)
    for side, stack in zip(SIDES, (spec.encoder, spec.decoder), strict=True):
        embeddings = stack.embeddings[0] if side == "encoder" else stack.embeddings
        embeddings.weight = weights.tokens(side).numpy()
        stack.position_encodings.encodings = weights.positions(side).numpy()
        if settings.norm == "pre":
            _set_norm(stack.layer_norm, weights.module(f"{side}_norm"))
        for number, layer in enumerate(stack.layer):
            _set_layer(layer, weights, f"{side}.{number}", side, shared[side])
    numbered = [[token(piece) for piece in range(len(weights.tokens(side)))] for side in SIDES]
    source, target = numbered if spelled is None else spelled
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


def _shared_heads(weights: Weights, side: str, layers: int) -> int | None:
    """Return the number of key-value heads of a side's attentions if all are equal and fewer than the heads."""
    names = [f"{side}.{number}.{attention}" for number in range(layers) for attention in SIDES[side]]
    (heads, keys), *others = {
        (shape.heads, shape.key_heads) for shape in (weights.module(name).projection for name in names)
    }
    return None if others or keys == heads else keys


def _set_layer(layer: Any, weights: Weights, name: str, side: str, shared: int | None) -> None:
    """`shared`: the key-value heads of its attentions; None: keys and values are repeated for each head."""
    self_attention, *cross_attentions = (f"{name}.{attention}" for attention in SIDES[side])
    q, k, v, out = _projections(weights, self_attention, repeated=shared is None)
    rotary = weights.module(self_attention).positions
    if isinstance(rotary, Rotary):
        layer.self_attention = MultiHeadAttentionSpec(
            self_attention=True,
            num_heads_kv=shared,
            rotary_dim=2 * rotary.pairs,
            rotary_interleave=not rotary.in_halves,
            rotary_base=BASE,
        )
    _set_linear(layer.self_attention.linear[0], *_concatenated(q, k, v))
    _set_linear(layer.self_attention.linear[1], *out)
    _set_norm(layer.self_attention.layer_norm, weights.norm_around(self_attention))
    for cross_attention in cross_attentions:
        q, k, v, out = _projections(weights, cross_attention, repeated=shared is None)
        _set_linear(layer.attention.linear[0], *q)
        _set_linear(layer.attention.linear[1], *_concatenated(k, v))
        _set_linear(layer.attention.linear[2], *out)
        _set_norm(layer.attention.layer_norm, weights.norm_around(cross_attention))
    feed_forward = weights.module(f"{name}.feed_forward")
    # of a gated layer CTranslate2 activates the first map, which mtkit calls the gate
    first = feed_forward.inner if feed_forward.gate is None else feed_forward.gate
    _set_linear(layer.ffn.linear_0, first.weight, first.bias)
    if feed_forward.gate is not None:
        _set_linear(layer.ffn.linear_0_noact, feed_forward.inner.weight, feed_forward.inner.bias)
    _set_linear(layer.ffn.linear_1, feed_forward.outer.weight, feed_forward.outer.bias)
    _set_norm(layer.ffn.layer_norm, weights.module(f"{name}.feed_forward_residual.norm"))


def _projections(weights: Weights, name: str, *, repeated: bool) -> list[Map]:
    """Return the maps of queries, keys, values and output; keys and values `repeated` for each head that reads them."""
    maps: Iterator[Map] = ((linear.weight, linear.bias) for linear in weights.projections(name))
    q, k, v, out = maps
    if repeated:
        shape = weights.module(name).projection
        k, v = ((for_each_head(weight, shape), for_each_head(bias, shape)) for weight, bias in (k, v))
    return [q, k, v, out]


def _concatenated(*linears: Map) -> Map:
    return torch.cat([weight for weight, _ in linears]), torch.cat([bias for _, bias in linears])


def _set_linear(spec: Any, weight: Tensor, bias: Tensor | None) -> None:
    spec.weight = weight.detach().float().cpu().numpy()
    if bias is not None:
        spec.bias = bias.detach().float().cpu().numpy()


def _set_norm(spec: Any, norm: nn.LayerNorm) -> None:
    spec.gamma, spec.beta = norm.weight.detach().float().cpu().numpy(), norm.bias.detach().float().cpu().numpy()
