"""Marian models as Hugging Face writes them: random weights, with sentencepiece models trained on a few lines."""

import io
import json
import random
import shutil
import warnings
from pathlib import Path
from typing import Any

import sentencepiece
import torch
from transformers import (
    MarianConfig,
    MarianMTModel,
    MarianTokenizer,
    PegasusConfig,
    PegasusForConditionalGeneration,
)

from tests.interchange.text import ENGLISH, OTHERS, sentences

LOUD = 2.0
"""Size of the layers' random weights, by which translations depend on their sources."""

LIMIT = 60
"""Tokens of a translation in Hugging Face's count, the start mark among them."""


def trained_model(words: list[str], size: int, kind: str = "unigram") -> bytes:
    """A sentencepiece model with its own special pieces."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences(words, 200, 1)),
        model_writer=model,
        model_type=kind,
        vocab_size=size,
        character_coverage=1.0,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    return model.getvalue()


def save_theirs(
    folder: Path, *, separate: bool = False, norm: str = "post", tags: tuple[str, ...] = (), kind: str = "unigram"
) -> Path:
    """A folder as `save_pretrained` of model and tokenizer writes it, with the special ids of OPUS-MT."""
    folder.mkdir(parents=True)
    models = {"source": trained_model(ENGLISH, 70, kind), "target": trained_model(OTHERS, 80, kind)}
    for name, content in models.items():
        (folder / f"{name}.spm").write_bytes(content)
    pieces = {name: _pieces(content) for name, content in models.items()}
    longest = max(map(len, pieces.values()))  # one id of padding serves both sides: they are of one size
    every = {name: _vocabulary([*each, *map(str, range(longest - len(each)))], 1) for name, each in pieces.items()}
    if not separate:
        every = {}
        every["source"] = _vocabulary([*tags, *dict.fromkeys([*pieces["source"], *pieces["target"]])], 2)
    paths = {"source": folder / "vocab.json", "target": folder / "target_vocab.json"}
    for name, vocabulary in every.items():
        paths[name].write_text(json.dumps(vocabulary), encoding="utf-8")
    sizes = {name: len(vocabulary) for name, vocabulary in every.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it recommends a package that it does not use
        MarianTokenizer(
            str(folder / "source.spm"),
            str(folder / "target.spm"),
            str(folder / "vocab.json"),
            target_vocab_file=str(folder / "target_vocab.json") if separate else None,
            source_lang="en",
            target_lang="ja",
            separate_vocabs=separate,
        ).save_pretrained(folder)
    _model(norm, sizes["source"], sizes.get("target")).save_pretrained(folder)
    return folder


def change(folder: Path, copy: Path, name: str, **values: object) -> Path:
    """A copy of the folder with other values in one of its files."""
    shutil.copytree(folder, copy)
    content = json.loads((copy / name).read_text(encoding="utf-8"))
    (copy / name).write_text(json.dumps({**content, **values}), encoding="utf-8")
    return copy


def their_tokens(folder: Path, lines: list[str], beam: int = 1, **search: object) -> list[list[str]]:
    """The pieces that Hugging Face's generate() gives for each line, marks left out; one line at a time."""
    model, tokenizer = load_theirs(folder)
    found = []
    for line in lines:
        inputs = tokenizer([line], return_tensors="pt")
        with torch.no_grad():
            ids = model.generate(**inputs, num_beams=beam, early_stopping=beam > 1, **search)[0].tolist()
        marks = {model.config.pad_token_id, model.config.eos_token_id, model.config.decoder_start_token_id}
        found.append([tokenizer._convert_id_to_token(each) for each in ids if each not in marks])
    return found


def load_theirs(folder: Path) -> tuple[Any, Any]:
    """Model and tokenizer by their own from_pretrained."""
    kind = json.loads((folder / "config.json").read_text(encoding="utf-8"))["model_type"]
    model = {"marian": MarianMTModel, "pegasus": PegasusForConditionalGeneration}[kind]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return model.from_pretrained(folder).eval(), MarianTokenizer.from_pretrained(folder)


def _pieces(content: bytes) -> list[str]:
    processor = sentencepiece.SentencePieceProcessor(model_proto=content)
    every = range(processor.get_piece_size())
    return [processor.id_to_piece(each) for each in every if not processor.is_control(each) and each]


def _vocabulary(pieces: list[str], left_out: int) -> dict[str, int]:
    """In another order, some pieces of sentencepiece missing, as one that was counted on other text."""
    kept = pieces[: len(pieces) // 2] + pieces[len(pieces) // 2 + left_out :]
    random.Random(3).shuffle(kept)
    return {piece: number for number, piece in enumerate(["</s>", "<unk>", *kept, "<pad>"])}


def _model(norm: str, size: int, size_of_target: int | None) -> Any:
    torch.manual_seed(5)
    pad = (size_of_target or size) - 1
    shared: dict[str, Any] = {
        "vocab_size": size,
        "d_model": 16,
        "encoder_layers": 2,
        "decoder_layers": 1,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
        "encoder_ffn_dim": 24,
        "decoder_ffn_dim": 24,
        "activation_function": "swish",
        "max_position_embeddings": 64,
        "scale_embedding": True,
        "static_position_embeddings": True,
        "pad_token_id": pad,
        "decoder_start_token_id": pad,
        "eos_token_id": 0,
        "forced_eos_token_id": 0,
        "bos_token_id": None,
        "init_std": 0.3,
    }
    model: Any
    if norm == "pre":
        model = PegasusForConditionalGeneration(PegasusConfig(**shared))
    else:
        both = {"decoder_vocab_size": size_of_target or size, "share_encoder_decoder_embeddings": not size_of_target}
        model = MarianMTModel(MarianConfig(**shared, **both))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("bias"):
                weight.normal_(std=0.2)
            elif "attn." in name or "fc" in name:
                weight.normal_(std=LOUD)
        model.final_logits_bias.normal_(std=0.3)
        model.final_logits_bias[0, 0] = 1.2 if size_of_target else 2.6  # so that some end early
    model.generation_config.update(
        max_length=LIMIT,
        num_beams=4,
        early_stopping=True,
        bad_words_ids=[[pad], [1]],
        length_penalty=1.0,
        no_repeat_ngram_size=2,
    )
    return model
