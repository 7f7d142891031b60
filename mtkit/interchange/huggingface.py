"""Export of a run as Hugging Face's Marian model (model.norm post) or Pegasus model (model.norm pre).

config.json, generation_config.json     the model and its search
model.safetensors                       the weights, including mtkit's tables of positions, which both classes load
source.spm, target.spm, vocab.json,     the tokenizer, of the class MarianTokenizer; target_vocab.json for separate
target_vocab.json, tokenizer_config.json  vocabularies

Pieces keep their ids; special pieces get Marian's spelling.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from mtkit.decoding.engines.plain import GROUPED, Weights, for_each_head, unlike_plain
from mtkit.errors import MtkitError
from mtkit.interchange.marian_weights import BIAS, OUTPUT, POSITIONS, SHARED, TABLES, layer_names
from mtkit.model.network import Network
from mtkit.recipe import Recipe
from mtkit.runs import Run
from mtkit.storage.files import write_json
from mtkit.text.characters import Folding
from mtkit.text.languages import languages_of
from mtkit.text.model_file import ModelFile, charsmap_of
from mtkit.text.tokenizer import BOS, BREAK, EOS, PAD, SPECIALS, TAGS, UNK, Tokenizer

HUGGINGFACE = {PAD: "<pad>", UNK: "<unk>", BOS: "<s>", EOS: "</s>"}
"""Spelling of the special pieces in Hugging Face transformers."""

SPECIAL_IDS = {"pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS, "decoder_start_token_id": BOS}
"""Ids of the special pieces in Hugging Face's configurations."""

CTRANSLATE2 = {PAD: "<blank>", UNK: "<unk>", BOS: "<s>", EOS: "</s>"}
"""Spelling of the special pieces in CTranslate2."""


def spelled(tokenizer: Tokenizer, marks: dict[int, str]) -> list[str]:
    """Return a vocabulary's pieces (V), special ones spelt as in `marks`; for Hugging Face, language tags as >>de<<.

    Raises: MtkitError if two pieces would have the same spelling.
    """
    pieces = [marks.get(number, tokenizer.piece(number)) for number in range(tokenizer.size)]
    if marks is HUGGINGFACE:
        opening, closing = TAGS[0].split("{}")
        pieces = [
            TAGS[1].format(piece.removeprefix(opening).removesuffix(closing))
            if piece.startswith(opening) and piece not in SPECIALS
            else piece
            for piece in pieces
        ]
    if len(set(pieces)) < len(pieces):
        twice = next(piece for place, piece in enumerate(pieces) if piece in pieces[:place])
        raise MtkitError(f"the vocabulary has a piece of text {twice}, which is a special piece in that format")
    return pieces


def models(run: Run) -> dict[str, bytes]:
    """Return {file name: sentencepiece model} for source.spm and target.spm; source.spm includes the run's folding.

    Raises: MtkitError if the run has a folding and its source model also has normalisation rules.
    """
    source = run.tokenizers.source.processor.serialized_model_proto()
    target = run.tokenizers.target.processor.serialized_model_proto()
    folding = run.folder / "tokenizer" / "folding.model"
    if folding.is_file() and (charsmap := charsmap_of(Folding(folding.read_bytes()).whole_model)):
        model = ModelFile.read(source)
        if model.charsmap:
            raise MtkitError(f"{run.folder} folds its source text by two rules, but a sentencepiece model has only one")
        source = model.with_charsmap(charsmap).written()
    return {"source.spm": source, "target.spm": target}


def tag_of(run: Run, pieces: Sequence[str]) -> str | None:
    """Return the tag to put before a source for the run's first direction; None if it needs none."""
    tags = run.tokenizers.source.tags(run.directions)
    return pieces[tags[0]] if tags else None


CLASSES = {"post": ("marian", "MarianMTModel"), "pre": ("pegasus", "PegasusForConditionalGeneration")}
"""{model.norm: (Hugging Face's model type, its class)}."""


def check(recipe: Recipe) -> None:
    """Raises: MtkitError for a part of the model that neither class supports."""
    model, part = recipe.model, unlike_plain(recipe, extra=GROUPED)
    if part is not None:
        raise MtkitError(f"Hugging Face's Marian and Pegasus have no {part}")
    if model.activation == "swiglu":
        raise MtkitError("Hugging Face's Marian and Pegasus have no model.activation swiglu")
    if model.norm == "pre" and model.tie != "all":
        raise MtkitError(
            f"model.norm pre needs Hugging Face's Pegasus, which has no model.tie {model.tie}: it shares one table"
        )


def write(run: Run, model: Network, folder: Path) -> None:
    """Write the files of a model that `check` accepts into an existing folder."""
    write_json(folder / "config.json", configuration(run.recipe, model))
    write_json(folder / "generation_config.json", _search(run))
    (folder / "model.safetensors").write_bytes(save(tensors(run.recipe, model), metadata={"format": "pt"}))
    _write_tokenizer(run, folder)


def configuration(recipe: Recipe, model: Network) -> dict[str, Any]:
    """Return the content of config.json."""
    settings, weights = recipe.model, Weights(model)
    kind, name = CLASSES[settings.norm]
    rows = {"vocab_size": len(weights.tokens("encoder"))}
    if kind == "marian":
        rows["decoder_vocab_size"] = len(weights.output)
    return {
        "architectures": [name],
        "model_type": kind,
        "is_encoder_decoder": True,
        "torch_dtype": "float32",
        **rows,
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
        "dropout": settings.dropout,
        "attention_dropout": settings.attention_dropout,
        "activation_dropout": settings.activation_dropout,
        "share_encoder_decoder_embeddings": settings.tie == "all",
        "tie_word_embeddings": settings.tie != "none",
        **SPECIAL_IDS,
        "forced_eos_token_id": None,
    }


def caution(recipe: Recipe) -> str:
    """Return a warning of what a model loses if transformers trains it further; empty if it loses nothing."""
    if recipe.model.norm == "pre" or recipe.model.positions == "sinusoidal-halves":
        return ""
    return (
        "transformers does not save the positions of a MarianMTModel, so a copy that it saves again has other "
        "positions; to train the model there, set model.positions: sinusoidal-halves"
    )


def _search(run: Run) -> dict[str, Any]:
    chosen, longest = run.recipe.decoding, run.recipe.model.max_length
    beam = chosen.beam if chosen.method == "beam" else 1
    return {
        **SPECIAL_IDS,
        # mtkit makes no breaks in the translation of one line; joined lines of a document need them
        "suppress_tokens": [PAD, UNK, BOS, *([] if run.document_pieces else [BREAK])],
        "num_beams": beam,
        **({"early_stopping": True, "length_penalty": chosen.length_penalty} if beam > 1 else {}),
        **(
            {
                "do_sample": True,
                "temperature": chosen.temperature,
                "top_k": chosen.top_k,
                "top_p": chosen.top_p,
                "epsilon_cutoff": chosen.epsilon,
            }
            if chosen.method == "sample"
            else {}
        ),
        "no_repeat_ngram_size": chosen.no_repeat_ngram,
        "max_length": min(chosen.max_pieces or longest, longest) + 1,  # their limit counts the start mark
    }


def tensors(recipe: Recipe, model: Network) -> dict[str, Tensor]:
    """Return all weights under Hugging Face's names, in float32 on the CPU; a tied weight has one name."""
    ours, weights = model.state_dict(), Weights(model)
    named = {theirs: _of_all_heads(ours[name], name, weights) for name, theirs in layer_names(recipe.model)}
    if recipe.model.tie == "all":
        named[SHARED] = weights.tokens("encoder")
    else:
        named |= {name: weights.tokens(side) for side, name in TABLES.items()}
    if recipe.model.tie == "none":
        named[OUTPUT] = weights.output
    bias = weights.output_bias
    named[BIAS] = (torch.zeros(len(weights.output)) if bias is None else bias).view(1, -1)
    named |= {name: weights.positions(side) for side, name in POSITIONS.items()}
    return {name: tensor.detach().float().cpu().clone().contiguous() for name, tensor in named.items()}


def _of_all_heads(weight: Tensor, name: str, weights: Weights) -> Tensor:
    """Return a weight; keys and values that several heads share are repeated for each head."""
    place, *_ = name.rpartition(".")
    attention, _, part = place.rpartition(".")
    if part not in ("k_proj", "v_proj"):
        return weight
    return for_each_head(weight, weights.module(attention).projection)


def _write_tokenizer(run: Run, folder: Path) -> None:
    for name, content in models(run).items():
        (folder / name).write_bytes(content)
    joint = run.tokenizers.joint
    for name, tokenizer in (("vocab.json", run.tokenizers.source), ("target_vocab.json", run.tokenizers.target)):
        if name == "vocab.json" or not joint:
            pieces = spelled(tokenizer, HUGGINGFACE)
            write_json(folder / name, {piece: number for number, piece in enumerate(pieces)})
    source, target = languages_of(run.directions[0])
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "MarianTokenizer",
            "source_lang": source,
            "target_lang": target,
            "separate_vocabs": not joint,
            "pad_token": HUGGINGFACE[PAD],
            "unk_token": HUGGINGFACE[UNK],
            "bos_token": HUGGINGFACE[BOS],
            "eos_token": HUGGINGFACE[EOS],
            "split_special_tokens": True,  # </s> in text is ordinary text
            "clean_up_tokenization_spaces": False,
            "model_max_length": run.recipe.model.max_length,
        },
    )
