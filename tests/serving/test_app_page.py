"""The page's script, over a document that holds no more than it uses: what a click asks the server for."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from mtkit.decoding.translator import Translator
from mtkit.serving.batcher import ServingLimits
from mtkit.serving.service import Service
from tests.decoding.trained import make_run
from tests.serving.browser import CHROMIUM, browser
from tests.serving.threads import served

PAGE = Path(__file__).parents[2] / "mtkit/serving/page.html"

DOCUMENT = """
const made = () => ({ value: "", children: [], hidden: true, style: { setProperty() {} },
  setAttribute(name, value) { this[name] = value; }, append(...more) { this.children.push(...more); },
  replaceChildren(...all) { this.children = all; } });
const elements = {}, sent = [], signals = [];
const byId = id => (elements[id] ??= made());
globalThis.document = { getElementById: byId, createElement: made };
globalThis.location = { hash: "" };
globalThis.addEventListener = (name, handler) => { globalThis[`on${name}`] = handler; };
globalThis.fetch = async (path, request) => {
  if (request) { sent.push(JSON.parse(request.body)); signals.push(request.signal); }
  const answers = { languages: [], health: { hypotheses: 3 },
    attention: { hypotheses: [{ text: "eins", score: -1 }, { text: "zwei", score: null }], source: ["a"], target: ["b"],
      roles: { cross: [{ layer: 0, heads: [[[1]]] }] }, note: "some is left out" } };
  return { ok: true, json: async () => answers[path] };
};
"""

CLICKS = """
const settled = () => new Promise(done => setTimeout(done, 10));
const buttons = () => byId("hypotheses").children.map(item => item.children[0]);
(async () => {
  await settled();
  Object.assign(byId("text"), { value: "A dog." });
  Object.assign(byId("direction"), { value: JSON.stringify(["en", "de"]) });
  byId("count").value = 2;
  byId("form").onsubmit({ preventDefault() {} });
  await settled();
  byId("text").value = "Another.";
  byId("direction").value = JSON.stringify(["en", "zh"]);
  byId("count").value = 1;
  for (const k of [1, 0]) { buttons()[k].onclick(); await settled(); }
  console.log(JSON.stringify({ sent, pressed: buttons().map(each => each["aria-pressed"]) }));
})();
"""

REPEATED = """
(async () => {
  Object.assign(byId("text"), { value: "A dog." });
  Object.assign(byId("direction"), { value: JSON.stringify(["en", "de"]) });
  for (const repeat of [false, true, true]) byId("text").onkeydown({ key: "Enter", ctrlKey: true, repeat });
  const states = [byId("state").textContent];
  byId("form").onsubmit({ preventDefault() {} });
  states.push(byId("state").textContent);
  await new Promise(done => setTimeout(done, 10));
  states.push(byId("state").textContent);
  console.log(JSON.stringify({ aborted: signals.map(each => each.aborted), states }));
})();
"""

LINKED = """
(async () => {
  const texts = [], look = async () => {
    await new Promise(done => setTimeout(done, 10));
    texts.push([byId("text").value, byId("error").hidden]);
  };
  location.hash = "#100%";  // as it is before the page has loaded
  await look();
  location.hash = "#50%25%20of%20it";
  globalThis.onhashchange();
  await look();
  console.log(JSON.stringify(texts));
})();
"""

SHOWN = """
(async () => {
  Object.assign(byId("text"), { value: "A dog." });
  Object.assign(byId("direction"), { value: JSON.stringify(["en", "ar"]) });
  byId("role").value = "cross";
  byId("form").onsubmit({ preventDefault() {} });
  await new Promise(done => setTimeout(done, 10));
  const button = byId("hypotheses").children[0].children[0], [top, body] = byId("map").children;
  const [down, cell] = body.children[0].children, across = top.children[0].children[1];
  const dirs = [button, button.children[1], down, across].map(each => each.dir);
  const langs = [byId("output"), byId("hypotheses"), down, across].map(each => each.lang);
  console.log(JSON.stringify({ dirs, langs, title: cell.title, note: byId("note").textContent }));
})();
"""


def _done(script: str) -> Any:
    """What the page's script and another print."""
    (own,) = re.findall("<script>(.*?)</script>", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    whole = f"{DOCUMENT}{{{own}}}{script}"
    return json.loads(
        subprocess.run(["node", "-"], input=whole, capture_output=True, text=True, check=True, timeout=60).stdout
    )


def test_what_is_typed_and_what_comes_of_it_run_as_their_letters_do() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for element in ('<textarea id="text"', '<pre id="output"'):
        assert f'{element} dir="auto"' in page


@pytest.mark.skipif(shutil.which("node") is None, reason="no Node here")
def test_hypotheses_and_pieces_run_as_their_letters_do_and_have_their_language() -> None:
    found = _done(SHOWN)
    assert found["dirs"] == ["auto", "ltr", "auto", "auto"]
    assert found["langs"] == ["ar", "ar", "ar", "en"]
    assert found["title"] == "\u2068b\u2069 → \u2068a\u2069: 1.000"
    assert found["note"] == "mean of the last layer: each row shows where the model looked; some is left out"


@pytest.mark.skipif(shutil.which("node") is None, reason="no Node here")
def test_a_click_asks_for_what_is_shown_and_not_for_what_the_form_holds() -> None:
    found = _done(CLICKS)
    first = {"q": "A dog.", "source": "en", "target": "de", "alternatives": 1, "hypothesis": 0}
    assert found["sent"] == [first, {**first, "hypothesis": 1}, first]
    assert found["pressed"] == [True, False]


@pytest.mark.skipif(shutil.which("node") is None, reason="no Node here")
def test_a_request_ends_the_one_before_and_a_held_key_sends_one() -> None:
    found = _done(REPEATED)
    assert found["aborted"] == [True, False]
    assert found["states"] == ["translating…", "translating…", ""]


@pytest.mark.skipif(shutil.which("node") is None, reason="no Node here")
def test_a_link_brings_its_text() -> None:
    assert _done(LINKED) == [["100%", True], ["50% of it", True]]


TYPED = """
new Promise(done => {
  const text = document.getElementById("text"), found = document.getElementById("found");
  text.value = %s;
  document.getElementById("form").requestSubmit();
  const busy = () => document.getElementById("state").textContent;
  const look = () => busy() ? setTimeout(look, 20) : setTimeout(() => done(document.body.innerText), 50);
  look();
})
"""
READY = """
new Promise(done => {
  const look = () => document.getElementById("direction").options.length ? done() : setTimeout(look, 20);
  look();
})
"""


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
def test_nothing_is_visible_that_belongs_to_an_earlier_text(tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs").run
    service = Service(Translator([run], run.recipe.decoding.model_copy(update={"beam": 2, "max_pieces": 6})))
    with served(service, ServingLimits(wait=0, characters=50)) as port, browser(tmp_path / "browser") as page:
        page.open(f"http://127.0.0.1:{port}/")
        page.run(READY)
        for text, visible in (
            ("The old dog.", {"Hypotheses", "Attention"}),
            ("The old dog.\nA cat.", {"Translation"}),
            ("A tree.", {"Hypotheses", "Attention"}),
            ("x" * 51, {"characters"}),
            ("The dog.\nA cat.", {"Translation"}),
            ("x\n" * 30, {"characters"}),
        ):
            shown = page.run(TYPED % json.dumps(text))
            every = {"Hypotheses", "Attention", "Translation", "characters"}
            assert {word for word in every if word in shown} == visible, text
