"""Places of hypotheses: the state by rank is that of `reorder` at every step, and no more than necessary is copied."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from mtkit.attention.states import reorder
from mtkit.decoding.search import places as module
from mtkit.decoding.search.places import Places
from mtkit.model.network import Logits

SEGMENTS, HYPOTHESES = 4, 5


class Tokens:
    """A model whose state is all tokens of a hypothesis, and whose logits and weights are that state."""

    def step(self, token: Tensor, state: Any, *, need_weights: bool = False) -> tuple[Logits, Any, Tensor | None]:
        seen = torch.cat([state["seen"], token[..., None].float()], -1)
        state = {**state, "seen": seen, "last": [token.clone()]}
        return Logits.known(seen), state, seen * 2 if need_weights else None


def first_state(hypotheses: int) -> dict[str, Any]:
    return {"seen": torch.zeros(SEGMENTS, hypotheses, 0), "shared": {"source": torch.arange(SEGMENTS)}, "count": 0}


@pytest.mark.parametrize("first", [1, HYPOTHESES])
def test_hypotheses_have_what_reorder_gives_them_whatever_their_places(first: int) -> None:
    generator = torch.Generator().manual_seed(3)
    model: Any = Tokens()
    places, state, expected = Places(), first_state(first), first_state(first)
    hypotheses, segments = first, SEGMENTS
    for step in range(40):
        token = torch.randint(1000, (segments, hypotheses), generator=generator)
        logits, state, weights = places.step(model, token, state, need_weights=step % 2 == 0)
        known, expected, _ = model.step(token, expected)
        assert torch.equal(logits.whole(), known.hidden)
        assert weights is None if step % 2 else torch.equal(weights, 2 * known.hidden)
        if step == 20:  # a segment is dropped
            running = torch.tensor([3, 1, 2])
            state, expected = reorder(state, running), reorder(expected, running)
            places.keep(running)
            segments = len(running)
        parents = torch.randint(hypotheses, (segments, HYPOTHESES), generator=generator)
        if step == 30:  # fewer hypotheses go on, and then more again
            parents = parents[:, :2]
        state, expected = places.follow(state, parents, hypotheses), reorder(expected, parents)
        hypotheses = parents.shape[1]
    assert state["shared"]["source"].tolist() == [3, 1, 2]


def test_only_further_children_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[int] = []
    real = module.overwrite
    monkeypatch.setattr(
        module, "overwrite", lambda state, source, target: copied.append(len(source)) or real(state, source, target)
    )
    places, state = Places(), {"x": torch.arange(8.0).view(2, 4)}
    for parents in ([[3, 2, 1, 0], [0, 1, 2, 3]], [[0, 0, 1, 1], [2, 2, 2, 2]]):
        state = places.follow(state, torch.tensor(parents), 4)
    assert copied == [2 + 3]  # nothing for a permutation
    logits, *_ = places.step(SimpleNamespace(step=lambda *_, **__: (Logits.known(state["x"][..., None]), {}, None)),  # type: ignore[arg-type]
                             torch.zeros(2, 4, dtype=torch.long), {}, need_weights=False)  # fmt: skip
    assert logits.hidden.squeeze(2).tolist() == [[3, 3, 2, 2], [6, 6, 6, 6]]
