"""Training of Hugging Face's MarianMTModel with the same sizes on the same batches, as its users do it."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import MarianConfig, MarianMTModel

from mtkit.data.batches import Batch
from mtkit.data.prepared import Prepared
from mtkit.errors import MtkitError, shown
from mtkit.recipe import Recipe
from mtkit.text.tokenizer import BOS, EOS, PAD
from mtkit.training.data_loader import UpdateBatches
from mtkit.training.optimizer import build_schedule
from mtkit.training.world import World

PRECISIONS = ("float32", "bfloat16", "float16")
"""Precisions of Hugging Face's trainer: float32, or autocast to the others."""

IGNORED = -100
"""Label of padding, as in Hugging Face's collator."""


class HuggingFaceTrainer:
    """Update of Hugging Face's Seq2SeqTrainer: AdamW (fused, its default), clipping, autocast, label smoothing.

    The smoothed loss is PyTorch's cross-entropy, which is faster than the trainer's and differs from it by a constant.
    MarianMTModel is post-norm, and its embeddings are tied as in the recipe.
    """

    program, attention = "huggingface", "full"

    def __init__(self, recipe: Recipe, prepared: Prepared, world: World, precision: str) -> None:
        """Build the model. Raises: MtkitError under torchrun, and for an unsupported precision or loss."""
        if world.size > 1:
            raise MtkitError("--beside measures one process; leave it out under torchrun")
        if recipe.training.r_drop:
            raise MtkitError("huggingface has no R-Drop: leave out --beside, or set training.r_drop: 0")
        if precision not in PRECISIONS:
            raise MtkitError(f"huggingface has no precision {shown(precision)}; it has {', '.join(PRECISIONS)}")
        self.precision = precision
        settings, torch_state = recipe.training, torch.random.get_rng_state()
        torch.manual_seed(recipe.seed)
        self.model: nn.Module = MarianMTModel(marian_config(recipe, prepared)).to(world.device).train()
        torch.random.set_rng_state(torch_state)
        self._parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self._optimizer = torch.optim.AdamW(
            self._parameters,
            lr=1.0,
            betas=settings.betas,
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            fused=True,
        )
        self._schedule = build_schedule(settings, recipe.model.d_model)
        self._scaler = torch.amp.GradScaler(world.device.type, enabled=precision == "float16")
        self._settings, self._device = settings, world.device
        self._loss = torch.zeros((), device=world.device)

    def arithmetic(self) -> AbstractContextManager[object]:
        """Context that changes nothing: Hugging Face trains with the process's settings."""
        return nullcontext()

    def update(self, work: UpdateBatches, number: int) -> None:
        """Run forward and backward of each batch, clip, and step."""
        for batch in work.batches:
            loss = self._loss_of(batch)
            self._scaler.scale(loss / work.tokens).backward()
            self._loss += loss.detach()
        self._scaler.unscale_(self._optimizer)
        if self._settings.clip_norm > 0:
            nn.utils.clip_grad_norm_(self._parameters, self._settings.clip_norm)
        for group in self._optimizer.param_groups:
            group["lr"] = self._schedule(number, 0.0)
        self._scaler.step(self._optimizer)
        self._scaler.update()
        self._optimizer.zero_grad()

    def read_loss(self) -> float:
        """Return the loss from the running sum of `update`."""
        loss = float(self._loss)
        self._loss.zero_()
        return loss

    def _loss_of(self, batch: Batch) -> Tensor:
        labels = batch.target_out.masked_fill(~batch.target_valid, IGNORED)
        reduced = self.precision != "float32"
        dtype = getattr(torch, self.precision) if reduced else None
        with torch.autocast(self._device.type, dtype, enabled=reduced):
            logits = self.model(
                input_ids=batch.source.to(self._device, non_blocking=True),
                attention_mask=batch.source_valid.to(self._device, non_blocking=True).long(),
                decoder_input_ids=batch.target_in.to(self._device, non_blocking=True),
                use_cache=False,
            ).logits
        return F.cross_entropy(
            logits.flatten(0, 1).float(),
            labels.flatten().to(self._device, non_blocking=True),
            ignore_index=IGNORED,
            label_smoothing=self._settings.label_smoothing,
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
