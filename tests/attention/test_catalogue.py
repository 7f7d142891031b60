"""The table and the pages of mechanisms show all there is."""

from types import ModuleType

import pytest
import torch

from mtkit.attention import mechanisms
from mtkit.attention.catalogue import describe, table
from mtkit.attention.contract import Attention, Site
from mtkit.attention.registry import Mechanism, _only_mechanism_in


def test_the_table_has_a_row_for_each_mechanism() -> None:
    first_words = [line.split()[0] for line in table().split("\n")[1:]]
    assert sorted(first_words) == sorted(mechanisms())


@pytest.mark.parametrize("name", sorted(mechanisms()))
def test_a_page_names_roles_cost_and_every_option(name: str) -> None:
    mechanism, page = mechanisms()[name], describe(name)
    for word in [mechanism.paper, mechanism.complexity, *mechanism.roles, *mechanism.options]:
        assert word in page


def test_a_page_says_what_options_mean() -> None:
    assert "window_radius: number of tokens seen on each side" in describe("band")


@pytest.mark.parametrize(
    ("name", "option", "default"),
    [
        ("strided", "stride", "the square root of model.max_length, rounded"),
        ("longformer", "global_tokens", "1 in the encoder, 0 in the decoder"),
        ("routing", "local_heads", "half of the heads in the self roles, none in the cross role"),
        ("global", "global_tokens", "1 in the self roles, 8 in the cross role"),
        ("performer", "features", "K ln K"),
        ("image-2d", "image_flange", "[8, 16]"),
        ("luna", "tie_kv", "true"),
    ],
)
def test_a_page_says_what_each_option_is_by_default(name: str, option: str, default: str) -> None:
    lines = describe(name).partition("\noptions")[2].split("\n")
    line = next(line for line in lines if line.startswith(f"  {option} "))
    assert line.split(None, 1)[1].startswith(f"{default}  ")


@pytest.mark.parametrize("mechanism", mechanisms().values(), ids=list(mechanisms()))
def test_a_default_of_null_is_explained(mechanism: Mechanism) -> None:
    lines = describe(mechanism.name).partition("\noptions")[2].split("\n")
    for option in mechanism.options:
        line = next(line for line in lines if line.startswith(f"  {option} "))
        assert line.split()[1] != "null", line


def test_a_class_that_declares_too_little_is_told_what_is_missing() -> None:
    module = ModuleType("mine")
    module.Mine = type("Mine", (Attention,), {"__module__": "mine", "paper": "", "growth": 1})  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match=r"Mine in mine does not declare: roles, published, complexity"):
        _only_mechanism_in(module)


def test_a_mechanism_without_a_method_says_which_and_who_needs_it() -> None:
    class Mine(Attention):
        pass

    mine, x = Mine(Site("decoder", 8, 2)), torch.zeros(1, 2, 8)
    with pytest.raises(NotImplementedError, match=r"^Mine has no attend, which all roles need$"):
        mine(x)
    with pytest.raises(NotImplementedError, match=r"^Mine has no begin, which the decoder and cross roles need$"):
        mine.start(1)
    with pytest.raises(NotImplementedError, match=r"^Mine has no advance, which the decoder and cross roles need$"):
        mine.step(x, {})
