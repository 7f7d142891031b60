"""Decoding with CTranslate2: the run's model, its very weights, in CTranslate2's format."""

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import ctranslate2
import torch
from ctranslate2.specs import TransformerSpec
from ctranslate2.specs.common_spec import Activation
from torch import Tensor, nn

from mtkit.benchmark.decoding import Decoded
from mtkit.benchmark.peers.weights import Weights, check_plain
from mtkit.data.tokenizer import EOS, PAD
from mtkit.decoding.lexicon import Lexicon
from mtkit.decoding.lines.limits import TrainedOn
from mtkit.model.network import Network
from mtkit.recipe import DecodingSettings
from mtkit.runs import Run

ARITHMETICS = {"cpu": ("float32", "int8"), "cuda": ("float16", "int8_float16")}
"""What it is measured in, by device."""

SIZES = (16, 32, 64, 128)
"""Segments a batch, among which the fastest is chosen."""

ACTIVATIONS = {"relu": Activation.RELU, "gelu": Activation.GELU, "swiglu": Activation.SWISH}

SPECIALS = ["<blank>", "<unk>", "<s>", "</s>"]


class CTranslate2:
    """Sentencepiece as mtkit's, pieces by number as CTranslate2's tokens, and its own search and batching."""

    program = "ctranslate2"
    sizes: Sequence[int] = SIZES

    def __init__(
        self,
        run: Run,
        model: Network,
        settings: DecodingSettings,
        arithmetic: str,
        lexicon: Lexicon | None = None,
    ) -> None:
        """With a lexicon, its vocabulary map holds the same.

        Raises: MtkitError where CTranslate2 has no such model.
        """
        check_plain(run.recipe, "ctranslate2")
        self.arithmetic = arithmetic
        self.shortlist = 0 if lexicon is None else lexicon.each
        self._tokenizers, self._settings = run.tokenizers, settings
        self._trained_on = TrainedOn.of([run])
        self._longest = (model.longest_source, model.longest_target)
        with TemporaryDirectory() as folder:
            convert(run, model, Path(folder) / "model")
            if lexicon is not None:
                write_map(lexicon, Path(folder) / "model" / "vmap.txt")
            device = model.output_weight.device
            threads = torch.get_num_threads()
            self._translator: Any = ctranslate2.Translator(
                str(Path(folder) / "model"),
                device=device.type,
                compute_type=arithmetic,
                # a batch for each core: the faster way for it too
                inter_threads=threads if device.type == "cpu" else 1,
                intra_threads=1,
            )
            torch.set_num_threads(threads)  # the line above leaves this thread with one

    def translate(self, lines: Sequence[str], beam: int, size: int) -> list[Decoded]:
        """Its batches are sorted by length, as it does by itself."""
        encoded = [pieces[: self._longest[0] - 1] for pieces in self._tokenizers.source.encode_lines(lines)]
        sources = [[*map(str, pieces), SPECIALS[EOS]] for pieces in encoded]
        most = self._settings.max_pieces
        limit = max(self._trained_on.limit([*pieces, EOS], None, self._longest[1], most) for pieces in encoded)
        found = self._translator.translate_batch(
            sources,
            beam_size=beam,
            max_batch_size=size,
            length_penalty=self._settings.length_penalty,
            max_decoding_length=limit,
            disable_unk=True,
            use_vmap=self.shortlist > 0,
        )
        pieces = [list(map(int, each.hypotheses[0])) for each in found]
        return [Decoded(self._tokenizers.target.decode(each), len(each) + 1) for each in pieces]


def convert(run: Run, model: Network, folder: Path) -> None:
    """Write the model as CTranslate2's Transformer: positions as explicit encodings, pieces named by their numbers."""
    settings = run.recipe.model
    spec: Any = TransformerSpec.from_config(
        (settings.encoder_layers, settings.decoder_layers),
        settings.heads,
        pre_norm=settings.norm == "pre",
        activation=ACTIVATIONS[settings.activation],
        ffn_glu=settings.activation == "swiglu",
    )
    weights = Weights(model)
    _linear(spec.decoder.projection, weights.output, None)
    for side, its in (("encoder", spec.encoder), ("decoder", spec.decoder)):
        embeddings = its.embeddings[0] if side == "encoder" else its.embeddings
        embeddings.weight = weights.tokens(side)
        its.position_encodings.encodings = weights.positions(side)
        if settings.norm == "pre":
            _norm(its.layer_norm, weights.module(f"{side}_norm"))
        for number, layer in enumerate(its.layer):
            _layer(layer, weights, f"{side}.{number}", side)
    vocabularies = [_vocabulary(each.size) for each in (run.tokenizers.source, run.tokenizers.target)]
    spec.register_source_vocabulary(vocabularies[0])
    spec.register_target_vocabulary(vocabularies[1])
    spec.config.unk_token, spec.config.bos_token, spec.config.eos_token = SPECIALS[1:]
    spec.config.decoder_start_token = spec.config.bos_token
    spec.config.add_source_bos = spec.config.add_source_eos = False
    # the layers' epsilon is CTranslate2's default, 1e-5, as PyTorch's
    spec.validate()
    spec.optimize(quantization=None)
    folder.mkdir()
    spec.save(str(folder))


def write_map(lexicon: Lexicon, path: Path) -> None:
    """A line for each source piece, a tab between it and what translates it; that of no piece holds for all."""
    lines = ["\t" + " ".join(_token(piece) for piece in lexicon.frequent.tolist())]
    for source, targets in enumerate(lexicon.translations.tolist()):
        lines.append(f"{_token(source)}\t" + " ".join(_token(piece) for piece in targets if piece != PAD))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _layer(layer: Any, weights: Weights, name: str, side: str) -> None:
    own = "attention" if side == "encoder" else "self_attention"
    q, k, v, out = weights.projections(f"{name}.{own}")
    _linear(layer.self_attention.linear[0], *_joined(q, k, v))
    _linear(layer.self_attention.linear[1], out.weight, out.bias)
    _norm(layer.self_attention.layer_norm, weights.norm_around(f"{name}.{own}"))
    if side == "decoder":
        q, k, v, out = weights.projections(f"{name}.cross_attention")
        _linear(layer.attention.linear[0], q.weight, q.bias)
        _linear(layer.attention.linear[1], *_joined(k, v))
        _linear(layer.attention.linear[2], out.weight, out.bias)
        _norm(layer.attention.layer_norm, weights.norm_around(f"{name}.cross_attention"))
    feed_forward = weights.module(f"{name}.feed_forward")
    # of a gated layer CTranslate2 activates the first map, which mtkit calls the gate
    first = feed_forward.inner if feed_forward.gate is None else feed_forward.gate
    _linear(layer.ffn.linear_0, first.weight, first.bias)
    if feed_forward.gate is not None:
        _linear(layer.ffn.linear_0_noact, feed_forward.inner.weight, feed_forward.inner.bias)
    _linear(layer.ffn.linear_1, feed_forward.outer.weight, feed_forward.outer.bias)
    _norm(layer.ffn.layer_norm, weights.module(f"{name}.feed_forward_residual.norm"))


def _linear(spec: Any, weight: Tensor, bias: Tensor | None) -> None:
    spec.weight = weight.detach().float().cpu().numpy()
    if bias is not None:
        spec.bias = bias.detach().float().cpu().numpy()


def _joined(*linears: nn.Linear) -> tuple[Tensor, Tensor]:
    return torch.cat([each.weight for each in linears]), torch.cat([each.bias for each in linears])


def _norm(spec: Any, norm: nn.LayerNorm) -> None:
    spec.gamma, spec.beta = norm.weight.detach().float().cpu().numpy(), norm.bias.detach().float().cpu().numpy()


def _vocabulary(size: int) -> list[str]:
    return [_token(piece) for piece in range(size)]


def _token(piece: int) -> str:
    return SPECIALS[piece] if piece < len(SPECIALS) else str(piece)
