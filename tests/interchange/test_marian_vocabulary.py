"""The numbering of a Marian vocabulary: special pieces that share a row of the weights, and pieces without one."""

import pytest
import torch

from mtkit.errors import DataError
from mtkit.interchange.marian import FIRST, NEVER, number
from mtkit.text.tokenizer import BOS, BREAK, EOS, PAD, UNK

VOCABULARY = {"</s>": 0, "<unk>": 1, "▁a": 2, "b": 3, "<pad>": 4}


@pytest.mark.parametrize("start", [4, 0, 1])
def test_of_special_pieces_in_one_row_the_first_keeps_its_bias(start: int) -> None:
    """Marian begins with the row of <pad>, or of </s>: a model that could not predict </s> would not end."""
    found = number(VOCABULARY, [], size=5, pad=4, eos=0, start=start)
    assert found.rows[:FIRST] == (4, 1, start, 0, None)
    assert found.added == {BOS, BREAK}
    bias = torch.arange(5) / 10
    biases = found.biases(bias)
    assert biases[[PAD, UNK, EOS]].tolist() == bias[[4, 1, 0]].tolist()
    assert biases[[BOS, BREAK]].tolist() == [NEVER] * 2
    assert biases[FIRST:].tolist() == bias[[2, 3]].tolist()
    table = torch.eye(5)
    rows = found.embeddings(table)
    assert torch.equal(rows[BOS], table[start])
    assert not rows[BREAK].any()


def test_rows_without_a_name_get_one_and_wrong_ids_are_refused() -> None:
    found = number(VOCABULARY, [], size=7, pad=4, eos=0, start=4)
    assert found.pieces == ("▁a", "b", "< 5>", "< 6>")
    assert found.marks == ["< 5>", "< 6>"]
    for wrong, message in (
        ({**VOCABULARY, "c": 3}, "two of its pieces have one id"),
        ({**VOCABULARY, "c": 9}, "outside the 5 rows"),
        ({piece: row for piece, row in VOCABULARY.items() if piece != "<unk>"}, "has no piece <unk>"),
    ):
        with pytest.raises(DataError, match=message):
            number(wrong, [], size=5, pad=4, eos=0, start=4)
