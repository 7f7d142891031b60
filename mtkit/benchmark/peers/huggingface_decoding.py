"""Decoding with Hugging Face's generate(): the run's weights in the class that computes the same.

Pre-norm models use Pegasus's architecture, post-norm models Marian's; mtkit's position tables replace theirs.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, MarianConfig, MarianMTModel, PegasusConfig, PegasusForConditionalGeneration

from mtkit.benchmark.decoding import Decoded
from mtkit.decoding.engines.plain import Weights, check_plain
from mtkit.decoding.lines.source import TrainedOn
from mtkit.decoding.translate import padded
from mtkit.errors import MtkitError
from mtkit.model.network import Network
from mtkit.recipe import DecodingSettings, ModelSettings
from mtkit.runs import Run
from mtkit.text.tokenizer import BOS, EOS, PAD

ARITHMETICS = {"cpu": ("float32",), "cuda": ("float32", "bfloat16")}
"""Measured arithmetics by device."""

SIZES = (32, 64, 128)
"""Segments per batch; the fastest is chosen."""


class HuggingFaceDecoder:
    """Hugging Face's generate() with its cache, mtkit's sentencepiece model, and batches of similar lengths."""

    program = "huggingface"
    shortlist = 0
    sizes: Sequence[int] = SIZES

    def __init__(self, run: Run, model: Network, settings: DecodingSettings, arithmetic: str) -> None:
        """Convert the model. Raises: MtkitError if Hugging Face has no such model."""
        check_plain(run.recipe, "--beside huggingface")
        if run.recipe.model.tie != "all" or run.recipe.model.activation == "swiglu":
            raise MtkitError("--beside huggingface takes models with model.tie = all and no swiglu; leave it out")
        self.arithmetic = arithmetic
        self._tokenizers, self._settings = run.tokenizers, settings
        self._trained_on = TrainedOn.of([run])
        self._longest = (model.longest_source, model.longest_target)
        self._device = model.output_weight.device
        self._model: Any = convert(run.recipe.model, model).to(self._device, getattr(torch, arithmetic)).eval()

    @torch.no_grad()
    def translate(self, lines: Sequence[str], beam: int, size: int) -> list[Decoded]:
        """Translate the longest segments first; a batch has the highest piece limit of its segments."""
        encoded = [pieces[: self._longest[0] - 1] for pieces in self._tokenizers.source.encode_lines(lines)]
        order = sorted(range(len(lines)), key=lambda line: -len(encoded[line]))
        decoded: dict[int, Decoded] = {}
        for first in range(0, len(order), size):
            chosen = order[first : first + size]
            sources = [[*encoded[line], EOS] for line in chosen]
            most = self._settings.max_pieces
            limit = max(self._trained_on.limit(pieces, None, self._longest[1], most) for pieces in sources)
            generated = self._generate(padded(sources, self._device), beam, limit).tolist()
            for line, row in zip(chosen, generated, strict=True):
                pieces = row[1 : row.index(EOS)] if EOS in row else row[1:]
                decoded[line] = Decoded(self._tokenizers.target.decode(pieces), len(pieces) + 1)
        return [decoded[line] for line in range(len(lines))]

    def _generate(self, source: Tensor, beam: int, limit: int) -> Tensor:
        how = GenerationConfig(
            num_beams=beam,
            do_sample=False,
            length_penalty=self._settings.length_penalty,
            max_new_tokens=limit,
            decoder_start_token_id=BOS,
            bos_token_id=BOS,
            eos_token_id=EOS,
            pad_token_id=PAD,
        )
        generated: Tensor = self._model.generate(source, attention_mask=(source != PAD).long(), generation_config=how)
        return generated


def convert(settings: ModelSettings, model: Network) -> nn.Module:
    """Return the model as a Pegasus or Marian model, in evaluation mode, in float32 on the CPU."""
    weights = Weights(model)
    configuration: dict[str, Any] = {
        "vocab_size": len(weights.output),
        "d_model": settings.d_model,
        "encoder_layers": settings.encoder_layers,
        "decoder_layers": settings.decoder_layers,
        "encoder_attention_heads": settings.heads,
        "decoder_attention_heads": settings.heads,
        "encoder_ffn_dim": settings.feed_forward,
        "decoder_ffn_dim": settings.feed_forward,
        "activation_function": settings.activation,
        "max_position_embeddings": settings.max_length,
        "scale_embedding": True,
        "pad_token_id": PAD,
        "eos_token_id": EOS,
        "bos_token_id": BOS,
        "decoder_start_token_id": BOS,
        "forced_eos_token_id": None,
    }
    built: Any
    if settings.norm == "pre":
        built = PegasusForConditionalGeneration(PegasusConfig(**configuration))
    else:
        built = MarianMTModel(MarianConfig(**configuration))
    with torch.no_grad():
        built.final_logits_bias.zero_()
        if weights.output_bias is not None:
            built.final_logits_bias.copy_(weights.output_bias)
        for side in ("encoder", "decoder"):
            its = getattr(built.model, side)
            its.embed_tokens.weight.copy_(weights.tokens(side))
            its.embed_positions.weight.copy_(weights.positions(side))
            if settings.norm == "pre":
                _copy(its.layer_norm, weights.module(f"{side}_norm"))
            for number, layer in enumerate(its.layers):
                _layer(layer, weights, f"{side}.{number}", side)
        built.lm_head.weight.copy_(weights.output)
    return built.eval()


def _layer(layer: Any, weights: Weights, name: str, side: str) -> None:
    prefix = "attention" if side == "encoder" else "self_attention"
    _attention(layer.self_attn, layer.self_attn_layer_norm, weights, f"{name}.{prefix}")
    if side == "decoder":
        _attention(layer.encoder_attn, layer.encoder_attn_layer_norm, weights, f"{name}.cross_attention")
    _copy(layer.fc1, weights.module(f"{name}.feed_forward.inner"))
    _copy(layer.fc2, weights.module(f"{name}.feed_forward.outer"))
    _copy(layer.final_layer_norm, weights.module(f"{name}.feed_forward_residual.norm"))


def _attention(attention: Any, norm: nn.LayerNorm, weights: Weights, name: str) -> None:
    for its, own in zip(("q_proj", "k_proj", "v_proj", "out_proj"), weights.projections(name), strict=True):
        _copy(getattr(attention, its), own)
    _copy(norm, weights.norm_around(name))


def _copy(its: Any, own: Any) -> None:
    its.weight.copy_(own.weight)
    its.bias.copy_(own.bias)
