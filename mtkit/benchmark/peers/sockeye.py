"""Sockeye's Transformer of a recipe's size: its training on mtkit's batches, its decoding with a run's weights."""

import warnings
from typing import Any

import numpy as np
import torch
from sockeye import constants
from sockeye.beam_search import CandidateScorer, get_search_algorithm
from sockeye.data_io import DataConfig
from sockeye.encoder import EmbeddingConfig
from sockeye.inference import Translator
from sockeye.layers import MultiHeadAttentionBase
from sockeye.loss import CrossEntropyLoss
from sockeye.model import ModelConfig, SockeyeModel, initialize_parameters
from sockeye.training import ModelWithLoss
from sockeye.transformer import TransformerConfig
from torch import Tensor, nn

from mtkit.benchmark.peers.decoding import PeerDecoder, load, renamed, vocabulary_sizes
from mtkit.benchmark.peers.training import PeerTrainer
from mtkit.benchmark.training import COUNTED
from mtkit.data.batches import Batch
from mtkit.data.prepared import Prepared
from mtkit.decoding.engines.plain import Weights
from mtkit.errors import MtkitError
from mtkit.model.network import Network
from mtkit.recipe import DecodingSettings, Recipe
from mtkit.runs import Run
from mtkit.text.tokenizer import PAD
from mtkit.training.data_loader import UpdateBatches

NAMES = {
    "source_embedding.tokens": "embedding_source.embedding",
    "target_embedding.tokens": "embedding_target.embedding",
    "coder.": "coder.layers.",
    "coder_norm.": "coder.final_process.layer_norm.",
    "cross_attention.": "enc_attention.",
    "self_attention.": "autoregr_layer.",
    ".attention.": ".self_attention.",
    "attention_residual.norm": "{}_self_attention.layer_norm",
    "self_residual.norm": "{}_autoregr_layer.layer_norm",
    "cross_residual.norm": "{}_enc_attention.layer_norm",
    "feed_forward_residual.norm": "{}_ff.layer_norm",
    "feed_forward.inner": "ff.ff1",
    "feed_forward.outer": "ff.ff2",
    "out_proj": "ff_out",
    "output_weight": "output_layer.weight",
    "output_bias": "output_layer.bias",
}
"""Parts of the names of weights and Sockeye's names for them, replaced in this order; {} is `model.norm`."""


class SockeyeTrainer(PeerTrainer):
    """Update of Sockeye's training: its loss, and its model compiled by tracing; its optimiser is Adam, here AdamW.

    Sockeye's attention has no biases, and its trainer computes in float16 on GPUs only.
    """

    program, precisions, fused = "sockeye", ("float32",), None

    def build(self, recipe: Recipe, prepared: Prepared) -> Any:
        """Return the model with random weights. Raises: MtkitError if Sockeye has no such model."""
        tokenizers = prepared.tokenizers
        model = untrained(recipe, tokenizers.source.size, tokenizers.target.size)
        self._smoothed = CrossEntropyLoss(label_smoothing=recipe.training.label_smoothing)
        self._computed = ModelWithLoss(model, [self._smoothed])
        return model.apply(initialize_parameters)

    def update(self, work: UpdateBatches, number: int) -> None:
        """Compile the model after the first updates: their memory is measured, which compiled code does not allow."""
        if number == COUNTED + 1:
            with warnings.catch_warnings(action="ignore"):  # of the tracer
                traced = torch.jit.trace(self.model, self._inputs(work.batches[0]), strict=False, check_trace=False)
            self._computed = ModelWithLoss(traced, [self._smoothed])
        super().update(work, number)

    def loss_of(self, batch: Batch) -> Tensor:
        """Return Sockeye's mean loss times the number of target pieces."""
        labels = {constants.TARGET_LABEL_NAME: batch.target_out.to(self.device, non_blocking=True)}
        mean: Tensor = self._computed(*self._inputs(batch), labels)[0]
        return mean * batch.target_tokens

    def _inputs(self, batch: Batch) -> tuple[Tensor, ...]:
        """Return source, its lengths, target and its lengths."""
        tensors = (batch.source, lengths(batch.source_valid), batch.target_in, lengths(batch.target_valid))
        source, source_length, target, target_length = (each.to(self.device, non_blocking=True) for each in tensors)
        return source.unsqueeze(2), source_length, target.unsqueeze(2), target_length


class SockeyeDecoder(PeerDecoder):
    """Sockeye's beam search, compiled by tracing; it decodes greedily by a beam of 1."""

    program = "sockeye"

    def __init__(self, run: Run, model: Network, settings: DecodingSettings, arithmetic: str) -> None:
        """Convert the model. Raises: MtkitError if Sockeye has no such model."""
        super().__init__(run, model, settings, arithmetic)
        self._model = convert(run.recipe, model).to(self.device)
        self._searches: dict[int, Any] = {}  # a search is compiled at its first batch

    def generate(self, source: Tensor, beam: int, limit: int) -> list[list[int]]:
        """Return the best translations."""
        if beam not in self._searches:
            self._searches[beam] = get_search_algorithm(
                models=[self._model],
                beam_size=beam,
                device=self.device,
                output_scores=False,
                scorer=CandidateScorer(self.settings.length_penalty),
                prevent_unk=True,
            )
        limits = torch.full((len(source),), limit, dtype=torch.int32, device=self.device)
        with warnings.catch_warnings(action="ignore"):  # of the tracer
            result = self._searches[beam](source.unsqueeze(2), lengths(source != PAD), None, limits)
        best = np.arange(0, len(source) * beam, beam)
        rows = Translator._get_best_word_indices_for_kth_hypotheses(best, result.best_hyp_indices.cpu().numpy())
        pieces = result.best_word_indices.cpu().numpy()[rows, 0, np.arange(rows.shape[1])]
        found: list[list[int]] = pieces.tolist()
        return found


def lengths(valid: Tensor) -> Tensor:
    """Return the number of pieces of each segment, and 0 special ones before them (B, 2)."""
    counts = valid.sum(1)
    return torch.stack([counts, torch.zeros_like(counts)], 1)


def untrained(recipe: Recipe, source_vocabulary: int, target_vocabulary: int, *, decodes: bool = False) -> Any:
    """Return Sockeye's model of the recipe's sizes and tying, which trains or `decodes`.

    Raises: MtkitError if it has no such model.
    """
    model = recipe.model
    if model.positions in ("learned", "none") or model.activation == "swiglu":
        raise MtkitError("--beside sockeye takes models with sinusoidal positions and no swiglu; leave it out")
    stack = {
        "model_size": model.d_model,
        "attention_heads": model.heads,
        "feed_forward_num_hidden": model.feed_forward,
        "act_type": {"swish": "swish1"}.get(model.activation, model.activation),
        "dropout_attention": model.attention_dropout,
        "dropout_act": model.activation_dropout,
        "dropout_prepost": model.dropout,
        "positional_embedding_type": "fixed",
        "preprocess_sequence": "n" if model.norm == "pre" else "",
        "postprocess_sequence": "dr" if model.norm == "pre" else "drn",
        "max_seq_len_source": model.max_length,
        "max_seq_len_target": model.max_length,
        "depth_key_value": model.d_model,
    }
    sizes = ModelConfig(
        config_data=DataConfig(None, model.max_length, model.max_length, 1, 1),
        vocab_source_size=source_vocabulary,
        vocab_target_size=target_vocabulary,
        config_embed_source=EmbeddingConfig(source_vocabulary, model.d_model, 0.0),
        config_embed_target=EmbeddingConfig(target_vocabulary, model.d_model, 0.0),
        config_encoder=TransformerConfig(num_layers=model.encoder_layers, **stack),
        config_decoder=TransformerConfig(num_layers=model.decoder_layers, **stack),
        weight_tying_type={"all": "src_trg_softmax", "decoder": "trg_softmax", "none": "none"}[model.tie],
    )
    if decodes:
        sizes.disable_dropout()
    return SockeyeModel(sizes, inference_only=decodes)


def convert(recipe: Recipe, model: Network) -> Any:
    """Return the model as one of Sockeye that decodes; biases are added to its attention, which has none.

    Raises: MtkitError if Sockeye has no such model.
    """
    built = untrained(recipe, *vocabulary_sizes(model), decodes=True)
    weights = renamed(model, {part: name.format(recipe.model.norm) for part, name in NAMES.items()})
    weights.setdefault("output_layer.bias", torch.zeros(len(model.output_weight)))
    weights |= {f"{stack}.pos_embedding.weight": Weights(model).positions(stack) for stack in ("encoder", "decoder")}
    for name, module in built.named_modules():
        if isinstance(module, MultiHeadAttentionBase):
            projections = [[weights.pop(f"{name}.{role}_proj.{kind}") for kind in ("weight", "bias")] for role in "qkv"]
            query, *pair = (torch.cat([weight, bias[:, None]], 1) for weight, bias in projections)
            # the rows of a head are its keys, then its values
            both = torch.stack([part.unflatten(0, (module.heads, -1)) for part in pair], 1).flatten(0, 2)
            parts = {"ff_q": query, "ff_kv": both} if hasattr(module, "ff_q") else {"ff_in": torch.cat([query, both])}
            for part, rows in parts.items():
                weights |= {f"{name}.{part}.weight": rows[:, :-1], f"{name}.{part}.bias": rows[:, -1]}
                getattr(module, part).bias = nn.Parameter(rows.new_empty(len(rows)))
            module.ff_out.bias = nn.Parameter(query.new_empty(len(query)))
            module.kv_interleaved = True
    load("sockeye", built, weights, ())
    return built.eval()
