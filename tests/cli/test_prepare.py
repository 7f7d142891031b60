import os
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

from mtkit.cli.app import main
from mtkit.data.prepared import open_prepared
from tests.decoding.trained import make_run


def process(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Runs the command as a process."""
    return subprocess.run(
        [sys.executable, "-m", "mtkit", "prepare", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "COLUMNS": "120"},
    )


def run(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Runs the command in this process: most of a process is its imports."""
    stdout, stderr = StringIO(), StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(stdout), redirect_stderr(stderr):
        patch.chdir(folder)
        patch.setenv("COLUMNS", "120")
        patch.setattr("sys.argv", ["mtkit", "prepare", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
    code = ended.value.code
    assert isinstance(code, int)
    return subprocess.CompletedProcess(arguments, code, stdout.getvalue(), stderr.getvalue())


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text("data: {builtin: {train: 60, valid: 5, test: 5}, tokenizer: {vocabulary: 400}}\n")
    return path


def test_the_built_in_corpus_is_prepared_once(tmp_path: Path, recipe: Path) -> None:
    first = process(tmp_path, "--recipe", "small.yaml", "--sentences", "3", "--seed", "5")
    assert first.returncode == 0, first.stderr
    assert "mtkit-data prepared in" in first.stdout
    assert "Next: mtkit train --recipe small.yaml --name small\n" in first.stdout
    assert "bpe, normalisation nfkc" in first.stdout
    again = process(tmp_path, "--recipe", "small.yaml", "--sentences", "3", "--seed", "5")
    assert again.returncode == 0
    assert "up to date" in again.stdout
    prepared = open_prepared(tmp_path / "mtkit-data")
    builtin = prepared.settings.builtin.model_dump(exclude_none=True)
    assert builtin == {"seed": 5, "train": 60, "valid": 5, "test": 5, "sentences": 3}


def test_a_task_is_prepared_with_its_options(tmp_path: Path) -> None:
    small = ("train=60", "valid=5", "test=5", "vocabulary=50", "longer=[2]")
    options = [word for option in small for word in ("--task-option", option)]
    first = run(tmp_path, "--task", "reverse", "--seed", "3", *options)
    assert first.returncode == 0, first.stderr
    assert first.stdout.endswith("Next: mtkit train\n")
    prepared = open_prepared(tmp_path / "mtkit-data")
    task = prepared.settings.task
    assert task is not None
    assert (task.name, task.seed, task.train, task.options) == ("reverse", 3, 60, {"vocabulary": 50})
    assert list(prepared.tests) == ["test", "test-2x"]
    (tmp_path / "r.yaml").write_text("data: {task: reverse, tokenizer: {kind: bpe}}\n")
    changed = run(tmp_path, "--recipe", "r.yaml", "--seed", "4", *options)
    assert changed.returncode == 2
    assert "task.seed: 3 -> 4" in changed.stderr
    assert "tokenizer.kind: words -> bpe" in changed.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--task", "copi"), "no task 'copi' (did you mean 'copy'?); `mtkit tasks` lists: copy"),
        (("--task", "copy", "--task-option", "longer"), "--task-option longer: write KEY=VALUE, as in longest=40"),
        (("--task-option", "longest=3"), "--task-option applies to a built-in task; give --task NAME"),
        (("--task", "copy", "--train", "a.en", "a.de"), "leave out data.train"),
        (("--task", "copy", "--sentences", "3"), "leave one of them out"),
        (("--task", "copy", "--part", "1/2"), "built-in text is not prepared in parts"),
    ],
)
def test_wrong_options_of_tasks_are_refused(tmp_path: Path, options: tuple[str, ...], message: str) -> None:
    refused = run(tmp_path, *options)
    assert refused.returncode == 2
    assert message in refused.stderr
    assert list(tmp_path.iterdir()) == []


def test_training_text_that_is_held_out_too_can_be_kept(tmp_path: Path) -> None:
    for side in ("en", "fr"):
        (tmp_path / f"a.{side}").write_text("".join(f"{side} {number} dogs by the sea\n" for number in range(50)))
    same = ("--train", "a.en", "a.fr", "--valid", "a.en", "a.fr", "--vocabulary", "300")
    refused = run(tmp_path, *same)
    assert refused.returncode == 2
    assert "--keep-overlap" in refused.stderr
    assert run(tmp_path, *same, "--keep-overlap").returncode == 0
    assert len(open_prepared(tmp_path / "mtkit-data").train) == 50


def test_parts_are_prepared_and_joined(tmp_path: Path) -> None:
    for name, text in (("a.en", "the %d dogs see a house\n"), ("a.ja", "%d匹の犬が家を見る。\n")):
        (tmp_path / name).write_text("".join(text % number for number in range(60)), encoding="utf-8")
        (tmp_path / f"valid.{name}").write_text(text % 70, encoding="utf-8")
    own = ("--train", "a.en", "a.ja", "--valid", "valid.a.en", "valid.a.ja", "--vocabulary", "400")
    wrong = (("--part", "3/2"), ("--part", "1/2", "--join"), ("--join",))
    for options, said in zip(wrong, ("--part 3/2 is no part", "leave one out", "no parts of mtkit-data"), strict=True):
        refused = run(tmp_path, *own, *options)
        assert (refused.returncode, said in refused.stderr) == (2, True), refused.stderr
    for number in (1, 2):
        done = run(tmp_path, *own, "--part", f"{number}/2")
        assert done.returncode == 0, done.stderr
        assert f"pairs encoded: mtkit-data.part-{number}-of-2" in done.stdout
    joined = run(tmp_path, *own, "--join")
    assert joined.returncode == 0, joined.stderr
    assert "rm -r mtkit-data.part-*" in joined.stderr
    assert "mtkit-data prepared in" in joined.stdout
    assert len(open_prepared(tmp_path / "mtkit-data").train) == 60


def test_own_text_and_options_arrive(tmp_path: Path) -> None:
    (tmp_path / "a.en").write_text("".join(f"the {number} dogs see a house by the sea\n" for number in range(50)))
    (tmp_path / "a.fr").write_text("".join(f"les {number} chiens voient une maison au bord\n" for number in range(50)))
    (tmp_path / "b.en").write_text("a dog\n")
    (tmp_path / "b.fr").write_text("un chien\n")
    pair, other = ("a.en", "a.fr"), ("b.en", "b.fr")
    done = run(
        tmp_path, "--train", *pair, "--valid", *other, "--test", *other, "--target-language", "fr", "--separate",
        "--tokenizer", "unigram", "--vocabulary", "304", "--normalization", "identity", "--data", "own",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    prepared = open_prepared(tmp_path / "own")
    assert (prepared.settings.target_language, prepared.settings.tokenizer.kind) == ("fr", "unigram")
    assert prepared.settings.tokenizer.normalization == "identity"
    assert not prepared.tokenizers.joint
    assert prepared.test is not None
    assert "--data own" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--train", "none.en", "none.de", "--valid", "none.en", "none.de"), "no file none.en"),
        (("--train", "a", "b"), "give --valid SRC TGT (data.valid in a recipe)"),
        (("--train", "a", "b", "--valid", "a", "b", "--seed", "3"), "apply to built-in text only"),
        (("--tokenizer", "word"), "data.tokenizer.kind"),
        (("--vocabulary", "0"), "data.tokenizer.vocabulary"),
        (("--workers", "0"), "--workers 0"),
        (("--target-language", ""), "give one word"),
        (("--target-language", "Simplified Chinese"), "give one word"),
        (("--tokenizer-from", "nobody"), "--tokenizer-from nobody: no run of that name"),
        (("--recipe", "none.yaml"), "none.yaml"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    done = run(tmp_path, *arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_options_of_the_built_in_corpus_are_refused_beside_text_of_a_recipe(tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text("data: {train: {source: a, target: b}, valid: {source: a, target: b}}\n")
    for option in ("--seed", "--sentences"):
        done = run(tmp_path, "--recipe", "own.yaml", option, "3")
        assert done.returncode == 2
        assert "or use a recipe without training text; own.yaml has some" in done.stderr


def test_what_to_type_next_is_quoted(tmp_path: Path) -> None:
    recipe = tmp_path / "my recipe.yaml"
    recipe.write_text("data: {builtin: {train: 60, valid: 5, test: 5}, tokenizer: {vocabulary: 400}}\n")
    done = run(tmp_path, "--recipe", recipe.name, "--data", "my data")
    assert done.returncode == 0, done.stderr
    assert "Next: mtkit train --recipe 'my recipe.yaml' --data 'my data' --name 'my recipe'\n" in done.stdout
    for side in ("en", "fr"):
        (tmp_path / f"a.{side}").write_text("".join(f"{side} {number} dogs by the sea\n" for number in range(60)))
        (tmp_path / f"b.{side}").write_text(f"{side} dogs see a house\n")
    own = ("--train", "a.en", "a.fr", "--valid", "b.en", "b.fr", "--vocabulary", "300", "--data", "my parts")
    part = run(tmp_path, *own, "--part", "1/1")
    assert part.returncode == 0, part.stderr
    joined = run(tmp_path, *own, "--join")
    assert "rm -r 'my parts'.part-*" in joined.stderr, joined.stderr


def test_the_tokenizer_of_other_data_is_taken_over(tmp_path: Path, recipe: Path) -> None:
    assert run(tmp_path, "--recipe", "small.yaml").returncode == 0
    for side in ("en", "de"):
        (tmp_path / f"a.{side}").write_text("".join(f"{side} {number} dogs by the sea\n" for number in range(50)))
    own = ("--tokenizer-from", "mtkit-data", "--train", "a.en", "a.de", "--valid", "a.en", "a.de", "--keep-overlap")
    refused = run(tmp_path, *own, "--data", "own", "--vocabulary", "500")
    assert refused.returncode == 2
    assert "data.tokenizer.vocabulary = 500 (--vocabulary) contradicts the tokenizer of mtkit-data" in refused.stderr
    assert len(refused.stderr.splitlines()) == 1
    done = run(tmp_path, *own, "--data", "own")
    assert done.returncode == 0, done.stderr
    assert "vocabulary of mtkit-data: " in done.stdout
    models = [(tmp_path / each / "tokenizer/joint.model").read_bytes() for each in ("own", "mtkit-data")]
    assert models[0] == models[1]
    # other data has no weights to begin with
    assert "Next: mtkit train --data own --preset small --max-minutes 60\n" in done.stdout


def test_after_the_tokenizer_of_a_run_training_begins_with_its_weights(tmp_path: Path) -> None:
    make_run(tmp_path)
    own = ("--train", "train.source", "train.target", "--valid", "valid.source", "valid.target", "--data", "own")
    done = run(tmp_path, "--tokenizer-from", "one", *own)
    assert done.returncode == 0, done.stderr
    assert "Next: mtkit train --data own --init-from one --name one-tuned\n" in done.stdout


def test_several_corpora_come_from_a_recipe_and_the_command_line_replaces_them(tmp_path: Path) -> None:
    for name, words in (("a", "the dogs see a house"), ("b", "a cat sat on the mats"), ("v", "cats")):
        for side in ("en", "de"):
            (tmp_path / f"{name}.{side}").write_text("".join(f"{words} {number} {side}\n" for number in range(40)))
    corpora = "".join(f"    - {{source: {name}.en, target: {name}.de}}\n" for name in "ab")
    sides = "  valid: {source: v.en, target: v.de}\n  test: {one: {source: v.en, target: v.de}}\n"
    (tmp_path / "two.yaml").write_text(f"data:\n  tokenizer: {{vocabulary: 320}}\n  train:\n{corpora}{sides}")
    both = run(tmp_path, "--recipe", "two.yaml", "--data", "both", "--workers", "2")
    assert both.returncode == 0, both.stderr
    assert "corpus 2" in both.stdout
    one = run(tmp_path, "--recipe", "two.yaml", "--data", "one", "--train", "a.en", "a.de", "--test", "b.en", "b.de")
    assert one.returncode == 0, one.stderr
    assert (len(open_prepared(tmp_path / "both").train), len(open_prepared(tmp_path / "one").train)) == (80, 40)
    assert list(open_prepared(tmp_path / "both").tests) == ["one"]
    assert list(open_prepared(tmp_path / "one").tests) == ["test"]


def test_help_has_examples(tmp_path: Path) -> None:
    shown = run(tmp_path, "--help").stdout
    assert "mtkit prepare --train a.en a.de --valid b.en b.de" in shown
