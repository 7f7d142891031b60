"""A service of strings: parts of requests, lines of any length, documents, names of languages."""

import re
from html import unescape
from typing import Any

import pytest

from mtkit.decoding.alignment_heads import Heads
from mtkit.decoding.translator import Translator
from mtkit.serving.service import AttentionJob, Service, TextPart, TranslationJob, join_parts, language_name
from tests.decoding.trained import make_run

SETTINGS = {"beam": 3, "max_pieces": 6}


@pytest.fixture(scope="module")
def translator(tmp_path_factory: pytest.TempPathFactory) -> Translator:
    run = make_run(tmp_path_factory.mktemp("runs"), directions=("en-de", "en-zh")).run
    return Translator([run], run.recipe.decoding.model_copy(update=SETTINGS))


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ("de", "German"),
        ("deu", "German"),
        ("zh-CN", "Chinese (China)"),
        ("zh_Hant", "Chinese (Traditional)"),
        ("es-419", "Spanish (Latin America)"),
        ("yue", "Cantonese"),
        ("en-abc", "English (abc)"),
        ("qqq", "qqq"),
    ],
)
def test_languages_have_names(code: str, name: str) -> None:
    assert language_name(code) == name


@pytest.mark.parametrize("n_best", [1, 2])
@pytest.mark.parametrize("most", [2, 5, 11, 1000])
def test_parts_of_a_request_have_the_translations_of_the_whole(translator: Translator, most: int, n_best: int) -> None:
    service = Service(translator)
    strings = ["a dog\r\n\na cat\r", "", "\n", "The tree. A house sees the river.\nA house.", "a\n b \n\n"]
    lines = {line for string in strings for line in re.split("[\r\n]", string)}
    pieces = max(map(len, translator.tokenizers.source.encode_lines(sorted(lines))))
    parts = service.jobs(strings, "en-de", n_best, most=most)
    whole = [
        TranslationJob(tuple(TextPart(string, number) for number, string in enumerate(strings)), "en-de", n_best, 1)
    ]
    results = [result for part in parts for result in service.work([part])]
    assert [len(result) for result in results] == [len(part.parts) for part in parts]
    assert all(part.size <= most or len(part.parts) == 1 for part in parts)
    assert len(parts) == 1 or most < 1000
    if most > pieces:
        assert join_parts(parts, results) == join_parts(whole, service.work(whole))
    assert [hypotheses[0].count("\n") for hypotheses in join_parts(parts, results)] == [s.count("\n") for s in strings]


def test_a_line_of_any_length_is_split(translator: Translator) -> None:
    service = Service(translator)
    texts = ["x" * 90, "The dog. " * 12 + "\n", "a dog " * 30 + "\r\nA cat.", " " * 100]
    parts = service.jobs(texts, "en-de", 1, most=12)
    assert max(part.size for part in parts) <= 12
    for number, text in enumerate(texts):
        split = "".join(unit.text for part in parts for unit in part.parts if unit.number == number)
        assert "".join(split.split()) == "".join(text.split())
        assert re.findall("[\r\n]", split) == re.findall("[\r\n]", text)
    hypotheses = join_parts(parts, [result for part in parts for result in service.work([part])])
    assert len(hypotheses) == len(texts)
    assert hypotheses[1][0].endswith("\n")
    assert len(hypotheses[1][0].split("\n")) == 2


def test_sampled_translations_do_not_depend_on_other_requests(translator: Translator) -> None:
    settings = translator.settings.model_copy(update={"method": "sample", "n_best": 1})
    service = Service(translator.with_settings(settings))
    dog, cats = (service.jobs([text], "en-de", 1, 100)[0] for text in ("The dog sees a tree.", "A cat.\nA bird.\nOne."))
    assert service.work([cats, dog])[1] == service.work([dog])[0]


@pytest.mark.parametrize("html", [False, True])
def test_parts_of_a_string_have_draws_of_their_own(translator: Translator, html: bool) -> None:
    settings = translator.settings.model_copy(update={"method": "sample", "n_best": 1})
    service = Service(translator.with_settings(settings))
    strings = ["<p>A cat.</p>" * 6 if html else "A cat.\n" * 6, "A cat."]
    whole, parts = (service.jobs(strings, "en-de", 1, most, html=html) for most in (1000, 12))
    assert (len(whole), len(parts) > 2) == (1, True)
    expected, found = (join_parts(jobs, [service.work([job])[0] for job in jobs]) for jobs in (whole, parts))
    assert found == expected
    assert len({*re.split("\n|<p>", found[0][0])}) > 4


@pytest.fixture(scope="module")
def of_documents(tmp_path_factory: pytest.TempPathFactory) -> Translator:
    run = make_run(tmp_path_factory.mktemp("documents"), documents=60).run
    return Translator([run], run.recipe.decoding.model_copy(update={"method": "greedy", "max_pieces": 6}))


def test_a_long_line_parts_the_document_and_no_more(of_documents: Translator) -> None:
    service, short, long = Service(of_documents), "A dog.\n\nA cat.\n", "The dog sees a tree. " * 9 + "\n"
    found = [part for job in service.jobs([short + long + short], "en-de", 1, 40) for part in job.parts]
    assert (found[0].text, found[-1].text) == (short, short)
    assert len(found) > 3
    assert [part.first for part in found] == [0, *range(3, len(found) + 2)]
    page = f"<p>{short}<p>{long}<p>A cat."
    assert len(service.jobs([page], "en-de", 1, 40, html=True)) == 1
    assert len(service.jobs([page], "en-de", 2, 40, html=True)) > 1


def test_strings_are_documents_of_their_own(of_documents: Translator, monkeypatch: pytest.MonkeyPatch) -> None:
    translator = of_documents
    documents: list[Any] = []
    source = translator.source

    def recorded(texts: list[str], **how: Any) -> Any:
        documents.append(how["documents"])
        return source(texts, **how)

    monkeypatch.setattr(translator, "source", recorded)
    monkeypatch.setattr(translator, "with_settings", lambda settings: translator)
    service = Service(translator)
    jobs = [
        service.jobs(strings, "en-de", 1, 1000)[0] for strings in (["A dog.\nA cat.", "A tree."], ["Birds.\nA dog."])
    ]
    assert [len(found) for found in service.work(jobs)] == [2, 1]
    assert documents == [[0, 0, 1, 2, 2]]
    assert len(service.jobs(["A dog.\n" * 50], "en-de", 1, 20)) == 1  # its lines are translated together
    assert len(service.jobs(["A dog.\n" * 50], "en-de", 2, 20)) > 1


def test_more_weights_than_a_page_can_hold_are_left_out(
    translator: Translator, monkeypatch: pytest.MonkeyPatch
) -> None:
    look = AttentionJob("a dog", "en-de", 1, 0, size=3)
    whole = Service(translator).work([look])[0]
    assert (list(whole["roles"]), "note" in whole) == (["cross", "encoder", "decoder"], False)
    counts = {
        role: sum(len(head) * len(head[0]) for layer in layers for head in layer["heads"])
        for role, layers in whole["roles"].items()
    }
    assert counts["encoder"] < counts["cross"]
    for most, left in (
        (counts["cross"], ["cross"]),
        (counts["encoder"], ["encoder"]),  # a role that is left out takes no room
    ):
        monkeypatch.setattr("mtkit.serving.service.MOST_WEIGHTS", most)
        shown = Service(translator).work([look])[0]
        assert (list(shown["roles"]), shown["note"]) == (
            left,
            f"some attention is left out; an answer has at most {most} weights",
        )


HTML = "<p>A <b>small</b> dog <i>sees &amp; finds</i> the tree.</p>\n<script>a < b</script><p>A <a href='x'>house</a>."


def tags(html: str) -> list[str]:
    return sorted(re.findall("</?[a-z].*?>", html))


@pytest.mark.parametrize("n_best", [1, 2])
@pytest.mark.parametrize("most", [1, 12, 1000])
def test_parts_of_html_have_the_translations_of_the_whole(translator: Translator, most: int, n_best: int) -> None:
    service = Service(translator)
    strings = [HTML, "", "<br>", "a dog", HTML[5:]]
    whole = service.jobs(strings, "en-de", n_best, most=10_000, html=True)
    assert len(whole) == 1
    expected = join_parts(whole, service.work(whole))
    parts = service.jobs(strings, "en-de", n_best, most=most, html=True)
    assert (len(parts) > 1) == (most < 1000)
    assert join_parts(parts, [result for part in parts for result in service.work([part])]) == expected
    own = translator.with_settings(translator.settings.model_copy(update={"n_best": n_best}))
    plain = own.translate(["A small dog sees & finds the tree.", "a dog"], direction="en-de")
    for k in range(n_best):
        for string, hypotheses in zip(strings, expected, strict=True):
            assert tags(hypotheses[k]) == tags(string)
        paragraph = re.sub("<.*?>", "", expected[0][k].split("\n")[0])
        assert (unescape(paragraph), unescape(expected[3][k])) == (plain[0][k].text, plain[1][k].text)


def test_heads_are_chosen_once_and_only_for_html(translator: Translator) -> None:
    calls = []

    def heads() -> Heads:
        calls.append(1)
        return Heads()

    service = Service(translator, heads)
    for html, count in ((False, 0), (True, 1), (True, 1)):
        service.work(service.jobs([HTML], "en-de", 1, 1000, html=html))
        assert len(calls) == count


def test_html_and_text_share_no_batch(translator: Translator) -> None:
    service = Service(translator)
    (text,), (html,) = (service.jobs([HTML], "en-de", 1, 1000, html=html) for html in (False, True))
    assert text.kind != html.kind
