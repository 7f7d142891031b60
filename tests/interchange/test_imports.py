"""Imported models against Hugging Face's own classes: tokens, scores, and what is refused."""

import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mtkit.decoding.translator import Translator
from mtkit.errors import MtkitError
from mtkit.interchange.imports import import_marian
from mtkit.interchange.marian_weights import BIAS, POSITIONS
from mtkit.recipe import DecodingSettings
from mtkit.runs import Run
from mtkit.text.tokenizer import EOS

transformers = pytest.importorskip("transformers")

from tests.interchange.text import ENGLISH, SOURCES  # noqa: E402
from tests.interchange.theirs import LIMIT, change, load_theirs, save_theirs, their_tokens  # noqa: E402

KINDS = {
    "shared": {},
    "separate": {"separate": True},
    "pre-norm": {"norm": "pre"},
    "bpe": {"kind": "bpe"},
    "languages": {"tags": (">>jpn<<", ">>deu<<")},
}


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Run]]:
    """Hugging Face's folder and the run made of it, by the kind of model; made once."""
    place, made = tmp_path_factory.mktemp("theirs"), dict[str, tuple[Path, Run]]()

    def make(kind: str) -> tuple[Path, Run]:
        if kind not in made:
            folder = save_theirs(place / kind, **KINDS[kind])
            made[kind] = folder, import_marian(folder, place / f"{kind}-run").run
        return made[kind]

    return make


def own_tokens(run: Run, lines: list[str], direction: str | None = None, **settings: object) -> list[list[str]]:
    """The pieces of mtkit's translations, by the run's own settings and these."""
    chosen = DecodingSettings.model_validate({**run.recipe.decoding.model_dump(), **settings})
    found = Translator([run], chosen, engine="mtkit", device="cpu").translate(lines, direction=direction)
    piece = run.tokenizers.target.piece
    return [[piece(each) for each in best.pieces if each != EOS] for best, *_ in found]


@pytest.mark.parametrize("kind", ["shared", "separate", "pre-norm", "bpe"])
@pytest.mark.parametrize("beam", [1, 4])
def test_tokens_are_hugging_faces(kind: str, beam: int, imported: Callable[[str], tuple[Path, Run]]) -> None:
    folder, run = imported(kind)
    assert run.recipe.decoding.max_pieces == LIMIT - 1
    theirs = their_tokens(folder, SOURCES, beam)
    own = own_tokens(run, SOURCES, method="beam" if beam > 1 else "greedy", beam=beam)
    assert len(set(map(tuple, theirs))) > 5  # they differ by their source
    assert sum(map(len, theirs)) > 5 * len(SOURCES)
    # at the maximum length Hugging Face ends a hypothesis at no cost, where mtkit goes by its probability
    ended = [place for place, tokens in enumerate(theirs) if len(tokens) < LIMIT - 2]
    assert len(ended) > len(SOURCES) / 4
    assert [own[place] for place in ended] == [theirs[place] for place in ended]


@pytest.mark.parametrize("kind", ["shared", "pre-norm"])
def test_a_source_has_as_many_positions_as_in_hugging_face(
    kind: str, imported: Callable[[str], tuple[Path, Run]]
) -> None:
    folder, run = imported(kind)
    model, tokenizer = load_theirs(folder)
    word = next(word for word in ENGLISH if len(tokenizer(f"{word} {word}").input_ids) == 3)
    fits, longer = (" ".join([word] * count) for count in (63, 64))  # the end mark is the 64th
    translator = Translator([run], DecodingSettings(method="greedy", no_repeat_ngram=2), engine="mtkit", device="cpu")
    assert [best.parts for best, *_ in translator.translate([fits, longer])] == [1, 2]
    assert own_tokens(run, [fits], method="greedy") == their_tokens(folder, [fits])
    with pytest.raises(IndexError):
        their_tokens(folder, [longer])
    full, over = (torch.full((1, length), 5) for length in (64, 65))  # of the target
    model(input_ids=full, decoder_input_ids=full)
    with pytest.raises(IndexError):
        model(input_ids=full, decoder_input_ids=over)
    assert run.recipe.model.max_length == 64


def test_a_target_vocabulary_that_is_not_in_use_changes_nothing(tmp_path: Path) -> None:
    folder = save_theirs(tmp_path / "theirs")
    expected = import_marian(folder, tmp_path / "expected").run
    pieces = json.loads((folder / "vocab.json").read_text())
    (folder / "target_vocab.json").write_text(
        json.dumps({piece: number for number, piece in enumerate(sorted(pieces))})
    )
    again = import_marian(folder, tmp_path / "again").run
    assert again.recipe.data.tokenizer.joint
    lines = [line.strip() for line in SOURCES]
    assert own_tokens(again, lines) == own_tokens(expected, lines)
    assert their_tokens(folder, lines) == own_tokens(again, lines, method="greedy")


def test_a_tag_asks_for_the_target_language(imported: Callable[[str], tuple[Path, Run]]) -> None:
    folder, run = imported("languages")
    assert set(run.directions) == {"en-jpn", "en-deu"}
    for language in ("jpn", "deu"):
        theirs = their_tokens(folder, [f">>{language}<< {line.strip()}" for line in SOURCES])
        assert own_tokens(run, [line.strip() for line in SOURCES], f"en-{language}", method="greedy") == theirs
    with pytest.raises(MtkitError, match="choose one with --direction: en-"):
        own_tokens(run, SOURCES)


def test_given_translations_have_hugging_faces_probability(imported: Callable[[str], tuple[Path, Run]]) -> None:
    folder, run = imported("shared")
    model, tokenizer = load_theirs(folder)
    targets = ["犬 が 家", "我们 都 喜欢 狗。", "der alte Hund"]
    found = Translator([run], engine="mtkit", device="cpu").force_pieces(SOURCES[:3], targets)
    for source, target, forced in zip(SOURCES, targets, found, strict=False):
        inputs, labels = tokenizer([source], return_tensors="pt"), tokenizer(text_target=[target], return_tensors="pt")
        with torch.no_grad():
            logits = model(**inputs, labels=labels.input_ids).logits.log_softmax(-1)
        expected = logits.gather(-1, labels.input_ids[..., None]).sum().item()
        assert forced.log_prob == pytest.approx(expected, abs=1e-3)


def test_it_does_what_a_run_does(imported: Callable[[str], tuple[Path, Run]]) -> None:
    _, run = imported("shared")
    lines = SOURCES[:12]
    plain = own_tokens(run, lines, beam=3, method="beam", no_repeat_ngram=0)
    int8 = Translator([run], run.recipe.decoding, dtype="int8", engine="mtkit", device="cpu").translate(lines)
    assert len(int8) == len(lines)
    pytest.importorskip("ctranslate2")
    settings = run.recipe.decoding.model_copy(update={"beam": 3, "no_repeat_ngram": 0})
    other = Translator([run], settings, engine="ctranslate2", device="cpu").translate(lines)
    piece = run.tokenizers.target.piece
    assert [[piece(each) for each in best.pieces if each != EOS] for best, *_ in other] == plain


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("config.json", {"model_type": "t5"}, "config.json: model_type = t5"),
        ("config.json", {"scale_embedding": False}, "config.json: scale_embedding = False"),
        ("config.json", {"normalize_embedding": True}, "normalize_embedding = True"),
        ("config.json", {"activation_function": "gelu_new"}, "activation_function = gelu_new"),
        ("config.json", {"decoder_ffn_dim": 32}, "encoder_ffn_dim = 24 and decoder_ffn_dim = 32"),
        ("config.json", {"normalize_before": True}, r"the weight model\.encoder\.layer_norm\.weight is missing"),
        ("config.json", {"encoder_layers": 1}, r"no place for the weight model\.encoder\.layers\.1\."),
        ("config.json", {"d_model": 32}, "holds another model"),
        ("config.json", {"d_model": "wide"}, "d_model = 'wide'"),
        ("vocab.json", {"</s>": 3}, "vocab.json: two of its pieces have one id"),
        ("config.json", {"vocab_size": 500}, r"config\.json: vocab_size = 500, and the weights have at most 72 rows"),
        ("config.json", {"vocab_size": 2**40}, r"vocab_size = 1,099,511,627,776, and the weights have at most 72"),
        ("config.json", {"d_model": 2**30}, r"d_model = 1,073,741,824, and the weights have at most 72"),
        ("vocab.json", {"new": 9_999}, "vocab.json: the id 9999 of new is outside"),
        ("tokenizer_config.json", {"source_lang": None}, "give --source-language"),
    ],
)
def test_what_mtkit_cannot_hold_is_refused_by_name(
    name: str, values: dict[str, object], message: str, imported: Callable[[str], tuple[Path, Run]], tmp_path: Path
) -> None:
    folder = change(imported("shared")[0], tmp_path / "changed", name, **values)
    with pytest.raises(MtkitError, match=message):
        import_marian(folder, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("value", "dtype", "message"),
    [
        (math.nan, torch.float32, r"changed: the weight model\.shared\.weight has values that are NaN or infinite"),
        (math.inf, torch.float16, r"changed: the weight model\.shared\.weight has values that are NaN or infinite"),
        (1e300, torch.float64, r"changed: the weight model\.shared\.weight has values that are NaN or infinite"),
        (3, torch.int8, r"changed: the weight model\.shared\.weight is torch\.int8: mtkit imports float32"),
        (1, torch.complex64, r"changed: the weight model\.shared\.weight is torch\.complex64"),
    ],
)
def test_weights_that_are_no_real_numbers_are_refused(
    value: float, dtype: torch.dtype, message: str, imported: Callable[[str], tuple[Path, Run]], tmp_path: Path
) -> None:
    folder = tmp_path / "changed"
    shutil.copytree(imported("shared")[0], folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.shared.weight"] = weights["model.shared.weight"].to(dtype)
    weights["model.shared.weight"][2, 3] = value
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(MtkitError, match=message):
        import_marian(folder, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("shape", [(5,), (0, 16), (63, 16), (64, 8)])
def test_a_table_of_positions_of_another_shape_is_refused(
    shape: tuple[int, ...], imported: Callable[[str], tuple[Path, Run]], tmp_path: Path
) -> None:
    folder = tmp_path / "changed"
    shutil.copytree(imported("shared")[0], folder)
    weights = load_file(folder / "model.safetensors")
    weights[POSITIONS["encoder"]] = torch.zeros(shape)
    save_file(weights, folder / "model.safetensors")
    message = f"changed: the weight {POSITIONS['encoder']} has the shape {shape}, and config.json requires (64, 16)"
    with pytest.raises(MtkitError, match=re.escape(message)):
        import_marian(folder, tmp_path / "run")


@pytest.mark.parametrize("name", ["lm_head.weight", "model.decoder.embed_tokens.weight"])
def test_a_shared_table_may_have_any_of_its_names(
    name: str, imported: Callable[[str], tuple[Path, Run]], tmp_path: Path
) -> None:
    folder, run = imported("shared")
    shutil.copytree(folder, tmp_path / "changed")
    weights = load_file(folder / "model.safetensors")
    weights[name] = weights.pop("model.shared.weight")
    save_file(weights, tmp_path / "changed" / "model.safetensors")
    again = import_marian(tmp_path / "changed", tmp_path / "run").run
    assert again.weights().read_bytes() == run.weights().read_bytes()


def test_an_infinitely_negative_bias_excludes_its_piece(
    imported: Callable[[str], tuple[Path, Run]], tmp_path: Path
) -> None:
    folder = tmp_path / "changed"
    shutil.copytree(imported("shared")[0], folder)
    weights = load_file(folder / "model.safetensors")
    weights[BIAS] = torch.zeros_like(weights[BIAS]).index_fill(-1, torch.tensor([20]), -math.inf)
    save_file(weights, folder / "model.safetensors")
    import_marian(folder, tmp_path / "run")
    bias = load_file(tmp_path / "run" / "checkpoints" / "update-00000000" / "model.safetensors")["output_bias"]
    assert bias.isfinite().all()


def test_a_pickle_is_refused_with_the_line_that_converts_it(
    imported: Callable[[str], tuple[Path, Run]], tmp_path: Path
) -> None:
    folder = tmp_path / "old"
    shutil.copytree(imported("shared")[0], folder)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(MtkitError, match=r"pickle pytorch_model\.bin.*python -c \"from transformers import MarianMT"):
        import_marian(folder, tmp_path / "run")


def test_a_run_of_that_name_stays(imported: Callable[[str], tuple[Path, Run]]) -> None:
    folder, run = imported("shared")
    with pytest.raises(MtkitError, match="exists; choose another --name"):
        import_marian(folder, run.folder)
