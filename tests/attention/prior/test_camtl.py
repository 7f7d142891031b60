"""CA-MTL: where it is full attention, what its map holds, and what a task changes, in a layer and in a whole model."""

from typing import Any

import pytest
import torch
from torch import Tensor

from mtkit.attention import Attention, reorder
from mtkit.errors import MtkitError
from mtkit.model.build import build_model
from mtkit.model.transformer import Transformer
from mtkit.recipe import load_recipe
from tests.attention.small import maker, refusals
from tests.contract.counting import count

ROLES = ["encoder", "decoder"]
VALID = torch.tensor([[True] * 11, [True] * 6 + [False] * 5])
TASKS = torch.tensor([2, 1])

make = maker("camtl", max_length=23)


def stirred(role: str = "encoder", **options: Any) -> Any:
    attention = make(role, **{"tasks": 3, "blocks": 5} | options)
    with torch.no_grad():
        for name in ("map", "modulation.weight", "modulation.bias"):
            torch.nn.init.normal_(attention.get_parameter(name))
    return attention


def same_as_full(attention: Attention, role: str) -> bool:
    full, x = make(role, "full"), torch.randn(2, 11, 32)
    full.load_state_dict({name: value for name, value in attention.state_dict().items() if name in full.state_dict()})
    return torch.allclose(
        attention(x, query_valid=VALID, task=TASKS).output[VALID], full(x, query_valid=VALID).output[VALID], atol=1e-5
    )


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("per_block", [False, True])
def test_it_starts_as_full_attention_and_learns_to_be_another(role: str, per_block: bool) -> None:
    attention = make(role, tasks=3, blocks=5, per_block=per_block)
    assert same_as_full(attention, role)
    optimizer = torch.optim.SGD(attention.parameters(), lr=0.5)
    for _ in range(2):  # the first moves the map and the modulation off zero, the second the task embedding
        before = attention.task_embedding.weight.clone()
        optimizer.zero_grad()
        attention(torch.randn(2, 11, 32), task=TASKS).output.square().sum().backward()
        optimizer.step()
    assert not same_as_full(attention, role)
    assert (attention.task_embedding.weight != before).any(-1).tolist() == [False, True, True]


@pytest.mark.parametrize(("apply_layers", "conditioned"), [("top-half", [2, 3, 4]), ("all", [0, 1, 2, 3, 4])])
def test_the_upper_half_of_the_layers_is_conditioned(apply_layers: str, conditioned: list[int]) -> None:
    layers = [make(layer=layer, layers=5, apply_layers=apply_layers) for layer in range(5)]
    assert [layer for layer, each in enumerate(layers) if hasattr(each, "map")] == conditioned
    assert [layer for layer, each in enumerate(layers) if each.longest == 23] == conditioned
    if apply_layers == "top-half":
        assert layers[0].state_dict().keys() == make(name="full").state_dict().keys()


def added(attention: Any, task: int, length: int) -> Tensor:
    """What the task adds to the scores, up to a constant for each row: from the weights where scores are zero."""
    with torch.no_grad():
        for projection in (attention.q_proj, attention.k_proj):
            projection.weight.zero_()
            projection.bias.zero_()
    weights = attention(torch.randn(1, length, 32), task=torch.tensor([task]), need_weights=True).weights
    assert torch.allclose(weights, weights[:, :1].expand_as(weights)), "heads share the map"
    return weights[0, 0].double().log()


@pytest.mark.parametrize("length", [1, 4, 5, 6, 23])
def test_the_map_is_block_diagonal_and_one_modulation_serves_all_blocks(length: int) -> None:
    attention = stirred()
    assert attention.block == 5  # 23 positions: four blocks of 5 and one of 3
    logits = added(attention, 1, length)
    z = attention.task_proj(attention.task_embedding.weight[1])
    gamma, beta = attention.modulation(z).chunk(2)
    for t in range(length):
        first = t // 5 * 5
        last = min(first + 5, length)
        expected = torch.zeros(length)
        expected[first:last] = ((1 + gamma) * attention.map[t] + beta)[: last - first]
        torch.testing.assert_close(logits[t], expected.double().log_softmax(-1), atol=1e-4, rtol=1e-4)


def test_per_block_modulates_every_entry_apart() -> None:
    shared, own = stirred(), stirred(per_block=True)
    assert own.modulation.out_features == 23 * shared.modulation.out_features
    spread = []
    for attention in (shared, own):
        with torch.no_grad():
            attention.map.zero_()  # beta alone: in the shared form whole blocks are alike
        logits = added(attention, 1, 20)
        blocks = [logits[first : first + 5, first : first + 5] for first in (0, 5, 10)]
        spread.append(max((block - block[:1] - (block - block[:1]).mean(-1, True)).abs().max() for block in blocks))
    assert spread[0] < 1e-4
    assert spread[1] > 0.1


@pytest.mark.parametrize(("tasks", "segments"), [(40, 2), (3, 40)])
def test_no_tensor_of_maps_is_larger_than_the_scores(tasks: int, segments: int) -> None:
    attention, x = stirred(tasks=tasks), torch.randn(segments, 20, 32)
    task = torch.arange(segments) % tasks
    counted, _ = count(lambda: attention(x, task=task))
    assert counted.largest <= segments * 4 * 20 * 20
    torch.testing.assert_close(attention(x, task=task).output, attention.naive(x, task=task).output)


def test_a_constant_added_to_a_whole_row_of_the_map_changes_nothing() -> None:
    attention, x = stirred(blocks=1), torch.randn(2, 23, 32)
    with torch.no_grad():
        attention.modulation.weight[:23] = 0  # gamma is zero, so that a row of the map enters as it stands
        attention.modulation.bias[:23] = 0
        before = attention(x, task=TASKS).output
        attention.map[7] += 3
        assert torch.allclose(attention(x, task=TASKS).output, before, atol=1e-5)
        attention.map[7, :4] += 3
        assert not torch.allclose(attention(x, task=TASKS).output, before, atol=1e-3)


def test_a_step_keeps_for_a_segment_only_what_one_block_needs() -> None:
    attention = stirred("decoder", max_length=1000, blocks=100)
    state, _ = attention.start(2, hypotheses=3, task=TASKS)
    assert state["shared"]["condition"].shape == (2, 2 * 10)


@pytest.mark.parametrize("role", ROLES)
def test_more_positions_than_the_map_has_are_refused(role: str) -> None:
    attention = stirred(role)
    with pytest.raises(MtkitError, match="23 positions, not 24"):
        attention(torch.randn(1, 24, 32))
    if role == "decoder":
        state, _ = attention.start(1)
        for _ in range(23):
            _, state = attention.step(torch.randn(1, 1, 32), state)
        with pytest.raises(MtkitError, match="23 positions, not 24"):
            attention.step(torch.randn(1, 1, 32), state)


test_options_that_mean_nothing_are_refused = refusals(
    make,
    ({"tasks": 0}, "tasks = 0 must"),
    ({"blocks": 0}, "blocks = 0 must"),
    ({"task_dim": 0}, "task_dim = 0 must"),
    ({"apply_layers": "top"}, "top-half, all"),
    ({"role": "cross"}, "encoder, decoder"),
)


def test_the_map_is_added_in_float32_under_autocast() -> None:
    attention, x = stirred("decoder"), torch.randn(2, 11, 32)
    added(attention, 1, 11)  # no scores but the map's, to which bfloat16 would leave 8 bits
    expected = attention(x, task=TASKS, need_weights=True).weights
    with torch.autocast("cpu", dtype=torch.bfloat16):
        weights = attention(x, task=TASKS, need_weights=True).weights
        state, _ = attention.start(2, task=TASKS)
        step, _ = attention.step(x[:, :1], state)
    torch.testing.assert_close(weights, expected)
    assert step.output.isfinite().all()


def model(**options: Any) -> Transformer:
    recipe = load_recipe(
        None,
        {
            "model": {"d_model": 16, "heads": 2, "feed_forward": 24, "max_length": 32},
            "attention": {"name": "camtl", "options": {"blocks": 8, **options}},
        },
    )
    net = build_model(recipe, source_vocabulary=24, target_vocabulary=24, tasks=2).eval()
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            if "modulation" in name or name.endswith(".map"):
                parameter.normal_()
    return net


@torch.no_grad()
def test_a_model_gives_each_segment_what_its_task_asks_for_and_decodes_the_same() -> None:
    net, task = model(), torch.tensor([0, 1, 0])
    source, target = torch.randint(4, 24, (3, 7)), torch.randint(4, 24, (3, 6))
    valid = torch.arange(7) < torch.tensor([[7], [4], [2]])

    def logits(task: Tensor | None) -> Tensor:
        return net(source, target, source_valid=valid, task=task).hidden @ net.output_weight.T

    whole, first, second = logits(task), logits(None), logits(torch.ones(3, dtype=torch.long))
    torch.testing.assert_close(whole, torch.stack([first[0], second[1], first[2]]), atol=1e-5, rtol=0)
    assert (first - second).abs().amax((1, 2)).min() > 1e-2
    state = net.start(net.encode(source, valid, task=task), hypotheses=2)
    for position in range(6):
        step, state, _ = net.step(target[:, position, None].expand(-1, 2), state)
        torch.testing.assert_close(step.whole(), whole[:, position, None].expand(-1, 2, -1), atol=1e-4, rtol=0)
        if position == 2:  # a segment leaves, the others change places
            kept = torch.tensor([1, 0])
            state = reorder(reorder(state, kept), torch.tensor([[1, 0], [1, 1]]))
            whole, target = whole[kept], target[kept]


def test_the_model_builder_hands_on_the_number_of_tasks_unless_the_recipe_sets_it() -> None:
    def tasks(net: Transformer) -> set[int]:
        return {each.tasks for _, each in net.attentions() if hasattr(each, "tasks")}

    assert tasks(model()) == {2}
    assert tasks(model(tasks=5)) == {5}
    with pytest.raises(MtkitError, match="no task 2: it was built for tasks = 2"):
        model()(torch.ones(1, 3, dtype=torch.long), torch.ones(1, 3, dtype=torch.long), task=torch.tensor([2]))
