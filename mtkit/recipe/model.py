"""The recipe's settings of the model and of its attentions."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from mtkit.recipe.settings import NonNegativeInt, PositiveInt, Settings
from mtkit.storage.records import as_python

Layers = Annotated[int, Field(gt=0, le=10_000)]


class WordVectorFiles(Settings):
    """Files of word vectors that initialise embeddings: text of word2vec, GloVe or fastText (.vec or .txt, .gz too)."""

    source: Path | None = None
    """Word vectors of the source language, of the embeddings' width."""
    target: Path | None = None
    """Word vectors of the target language, of the embeddings' width."""


class ModelSettings(Settings):
    """The encoder-decoder: a Transformer, or a recurrent network with attention to the source."""

    architecture: Literal["transformer", "rnn"] = "transformer"
    """The Transformer, or the recurrent encoder-decoder of Bahdanau et al. (rnn). The rnn ignores
    feed_forward, norm, activation, positions and the heads of self-attention."""
    cell: Literal["gru", "lstm"] = "gru"
    """Recurrent unit of the rnn."""
    form: Literal["paper", "textbook"] = "paper"
    """Form of the rnn. paper: a bidirectional encoder, and a maxout layer before the output. textbook: a unidirectional
    encoder, whose last states are the decoder's initial states; the output reads the top layer."""
    d_model: PositiveInt = 128
    """Model width: length of a token vector."""
    heads: PositiveInt = 4
    """Number of attention heads. It must divide d_model."""
    feed_forward: PositiveInt = 512
    """Inner width of the feed-forward sub-layer."""
    encoder_layers: Layers = 2
    """Layers of the encoder."""
    decoder_layers: Layers = 2
    """Layers of the decoder."""
    norm: Literal["pre", "post"] = "pre"
    """Layer norm before each sub-layer and at the end of the stack (pre), or after each residual sum (post)."""
    reversible: bool = False
    """Reversible layers: the backward pass recomputes activations from two residual streams. Activation memory does not
    grow with the number of layers; computation is a third more. Requires norm pre and attentions without carry."""
    activation: Literal["relu", "gelu", "swish", "swiglu"] = "relu"
    """Activation of the feed-forward sub-layer."""
    positions: Literal["sinusoidal", "sinusoidal-halves", "sinusoidal-cat", "learned", "none"] = "sinusoidal"
    """Absolute positions of the embeddings: sines and cosines interleaved (sinusoidal), the same in two halves
    (sinusoidal-halves, as Hugging Face's Marian has them), in two halves with the frequencies of tensor2tensor
    (sinusoidal-cat), or learned. Relative positions are an option of the attention (positions=rotary)."""
    position_width: NonNegativeInt = 0
    """Concatenate positions of this width to embeddings of width d_model - position_width; 0 adds positions of width
    d_model. Concatenated positions need tie none, which is their default."""
    sentence_positions: bool = False
    """Positions count from the last break of a document, not from the beginning of its row. Transformers only."""
    tie: Literal["none", "decoder", "all"] = "all"
    """Share the output projection with the target embedding (decoder), or with both embeddings (all). If it is not set,
    models with separate vocabularies use decoder, and models with concatenated positions none."""
    embeddings: WordVectorFiles | None = None
    """Word vectors with which the embeddings begin, for one side or both. With `tie: all`, one file for both sides."""
    output_bias: bool = False
    """Add a learned bias per piece to the logits."""
    dropout: float = Field(default=0.1, ge=0.0, lt=1.0)
    """Dropout probability in embeddings and at the end of each sub-layer."""
    attention_dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Dropout probability of attention weights."""
    activation_dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Dropout probability inside the feed-forward sub-layer."""
    max_length: PositiveInt = 1024
    """Maximum pieces of source and target, including the end mark."""

    @model_validator(mode="before")
    @classmethod
    def _concatenated_positions_are_not_tied(cls, settings: Any) -> Any:
        if isinstance(settings, Mapping) and settings.get("position_width") and "tie" not in settings:
            return {**settings, "tie": "none"}
        return settings

    @model_validator(mode="after")
    def _positions_leave_channels_for_tokens(self) -> Self:
        width = self.position_width
        if width >= self.d_model:
            raise ValueError(f"model.position_width = {width} must be less than model.d_model = {self.d_model}")
        if self.architecture == "rnn" or self.positions == "none":
            what = "the rnn" if self.architecture == "rnn" else "model.positions = none"
            if width:
                raise ValueError(f"{what} has no positions to concatenate; leave model.position_width out")
            if self.sentence_positions:
                raise ValueError(f"{what} has no absolute positions; leave model.sentence_positions out")
        if width and self.tie != "none":
            raise ValueError(
                f"model.tie = {self.tie} needs embeddings as wide as model.d_model, and model.position_width = {width} "
                "makes them narrower; set model.tie = none"
            )
        return self

    @model_validator(mode="after")
    def _heads_divide_the_width(self) -> Self:
        if self.d_model % self.heads:
            raise ValueError(f"model.heads = {self.heads} does not divide model.d_model = {self.d_model}")
        return self

    @model_validator(mode="after")
    def _reversible_layers_are_pre_norm(self) -> Self:
        if self.reversible and self.norm != "pre":
            raise ValueError("model.reversible = true needs model.norm = pre: a norm after the sum cannot be inverted")
        return self

    @model_validator(mode="after")
    def _the_rnn_is_whole(self) -> Self:
        if self.architecture != "rnn":
            return self
        if self.reversible:
            raise ValueError("model.reversible = true needs model.architecture = transformer")
        for option in ("attention_dropout", "activation_dropout"):
            if getattr(self, option):
                raise ValueError(f"the rnn does not support model.{option}; leave it out, and set model.dropout")
        if self.form == "textbook" and self.encoder_layers != self.decoder_layers:
            raise ValueError(
                "model.form = textbook needs model.encoder_layers = model.decoder_layers: each decoder layer "
                "starts from the state of one encoder layer"
            )
        return self


AttentionNames = str | list[str] | None


class AttentionSettings(Settings):
    """Attention mechanisms per role and layer."""

    name: str | None = None
    """Mechanism in the roles of its paper. The other roles use `full`. Default: `full`, or `additive` in the rnn, which
    has only cross attention. `full:2+band:2`, here and for each role, has several mechanisms in the heads of
    a layer."""
    encoder: AttentionNames = None
    """Encoder self-attention: one name, or a list with one name per layer. Roles that the paper lacks are allowed."""
    decoder: AttentionNames = None
    """Decoder causal self-attention: one name, or a list with one name per layer."""
    cross: AttentionNames = None
    """Cross attention, from decoder to source: one name, or a list with one name per layer."""
    options: Annotated[dict[str, Any], BeforeValidator(as_python)] = Field(default_factory=dict)
    """Options of mechanisms and slots, for all roles or for one: `window_radius: 64`, `decoder.window_radius: 64`,
    `positions: rotary`, `projection: multi-query`; or for one mechanism of several: `band.window_radius: 64`."""
