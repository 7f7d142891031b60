"""The sentencepiece models of an export cut text as the run does."""

from pathlib import Path

import sentencepiece

from mtkit.interchange.huggingface import models
from tests.decoding.trained import make_run


def test_an_exported_model_drops_invisible_characters_as_the_run_does(tmp_path: Path) -> None:
    run = make_run(tmp_path).run
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
