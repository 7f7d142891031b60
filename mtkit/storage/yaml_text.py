"""YAML by the core schema of version 1.2 (https://yaml.org/spec/1.2.2/, section 10.3), with limits for foreign files.

PyYAML follows version 1.1, in which `no` is false, `012` is ten, `12:30` is 750 and `1e-3` a string. Here only true and
false are booleans, `012` is twelve and `1e-3` a number. `<<`, which merges mappings, is kept from version 1.1.
"""

import re
from typing import Any, ClassVar

import yaml
from yaml.composer import ComposerError
from yaml.constructor import ConstructorError
from yaml.events import AliasEvent

DEEPEST = 50
"""Maximum depth of nested lists and mappings."""

MOST = 100_000
"""Maximum number of values in a text; values that an alias repeats count each time."""

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
"""{type: (pattern of its plain words, their first characters)}. Every other plain word is a string."""


def load_yaml(text: str) -> Any:
    """Parse YAML text. Raises: yaml.YAMLError, also for repeated keys, values over a limit, and unsupported tags."""
    return yaml.load(text, _Loader)


def dump_yaml(content: Any) -> str:
    """Format YAML text that parsers of versions 1.1 and 1.2 read alike."""
    return yaml.dump(content, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}  # type: ignore[misc]
    yaml_constructors: ClassVar[dict[str | None, Any]] = {None: yaml.SafeLoader.construct_undefined}

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = self._values = 0
        self._sizes: dict[yaml.Node, int] = {}
        """Number of values in each complete node, including itself."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> Any:
        """Parse a node, and count its depth and values."""
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        mark, values = event.start_mark, self._values
        self._depth += 1
        if self._depth > DEEPEST + 1:
            raise ComposerError(problem=f"more than {DEEPEST} nested lists or mappings", problem_mark=mark)
        node: Any = super().compose_node(parent, index)
        self._depth -= 1
        if isinstance(event, AliasEvent) and node not in self._sizes:
            raise ComposerError(problem="an alias inside its own anchor", problem_mark=mark)
        self._values += self._sizes.get(node, 1)
        if self._values > MOST:
            raise ComposerError(problem=f"more than {MOST:,} values", problem_mark=mark)
        self._sizes[node] = self._values - values
        return node

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Parse a mapping, and refuse repeated keys."""
        node = super().compose_mapping_node(anchor)
        lines: dict[tuple[str, str], int] = {}
        for key, _ in node.value:
            word = (key.tag, str(key.value))
            mark: Any = key.start_mark
            if word in lines:
                problem = f"'{key.value}' is repeated from line {lines[word]}; keep one of them"
                raise ComposerError(problem=problem, problem_mark=mark)
            lines[word] = mark.line + 1
        return node

    def construct_number(self, node: yaml.ScalarNode) -> int | float:
        """Convert an integer or a float."""
        word = str(self.construct_scalar(node)).lower()
        try:
            if node.tag == f"{_TAG}float":
                return float(word.replace(".inf", "inf").replace(".nan", "nan"))
            number = int(word, {"0o": 8, "0x": 16}.get(word[:2], 10))
            str(number)  # raises for thousands of digits
        except ValueError as error:
            raise ConstructorError(problem=f"{word[:20]!r} is not a number", problem_mark=node.start_mark) from error
        return number

    def construct_text(self, node: yaml.ScalarNode) -> str:
        """Convert a string; escapes can write characters that UTF-8 and file names do not have."""
        text = str(self.construct_scalar(node))
        try:
            is_text = b"\0" not in text.encode()
        except UnicodeEncodeError:
            is_text = False
        if not is_text:
            raise ConstructorError(problem=f"{text[:20]!a} is not text", problem_mark=node.start_mark)
        return text

    def construct_boolean(self, node: yaml.ScalarNode) -> bool:
        """Convert true or false."""
        word = str(self.construct_scalar(node)).lower()
        if word not in ("true", "false"):
            raise ConstructorError(problem=f"{word[:20]!r} is not true or false", problem_mark=node.start_mark)
        return word == "true"


class _Dumper(yaml.SafeDumper):
    def represent_text(self, text: str) -> yaml.ScalarNode:
        """Quote U+0085, a line break of version 1.1 only, so that it is written as an escape."""
        return self.represent_scalar(f"{_TAG}str", text, style='"' if "\x85" in text else None)


_Dumper.add_representer(str, _Dumper.represent_text)


for _kind, (_pattern, _first) in _WORDS.items():
    for _class in (_Loader, _Dumper):  # the dumper also has 1.1's patterns, and quotes strings that match either
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
