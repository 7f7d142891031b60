"""`mtkit score`, as typed."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from mtkit.cli.app import app
from mtkit.decoding.held_out import HeldOut, Speed, save
from mtkit.decoding.translation import Translation
from mtkit.errors import MtkitError
from mtkit.runs import FORMAT, Run
from tests.decoding.trained import make_run, sentences

REFERENCES = ["the old dog sees a house", "two birds sing in the tree"]
ABOUT = {"format": FORMAT, "vocabularies": {"source": 8, "target": 8}}
OTHERS = ["an old dog sees a house", "two birds sing"]


@pytest.fixture(autouse=True)
def _inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, hypotheses in (("one", REFERENCES), ("two", OTHERS)):
        run = Run(Path("mtkit-runs") / name)
        translations = [[Translation(text, 0.0, 0.0, (3,))] for text in hypotheses]
        save(run, HeldOut("test", ["x", "y"], REFERENCES), translations, Speed(1, 2, 2), {})
        (run.folder / "run.json").write_text(json.dumps(ABOUT))
        (run.folder / "recipe.yaml").write_text("scoring: {lowercase: false}\n")
    Path("hypothesis").write_text("".join(f"{line}\n" for line in OTHERS))
    Path("reference").write_text("".join(f"{line}\n" for line in REFERENCES))


def typed(*arguments: str) -> Result:
    result = CliRunner().invoke(app, ["score", *arguments], catch_exceptions=False)
    assert result.exit_code == 0
    return result


def values(*arguments: str) -> dict[str, float]:
    return {score["name"]: score["value"] for score in json.loads(typed(*arguments, "--json").stdout)["scores"]}


def systems(*arguments: str) -> list[dict[str, Any]]:
    (side,) = json.loads(typed(*arguments, "--json").stdout)["sides"]
    found: list[dict[str, Any]] = side["systems"]
    return found


def test_a_runs_translations_are_scored() -> None:
    assert values("--name", "one")["BLEU"] == pytest.approx(100)
    assert values("--run", "mtkit-runs/one")["TER"] == 0
    assert values("--name", "two") == values("--hypothesis", "hypothesis", "--reference", "reference")
    assert values() == values("--name", "two")  # the latest run


def test_several_systems_are_compared_with_the_first() -> None:
    shown = typed("--name", "one", "--name", "two", "--paired-test", "bootstrap").stdout
    assert "two minus one" in shown
    assert "p bootstrap" in shown
    assert "p randomisation" not in shown
    by_name = systems("--name", "one", "--name", "two")
    by_folder = systems("--run", "mtkit-runs/one", "--run", "mtkit-runs/two")
    by_file = systems("--hypothesis", "reference", "--hypothesis", "hypothesis", "--reference", "reference")
    assert [each["name"] for each in by_name] == ["one", "two"]
    assert [each["name"] for each in by_file] == ["reference", "hypothesis"]
    for each in (by_name, by_folder, by_file):
        assert [system["scores"] for system in each] == [system["scores"] for system in by_name]
        assert each[1]["differences"] == by_name[1]["differences"]
    bleu = by_name[1]["differences"][0]
    assert bleu["value"] == by_name[1]["scores"][0]["value"] - by_name[0]["scores"][0]["value"] < 0
    assert 0 < bleu["bootstrap_p"] <= 1
    assert 0 < bleu["randomisation_p"] <= 1


def test_every_side_is_scored_unless_some_are_chosen() -> None:
    run = Run(Path("mtkit-runs/two"))
    translations = [[Translation(text, 0.0, 0.0, (3,))] for text in REFERENCES]
    save(run, HeldOut("flickr", ["x", "y"], REFERENCES), translations, Speed(1, 2, 2), {})
    sides = json.loads(typed("--name", "two", "--json").stdout)["sides"]
    assert [side["name"] for side in sides] == ["test", "flickr"]
    assert [side["systems"][0]["scores"][0]["value"] for side in sides] == [values()["BLEU"], pytest.approx(100)]
    assert values("--side", "flickr")["BLEU"] == pytest.approx(100)
    shown = typed("--name", "two").stdout
    assert shown.index("test.reference.txt") < shown.index("flickr.reference.txt")
    assert "test.reference" not in typed("--name", "two", "--side", "flickr").stdout


def test_directions_are_scored_apart() -> None:
    Path("mtkit-runs/two/translations/test.direction.txt").write_text("en-fr\nen-de\n")
    (two,) = systems("--name", "two")
    assert [way["direction"] for way in two["by_direction"]] == ["en-fr", "en-de"]
    assert "en-fr" in typed("--name", "two").stdout


def test_lengths_need_the_sources() -> None:
    Path("source").write_text(f"{'x ' * 30}\nx y\n")
    pair = ["--hypothesis", "hypothesis", "--reference", "reference", "--by-length"]
    assert "words in source" in typed("--name", "two", "--by-length").stdout
    (found,) = systems(*pair, "--source", "source")
    assert [(row["words"], row["segments"]) for row in found["by_length"]] == [("1-10", 1), ("21-30", 1)]
    with pytest.raises(MtkitError, match="--source"):
        typed(*pair)


def test_metrics_are_chosen_by_option_or_recipe() -> None:
    assert list(values("--metric", "Exact", "--metric", "bleu")) == ["exact", "BLEU"]
    assert values("--name", "one", "--metric", "exact") == {"exact": 100}
    Path("mtkit-runs/two/recipe.yaml").write_text("scoring: {metrics: [exact]}\n")
    assert values("--name", "two") == {"exact": 0}


def test_segment_scores_and_comet_are_added(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("one.scores").write_text("0.5\n0.75\n")
    Path("two.scores").write_text("0.25\n0.5\n")
    Path("comet.py").write_text(
        "import json, sys; row = [{'COMET': 0.5}, {'COMET': 1}]; "
        "json.dump({'a': row}, open(sys.argv[sys.argv.index('--to_json') + 1], 'w'))"
    )
    monkeypatch.setenv("MTKIT_COMET", f"{sys.executable} comet.py")
    files = ["--segment-scores", "Mine=one.scores", "--segment-scores", "Mine=two.scores"]
    one, two = systems("--name", "one", "--name", "two", "--metric", "chrF", *files)
    assert [(score["name"], score["value"]) for score in one["scores"][1:]] == [("Mine", 0.625)]
    assert [difference["value"] for difference in two["differences"][1:]] == [-0.25]
    assert values("--name", "one", "--metric", "comet") == {"COMET": 0.75}


def test_the_target_language_says_how_text_is_cut() -> None:
    def signature(*arguments: str) -> str:
        scores = json.loads(typed(*arguments, "--json", "--metric", "BLEU").stdout)["scores"]
        return str(scores[0]["signature"])

    pair = ["--hypothesis", "hypothesis", "--reference", "reference"]
    assert "tok:13a" in signature(*pair)
    assert "tok:zh" in signature(*pair, "--target-language", "zh-CN")
    assert "tok:13a" in signature(*pair, "--target-language", "zh", "--tokenize", "13a")
    Path("mtkit-runs/two/recipe.yaml").write_text("data: {target_language: cmn}\n")
    assert "tok:zh" in signature("--name", "two")
    assert "tok:char" in signature("--name", "two", "--target-language", "th")
    Path("mtkit-runs/two/recipe.yaml").write_text("{data: {target_language: zh}, scoring: {tokenize: 13a}}\n")
    assert "tok:13a" in signature("--name", "two")
    Path("recipe.yaml").write_text("data: {target_language: zh}\n")
    assert "tok:zh" in signature(*pair, "--recipe", "recipe.yaml")
    Path("recipe.yaml").write_text(recipe_of("en-zh"))
    assert "tok:zh" in signature(*pair, "--recipe", "recipe.yaml")
    assert "tok:char" in signature(*pair, "--recipe", "recipe.yaml", "--target-language", "th")
    Path("recipe.yaml").write_text(recipe_of("en-zh", "zh-en"))
    assert "tok:13a" in signature(*pair, "--recipe", "recipe.yaml")


def recipe_of(*directions: str) -> str:
    """A recipe with a corpus of each direction."""
    corpora = [{"source": "a", "target": "b", "direction": each} for each in directions]
    return json.dumps({"data": {"train": corpora, "valid": corpora}})


def test_a_tokenizer_that_does_not_fit_is_noted() -> None:
    Path("hypothesis").write_text("老猫在树下看见了一座大房子。\n请问，去飞机场怎么走？\n")
    Path("reference").write_text("老狗在树下看见了一座小房子。\n请问，去火车站怎么走？\n")
    pair = ["--hypothesis", "hypothesis", "--reference", "reference"]
    wrong = typed(*pair, "--target-language", "de").stderr
    assert wrong.startswith("note: reference has no spaces between words")
    assert "--target-language zh" in wrong
    assert "leave out --tokenize" in typed(*pair, "--tokenize", "13a").stderr
    for name in ("zh", "Chinese"):
        assert "note" not in typed(*pair, "--target-language", name).stderr
    assert "--target-language china is unknown" in typed(*pair, "--target-language", "china").stderr


def test_the_language_of_files_is_that_of_their_name_or_script() -> None:
    Path("hypothesis").write_text("老猫在树下看见了一座大房子。\n请问，去飞机场怎么走？\n")
    Path("reference").write_text("老狗在树下看见了一座小房子。\n请问，去火车站怎么走？\n")
    Path("reference.ja.txt").write_bytes(Path("reference").read_bytes())
    result = typed("--hypothesis", "hypothesis", "--reference", "reference")
    assert "note: language of reference: zh; --target-language names another" in result.stderr
    assert "tok:zh" in result.stdout
    assert "asian:yes" in result.stdout
    result = typed("--hypothesis", "hypothesis", "--reference", "reference.ja.txt")
    assert "note: language of reference.ja.txt: ja" in result.stderr
    assert "asian:yes" in result.stdout


def test_byte_order_marks_are_left_out_and_noted() -> None:
    text = "the cat sits on the mat here\na dog runs over the hill now\n"
    Path("plain").write_text(text)
    Path("marked").write_text(f"\ufeff{text}")
    for hypothesis, reference in (("plain", "marked"), ("marked", "plain")):
        result = typed("--hypothesis", hypothesis, "--reference", reference, "--metric", "BLEU")
        assert "BLEU    100.00" in result.stdout
        assert result.stderr.startswith("note: marked begins with a byte order mark")
    assert not typed("--hypothesis", "plain", "--reference", "plain").stderr


def test_tokenised_text_is_noted() -> None:
    Path("hypothesis").write_text("an old dog .\ntwo birds .\n")
    result = typed("--hypothesis", "hypothesis", "--reference", "reference")
    assert "note: lines of hypothesis end in ' .'" in result.stderr
    assert "note" not in typed("--name", "one").stderr


def test_several_references_count() -> None:
    pair = ["--hypothesis", "hypothesis", "--reference", "reference"]
    assert values(*pair, "--reference", "hypothesis")["BLEU"] == pytest.approx(100)
    assert values(*pair)["BLEU"] < 90


def test_the_recipe_says_how_unless_an_option_does() -> None:
    def signature(*arguments: str) -> str:
        return json.loads(typed(*arguments, "--json").stdout)["scores"][0]["signature"]

    Path("mtkit-runs/two/recipe.yaml").write_text("scoring: {lowercase: true, tokenize: char}\n")
    assert "case:lc" in signature("--name", "two")
    assert "tok:char" in signature("--name", "two")
    assert "case:mixed" in signature("--name", "two", "--cased")
    assert "tok:13a" in signature("--name", "two", "--tokenize", "13a")
    Path("recipe.yaml").write_text("scoring: {lowercase: true}\n")
    assert "case:lc" in signature("--hypothesis", "hypothesis", "--reference", "reference", "--recipe", "recipe.yaml")


def test_the_table_shows_all() -> None:
    shown = typed("--name", "two", "--tokenize", "char", "--lowercase").stdout
    assert "tok:char" in shown
    assert "case:lc" in shown
    assert "bs:1000|seed:12345" in shown
    assert all(name in shown for name in ("BLEU", "chrF", "TER", "95% interval", "test.reference.txt"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--hypothesis", "hypothesis"], "go together"),
        (["--reference", "reference"], "go together"),
        (
            ["--hypothesis", "hypothesis", "--reference", "reference", "--name", "one"],
            "do not combine with --run, --name and --side",
        ),
        (["--hypothesis", "nowhere", "--reference", "reference"], "nowhere"),
        (["--hypothesis", "longer", "--reference", "reference"], "longer has 3 lines and reference has 2"),
        (["--name", "tow"], "did you mean 'two'"),
        (["--name", "three"], "mtkit translate"),
        (["--name", "one", "--tokenize", "13b"], "did you mean '13a'"),
        (["--name", "one", "--tokenize", "char", "--metric", "chrF"], "--tokenize is for BLEU, not for chrF"),
        (["--name", "one", "--paired-test", "bootstrap"], "--paired-test compares several systems, and there is one"),
        (["--name", "one", "--metric", "exakt"], "did you mean 'exact'"),
        (["--name", "one", "--name", "two", "--paired-test", "random"], "there are: bootstrap, randomisation"),
        (["--name", "one", "--side", "tests"], "did you mean 'test'"),
        (["--name", "one", "--name", "other"], r"test.reference.txt and .*test.reference.txt differ in line 2"),
        (["--name", "one", "--source", "reference"], "do not combine with --run, --name and --side"),
        (["--source", "reference"], "go together"),
        (["--name", "one", "--segment-scores", "Mine"], "is not NAME=FILE"),
        (
            ["--name", "one", "--segment-scores", "Mine=reference"],
            r"reference, line 1: 'the old dog .*' is not a number",
        ),
        (["--name", "one", "--documents", "--segment-scores", "Mine=reference"], "does not go with --documents"),
        (["--name", "one", "--documents", "--metric", "comet"], "comet scores lines, not --documents"),
    ],
)
def test_mistakes_are_named(arguments: list[str], message: str) -> None:
    Path("longer").write_text("a\nb\nc")
    other = HeldOut("test", ["x", "y"], [REFERENCES[0], "others"])
    save(Run(Path("mtkit-runs/other")), other, [[Translation("x", 0, 0, ())]] * 2, Speed(1, 2, 2), {})
    Path("mtkit-runs/other/run.json").write_text(json.dumps(ABOUT))
    Path("mtkit-runs/three").mkdir()
    Path("mtkit-runs/three/run.json").write_text(json.dumps(ABOUT))
    Path("mtkit-runs/three/recipe.yaml").write_text("seed: 1\n")
    with pytest.raises(MtkitError, match=message) as raised:
        typed(*arguments)
    assert "\n" not in str(raised.value)


def contrastive_run(name: str, seed: int) -> None:
    """The run mtkit-runs/`name`, with the same data as others."""
    trained = make_run(Path("made"), name=name, seed=seed)
    (Path("made") / "mtkit-runs" / name).resolve().rename(Path("mtkit-runs").resolve() / name)
    assert trained.run.folder.name == name


def test_contrastive_translations_of_several_runs() -> None:
    for number, name in enumerate(("first", "second")):
        contrastive_run(name, number + 1)
    rows = [
        {
            "source": source,
            "right": right,
            "wrong": wrong,
            "source_context": ["A."],
            "target_context": ["B."],
            "labels": {"distance": number % 2},
        }
        for number, (source, right, wrong) in enumerate(zip(*[iter(sentences(60, 3))] * 3, strict=True))
    ]
    Path("pairs.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    both = ["--contrastive", "pairs.jsonl", "--name", "first", "--name", "second", "--threads", "1"]
    result = typed(*both)
    assert result.stdout.startswith("pairs.jsonl: share of segments")
    assert "difference: the accuracy minus the accuracy of first" in result.stdout
    assert result.stderr.count("trained on single sentences, so the contexts of 20 segments are left out") == 2
    content = json.loads(typed(*both, "--sentences", "--json").stdout)
    assert content["all"]["segments"] == 20
    assert [row["value"] for row in content["labels"]["distance"]] == [0, 1]
    for system in content["scores"]:
        kept = [json.loads(line)["log_probs"] for line in Path(system["path"]).read_text().splitlines()]
        (found,) = [each for each in content["all"]["systems"] if each["name"] == system["name"]]
        assert found["right"] == sum(right > wrong for right, wrong in kept)
    assert "/ length^1" in typed(*both[:4], "--length-penalty", "1").stdout
    for wrong, message in (
        (["--metric", "BLEU"], "--metric does not go with --contrastive"),
        (["--cased"], "--lowercase does not go with --contrastive"),
        (["--source-context", "a"], "--source-context and --target-context go together"),
        (["--source-context", "reference", "--target-context", "reference"], "belong to ContraPro"),
        (["--documents"], "needs a run trained on documents"),
        (["--direction", "en-fr"], "not trained on the direction"),
    ):
        with pytest.raises(MtkitError, match=message):
            typed(*both, *wrong)
    assert "BLEU" in typed("--name", "one", "--sentences").stdout
    for option in (["--checkpoint", "last"], ["--direction", "en-de"], ["--length-penalty", "0"]):
        with pytest.raises(MtkitError, match="applies to --contrastive or --gold-alignments only"):
            typed("--name", "one", *option)


def test_gold_alignments_of_runs_and_of_files() -> None:
    contrastive_run("third", 3)
    Path("text").write_text("".join(f"{line}\n" for line in sentences(3, 1)))
    words = [line.split() for line in Path("text").read_text().splitlines()]
    in_order = [" ".join(f"{place}-{place}" for place in range(len(line))) for line in words]
    Path("links").write_text("".join(f"{line}\n" for line in in_order))
    Path("none").write_text("\n\n0-0\n")
    gold = ["--gold-alignments", "links"]
    text = ["--source", "text", "--reference", "text", "--name", "third"]
    result = typed(*gold, *text)
    assert result.stdout.startswith(f"links: 3 lines, {sum(map(len, words))} sure and 0 possible links")
    assert "words are aligned by" in result.stderr
    files = json.loads(typed(*gold, "--hypothesis", "links", "--hypothesis", "none", "--json").stdout)
    assert [system["scores"][0]["value"] for system in files["systems"]] == [
        0,
        pytest.approx(100 * (1 - 2 / (1 + sum(map(len, words))))),
    ]
    assert files["systems"][1]["differences"][0]["randomisation_p"] is not None
    for wrong, message in (
        ([*gold, "--source", "text"], "needs --source FILE and one --reference FILE"),
        ([*gold, *text, "--metric", "BLEU"], "--metric does not go with --gold-alignments"),
        ([*gold, "--hypothesis", "links", "--source", "text"], "--source does not go with --gold-alignments of --hyp"),
        ([*gold, *text, "--one-based"], "has a word 0; leave --one-based out"),
        ([*gold, *text, "--paired-test", "x"], "--paired-test compares several systems"),
        ([*gold, *2 * ["--hypothesis", "links"], "--paired-test", "x"], "no test 'x'"),
        (["--one-based"], "--one-based applies to --contrastive or --gold-alignments only"),
    ):
        with pytest.raises(MtkitError, match=message):
            typed(*wrong)
