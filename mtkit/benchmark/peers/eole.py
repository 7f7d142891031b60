"""Eole's Transformer of a recipe's size: its training on mtkit's batches, its decoding with a run's weights."""

import logging
import warnings
from typing import Any

import torch
from pyonmttok import Vocab
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

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it warns of CUDA operations that are not compiled
    from eole.config.models import TransformerModelConfig
    from eole.config.run import PredictConfig
    from eole.config.training import TrainingConfig
    from eole.models.model import EncoderDecoderModel
    from eole.predict import GNMTGlobalScorer, Translator
    from eole.utils.loss import LossCompute

NAMES = {
    "source_embedding.tokens": "src_emb.embeddings",
    "target_embedding.tokens": "tgt_emb.embeddings",
    "output_weight": "generator.weight",
    "output_bias": "generator.bias",
    "coder.": "coder.transformer_layers.",
    "coder_norm.": "coder.layer_norm.",
    "self_residual.norm": "input_layernorm",
    "attention_residual.norm": "input_layernorm",
    "cross_residual.norm": "precontext_layernorm",
    "feed_forward_residual.norm": "post_attention_layernorm",
    "cross_attention.": "context_attn.",
    "self_attention.": "self_attn.",
    ".attention.": ".self_attn.",
    "q_proj": "linear_query",
    "k_proj": "linear_keys",
    "v_proj": "linear_values",
    "out_proj": "final_linear",
    "feed_forward.inner": "mlp.gate_up_proj",
    "feed_forward.outer": "mlp.down_proj",
}
"""Parts of the names of weights and Eole's names for them, replaced in this order."""

PREDICTION = PredictConfig(model_path="no/model", src="", ban_unk_token=True, max_length_ratio=0)
"""Eole's defaults, with mtkit's limits of lengths; it looks for no model in a folder that does not exist."""


class EoleTrainer(PeerTrainer):
    """Update of Eole's training: AdamW as PyTorch's default, Eole's loss and statistics, bfloat16 by autocast.

    Its feed-forward layers also drop out inner activations, at the rate of the other dropout.
    """

    program, precisions, fused = "eole", ("float32", "bfloat16"), None

    def build(self, recipe: Recipe, prepared: Prepared) -> Any:
        """Return the model with random weights. Raises: MtkitError if Eole has no such model."""
        settings = TrainingConfig(
            dropout=[recipe.model.dropout],
            attention_dropout=[recipe.model.attention_dropout],
            param_init_method="xavier_uniform",
        )
        pieces = vocabularies(prepared.tokenizers.source.size, prepared.tokenizers.target.size)
        model: Any = EncoderDecoderModel.build(configuration(recipe), pieces, settings)
        model.init_weights(settings)
        smoothed = nn.CrossEntropyLoss(
            ignore_index=PAD, reduction="sum", label_smoothing=recipe.training.label_smoothing
        )
        self._compute_loss = LossCompute(smoothed, model.generator, vocabs=pieces)
        return model

    def loss_of(self, batch: Batch) -> Tensor:
        """Return Eole's loss."""
        source = batch.source.to(self.device, non_blocking=True)
        target = torch.cat([batch.target_in[:, :1], batch.target_out], 1).to(self.device, non_blocking=True)
        lengths = batch.source_valid.sum(1).to(self.device, non_blocking=True)
        whole = {"src": source, "tgt": target, "srclen": lengths, "cid": [], "cid_line_number": []}
        with self.autocast():
            output, attention, _ = self.model(source, target, lengths)
            loss: Tensor = self._compute_loss(whole, output, attention)[0]
        return loss


class EoleDecoder(PeerDecoder):
    """Eole's Translator, whose beam search keeps keys and values; it decodes greedily by a beam of 1."""

    program = "eole"

    def __init__(self, run: Run, model: Network, settings: DecodingSettings, arithmetic: str) -> None:
        """Convert the model. Raises: MtkitError if Eole has no such model."""
        super().__init__(run, model, settings, arithmetic)
        self._translator = Translator(
            convert(run.recipe, model).to(self.device),
            vocabularies(*vocabulary_sizes(model)),
            PREDICTION,
            configuration(run.recipe),
            global_scorer=GNMTGlobalScorer(settings.length_penalty, 0.0, "avg", "none"),
            logger=logging.getLogger("eole"),
        )

    def generate(self, source: Tensor, beam: int, limit: int) -> list[list[int]]:
        """Return the best translations."""
        self._translator.update_settings(beam_size=beam, max_length=limit)
        batch = {"src": source, "srclen": (source != PAD).sum(1)}
        predictions = self._translator.predict_batch(batch, attn_debug=False)["predictions"]
        return [best.tolist() for best, *_ in predictions]


def vocabularies(source: int, target: int) -> dict[str, Any]:
    """Return vocabularies whose tokens are mtkit's piece numbers."""
    sides = {"src": Vocab(list(map(str, range(source)))), "tgt": Vocab(list(map(str, range(target))))}
    special = {"pad_token": str(PAD), "unk_token": str(UNK), "bos_token": str(BOS), "eos_token": str(EOS)}
    return {**sides, "specials": special, "decoder_start_token": str(BOS)}


def configuration(recipe: Recipe) -> Any:
    """Return a model's sizes and tying. Raises: MtkitError if Eole has no such model."""
    model = recipe.model
    if model.norm != "pre" or model.positions != "sinusoidal" or model.activation not in ("relu", "gelu"):
        needed = "norm = pre, positions = sinusoidal and activation = relu or gelu"
        raise MtkitError(f"--beside eole takes models with {needed}; leave it out")
    return TransformerModelConfig(
        encoder={"layers": model.encoder_layers},
        decoder={"layers": model.decoder_layers},
        embeddings={"word_vec_size": model.d_model},
        hidden_size=model.d_model,
        heads=model.heads,
        transformer_ff=model.feed_forward,
        mlp_activation_fn=model.activation,
        add_qkvbias=True,
        add_final_linear_bias=True,
        add_ffnbias=True,
        share_embeddings=model.tie == "all",
        share_decoder_embeddings=model.tie != "none",
        generator_bias=model.output_bias,
    )


def convert(recipe: Recipe, model: Network) -> Any:
    """Return the model as one of Eole, in evaluation mode. Raises: MtkitError if Eole has no such model."""
    built = EncoderDecoderModel.build(configuration(recipe), vocabularies(*vocabulary_sizes(model)), PREDICTION)
    load("eole", built, renamed(model, NAMES), ("pe.pe", "layer_scalar"))
    return built.eval()
