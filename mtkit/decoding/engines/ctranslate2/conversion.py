"""What CTranslate2 can do as mtkit does it: the first reason against it, by its name in recipe or command.

The very weights of a model in CTranslate2's format; pieces are named by their numbers.

Absolute positions are written as explicit encodings. The format has one number of key-value heads for all attentions of
a side; where they differ in it, keys and values are repeated for each head that reads them.

The converted model of a checkpoint, kept in the run's folder and made where it is missing.

ctranslate2/<checkpoint>-<key>/  CTranslate2's files; the key is a hash of the weights, the settings and the conversion
ctranslate2/<checkpoint>-<key>/sha256.json  their checksums; a model whose files do not match them is converted anew
"""

import hashlib
import re
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.util import find_spec
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
from mtkit.decoding.engines.weights import GROUPED, Weights, unlike_plain
from mtkit.decoding.lexicon import Lexicon
from mtkit.errors import MtkitError
from mtkit.model.build import choose_attention
from mtkit.model.network import Network
from mtkit.recipe import DecodingSettings, Recipe
from mtkit.runs import Run
from mtkit.storage.files import digest, inside, write_json, writing
from mtkit.storage.records import read_object
from mtkit.text.tokenizer import BREAK, PAD

COMPUTE_TYPES = {
    None: "float32",
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.int8: "int8",
}
"""CTranslate2's name of each number type; None stands for float32."""


def why_not(
    runs: Sequence[Run], settings: DecodingSettings, dtype: torch.dtype | None, device: torch.device
) -> str | None:
    """The first reason why CTranslate2 cannot decode these runs so; None: it can."""
    if find_spec("ctranslate2") is None:
        return "the package is not installed (pip install 'mtkit[ctranslate2]')"
    if len(runs) > 1:
        return "several runs form an ensemble, and it decodes single models"
    part = not_held(runs[0].recipe)
    if part is not None:
        return f"its format has no {part}"
    return _of_settings(settings) or _of_arithmetic(dtype, device)


def not_held(recipe: Recipe) -> str | None:
    """The first part of the model that its format does not hold, as a recipe names it; None: it holds all."""
    part = unlike_plain(recipe, besides=(*GROUPED, "rotary"))
    if part is None and recipe.model.positions != "none":
        for role, (first, *_) in choose_attention(recipe).items():
            # it leaves out the absolute positions of a side whose first layer has rotary ones
            if first.options.get("positions"):
                return f"model.positions {recipe.model.positions} beside the rotary positions of {role} attention"
    return part


def _of_settings(settings: DecodingSettings) -> str | None:
    if settings.method == "sample":
        return "decoding.method = sample: its random numbers are others, and not repeatable"
    if settings.coverage_penalty:
        return f"decoding.coverage_penalty = {settings.coverage_penalty}: it does not tell the penalty from the score"
    if settings.no_repeat_ngram:
        return (
            f"decoding.no_repeat_ngram = {settings.no_repeat_ngram}: "
            "it divides the probability of forbidden pieces among the others"
        )
    return None


def _of_arithmetic(dtype: torch.dtype | None, device: torch.device) -> str | None:
    import ctranslate2

    if device.type == "cuda" and not ctranslate2.get_cuda_device_count():
        return "it finds no CUDA device"
    if device.type not in ("cpu", "cuda"):
        return f"it has no device {device.type}"
    name = COMPUTE_TYPES[dtype]
    if name not in ctranslate2.get_supported_compute_types(device.type):
        return f"it has no {name} on this {device.type.upper()}"
    return None


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


FOLDER = "ctranslate2"
"""Its name in a run's folder."""

CHECKSUMS = "sha256.json"

VERSION = 1
"""Of the conversion; a model converted by another is converted anew."""

_CONVERSION = re.compile(r"(average|update-[0-9]+)-[0-9a-f]{16}")
"""Name of the folder of a converted checkpoint."""

Files = dict[str, bytes]
"""The content of each file of a converted model, by its name."""


def converted(
    run: Run, checkpoint: str, model: Network, *, say: Callable[[str], object] = lambda message: None
) -> Files:
    """The model of this checkpoint in CTranslate2's format, from the run's folder or written there.

    What was converted from other weights of the checkpoint, or from checkpoints that are gone, is removed. `say` gets a
    message where the folder cannot be written or its files are damaged.
    """
    key = hashlib.sha256(f"{VERSION} {digest(run.weights(checkpoint))} {model.settings.model_dump_json()}".encode())
    name = f"{checkpoint}-{key.hexdigest()[:16]}"
    folder = run.folder / FOLDER / name
    with suppress(OSError):  # it is not there, or another process removes it, for which it is stale
        files = _read(folder)
        record = read_object(folder / CHECKSUMS)
        files.pop(CHECKSUMS, None)
        if _checksums(files) == record:
            return files
        if (folder / CHECKSUMS).exists():  # earlier versions wrote none
            say(f"{folder} is damaged; the model is converted again")
    with TemporaryDirectory() as elsewhere:
        made = Path(elsewhere) / "model"
        convert(model, made)
        files = _read(made)
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


def _remove_stale(run: Run, checkpoint: str, kept: Path, names: set[str]) -> None:
    """Removes folders that are named as other conversions are and hold only files of these names."""
    for other in kept.parent.iterdir():
        if other == kept or other.is_symlink() or not (found := _CONVERSION.fullmatch(other.name)):
            continue
        stale = found[1] == checkpoint or not (run.folder / "checkpoints" / found[1]).is_dir()
        with suppress(OSError):  # it is no folder, or another process removes it too
            if stale and {each.name for each in other.iterdir()} <= names:
                shutil.rmtree(other)
