"""YAML as recipes are written in: the core schema of YAML 1.2 (https://yaml.org/spec/1.2.2/, section 10.3).

PyYAML goes by version 1.1, where `no` is false, `012` is ten, `12:30` is 750 and `1e-3` a string. Here only true and
false are booleans, `012` is twelve and `1e-3` a number. Of version 1.1 stays `<<`, which merges mappings.
"""

import re
from typing import Any, ClassVar

import yaml
from yaml.composer import ComposerError
from yaml.constructor import ConstructorError
from yaml.events import AliasEvent

DEEPEST = 50
"""Lists and mappings in each other, at most."""

MOST = 100_000
"""Values in one text, at most, those counted again that an alias repeats."""

_TAG = "tag:yaml.org,2002:"

_WORDS = {
    "bool": (r"true|True|TRUE|false|False|FALSE", "tTfF"),
    "int": (r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", "-+0123456789"),
    "float": (
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        "-+.0123456789",
    ),
    "null": (r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    "merge": (r"<<", "<"),
}
"""What a plain word may be, and what it begins with then; any other is a string."""


def load_yaml(text: str) -> Any:
    """What stands in YAML text. Raises: yaml.YAMLError, also for equal keys and for what no recipe needs."""
    return yaml.load(text, _Loader)


def dump_yaml(content: Any) -> str:
    """YAML text that comes back as it was, by version 1.1 too."""
    return yaml.dump(content, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}  # type: ignore[misc]
    yaml_constructors: ClassVar[dict[str | None, Any]] = {None: yaml.SafeLoader.construct_undefined}

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = self._values = 0
        self._sizes: dict[yaml.Node, int] = {}
        """Values in each node that is whole, itself counted."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> Any:
        """A node and what it holds, counted."""
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        mark, before = event.start_mark, self._values
        self._depth += 1
        if self._depth > DEEPEST + 1:
            raise ComposerError(problem=f"more than {DEEPEST} lists in each other", problem_mark=mark)
        node: Any = super().compose_node(parent, index)
        self._depth -= 1
        if isinstance(event, AliasEvent) and node not in self._sizes:
            raise ComposerError(problem="an alias of what it stands in", problem_mark=mark)
        self._values += self._sizes.get(node, 1)
        if self._values > MOST:
            raise ComposerError(problem=f"more than {MOST:,} values", problem_mark=mark)
        self._sizes[node] = self._values - before
        return node

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """A mapping with each key once."""
        node = super().compose_mapping_node(anchor)
        lines: dict[tuple[str, str], int] = {}
        for key, _ in node.value:
            word = (key.tag, str(key.value))
            mark: Any = key.start_mark
            if word in lines:
                problem = f"'{key.value}' stands here and in line {lines[word]}; keep one of them"
                raise ComposerError(problem=problem, problem_mark=mark)
            lines[word] = mark.line + 1
        return node

    def construct_number(self, node: yaml.ScalarNode) -> int | float:
        """An integer or a float."""
        word = str(self.construct_scalar(node)).lower()
        try:
            if node.tag == f"{_TAG}float":
                return float(word.replace(".inf", "inf").replace(".nan", "nan"))
            number = int(word, {"0o": 8, "0x": 16}.get(word[:2], 10))
            str(number)  # which is refused for thousands of digits
        except ValueError as error:
            raise ConstructorError(problem=f"{word[:20]!r} is no number", problem_mark=node.start_mark) from error
        return number

    def construct_text(self, node: yaml.ScalarNode) -> str:
        """A string that names of files and UTF-8 can hold, which what an escape writes may not."""
        text = str(self.construct_scalar(node))
        try:
            sound = b"\0" not in text.encode()
        except UnicodeEncodeError:
            sound = False
        if not sound:
            raise ConstructorError(problem=f"{text[:20]!a} is no text", problem_mark=node.start_mark)
        return text

    def construct_boolean(self, node: yaml.ScalarNode) -> bool:
        """True or false."""
        word = str(self.construct_scalar(node)).lower()
        if word not in ("true", "false"):
            raise ConstructorError(problem=f"{word[:20]!r} is not true or false", problem_mark=node.start_mark)
        return word == "true"


class _Dumper(yaml.SafeDumper):
    pass


for _kind, (_pattern, _first) in _WORDS.items():
    for _class in (_Loader, _Dumper):  # what is a number by either version is quoted where it is meant as a string
        _class.add_implicit_resolver(f"{_TAG}{_kind}", re.compile(rf"(?:{_pattern})\Z"), list(_first))
for _kind, _constructor in {
    "bool": _Loader.construct_boolean,
    "int": _Loader.construct_number,
    "float": _Loader.construct_number,
    "null": yaml.SafeLoader.construct_yaml_null,
    "str": _Loader.construct_text,
    "seq": yaml.SafeLoader.construct_yaml_seq,
    "map": yaml.SafeLoader.construct_yaml_map,
}.items():
    _Loader.add_constructor(f"{_TAG}{_kind}", _constructor)
