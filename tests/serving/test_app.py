"""The HTTP interface over a tiny run: LibreTranslate's form, its errors, batches, limits."""

import html
import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from mtkit.decoding.translator import Translator
from mtkit.errors import MtkitError
from mtkit.serving.app import make_app
from mtkit.serving.batcher import ServingLimits
from mtkit.serving.service import Service
from tests.decoding.trained import make_run, sentences
from tests.serving.slow import Slow, ask

LIMITS = ServingLimits(strings=20, characters=2000)
SETTINGS = {"beam": 3, "max_pieces": 6}


@pytest.fixture(scope="module")
def translator(tmp_path_factory: pytest.TempPathFactory) -> Translator:
    run = make_run(tmp_path_factory.mktemp("runs"), directions=("en-de", "en-zh")).run
    return Translator([run], run.recipe.decoding.model_copy(update=SETTINGS))


@pytest.fixture(scope="module")
def client(translator: Translator) -> Iterator[TestClient]:
    with TestClient(make_app(Service(translator), LIMITS)) as client:
        yield client


def alone(translator: Translator, line: str, direction: str) -> str:
    return translator.translate([line], direction=direction)[0][0].text


@pytest.mark.parametrize("target", ["de", "zh"])
def test_strings_in_and_as_many_out(client: TestClient, translator: Translator, target: str) -> None:
    texts = ["The old dog.", "", "  ", "猫と犬。", "a\u2028b\x85c", "\x00", "The tree. A house sees the river."]
    answer = ask(client, texts, target).json()["translatedText"]
    assert answer == [alone(translator, text, f"en-{target}") for text in texts]
    assert ask(client, texts[0], target).json() == {"translatedText": answer[0]}
    assert ask(client, []).json() == {"translatedText": []}


def test_line_ends_stay(client: TestClient, translator: Translator) -> None:
    one, two = (alone(translator, line, "en-de") for line in ("a dog", "a cat"))
    assert ask(client, "a dog\n\r\na cat\r").json()["translatedText"] == f"{one}\n\r\n{two}\r"


def test_alternatives(client: TestClient, translator: Translator) -> None:
    own = translator.with_settings(translator.settings.model_copy(update={"n_best": 3}))
    best, *others = (each.text for each in own.translate(["a dog"], direction="en-de")[0])
    assert ask(client, "a dog", alternatives=2).json() == {"translatedText": best, "alternatives": others}
    assert ask(client, ["a dog"], alternatives=2).json()["alternatives"] == [others]
    assert "2 at most" in ask(client, "a dog", alternatives=3).json()["error"]


def test_html_keeps_its_tags(client: TestClient, translator: Translator) -> None:
    answer = ask(client, ["<p>a dog</p><br>\n<i>1</i>", "a &lt; b"], format="html").json()["translatedText"]
    texts = [html.escape(alone(translator, text, "en-de"), quote=False) for text in ("a dog", "a < b")]
    assert answer == [f"<p>{texts[0]}</p><br>\n<i>1</i>", texts[1]]
    answer = ask(client, "<p>a <b>dog</b></p>", format="html", alternatives=1).json()
    assert all(
        re.fullmatch("<p>.*<b>.*</b>.*</p>", text) for text in [answer["translatedText"], *answer["alternatives"]]
    )


def test_html_needs_attention_weights(translator: Translator, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise MtkitError("an ensemble has no attention weights")

    monkeypatch.setattr(translator, "check_links", refuse)
    with TestClient(make_app(Service(translator), LIMITS)) as other:
        answer = ask(other, "<p>a dog</p>", format="html")
        assert (answer.status_code, answer.json()["error"]) == (
            400,
            "this server translates no HTML: an ensemble has no attention weights",
        )
        assert ask(other, "<p>a dog</p>").status_code == 200


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ({"q": "a", "target": "fr"}, 400, "no direction auto-fr; this server has: en-de, en-zh"),
        ({"q": "a", "source": "de", "target": "de"}, 400, "no direction de-de"),
        ({"q": 3, "target": "de"}, 400, "q: should be a string or a list of strings"),
        ({"q": [["a"]], "target": "de"}, 400, "q: should be a string or a list of strings"),
        ({"target": "de"}, 400, "q: Field required"),
        ({"q": "a", "target": "de", "format": "xml"}, 400, "format 'xml' is not known"),
        ({"q": ["a"] * 21, "target": "de"}, 400, "21 strings"),
        ({"q": "a" * 2001, "target": "de"}, 400, "2,001 characters"),
        ({"q": ["a" * 1001, "b" * 1000], "target": "de"}, 400, "2,001 characters"),
        ({"q": "a", "target": "de", "alternatives": -1}, 400, "alternatives"),
        ({"q": "a" * 40_000, "target": "de"}, 413, "larger"),
    ],
)
def test_errors(client: TestClient, body: dict[str, Any], status: int, said: str) -> None:
    answer = client.post("/translate", json=body)
    assert (answer.status_code, set(answer.json())) == (status, {"error"})
    assert said in answer.json()["error"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *((field, "x" * 9000) for field in ("source", "target", "format")),
        *((field, "9" * digits) for field in ("alternatives", "hypothesis") for digits in (4000, 9000)),
    ],
)
def test_an_error_repeats_no_more_than_the_beginning_of_a_value(client: TestClient, field: str, value: str) -> None:
    path = "/attention" if field == "hypothesis" else "/translate"
    answer = client.post(path, json={"q": "a", "source": "en", "target": "de", field: value})
    assert answer.status_code == 400
    assert len(answer.json()["error"]) < 200


def test_a_request_may_have_as_much_as_the_limits_say(client: TestClient) -> None:
    assert len(ask(client, ["a" * 100] * 20).json()["translatedText"]) == 20
    assert ask(client, "a" * 2000).status_code == 200


def test_what_is_no_request(client: TestClient) -> None:
    headers = {"Content-Type": "application/json"}
    for content in ("{", "[]"):
        answer = client.post("/translate", content=content, headers=headers)
        assert (answer.status_code, set(answer.json())) == (400, {"error"})
    assert client.get("/nowhere").json() == {"error": "Not Found"}
    assert client.get("/translate").status_code == 405
    for path in ("/docs", "/redoc", "/openapi.json"):  # the first two would load scripts from the network
        assert client.get(path).status_code == 404


@pytest.mark.parametrize(
    ("form", "q"),
    [
        ("q=The+old+dog.&target=de&api_key=0", "The old dog."),
        ("q=a%26b%3D%2B%C3%A4&target=de&source=en", "a&b=+ä"),
        ("q=猫ä&target=de&format=text&alternatives=1", "猫ä"),
        ("q=&target=de", ""),
        ("q=a+dog&target=de&q=a+cat", ["a dog", "a cat"]),
        (' {"q": "a dog", "target": "de"}', "a dog"),
    ],
)
def test_a_form_is_taken_as_json_is(client: TestClient, form: str, q: Any) -> None:
    headers = {"Content-Type": "application/x-www-form-urlencoded; charset=utf-8"}
    answer = client.post("/translate", content=form.encode(), headers=headers)
    assert answer.json() == ask(client, q, alternatives=int("alternatives" in form)).json()


@pytest.mark.parametrize(
    ("content", "kind", "said"),
    [
        ("q=a", "application/x-www-form-urlencoded", "target: Field required"),
        ("q=%ff&target=de", "application/x-www-form-urlencoded", "neither an object of JSON nor a form"),
        ("q=a&target=de&target=zh", "application/x-www-form-urlencoded", "target: Input should be a valid string"),
        ("q=a&target=de", "text/plain", "neither an object of JSON nor a form"),
        ('--x\r\nContent-Disposition: form-data; name="q"\r\n\r\na\r\n--x--', "multipart/form-data", "not multipart"),
        ("null", "application/json", "neither an object of JSON nor a form"),
        ('{"q": ' + 20_000 * "[", "application/json", "neither an object of JSON nor a form"),
        ('{"q": "\xff"}', "application/json", "neither an object of JSON nor a form"),
    ],
)
def test_a_body_that_is_no_request_is_refused(client: TestClient, content: str, kind: str, said: str) -> None:
    answer = client.post("/translate", content=content.encode("latin-1"), headers={"Content-Type": kind})
    assert (answer.status_code, set(answer.json())) == (400, {"error"})
    assert answer.json()["error"].startswith(said) or said in answer.json()["error"]


def test_the_language_of_a_text_is_known_if_there_is_one(client: TestClient) -> None:
    found = client.post("/detect", data={"q": "a dog"})
    assert found.json() == [{"confidence": 100.0, "language": "en"}]
    several = Slow()
    several.languages = lambda: [{"code": "en"}, {"code": "fr"}]  # type: ignore[attr-defined]
    with TestClient(make_app(several)) as other:  # type: ignore[arg-type]
        answer = other.post("/detect", data={"q": "a dog"})
    assert answer.status_code == 501
    assert answer.json()["error"].endswith("source languages a text has: en, fr")


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        ("/translate", "q", "a\ud83d"),
        ("/translate", "q", ["a", "\ude00"]),
        ("/translate", "source", "\ud83d"),
        ("/translate", "target", "\ud83d"),
        ("/translate", "format", "\ud83d"),
        ("/attention", "q", "a\ud83d"),
        ("/attention", "source", "\ud83d"),
        ("/attention", "target", "\ud83d"),
    ],
)
def test_half_of_a_surrogate_pair_is_refused(client: TestClient, path: str, field: str, value: Any) -> None:
    content = json.dumps({"q": "a", "source": "en", "target": "de", field: value})  # escaped, as no bytes can hold it
    answer = client.post(path, content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400
    assert answer.json() == {"error": f"{field}: half of a surrogate pair is no character"}


def test_languages_health_and_metrics(client: TestClient) -> None:
    assert client.get("/languages").json() == [{"code": "en", "name": "English", "targets": ["de", "zh"]}]
    assert client.get("/health").json() == {"status": "ok", "waiting": 0, "hypotheses": 3}
    before = metrics(client)
    ask(client, ["a", "b"])
    ask(client, "a", "fr")
    after = metrics(client)
    changes = {name: after[name] - before.get(name, 0) for name in after}
    assert changes["mtkit_strings_total"] == 2
    assert changes['mtkit_requests_total{status="200"}'] == changes['mtkit_requests_total{status="400"}'] == 1
    assert changes["mtkit_request_seconds_count"] == changes['mtkit_request_seconds_bucket{le="+Inf"}'] == 2


@pytest.mark.parametrize("path", ["/", "/health"])
def test_a_probe_may_ask_for_the_header_alone(client: TestClient, path: str) -> None:
    assert client.head(path).status_code == 200


def metrics(client: TestClient) -> dict[str, float]:
    lines = [line for line in client.get("/metrics").text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


def test_the_attention_of_a_hypothesis(client: TestClient) -> None:
    body = {"q": "The old dog.", "source": "en", "target": "zh", "alternatives": 2, "hypothesis": 0}
    shown = client.post("/attention", json=body).json()
    assert len(shown["hypotheses"]) == 3
    for role, down, across in (
        ("cross", "target", "source"),
        ("encoder", "source", "source"),
        ("decoder", "target", "read"),
    ):
        for layer in shown["roles"][role]:
            assert len(layer["heads"]) == 2
            for head in layer["heads"]:
                assert len(head) == len(shown[down])
                assert all(len(row) == len(shown[across]) for row in head)
                assert all(sum(row) == pytest.approx(1, abs=0.01) for row in head)
    assert client.post("/attention", json={**body, "q": "two\nlines"}).status_code == 400
    assert client.post("/attention", json={**body, "q": "one\u2028line\x0bof\x85text\n"}).status_code == 200
    assert client.post("/attention", json={**body, "q": "\n \n"}).status_code == 400
    assert client.post("/attention", json={**body, "hypothesis": 3}).status_code == 400


@pytest.mark.parametrize("text", ["A dog.\n", "\r\n \nA dog.\r\n", " \u2028A dog.\x0b", "A dog. \x85\n"])
def test_attention_is_that_of_the_line_that_is_translated(client: TestClient, text: str) -> None:
    (line,) = filter(str.strip, re.split("[\r\n]", text))
    body = {"source": "en", "target": "de"}
    shown, wanted = (client.post("/attention", json={**body, "q": each}).json() for each in (text, line))
    assert shown == wanted
    translated = client.post("/translate", json={**body, "q": text}).json()["translatedText"]
    assert shown["hypotheses"][0]["text"] == translated.strip("\r\n")


def test_a_line_that_is_too_long_is_shown_without_attention(translator: Translator) -> None:
    with TestClient(make_app(Service(translator), ServingLimits(pieces=40))) as client:
        body = {"q": "The old dog sees the tree. " * 3, "source": "en", "target": "de", "alternatives": 1}
        shown = client.post("/attention", json=body).json()
        answer = client.post("/translate", json=body).json()
    assert "roles" not in shown
    assert "up to 10 pieces" in shown["note"]
    assert [each["text"] for each in shown["hypotheses"]] == [answer["translatedText"], *answer["alternatives"]]


def test_many_clients_get_their_own(client: TestClient, translator: Translator) -> None:
    texts = sentences(24, seed=9)
    with ThreadPoolExecutor(12) as pool:
        found = list(pool.map(lambda text: ask(client, text, source="auto").json()["translatedText"], texts))
    assert found == [alone(translator, text, "en-de") for text in texts]


def test_the_page_is_whole(client: TestClient) -> None:
    page = client.get("/")
    assert page.status_code == 200
    assert "default-src 'none'" in page.headers["Content-Security-Policy"]
    assert "://" not in page.text  # nothing from the network
    assert Path(__file__).parents[2].joinpath("mtkit/serving/page.html").read_text(encoding="utf-8") == page.text
