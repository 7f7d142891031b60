"""Training of Hugging Face's MarianMTModel with the same sizes on the same batches, as its users do it."""

from torch import Tensor, nn
from torch.nn import functional as F
from transformers import MarianConfig, MarianMTModel

from mtkit.benchmark.peers.training import PeerTrainer
from mtkit.data.batches import Batch
from mtkit.data.prepared import Prepared
from mtkit.recipe import Recipe
from mtkit.text.tokenizer import BOS, EOS, PAD

IGNORED = -100
"""Label of padding, as in Hugging Face's collator."""


class HuggingFaceTrainer(PeerTrainer):
    """Update of Hugging Face's Seq2SeqTrainer: AdamW (fused, its default), clipping, autocast, label smoothing.

    The smoothed loss is PyTorch's cross-entropy, which is faster than the trainer's and differs from it by a constant.
    MarianMTModel is post-norm, and its embeddings are tied as in the recipe.
    """

    program, precisions, fused = "huggingface", ("float32", "bfloat16", "float16"), True

    def build(self, recipe: Recipe, prepared: Prepared) -> nn.Module:
        """Return the model with random weights."""
        model: nn.Module = MarianMTModel(marian_config(recipe, prepared))
        return model

    def loss_of(self, batch: Batch) -> Tensor:
        """Return the smoothed cross-entropy, with padding masked by its label."""
        labels = batch.target_out.masked_fill(~batch.target_valid, IGNORED)
        with self.autocast():
            logits = self.model(
                input_ids=batch.source.to(self.device, non_blocking=True),
                attention_mask=batch.source_valid.to(self.device, non_blocking=True).long(),
                decoder_input_ids=batch.target_in.to(self.device, non_blocking=True),
                use_cache=False,
            ).logits
        return F.cross_entropy(
            logits.flatten(0, 1).float(),
            labels.flatten().to(self.device, non_blocking=True),
            ignore_index=IGNORED,
            label_smoothing=self.settings.label_smoothing,
            reduction="sum",
        )


def marian_config(recipe: Recipe, prepared: Prepared) -> MarianConfig:
    """Return the configuration with the recipe's sizes, vocabularies, dropout and tying."""
    model, tokenizers = recipe.model, prepared.tokenizers
    return MarianConfig(
        vocab_size=tokenizers.source.size,
        decoder_vocab_size=tokenizers.target.size,
        share_encoder_decoder_embeddings=model.tie == "all",
        tie_word_embeddings=model.tie != "none",
        d_model=model.d_model,
        encoder_layers=model.encoder_layers,
        decoder_layers=model.decoder_layers,
        encoder_attention_heads=model.heads,
        decoder_attention_heads=model.heads,
        encoder_ffn_dim=model.feed_forward,
        decoder_ffn_dim=model.feed_forward,
        activation_function={"swiglu": "silu"}.get(model.activation, model.activation),
        dropout=model.dropout,
        attention_dropout=model.attention_dropout,
        activation_dropout=model.activation_dropout,
        max_position_embeddings=model.max_length,
        scale_embedding=True,
        init_std=model.d_model**-0.5,
        pad_token_id=PAD,
        eos_token_id=EOS,
        bos_token_id=BOS,
        decoder_start_token_id=BOS,
        forced_eos_token_id=None,
    )
