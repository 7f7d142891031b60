"""JoeyNMT's Transformer of a recipe's size: its training on mtkit's batches, its decoding with a run's weights."""

import logging
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from joeynmt.model import build_model
from joeynmt.search import beam_search, greedy
from torch import Tensor, nn

from mtkit.benchmark.peers.decoding import PeerDecoder, load, renamed, vocabulary_sizes
from mtkit.benchmark.peers.training import PeerTrainer
from mtkit.data.batches import Batch
from mtkit.data.prepared import Prepared
from mtkit.errors import MtkitError
from mtkit.model.network import Network
from mtkit.recipe import DecodingSettings, Recipe
from mtkit.runs import Run
from mtkit.text.tokenizer import BOS, EOS, PAD, UNK

NAMES = {
    "source_embedding.tokens": "src_embed.lut",
    "target_embedding.tokens": "trg_embed.lut",
    "coder.": "coder.layers.",
    "coder_norm.": "coder.layer_norm.",
    "self_residual.norm": "x_layer_norm",
    "cross_residual.norm": "dec_layer_norm",
    "feed_forward_residual.norm": "feed_forward.layer_norm",
    "attention_residual.norm": "layer_norm",
    "self_attention.": "trg_trg_att.",
    "cross_attention.": "src_trg_att.",
    ".attention.": ".src_src_att.",
    "out_proj.": "output_layer.",
    "_proj.": "_layer.",
    "feed_forward.inner": "feed_forward.pwff_layer.0",
    "feed_forward.outer": "feed_forward.pwff_layer.3",
    "output_weight": "decoder.output_layer.weight",
}
"""Parts of the names of weights and JoeyNMT's names for them, replaced in this order."""


class JoeyTrainer(PeerTrainer):
    """Update of JoeyNMT's training: AdamW as PyTorch's default, and JoeyNMT's loss with label smoothing."""

    program, precisions, fused = "joeynmt", ("float32",), None

    def build(self, recipe: Recipe, prepared: Prepared) -> nn.Module:
        """Return the model with random weights. Raises: MtkitError if JoeyNMT has no such model."""
        tokenizers = prepared.tokenizers
        model = untrained(recipe, tokenizers.source.size, tokenizers.target.size)
        model.loss_function = ("crossentropy", recipe.training.label_smoothing)
        return model

    def loss_of(self, batch: Batch) -> Tensor:
        """Return JoeyNMT's loss."""
        names = ("source", "source_valid", "target_in", "target_out", "target_valid")
        source, source_valid, target_in, target_out, target_valid = (
            getattr(batch, name).to(self.device, non_blocking=True) for name in names
        )
        loss: Tensor = self.model(
            return_type="loss",
            src=source,
            src_length=source_valid.sum(1),
            src_mask=source_valid.unsqueeze(1),
            trg_input=target_in,
            trg=target_out,
            trg_mask=target_valid.unsqueeze(1),
        )[0]
        return loss


class JoeyDecoder(PeerDecoder):
    """JoeyNMT's greedy and beam search; they keep no keys and values from step to step."""

    program = "joeynmt"

    def __init__(self, run: Run, model: Network, settings: DecodingSettings, arithmetic: str) -> None:
        """Convert the model. Raises: MtkitError if JoeyNMT has no such model."""
        super().__init__(run, model, settings, arithmetic)
        self._model = convert(run.recipe, model).to(self.device)

    def generate(self, source: Tensor, beam: int, limit: int) -> list[list[int]]:
        """Return the best translations."""
        mask = (source != PAD).unsqueeze(1)
        length = mask.sum((1, 2))
        encoded, hidden, *_ = self._model(return_type="encode", src=source, src_length=length, src_mask=mask)
        inputs = {"src_mask": mask, "max_output_length": limit, "model": self._model}
        found: np.ndarray[Any, Any]
        if beam == 1:
            found, *_ = greedy(encoder_output=encoded, encoder_hidden=hidden, **inputs)
        else:
            alpha = self.settings.length_penalty
            found, *_ = beam_search(
                encoder_output=encoded, encoder_hidden=hidden, beam_size=beam, alpha=alpha, **inputs
            )
        rows: list[list[int]] = found.tolist()
        return rows


@dataclass
class Pieces:
    """A vocabulary as far as JoeyNMT's model reads it, with mtkit's piece numbers."""

    size: int
    pad_index: ClassVar[int] = PAD
    bos_index: ClassVar[int] = BOS
    eos_index: ClassVar[int] = EOS
    unk_index: ClassVar[int] = UNK
    sep_index: ClassVar[None] = None
    specials: ClassVar[tuple[str, ...]] = ()
    lang_tags: ClassVar[tuple[str, ...]] = ()

    def __len__(self) -> int:
        return self.size


def untrained(recipe: Recipe, source_vocabulary: int, target_vocabulary: int) -> Any:
    """Return JoeyNMT's model with the recipe's sizes, dropout and tying. Raises: MtkitError if it has no such model."""
    model = recipe.model
    if model.positions != "sinusoidal" or model.activation == "swiglu":
        raise MtkitError("--beside joeynmt takes models with model.positions = sinusoidal and no swiglu; leave it out")
    side = {
        "type": "transformer",
        "num_heads": model.heads,
        "hidden_size": model.d_model,
        "ff_size": model.feed_forward,
        "dropout": model.dropout,
        "layer_norm": model.norm,
        "activation": model.activation,
        "embeddings": {"embedding_dim": model.d_model, "scale": True, "dropout": model.dropout},
    }
    sizes = {
        "encoder": side | {"num_layers": model.encoder_layers},
        "decoder": side | {"num_layers": model.decoder_layers},
        "tied_embeddings": model.tie == "all",
        "tied_softmax": model.tie != "none",
    }
    logging.getLogger("joeynmt.model").setLevel("WARNING")  # it announces the model
    return build_model(sizes, Pieces(source_vocabulary), Pieces(target_vocabulary))


def convert(recipe: Recipe, model: Network) -> Any:
    """Return the model as one of JoeyNMT, in evaluation mode. Raises: MtkitError if JoeyNMT has no such model."""
    if model.output_bias is not None:
        raise MtkitError("--beside joeynmt takes models without a bias of the output; leave it out")
    built = untrained(recipe, *vocabulary_sizes(model))
    load("joeynmt", built, renamed(model, NAMES), ("pe.pe",))
    return built.eval()
