from random import Random

import pytest

from mtkit.recipe.data import TokenizerSettings
from mtkit.text.tokenizer import Tokenizer
from mtkit.text.tokenizer_training import train_tokenizer

LINES = ["the cats sat on the mats", "the rats ran", "that cat ran at a rat", "strands and bands and sands"] * 30
CHINESE = ["我们今天去北京。", "今天天气很好，我们去公园。", "北京的公园很好。", "你们去北京公园吗？"] * 30

_SYLLABLES = [
    "the",
    "cat",
    "s",
    "at",
    "rat",
    "an",
    "d",
    "st",
    "ran",
    "and",
    "北京",
    "公园",
    "的",
    "很好",
    "今天",
    "天气",
]
_DRAW = Random(1)
# words of many syllables, so that pieces of all lengths are worth their place
MADE_UP = [" ".join("".join(_DRAW.choices(_SYLLABLES, k=_DRAW.randint(1, 4))) for _ in range(8)) for _ in range(150)]


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    """A tokenizer of each kind; every character stands in more than one of the pieces."""
    return {
        kind: train_tokenizer(
            tmp_path_factory.mktemp("tokenizer") / "joint.model",
            LINES + CHINESE + MADE_UP,
            TokenizerSettings.model_validate({"kind": kind, "vocabulary": 384}),
        )
        for kind in ("bpe", "unigram")
    }
