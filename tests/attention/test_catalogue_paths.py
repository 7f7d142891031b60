"""Declared longest paths against brute force: which inputs change which outputs of real layers, at several lengths."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from mtkit.attention import Attention, build, mechanisms
from mtkit.attention.catalogue import complexity_table
from mtkit.errors import MtkitError
from tests.contract.cases import small_options

LENGTHS = (15, 30, 60)
"""Multiples of the block of `sparse-fixed`: a last block cut short has no summary."""
FAR = {"gaussian": {"initial_w": 1e-3}}
"""Options with which a weight does not round to zero at these lengths."""
MOST = 40


def declared(name: str, role: str) -> str:
    """The longest path of a role: "O(1), decoder none" is "none" in the decoder."""
    path = mechanisms()[name].longest_path
    assert path is not None, "declare longest_path"
    everywhere, _, decoder = path.partition(", decoder ")
    return decoder if decoder and role == "decoder" else everywhere


def layer(name: str, role: str, number: int, layers: int) -> Attention:
    torch.manual_seed(number)
    options = small_options(mechanisms()[name].kind) | FAR.get(name, {})
    made = build(
        name, role=role, d_model=32, heads=4, layer=number, layers=layers, max_length=2 * LENGTHS[-1], **options
    )
    for parameter in made.parameters():
        if name not in FAR:
            parameter.data.add_(0.1 * torch.randn_like(parameter))
    return made.double().eval()


@torch.no_grad()
def influence(stack: list[Attention], length: int) -> Tensor:
    """(T, T): whether output i of the layers, with residuals, changes with input j."""
    tokens = torch.randn(1, length, 32, dtype=torch.float64).repeat(length + 1, 1, 1)
    tokens[1:].diagonal().add_(torch.randn(32, length, dtype=torch.float64))
    carry = None
    for number, attention in enumerate(stack):
        attended = attention(F.layer_norm(tokens, (32,)) if number else tokens, carry=carry)
        tokens, carry = tokens + attended.output, attended.carry
    return (tokens[1:] != tokens[:1]).any(-1).T


def reached(name: str, role: str, length: int) -> Iterator[Tensor]:
    """(T, T): what has reached what after 1, 2, ... layers."""
    first = layer(name, role, 0, 2)
    if first(torch.randn(1, length, 32, dtype=torch.float64)).carry is not None:
        for layers in range(1, 6):
            yield influence([layer(name, role, number, layers) for number in range(layers)], length)
        return
    so_far = torch.eye(length)
    for number in range(MOST):
        so_far = (influence([layer(name, role, number, MOST)], length).float() @ so_far > 0).float()
        yield so_far > 0


def longest_path(name: str, role: str, length: int) -> int | None:
    """Layers until every token has reached every other; None: more than `MOST`."""
    wanted = torch.ones(length, length, dtype=torch.bool)
    wanted = wanted.tril() if role == "decoder" else wanted
    return next(
        (n for n, pairs in enumerate(reached(name, role, length), start=1) if bool((pairs | ~wanted).all())), None
    )


def fits(path: str, measured: list[int | None]) -> bool:
    """Whether the lengths of paths, over lengths that double twice, grow as declared."""
    if path == "none":
        return measured[-1] is None
    if None in measured:
        return False
    short, middle, long = (count or 0 for count in measured)
    if path == "O(1)":
        return max(short, middle, long) <= 2
    if path == "O(log T)":
        return 1 < long <= short + 4
    return path.startswith("O(T / ") and long >= 1.5 * middle >= 2 * short


CASES = [
    (name, role)
    for name, mechanism in mechanisms().items()
    for role in ("encoder", "decoder")
    if role in mechanism.roles and mechanism.longest_path != "by content"
]


@pytest.mark.parametrize(("name", "role"), CASES, ids=["-".join(case) for case in CASES])
def test_paths_are_as_long_as_declared(name: str, role: str) -> None:
    path = declared(name, role)
    lengths = LENGTHS[-1:] if path == "none" else LENGTHS
    measured = [longest_path(name, role, length) for length in lengths]
    assert fits(path, measured), f"{path}, and paths over {lengths} tokens have {measured} layers"


def test_every_mechanism_declares_both() -> None:
    for mechanism in mechanisms().values():
        assert mechanism.sequential_operations, mechanism.name
        assert mechanism.longest_path, mechanism.name


def test_the_table_begins_with_attention_recurrence_and_convolution() -> None:
    lines = complexity_table().splitlines()
    assert [line.split("  ")[0] for line in lines[1:4]] == [
        "attention to all tokens",
        "recurrence",
        "convolution, kernel of k tokens",
    ]
    names = {line.split()[0] for line in lines if line}
    assert set(mechanisms()) <= names
    tables = "\n".join(complexity_table().split("\n\n")[:2])
    assert max(map(len, tables.splitlines())) <= 120  # without a terminal, only the notes below are longer


def test_the_command_refuses_a_name() -> None:
    from mtkit.cli.attentions import attentions

    with pytest.raises(MtkitError, match="--complexity lists all mechanisms"):
        attentions("band", complexity=True)
