"""Marks in a model: computed from break pieces if an attention reads them, the same in whole passes and in steps."""

from typing import Any

import pytest
import torch
from torch import Tensor

from mtkit.attention import Attention, Beginning, Inputs, reorder
from mtkit.attention.states import close_gaps
from mtkit.model.build import build_model
from mtkit.model.network import Network
from mtkit.recipe import load_recipe
from mtkit.text.tokenizer import BREAK

SOURCE = torch.tensor([[7, 8, BREAK, 9, 10, BREAK, BREAK, 3], [9, 3, 0, 0, 0, 0, 0, 0]])
SOURCE_MARKS = [[0, 0, 3, 2, 2, 5, 7, 6], [0] * 8]
TARGET = torch.tensor([[2, 8, BREAK, 9, BREAK, 10], [2, BREAK, 9, 9, 9, 9]])
TARGET_MARKS = [[0, 0, 3, 2, 5, 4], [0, 3, 2, 2, 2, 2]]
ARCHITECTURES = ["transformer", "reversible", "rnn"]


class Seen:
    """The marks that a network's attentions get, by the method that gets them."""

    def __init__(self, network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
        self.marks: dict[tuple[str, str], list[Any]] = {}
        for _, attention in network.attentions():
            for method in ("attend", "begin", "advance"):
                monkeypatch.setattr(attention, method, self.recording(attention, method))

    def recording(self, attention: Attention, method: str) -> Any:
        run = getattr(attention, method)

        def record(inputs: Inputs | Beginning, *state: Any) -> Any:
            marks = [getattr(inputs, f"{side}_marks", None) for side in ("query", "memory")]
            listed = [None if each is None else each.tolist() for each in marks]
            self.marks.setdefault((attention.site.role, method), []).append(listed)
            return run(inputs, *state)

        return record


def model(architecture: str, reads: bool = True) -> Network:
    settings: dict[str, Any] = {"d_model": 16, "heads": 2, "max_length": 32, "encoder_layers": 2, "decoder_layers": 2}
    settings |= {"architecture": "rnn"} if architecture == "rnn" else {"feed_forward": 24}
    settings |= {"reversible": True} if architecture == "reversible" else {}
    network = build_model(load_recipe(None, {"model": settings}), source_vocabulary=24, target_vocabulary=24).eval()
    network.reads_marks = reads
    return network


def whole(network: Network) -> Tensor:
    return network(SOURCE, TARGET, source_valid=SOURCE != 0).hidden


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_whole_passes_get_the_marks_of_both_sides(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    network = model(architecture)
    seen = Seen(network, monkeypatch)
    whole(network).sum().backward()  # the backward pass of reversible layers runs them again
    times = 2 if architecture == "reversible" else 1
    if architecture == "rnn":  # it attends in steps
        assert seen.marks.pop(("cross", "begin")) == [[None, SOURCE_MARKS]]
        columns = [[[row[step]] for row in TARGET_MARKS] for step in range(6)]
        assert seen.marks == {("cross", "advance"): [[column, None] for column in columns]}
        return
    assert seen.marks == {
        ("encoder", "attend"): [[SOURCE_MARKS, None]] * 2 * times,
        ("decoder", "attend"): [[TARGET_MARKS, None]] * 2 * times,
        ("cross", "attend"): [[TARGET_MARKS, SOURCE_MARKS]] * 2 * times,
    }


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("gaps", [False, True])
@torch.no_grad()
def test_steps_get_the_marks_of_each_hypothesis(architecture: str, gaps: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    network = model(architecture)
    seen = Seen(network, monkeypatch)
    state = network.start(network.encode(SOURCE, SOURCE != 0), hypotheses=1)
    assert seen.marks["cross", "begin"][0] == [None, SOURCE_MARKS]
    seen.marks.clear()
    expected = []
    for step, column in enumerate(TARGET.split(1, 1)):
        if step == 2:  # of the second segment two hypotheses, of the first none
            state = close_gaps(state, torch.tensor([1])) if gaps else reorder(state, torch.tensor([1]))
            state = reorder(state, torch.tensor([[0, 0]]))
        token, rows = column, TARGET_MARKS
        if step >= 2:
            token = torch.tensor([[9, BREAK if step == 3 else 9]])
            rows = [[0, 0, 2, 2, 2, 2], [0, 0, 2, 5, 4, 4]]
        marks = [[row[step] for row in rows]] if step >= 2 else [[row[step]] for row in rows]
        expected += [[marks, None]]
        _, state, _ = network.step(token, state)
    layers = {"rnn": 1}.get(architecture, 2)
    for (_, method), marks in seen.marks.items():
        assert method == "advance"
        assert marks == [each for each in expected for _ in range(layers)]


@torch.no_grad()
def test_a_shortlist_changes_no_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    network = model("transformer")
    pieces = torch.tensor([0, 1, 2, 3, 9, BREAK, 8])
    state = network.start(network.encode(SOURCE, SOURCE != 0), hypotheses=1, pieces=pieces)
    seen = Seen(network, monkeypatch)
    for token in (2, 4, 5):  # BOS, 9, BREAK
        _, state, _ = network.step(torch.full((2, 1), token), state)
    assert [marks[0] for marks in seen.marks["decoder", "advance"][::2]] == [[[0], [0]], [[0], [0]], [[3], [3]]]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_no_marks_are_computed_if_no_attention_reads_them(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    network = model(architecture)
    marked = whole(network)
    network.reads_marks = False
    assert torch.equal(whole(network), marked)
    seen = Seen(network, monkeypatch)
    whole(network)
    state = network.start(network.encode(SOURCE, SOURCE != 0))
    network.step(TARGET[:, :1], state)
    assert state["sentence"] is None
    assert all(marks == [None, None] for calls in seen.marks.values() for marks in calls)


@torch.no_grad()
def test_a_large_batch_that_is_encoded_in_parts_has_its_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mtkit.model.transformer.TOGETHER", 1)
    network = model("transformer")
    seen = Seen(network, monkeypatch)
    encoded = network.encode(SOURCE, SOURCE != 0)
    assert encoded.marks is not None
    assert encoded.marks.tolist() == SOURCE_MARKS
    assert seen.marks["encoder", "attend"][::2] == [[SOURCE_MARKS[:1], None], [[[0, 0]], None]]


@pytest.mark.parametrize("anew", [True, False])
@torch.no_grad()
def test_a_sentence_with_positions_of_its_own_is_encoded_as_alone(anew: bool) -> None:
    settings = {"d_model": 16, "heads": 2, "max_length": 32, "feed_forward": 24, "sentence_positions": anew}
    attention = {"name": "group", "options": {"context_layers": 0}}
    recipe = load_recipe(None, {"model": settings, "attention": attention})
    network = build_model(recipe, source_vocabulary=24, target_vocabulary=24).eval()
    document = network.encode(SOURCE[:1]).memory
    alone = torch.cat([network.encode(SOURCE[:1, each]).memory for each in (slice(2), slice(2, 5), slice(5, 6))], 1)
    assert torch.allclose(document[:, :6], alone, atol=1e-6) is anew
