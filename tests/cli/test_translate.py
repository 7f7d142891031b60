"""`mtkit translate`, as typed."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from mtkit.cli.app import app
from mtkit.decoding import translator
from mtkit.decoding.lines import chunks
from mtkit.decoding.lines.source import SourceLines
from mtkit.errors import DataError, MtkitError, RecipeError
from tests.decoding.trained import make_run, sentences


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run and prepared data."""
    folder = tmp_path_factory.mktemp("work")
    make_run(folder)
    return folder


@pytest.fixture(autouse=True)
def _inside(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)


def typed(*arguments: str, stdin: bytes = b"") -> Result:
    return CliRunner().invoke(app, ["translate", *arguments], input=stdin, catch_exceptions=False)


def lines_of(result: Result) -> list[str]:
    assert result.exit_code == 0
    *lines, last = result.stdout_bytes.decode().split("\n")
    assert last == ""
    return lines


LOADED = """
import json, sys
sys.argv = ["mtkit", "translate", "--engine", "mtkit", "--input", "-"]
from mtkit.cli.app import main
try: main()
except SystemExit: pass
print(json.dumps(sorted(sys.modules)))
"""


def test_one_line_imports_only_what_it_needs() -> None:
    done = subprocess.run([sys.executable, "-c", LOADED], input=b"a line\n", capture_output=True, check=True)
    translation, modules = done.stdout.decode().splitlines()
    loaded = set(json.loads(modules))
    assert translation
    assert "mtkit.attention.scoring.full" in loaded
    families = ("compressed", "content", "heads", "linear", "lowrank", "prior", "sparse")
    unused = [f"mtkit.attention.{family}" for family in families]
    unused += ["mtkit.data.builtin", "mtkit.evaluation", "mtkit.training.loop", "mtkit.serving", "mtkit.interchange"]
    unused += ["datasets", "matplotlib", "sacrebleu", "sympy", "tabulate", "torch._dynamo", "torch._inductor.lowering"]
    assert loaded.isdisjoint(unused)
    assert sum(name.startswith("mtkit.") for name in loaded) <= 174


def test_bare_it_translates_the_test_side_into_the_run() -> None:
    result = typed("--engine", "mtkit")  # another says that it decodes
    there = Path("mtkit-runs/one/translations")
    translations = (there / "test.txt").read_text().split("\n")[:-1]
    assert len(translations) == 7
    assert (there / "test.reference.txt").read_text() == Path("test.target").read_text()
    assert (there / "test.source.txt").read_text() == Path("test.source").read_text()
    record = json.loads((there / "test.json").read_text())
    assert record["checkpoint"] == "update-00000010"
    assert record["settings"]["beam"] == 3
    assert record["segments_per_second"] > 0
    assert f"translation  {translations[0]}" in result.stdout
    assert str(there / "test.txt") in result.stdout
    assert record["joined"] == record["fell_back"] == 0
    # a model of ten updates goes on until it is stopped
    assert result.stderr.count("\n") == bool(record["cut"]) == ("may be incomplete" in result.stderr)
    # the same lines through --input give the same
    assert lines_of(typed("--input", "test.source")) == translations


def test_text_that_nobody_reads_gets_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mtkit.cli.translate.has_unread_input", lambda: True)
    assert typed().stderr.count("add --input - to translate standard input") == 1
    for options in (["--side", "test"], ["--input", "test.source"], ["--target", "test.target"]):
        assert "standard input" not in typed(*options).stderr


def test_as_many_lines_come_out_as_went_in() -> None:
    text = "Old dog.\n\n \t\nA bird\u2028sings\u0085here.\x0b\x0c\x00\r\n" + "The tree and the house. " * 9 + "\nlast"
    result = typed("--input", "-", stdin=text.encode())
    lines = lines_of(result)
    assert len(lines) == 6
    assert lines[1] == lines[2] == ""
    assert all(lines[number] for number in (0, 3, 4, 5))
    assert "translated in parts" in result.stderr
    assert ": line 5\n" in result.stderr


def test_output_goes_to_a_file() -> None:
    assert lines_of(typed("--input", "test.source", "--output", "out.txt")) == []
    assert Path("out.txt").read_text().count("\n") == 7


def test_n_best_and_scores() -> None:
    n_best = [line.split("\t") for line in lines_of(typed("--input", "test.source", "--n-best", "3"))]
    assert [int(number) for number, _, _ in n_best] == [line for line in range(1, 8) for _ in range(3)]
    scored = [line.split("\t") for line in lines_of(typed("--input", "test.source", "--scores"))]
    assert scored == [[score, text] for _, score, text in n_best[::3]]


def test_sampling_repeats_with_its_seed() -> None:
    command = ["--input", "test.source", "--method", "sample", "--top-k", "20", "--seed"]
    one, again, other = (lines_of(typed(*command, seed)) for seed in ("3", "3", "4"))
    assert one == again != other


def test_the_choice_among_samples_is_printed_with_its_utility() -> None:
    command = ["--input", "test.source", "--method", "sample", "--epsilon", "0.02", "--mbr", "chrf", "--samples", "8"]
    scored = [line.split("\t") for line in lines_of(typed(*command, "--scores"))]
    assert lines_of(typed(*command)) == [text for _, text in scored]
    assert all(0 < float(score) <= 100 for score, _ in scored)


def test_translations_begin_with_given_text(tmp_path: Path) -> None:
    (tmp_path / "prefixes").write_text("The\n\nOne\n\n\n\nA\n")
    begun = lines_of(typed("--input", "test.source", "--prefix", str(tmp_path / "prefixes")))
    free = lines_of(typed("--input", "test.source"))
    assert [begun[line] for line in (1, 3, 4, 5)] == [free[line] for line in (1, 3, 4, 5)]
    assert [line[:3] for line in begun[::2]] == ["The", "One", free[4][:3], begun[6][:3]]
    assert begun[6].startswith("A")


def test_forced_decoding_prints_a_log_probability_a_line() -> None:
    forced = lines_of(typed("--input", "test.source", "--target", "test.target"))
    assert len(forced) == 7
    assert all(float(log_prob) < 0 for log_prob in forced)
    batched = lines_of(typed("--target", "test.target", "--batch-tokens", "1"))
    assert list(map(float, batched)) == pytest.approx(list(map(float, forced)), abs=1e-4)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (["--name", "onne"], MtkitError, "did you mean 'one'"),
        (["--checkpoint", "average"], MtkitError, "no checkpoint 'average'"),
        (["--input", "nowhere.txt"], DataError, "nowhere.txt"),
        (["--data", "nowhere"], DataError, "mtkit prepare"),
        (["--input", "-", "--beam", "0"], RecipeError, "decoding.beam"),
        (["--input", "-", "--method", "greeedy"], RecipeError, "decoding.method"),
        (["--input", "-", "--n-best", "9"], RecipeError, "n_best"),
        (["--input", "-", "--top-k", "3"], MtkitError, "--method sample"),
        (["--input", "-", "--method", "greedy", "--beam", "3"], MtkitError, "--method beam"),
        (["--input", "-", "--device", "abacus"], MtkitError, "no device 'abacus'"),
        (["--input", "-", "--dtype", "int4"], MtkitError, "no dtype 'int4'"),
        (["--scores"], MtkitError, "--input"),
        (["--direction", "en-de"], MtkitError, "--input"),
        (["--document-ids", "test.source"], MtkitError, "--input"),
        (["--input", "-", "--side", "test"], MtkitError, "--side"),
        (["--side", "tset"], DataError, "did you mean 'test'"),
        (["--input", "-", "--direction", "en-fr"], MtkitError, "it supports: en-de"),
        (["--input", "-", "--documents"], MtkitError, "--documents needs a run trained on documents"),
        (["--input", "-", "--document-ids", "test.source"], MtkitError, "--document-ids needs a run trained"),
        (["--input", "-", "--document-ids", "-"], MtkitError, "cannot both be standard input"),
        (["--input", "-", "--target", "-"], MtkitError, "cannot both be standard input"),
        (["--input", "-", "--prefix", "-"], MtkitError, "cannot both be standard input"),
        (["--prefix", "test.source"], MtkitError, "--input"),
        (["--input", "a", "--output", "b", "--prefix", "c", "--part", "1/2"], MtkitError, "divided by bytes"),
        (["--input", "-", "--mbr", "chrf", "--method", "greedy"], RecipeError, "several hypotheses"),
        (["--input", "-", "--mbr", "chrf", "--samples", "9"], MtkitError, "--method sample"),
        (
            ["--target", "train.source"],
            DataError,
            r"train.source must have as many lines as the sources, a translation each \(7 and 200 lines\)",
        ),
    ],
)
def test_mistakes_are_named(arguments: list[str], error: type[MtkitError], message: str) -> None:
    with pytest.raises(error, match=message) as raised:
        typed(*arguments)
    assert "\n" not in str(raised.value)


def test_text_that_is_not_utf8_is_named_by_its_line() -> None:
    with pytest.raises(DataError, match="standard input, line 2"):
        typed("--input", "-", stdin=b"fine\nna\xefve\n")


def test_the_validation_side_stands_in_for_a_missing_test_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_run(tmp_path, test_side=False)
    monkeypatch.chdir(tmp_path)
    result = typed("--method", "greedy")
    assert "validation side" in result.stderr
    assert Path("mtkit-runs/one/translations/valid.txt").read_text().count("\n") == 7


def test_other_data_than_the_runs_is_noted(tmp_path: Path) -> None:
    make_run(tmp_path / "other", test_side=False)
    assert "is not the data that" in typed("--data", str(tmp_path / "other" / "mtkit-data")).stderr


def test_a_reader_who_has_had_enough_ends_it_silently(folder: Path) -> None:
    text = "".join(f"{line}\n" for line in sentences(50, 1)).encode()
    command = [sys.executable, "-m", "mtkit", "translate", "--input", "-", "--method", "greedy", "--engine", "mtkit"]
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(command, input=text, stdout=writing, stderr=subprocess.PIPE, check=False, cwd=folder)
    os.close(writing)
    assert done.stderr == b""


def test_lines_are_answered_one_by_one_until_it_is_interrupted(folder: Path) -> None:
    words = [sys.executable, "-m", "mtkit", "translate", "--input", "-", "--method", "greedy", "--engine", "mtkit"]
    heard = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell in the background has it ignored
    try:
        pipe = subprocess.PIPE
        with subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=pipe, cwd=folder, bufsize=0) as partner:
            assert partner.stdin is not None
            assert partner.stdout is not None
            assert partner.stderr is not None
            for line in sentences(3, 1):
                partner.stdin.write(f"{line}\n".encode())
                assert partner.stdout.readline().endswith(b"\n")
            partner.send_signal(signal.SIGINT)  # while it waits for more
            assert partner.wait(30) == 130
            assert partner.stderr.read() == b"mtkit: stopped\n"
    finally:
        signal.signal(signal.SIGINT, heard)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of two directions, trained on documents, with two test sides."""
    folder = tmp_path_factory.mktemp("wide")
    make_run(folder, directions=("en-de", "en-fr"), documents=20, sides=("flickr", "coco"))
    return folder


def test_every_test_side_is_translated_and_a_side_can_be_chosen(wide: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(wide)
    there = wide / "mtkit-runs" / "one" / "translations"
    result = typed("--side", "coco", "--side", "valid", "--method", "greedy")
    assert {each.stem for each in there.glob("*.json")} == {"coco", "valid"}
    result = typed("--method", "greedy")
    assert {each.stem for each in there.glob("*.json")} == {"coco", "valid", "flickr"}
    assert "flickr.txt" in result.stdout
    assert (there / "flickr.direction.txt").read_text() == "en-de\n" * 7 + "en-fr\n" * 7
    lines = (there / "flickr.txt").read_text().split("\n")
    assert len(lines) == 15
    assert lines[3] == lines[10] == ""  # blank lines part the documents
    with pytest.raises(MtkitError, match="--side: flickr, coco"):
        typed("--output", "out.txt")
    with pytest.raises(MtkitError, match="--side: flickr, coco"):
        typed("--target", "flickr.target.en-de")


def test_lines_go_one_way_of_several(wide: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(wide)
    with pytest.raises(MtkitError, match="--direction: en-de, en-fr"):
        typed("--input", "-")
    typed("--side", "flickr", "--sentences")
    both = (wide / "mtkit-runs" / "one" / "translations" / "flickr.txt").read_text().split("\n")[:-1]
    for number, direction in enumerate(("en-de", "en-fr")):
        found = lines_of(typed("--input", f"flickr.source.{direction}", "--direction", direction, "--sentences"))
        assert found == both[7 * number : 7 * number + 7]
    forced = ["--input", "flickr.source.en-fr", "--target", "flickr.target.en-fr", "--direction"]
    assert lines_of(typed(*forced, "en-fr")) != lines_of(typed(*forced, "en-de"))


def test_documents_are_translated_together_as_trained(wide: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing comes apart with a model that is not trained, so all is said to have been translated one by one."""
    monkeypatch.chdir(wide)
    command = ["--input", "flickr.source.en-de", "--direction", "en-de"]
    default, alone = typed(*command), typed(*command, "--sentences")
    assert "translated one by one" in default.stderr
    assert "apart" not in alone.stderr
    assert len(lines_of(default)) == len(lines_of(alone)) == 7
    Path("ids.txt").write_text("a\na\nb\nb\nb\nc\nd\n")
    assert "translated one by one" in typed(*command, "--document-ids", "ids.txt").stderr
    Path("ids.txt").write_text("a\nb\nc\nd\ne\nf\ng\n")
    assert typed(*command, "--document-ids", "ids.txt").stderr.count("apart") == 0
    Path("ids.txt").write_text("a\n")
    with pytest.raises(DataError, match=r"ids\.txt must have as many lines"):
        typed(*command, "--document-ids", "ids.txt")
    assert "one by one" in typed(*command, "--scores").stderr
    with pytest.raises(MtkitError, match="--sentences"):
        typed(*command, "--documents", "--n-best", "2")


def test_given_translations_of_documents_are_scored_as_trained(wide: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(wide)
    given = ["--input", "flickr.source.en-de", "--target", "flickr.target.en-de", "--direction", "en-de"]
    trained, alone = (list(map(float, lines_of(typed(*given, *how)))) for how in ([], ["--sentences"]))
    same = [one == pytest.approx(other, rel=1e-5) for one, other in zip(trained, alone, strict=True)]
    assert same[:4] == [True, False, False, True]  # the first lines of documents have no context


def test_word_scores_are_json_lines() -> None:
    given = ["--input", "test.source", "--target", "test.target"]
    scored = [json.loads(line) for line in lines_of(typed(*given, "--word-scores"))]
    assert [line["log_prob"] for line in scored] == pytest.approx([*map(float, lines_of(typed(*given)))], abs=1e-5)
    assert [[word for word, _ in line["words"][:-1]] for line in scored] == [
        line.split() for line in Path("test.target").read_text().splitlines()
    ]


def test_a_killed_translation_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "CHUNK", 3)
    command = ["--input", "test.source", "--method", "sample", "--n-best", "2", "--output"]
    typed(*command, "whole.txt")
    monkeypatch.setattr(chunks, "CHUNK", 100)
    typed(*command, "at-once.txt")
    assert Path("whole.txt").read_text() == Path("at-once.txt").read_text()
    monkeypatch.setattr(chunks, "CHUNK", 3)
    translate = translator.translate_lines
    firsts: list[int] = []

    def dying(engine: object, tokenizers: object, lines: SourceLines, **rest: object) -> object:
        assert lines.numbers
        firsts.append(lines.numbers[0])
        if len(firsts) == 2:
            raise KeyboardInterrupt
        return translate(engine, tokenizers, lines, **rest)  # type: ignore[arg-type]

    monkeypatch.setattr(translator, "translate_lines", dying)
    assert CliRunner().invoke(app, ["translate", *command, "killed.txt"]).exit_code != 0
    assert not Path("killed.txt").exists()
    result = typed(*command, "killed.txt")
    assert "resuming after line 3" in result.stderr
    assert firsts == [0, 3, 3, 6]
    assert Path("killed.txt").read_text() == Path("whole.txt").read_text()


def test_chunks_keep_line_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "CHUNK", 2)
    long = "The tree and the house. " * 9
    result = typed("--input", "-", stdin=f"a\nb\nc\n{long}\n".encode())
    assert ": line 4\n" in result.stderr
    scored = lines_of(typed("--input", "test.source", "--target", "test.target"))
    monkeypatch.setattr(chunks, "CHUNK", 100)
    together = lines_of(typed("--input", "test.source", "--target", "test.target"))
    assert list(map(float, together)) == pytest.approx(list(map(float, scored)), rel=1e-5)  # products of other shapes
    monkeypatch.setattr(chunks, "CHUNK", 2)
    Path("long.txt").write_text(f"a\nb\n{long}\n")
    with pytest.raises(DataError, match="source line 3"):
        typed("--input", "long.txt", "--target", "long.txt")


def test_output_to_a_device_leaves_the_device(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    reading = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    typed("--input", "test.source", "--output", str(tmp_path / "pipe"))
    assert os.read(reading, 10_000).count(b"\n") == 7
    os.close(reading)


def test_output_through_a_link_leaves_the_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    for options in (("--input", "-"), ("--side", "test")):
        link, real = tmp_path / "out.txt", tmp_path / "disk" / "out.txt"
        link.symlink_to(real)
        assert typed(*options, "--output", str(link), stdin=b"dogs\n").exit_code == 0
        assert link.is_symlink()
        assert real.read_text()
        link.unlink()
        real.unlink()


def test_several_runs_are_an_ensemble(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "two"
    make_run(folder)
    monkeypatch.chdir(folder)
    alone = lines_of(typed("--input", "test.source"))
    assert lines_of(typed("--input", "test.source", "--name", "one", "--run", "mtkit-runs/one")) == alone
    make_run(folder, name="two", seed=2, attention="linear")
    ensemble = ["--name", "one", "--name", "two"]
    together = lines_of(typed("--input", "test.source", *ensemble))
    assert len(together) == 7
    assert together not in (alone, lines_of(typed("--input", "test.source", "--name", "two")))
    typed(*ensemble)
    there = folder / "mtkit-runs" / "one" / "translations"
    assert (there / "test+two.txt").read_text() == "".join(f"{line}\n" for line in together)
    assert len(json.loads((there / "test+two.json").read_text())["ensemble"]) == 2
    make_run(tmp_path / "wide", directions=("en-de", "en-fr"))
    with pytest.raises(MtkitError, match="different tokenizers"):
        typed("--name", "one", "--run", str(tmp_path / "wide" / "mtkit-runs" / "one"))


def test_words_are_aligned_beside_the_translations(tmp_path: Path) -> None:
    links = tmp_path / "links"
    result = typed("--input", "-", "--alignments", str(links), stdin="The dog.\n\n犬 sees\u2028a cat\n".encode())
    assert len(lines_of(result)) == 3
    assert "words are aligned by" in result.stderr
    lines = links.read_text().split("\n")
    assert len(lines) == 4
    assert not lines[1]
    assert all("-" in pair for pair in lines[0].split())
    assert lines[0]
    again = typed("--side", "test", "--alignments", str(links))
    assert again.exit_code == 0
    assert "chosen" not in again.stderr
    assert links.read_text().count("\n") == 7
    for wrong, match in (
        (["--input", "test.source", "--target", "test.target"], "leave it out with --target"),
        (["--input", "test.source", "--output", str(links)], "two outputs"),
        (["--name", "one", "--name", "one"], "ensemble"),
    ):
        with pytest.raises(MtkitError, match=match):
            typed(*wrong, "--alignments", str(links))
