"""Exported models give the run's tokens in Hugging Face transformers and CTranslate2."""

import errno
import random
import re
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import torch
from typer.testing import CliRunner

from mtkit.cli.app import app
from mtkit.decoding.translator import Translator
from mtkit.errors import MtkitError
from mtkit.interchange import exports
from mtkit.interchange.exports import export_run
from mtkit.interchange.huggingface import models
from mtkit.interchange.imports import import_marian
from mtkit.recipe import DecodingSettings
from mtkit.runs import Run
from mtkit.text.tokenizer import BREAK, EOS
from mtkit.training.checkpoint import write_checkpoint
from tests.decoding import trained
from tests.interchange.ours import make_run
from tests.interchange.text import ENGLISH, SOURCES

BIAS = {"output_bias": True}

KINDS: dict[str, dict[str, Any]] = {
    "pre-norm": {"end": 6.0, "model": {"norm": "pre"} | BIAS},
    "post-norm": {"end": 5.0, "model": {"norm": "post", "activation": "gelu"} | BIAS},
    "separate": {"end": 2.0, "joint": False, "model": {"norm": "post", "tie": "decoder"} | BIAS},
    "untied": {"end": 4.5, "model": {"norm": "post", "tie": "none", "positions": "sinusoidal-halves"} | BIAS},
    "learned": {"end": 7.0, "model": {"positions": "learned", "activation": "swish"} | BIAS},
    "multi-query": {
        "end": 8.0,
        "model": BIAS,
        "attention": {"encoder": "multi-query", "cross": "grouped-query"},
    },
}
LINES = [*SOURCES[:12], *SOURCES[-6:], "</s> and <unk> are text", "我们都喜欢狗。犬が家を見る。", "ﬁne ｗｉｄｅ"]


@pytest.fixture(scope="module", params=list(KINDS))
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return make_run(tmp_path_factory.mktemp("runs") / request.param, **KINDS[request.param])


def load_theirs(folder: Path) -> tuple[Any, Any]:
    """Model and tokenizer by Hugging Face's own from_pretrained; skips the test where it is not installed."""
    pytest.importorskip("transformers")
    from tests.interchange import theirs

    return theirs.load_theirs(folder)


@pytest.fixture(autouse=True)
def few_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """The export compares fewer lines, which is quicker."""
    monkeypatch.setattr(exports, "COMPARED", 12)


def ours(run: Run, lines: list[str], beam: int, way: str | None = None) -> tuple[list[list[int]], list[bool]]:
    """The pieces of mtkit's translations, and whether they ended by themselves."""
    settings = {**run.recipe.decoding.model_dump(), "method": "beam" if beam > 1 else "greedy", "beam": beam}
    translator = Translator([run], DecodingSettings.model_validate(settings), device="cpu", dtype="float32")
    found = [best for best, *_ in translator.translate(lines, direction=way)]
    ended = [not each.cut and each.parts == 1 and len(each.pieces) > 0 for each in found]
    return [[piece for piece in each.pieces if piece != EOS] for each in found], ended


def alike(expected: list[list[int]], ended: list[bool], found: list[list[int]]) -> list[bool]:
    """Whether translations have the same pieces; of those that mtkit cut, up to there."""
    trios = zip(expected, ended, found, strict=True)
    return [other == one if done else other[: len(one)] == one for one, done, other in trios]


@pytest.mark.parametrize("beam", [1, 4])
def test_hugging_face_gives_the_same_tokens(run: Run, beam: int, tmp_path: Path) -> None:
    export_run(run, "huggingface", tmp_path / "out")
    model, tokenizer = load_theirs(tmp_path / "out")
    expected, ended = ours(run, LINES, beam)
    found = []
    for line in LINES:
        with torch.no_grad():
            pieces = model.generate(**tokenizer([line], return_tensors="pt"), num_beams=beam, early_stopping=beam > 1)
        found.append([each for each in pieces[0].tolist() if each > EOS])
    same = alike(expected, ended, found)
    assert len({*map(tuple, expected)}) > 4
    assert sum(ended) >= 3
    # in beam search, what ends at the maximum length does so at no cost there
    early = [done and len(pieces) < 15 for done, pieces in zip(ended, expected, strict=True)]
    assert all(same) if beam == 1 else all(each for each, done in zip(same, early, strict=True) if done)
    texts = tokenizer.batch_decode([[*each, EOS] for each in expected], skip_special_tokens=True)
    assert [each.strip() for each in texts] == [run.tokenizers.target.decode(each).strip() for each in expected]


def test_what_transformers_loses_where_it_saves_a_model_again_is_said(run: Run, tmp_path: Path) -> None:
    made = export_run(run, "huggingface", tmp_path / "out")
    model, _ = load_theirs(tmp_path / "out")
    model.save_pretrained(tmp_path / "again")
    (tmp_path / "out" / "config.json").replace(tmp_path / "again" / "config.json")
    again = type(model).from_pretrained(tmp_path / "again").eval()
    pieces = torch.tensor([[7, 9, 11, 8, EOS]])
    with torch.no_grad():
        first, second = (each(input_ids=pieces, decoder_input_ids=pieces).logits for each in (model, again))
    assert bool(made.caution) == (not torch.equal(first, second))
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert ("positions of a MarianMTModel" in card) == bool(made.caution)


def test_hugging_faces_tokenizer_cuts_alike(run: Run, tmp_path: Path) -> None:
    export_run(run, "huggingface", tmp_path / "out")
    _, tokenizer = load_theirs(tmp_path / "out")
    assert [tokenizer(line).input_ids for line in LINES] == [
        [*run.tokenizers.source.encode(line), EOS] for line in LINES
    ]


def test_it_comes_back_by_import_with_the_same_probabilities(run: Run, tmp_path: Path) -> None:
    if run.recipe.model.positions == "learned":
        pytest.skip("import takes sines and cosines alone")
    export_run(run, "huggingface", tmp_path / "out")
    imported = import_marian(tmp_path / "out", tmp_path / "back")
    assert not imported.notes
    back = imported.run
    targets = ["犬 が 家", "我们 都 喜欢 狗。", "der alte Hund", "", "見る"]
    translators = [Translator([each], device="cpu", dtype="float32") for each in (run, back)]
    first, second = (
        [forced.log_prob for forced in translator.force_pieces(LINES[: len(targets)], targets)]
        for translator in translators
    )
    assert first == pytest.approx(second, abs=1e-3)
    assert min(first) < -20


def test_ctranslate2_gives_the_same_tokens(run: Run, tmp_path: Path) -> None:
    ctranslate2 = pytest.importorskip("ctranslate2")
    import sentencepiece

    export_run(run, "ctranslate2", tmp_path / "out")
    source = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "out" / "source.spm"))
    target = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "out" / "target.spm"))
    expected, ended = ours(run, LINES, 1)
    program = ctranslate2.Translator(str(tmp_path / "out"), device="cpu", compute_type="float32")
    found = program.translate_batch(
        [source.encode(line, out_type=str) for line in LINES],
        beam_size=1,
        min_decoding_length=0,
        disable_unk=True,
        suppress_sequences=[["<s>"], ["<blank>"]],
        max_decoding_length=40,
    )
    names = {run.tokenizers.target.piece(each): each for each in range(run.tokenizers.target.size)}
    assert all(alike(expected, ended, [[names[each] for each in its.hypotheses[0]] for its in found]))
    for pieces, done, its in zip(expected, ended, found, strict=True):
        assert not done or target.decode(its.hypotheses[0]).strip() == run.tokenizers.target.decode(pieces).strip()


@pytest.fixture(scope="module", params=["learned", "pre-norm"])
def short_run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, list[str]]:
    """A run of 24 positions, whose translations do not end, and lines of 23 and of 24 pieces."""
    kind = KINDS[request.param]["model"] | {"max_length": 24}
    run = make_run(tmp_path_factory.mktemp("short") / "run", end=-50.0, model=kind, decoding={"method": "greedy"})
    encode, draw, lines = run.tokenizers.source.encode, random.Random(1), dict[int, str]()
    while not {23, 24} <= lines.keys():
        line = " ".join(draw.choices(ENGLISH, k=draw.randint(15, 24)))
        lines[len(encode(line))] = line
    return run, [lines[23], lines[24]]


def test_hugging_face_has_as_many_positions(short_run: tuple[Run, list[str]], tmp_path: Path) -> None:
    run, (fits, longer) = short_run
    export_run(run, "huggingface", tmp_path / "out")
    model, tokenizer = load_theirs(tmp_path / "out")
    assert [len(tokenizer(line, truncation=True).input_ids) for line in (fits, longer)] == [24, 24]
    translations = [best for best, *_ in Translator([run], device="cpu", dtype="float32").translate([fits, longer])]
    assert [each.parts for each in translations] == [1, 2]
    with torch.no_grad():
        (found,) = model.generate(**tokenizer([fits], return_tensors="pt")).tolist()
        # 24 pieces after the start mark; mtkit has the end mark as the last
        assert len(found) - 1 == len(translations[0].pieces) == 24
        assert tuple(found[1:24]) == translations[0].pieces[:23]
        with pytest.raises(IndexError):
            model.generate(**tokenizer([longer], return_tensors="pt"))
        with pytest.raises(IndexError):
            model.generate(**tokenizer([fits], return_tensors="pt"), max_length=26)


def test_ctranslate2_has_as_many_positions(short_run: tuple[Run, list[str]], tmp_path: Path) -> None:
    ctranslate2 = pytest.importorskip("ctranslate2")
    run, lines = short_run
    export_run(run, "ctranslate2", tmp_path / "out")
    source = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "out" / "source.spm"))
    program = ctranslate2.Translator(str(tmp_path / "out"), device="cpu", compute_type="float32")
    fits, longer = (source.encode(line, out_type=str) for line in lines)

    def pieces(tokens: list[str], most: int) -> list[str]:
        suppressed = [[piece] for piece in ("<s>", "<blank>", "<unk>", "< break>")]
        options = {"beam_size": 1, "max_decoding_length": most, "suppress_sequences": suppressed}
        return program.translate_batch([tokens], **options)[0].hypotheses[0]  # type: ignore[no-any-return]

    ((best, *_),) = Translator([run], device="cpu", dtype="float32", engine="mtkit").translate(lines[:1])
    found = pieces(fits, 24)
    assert len(found) == len(best.pieces) == 24
    assert found[:23] == [run.tokenizers.target.piece(piece) for piece in best.pieces[:23]]
    for tokens, most in ((longer, 24), (fits, 25)):
        with pytest.raises(RuntimeError, match="position"):
            pieces(tokens, most)


def test_no_line_of_ctranslate2_has_breaks_between_segments(tmp_path: Path) -> None:
    pytest.importorskip("ctranslate2")
    run = make_run(tmp_path / "run", model=BIAS)
    weights = {name: weight.clone() for name, weight in run.tensors().items()}
    weights["output_bias"][BREAK] += 50  # as in a model that has hardly been trained
    shutil.rmtree(run.checkpoint())
    write_checkpoint(run.folder / "checkpoints" / "update-00000010", {"model": weights}, {"update": 10})
    exported = export_run(run, "ctranslate2", tmp_path / "out")
    assert exported.agreement is not None
    assert not exported.agreement.differing
    assert '["< break>"]]' in (tmp_path / "out" / "README.md").read_text(encoding="utf-8")


def test_random_lines_have_no_character_that_only_mtkit_drops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line with U+0000 would differ in an export that is right."""
    monkeypatch.setattr(exports, "COMPARED", 50)
    run = make_run(tmp_path / "run", model=BIAS)
    folder = tmp_path / "models"
    folder.mkdir()
    (folder / "source.spm").write_bytes(models(run)["source.spm"])
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(folder / "source.spm"))
    lines = exports._sources(run)
    assert [theirs.encode(line) for line in lines] == [run.tokenizers.source.encode(line) for line in lines]


def test_a_direction_is_asked_for_by_its_tag(tmp_path: Path) -> None:
    run = make_run(tmp_path / "two", directions=("en-ja", "en-zh"), model=BIAS)
    pytest.importorskip("transformers")
    made = export_run(run, "huggingface", tmp_path / "out")
    assert made.agreement is not None
    assert not made.agreement.differing
    model, tokenizer = load_theirs(tmp_path / "out")
    expected, ended = ours(run, LINES, 1, "en-zh")
    for line, pieces, done in zip(LINES, expected, ended, strict=True):
        if done:
            with torch.no_grad():
                found = model.generate(**tokenizer([f">>zh<< {line}"], return_tensors="pt"), num_beams=1)
            assert [each for each in found[0].tolist() if each > EOS] == pieces
    assert ">>ja<< " in (tmp_path / "out" / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("parts", "to", "message"),
    [
        ({"attention": {"encoder": "longformer"}}, "huggingface", "have no encoder attention longformer"),
        ({"attention": {"cross": "luna"}}, "ctranslate2", "format has no cross attention luna"),
        ({"model": {"activation": "swiglu"}}, "huggingface", "no model.activation swiglu"),
        ({"model": {"position_width": 4}}, "huggingface", "no model.position_width 4 (concatenated positions)"),
        ({"model": {"position_width": 4}}, "ctranslate2", "no model.position_width 4 (concatenated positions)"),
        ({"model": {"sentence_positions": True}}, "huggingface", "no model.sentence_positions"),
        ({"model": {"tie": "none"}}, "huggingface", "Pegasus, which has no model.tie none"),
        ({}, "hugging-face", "no format 'hugging-face' (did you mean 'huggingface'?)"),
    ],
)
def test_what_the_format_lacks_is_refused_by_name(parts: dict, to: str, message: str, tmp_path: Path) -> None:  # type: ignore[type-arg]
    run = make_run(tmp_path / "a", **parts)
    with pytest.raises(MtkitError, match=re.escape(message)):
        export_run(run, to, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_other_tokens_are_told_and_many_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    run = make_run(tmp_path / "a", model=BIAS)
    theirs = exports._with_transformers

    def one_wrong(*given: Any) -> list[list[str]]:
        found = theirs(*given)
        return [["x", *found[0]], *found[1:]]

    monkeypatch.setattr(exports, "_with_transformers", one_wrong)
    made = export_run(run, "huggingface", tmp_path / "out")
    assert re.match(r"1 of \d+ lines have other tokens than mtkit: line \d+ from token \d+", made.compared)
    monkeypatch.setattr(exports, "_with_transformers", lambda *given: [["x"] for _ in theirs(*given)])
    with pytest.raises(MtkitError, match="this is a defect of mtkit"):
        export_run(run, "huggingface", tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_the_command_writes_a_card_and_leaves_what_exists(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", model=BIAS)
    typed = ["export", str(tmp_path / "out"), "--to", "huggingface", "--run", str(run.folder)]
    result = CliRunner().invoke(app, typed, catch_exceptions=False)
    assert result.stdout == f"{tmp_path / 'out'}\n"
    compared = find_spec("transformers") is not None
    said = "equal mtkit's greedy search in float32" if compared else "its tokens were not compared"
    assert said in result.stderr
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    for said in (
        "language:\n- en\n- ja",
        "pipeline_tag: translation",
        "model.d_model",
        "train.0.source",
        "from_pretrained",
    ):
        assert said in card
    assert not list((tmp_path / "out").glob("*.bin"))
    with pytest.raises(MtkitError, match="exists; choose another folder"):
        CliRunner().invoke(app, typed, catch_exceptions=False)


@pytest.mark.parametrize("to", ["huggingface", "argos"])
def test_on_a_full_disk_the_message_names_the_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: str) -> None:
    if to == "argos":
        pytest.importorskip("ctranslate2")
    write_bytes = Path.write_bytes

    def full(path: Path, content: bytes) -> int:
        if path.name == "README.md":
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return write_bytes(path, content)

    monkeypatch.setattr(Path, "write_bytes", full)
    run = make_run(tmp_path / "a", model=BIAS)
    with pytest.raises(MtkitError) as raised:
        export_run(run, to, tmp_path / "out")
    place = tmp_path / "out"
    assert (
        str(raised.value) == f"cannot write {place}: No space left on device; free some space or choose another place"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_an_exported_model_drops_invisible_characters_as_the_run_does(tmp_path: Path) -> None:
    run = trained.make_run(tmp_path).run
    source = run.tokenizers.source
    exported = sentencepiece.SentencePieceProcessor(model_proto=models(run)["source.spm"])
    texts = [
        "The\tdog sees a bird.\u200b",
        "\ufeffThe d\u00adog.",
        "The\x85dog\x01.\u2028",
        "می\u200cروم",
        "Ｔｈｅ ｄｏｇ",
        "👨\u200d👩",
    ]
    for text in ["The dog.", *texts]:
        assert exported.encode(text) == source.encode(text), ascii(text)
