from collections.abc import Callable

from mtkit.experiments.folder import Folder
from mtkit.experiments.report import as_object, caption, markdown, table
from mtkit.recipe import Recipe
from tests.experiments.results import result

Tiny = Callable[..., Recipe]
Opened = Callable[..., Folder]

ROW = ["full", "98.76", "97.26 to 100.01", "45,679", "1,234", "67.9", "812 MiB", "1,234,567", "1,000"]


def test_every_number_stands_in_its_column(tiny: Tiny, opened: Opened) -> None:
    settings = opened(tiny(), "full").settings()
    shown = table(settings, [result("full", 98.76)])
    head, row = shown.split("\n")[-2:]
    assert row.split("  ") != [""]
    assert [cell.strip() for cell in row.split("  ") if cell.strip()] == ROW
    for name, cell in zip(("BLEU", "training tokens/s", "peak memory", "updates"), (1, 3, 6, 8), strict=True):
        assert head.index(name) + len(name) == row.index(ROW[cell]) + len(ROW[cell])
    lines = markdown(settings, [result("full", 98.76)]).split("\n")
    assert [cell.strip() for cell in lines[-2].strip("|").split("|")] == ROW
    assert {line.count("|") for line in lines[2:-1]} == {len(ROW) + 1}


def test_a_failure_is_a_row_with_its_reason(tiny: Tiny, opened: Opened) -> None:
    settings = opened(tiny(), "full").settings()
    results = [result("full", 98.76), {"attention": "band", "failed": "loss | not finite"}]
    assert table(settings, results).split("\n")[-1].endswith("failed: loss | not finite")
    lines = markdown(settings, results).split("\n")
    assert lines[-2].split("|")[1].strip() == "band"
    assert lines[-2].endswith("failed: loss \\| not finite |")
    assert "note" not in table(settings, results[:1])


def test_the_caption_says_what_all_have_in_common(tiny: Tiny, opened: Opened) -> None:
    recipe = tiny(training={"max_minutes": 2.5}, decoding={"method": "beam", "beam": 3})
    shown = caption(opened(recipe, "full").settings(), [result("full", 1.0, side="valid")])
    for words in ("seed 1", "2 updates or 2.5 minutes", "beam 3", "nrefs:1|tok:13a", "validation side", "1 thread"):
        assert words in shown


def test_a_limit_of_many_updates_is_written_out(tiny: Tiny, opened: Opened) -> None:
    recipe = tiny(training={"max_updates": 1_000_000})
    assert "until 1,000,000 updates, " in caption(opened(recipe, "full").settings(), [result("full", 1.0)])


def test_the_caption_says_who_trained_in_what(tiny: Tiny, opened: Opened) -> None:
    def shown(**precisions: str) -> str:
        results = [result(name, 1.0) for name in precisions]
        for each in results:
            each["training"] = each["training"] | {"precision": precisions[each["attention"]]}
        return caption(opened(tiny(), "full", "band", "luna").settings(), results)

    assert ", bfloat16, greedy, " in shown(full="bfloat16", band="bfloat16")
    assert ", bfloat16 (full, luna), float32 (band), " in shown(full="bfloat16", band="float32", luna="bfloat16")


def test_json_keeps_numbers_whole(tiny: Tiny, opened: Opened) -> None:
    results = [result("full", 98.7654321)]
    found = as_object(opened(tiny(), "full").settings(), results)
    assert found["results"] == results
    assert found["settings"]["recipe"]["training"]["max_updates"] == 2


def test_what_makes_the_scores_doubtful_is_said_once(tiny: Tiny, opened: Opened) -> None:
    settings = opened(tiny(), "full").settings()
    results = [result("full", 1.0, doubt="BLEU 1.00 but chrF 60"), result("band", 1.1, doubt="BLEU 1.10 but 61")]
    assert table(settings, results).count(" but ") == 1
    assert "full: BLEU 1.00 but chrF 60" in caption(settings, results)
