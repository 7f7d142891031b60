"""The page's script, over a document that holds no more than it uses: what a click asks the server for."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "mtkit/serving/page.html"

DOCUMENT = """
const made = () => ({ value: "", children: [], hidden: true, style: { setProperty() {} },
  setAttribute(name, value) { this[name] = value; }, append(...more) { this.children.push(...more); },
  replaceChildren(...all) { this.children = all; } });
const elements = {}, sent = [];
const byId = id => (elements[id] ??= made());
globalThis.document = { getElementById: byId, createElement: made };
globalThis.location = { hash: "" };
globalThis.fetch = async (path, request) => {
  if (request) sent.push(JSON.parse(request.body));
  const answers = { languages: [], health: { hypotheses: 3 },
    attention: { hypotheses: [{ text: "eins", score: -1 }, { text: "zwei", score: null }] } };
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


@pytest.mark.skipif(shutil.which("node") is None, reason="no Node here")
def test_a_click_asks_for_what_is_shown_and_not_for_what_the_form_holds() -> None:
    (script,) = re.findall("<script>(.*?)</script>", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    whole = f"{DOCUMENT}{{{script}}}{CLICKS}"
    done = subprocess.run(["node", "-"], input=whole, capture_output=True, text=True, check=True, timeout=60)
    found = json.loads(done.stdout)
    first = {"q": "A dog.", "source": "en", "target": "de", "alternatives": 1, "hypothesis": 0}
    assert found["sent"] == [first, {**first, "hypothesis": 1}, first]
    assert found["pressed"] == [True, False]
