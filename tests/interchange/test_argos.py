"""Packages of Argos Translate are installed and translate as CTranslate2 does; text is split elsewhere."""

import json
import os
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest
import sentencepiece

from mtkit.errors import MtkitError
from mtkit.interchange import exports
from mtkit.interchange.exports import export_run
from mtkit.runs import Run
from tests.interchange.ours import make_run
from tests.interchange.text import SOURCES

pytestmark = pytest.mark.skipif(find_spec("ctranslate2") is None, reason="ctranslate2 writes the model")

PROGRAM = """
import json, sys, types
for name in ("stanza", "minisbd"):  # they split text into sentences with models from the network
    sys.modules[name] = types.ModuleType(name)
sys.modules["minisbd"].SBDetect, sys.modules["minisbd"].models = None, types.SimpleNamespace(list_models=lambda: ["en"])
import argostranslate.package, argostranslate.translate
path, *lines = json.load(sys.stdin)
argostranslate.package.install_from_path(path)
(package,) = argostranslate.package.get_installed_packages()
translation = argostranslate.translate.PackageTranslation(None, None, package)
translation.sentencizer = types.SimpleNamespace(split_sentences=lambda text: [text])
names = [package.from_code, package.from_name, package.to_code, package.to_name, package.get_readme()[:3]]
print(json.dumps([names, [translation.hypotheses(line, 1)[0].value for line in lines]]))
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return make_run(tmp_path_factory.mktemp("runs") / "run", end=5.0, model={"max_length": 1024})


@pytest.fixture(autouse=True)
def few_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exports, "COMPARED", 12)


def test_a_package_holds_the_files_that_argos_translate_reads(run: Run, tmp_path: Path) -> None:
    exported = export_run(run, "argos", tmp_path / "mine.argosmodel")
    assert "equal mtkit's greedy search" in exported.compared
    assert exported.caution == ""
    with zipfile.ZipFile(tmp_path / "mine.argosmodel") as package:
        names = {name.removeprefix("translate-en_ja-1_0/") for name in package.namelist()}
        metadata = json.loads(package.read("translate-en_ja-1_0/metadata.json"))
        card = package.read("translate-en_ja-1_0/README.md").decode()
    assert names >= {"metadata.json", "sentencepiece.model", "README.md", "model/model.bin", "model/config.json"}
    assert not any("spm" in name for name in names)
    assert (metadata["from_code"], metadata["to_code"]) == ("en", "ja")
    assert 'translate("...", "en", "ja")' in card
    assert [file.name for file in tmp_path.iterdir()] == ["mine.argosmodel"]
    with pytest.raises(MtkitError, match="exists"):
        export_run(run, "argos", tmp_path / "mine.argosmodel")


def test_a_short_model_gets_a_caution(tmp_path: Path) -> None:
    exported = export_run(make_run(tmp_path / "run", end=5.0), "argos", tmp_path / "out.argosmodel")
    assert "sentences of more than 63 pieces (model.max_length without" in exported.caution
    assert exported.caution.endswith(", and on translations of more than 63 pieces")


@pytest.mark.peer
def test_argos_translate_installs_a_package_and_translates_with_it(run: Run, tmp_path: Path) -> None:
    if find_spec("argostranslate") is None:
        pytest.skip("argostranslate is not installed")
    import ctranslate2

    lines = [*SOURCES[:8], "我们都喜欢狗。", "ﬁne ｗｉｄｅ"]
    export_run(run, "argos", tmp_path / "mine.argosmodel")
    export_run(run, "ctranslate2", tmp_path / "out")
    environment = {**os.environ, "HOME": str(tmp_path), "ARGOS_COMPUTE_TYPE": "float32"}
    environment = {name: value for name, value in environment.items() if not name.startswith("XDG")}
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input=json.dumps([str(tmp_path / "mine.argosmodel"), *lines]),
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    names, translations = json.loads(ended.stdout.splitlines()[-1])
    assert names == ["en", "English", "ja", "Japanese", "---"]
    tokenizer = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "out" / "source.spm"))
    program = ctranslate2.Translator(str(tmp_path / "out"), compute_type="float32")
    results = program.translate_batch(
        [tokenizer.encode(line, out_type=str) for line in lines], beam_size=4, length_penalty=0.2
    )
    expected = [tokenizer.decode_pieces(result.hypotheses[0]).strip() for result in results]
    assert [text.strip() for text in translations] == [text.replace("_", " ") for text in expected]
    assert len(set(expected)) > 3


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"joint": False, "model": {"tie": "decoder", "norm": "post"}}, "one vocabulary for both languages"),
        ({"directions": ("en-ja", "en-zh")}, "no tag for the target language"),
    ],
)
def test_what_a_package_cannot_hold_is_refused(tmp_path: Path, options: dict[str, object], error: str) -> None:
    run = make_run(tmp_path / "run", **options)  # type: ignore[arg-type]
    with pytest.raises(MtkitError, match=error):
        export_run(run, "argos", tmp_path / "out")
    assert not (tmp_path / "out").exists()
