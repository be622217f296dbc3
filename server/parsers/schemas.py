"""What the JSON schema of a tool says of its arguments: one reading, for the parsers of calls and for the grammars that force them.

A schema without `type` is read as peers read it: `properties` are of an object, `items` of an array, `pattern` of a string.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any
from urllib.parse import unquote

TYPES = frozenset({"string", "integer", "number", "boolean", "null", "array", "object"})
"""Names of types; of the numbers, "integer" are those without a fraction and "number" the others."""

MAX_VISITS = 1000
"""Schemas that are looked at for one argument; what is behind them may be anything. Lists of values count too."""

VALUES_PER_VISIT = 64

MAX_DEPTH = 32
"""Schemas within one another, references included."""

MAX_NESTING = 128
"""Levels of a schema in which references are renamed."""

MAX_SHAPES = 32
"""Alternatives of a whole object of arguments."""

_OF_PYTHON: Mapping[type, str] = {bool: "boolean", int: "integer", dict: "object", list: "array", str: "string", type(None): "null"}

_IMPLIED: Mapping[str, frozenset[str]] = {
    **dict.fromkeys(("properties", "required", "additionalProperties", "patternProperties"), frozenset({"object"})),
    **dict.fromkeys(("items", "prefixItems", "minItems", "maxItems", "uniqueItems", "contains"), frozenset({"array"})),
    **dict.fromkeys(("pattern", "minLength", "maxLength", "format"), frozenset({"string"})),
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"), frozenset({"integer", "number"})),
}
"""Types that a keyword is about."""


_OF_NAMES = ("properties", "patternProperties", "dependentSchemas")
"""Keywords with schemas by names that are no keywords."""

_OF_VALUES = ("enum", "const", "default", "examples")
"""Keywords with values, which are no schemas."""


def type_of(value: Any) -> str:
    """The type of a JSON value; a float without a fraction is an integer, as in JSON Schema."""
    if isinstance(value, float):
        return "integer" if value.is_integer() else "number"
    return _OF_PYTHON.get(type(value), "")


@dataclass(frozen=True)
class Values:
    """The values that a schema allows, as far as types and lists tell.

    Attributes:
        types: some of TYPES; all of them where the schema says nothing.
        options: the values themselves, where the schema lists them.
    """

    types: frozenset[str] = TYPES
    options: tuple[Any, ...] | None = None

    @property
    def is_text(self) -> bool:
        """Whether nothing but a text is legal."""
        return self.types <= {"string"}

    def __and__(self, other: Values) -> Values:
        types = self.types & other.types
        first, second = (self.options, other.options) if self.options is not None else (other.options, None)
        if first is None:
            return Values(types)
        common = None if second is None else set(map(_key, second))
        return Values(types, tuple(option for option in first if type_of(option) in types and (common is None or _key(option) in common)))

    def __or__(self, other: Values) -> Values:
        listed = self.options is not None and other.options is not None
        return Values(self.types | other.types, (*(self.options or ()), *(other.options or ())) if listed else None)

    def allows(self, value: Any) -> bool:
        """Whether a value is of a legal type, and listed where values are."""
        return type_of(value) in self.types and (self.options is None or _key(value) in map(_key, self.options))


NOTHING, TEXT = Values(frozenset(), ()), Values(frozenset({"string"}))


@dataclass(frozen=True)
class ObjectShape:
    """One alternative of an object: schemas of its properties, and those that it must have."""

    properties: Mapping[str, Any]
    required: frozenset[str]

    def __and__(self, other: ObjectShape) -> ObjectShape:
        both = {name: {"allOf": [self.properties[name], other.properties[name]]} for name in self.properties if name in other.properties}
        return ObjectShape({**self.properties, **other.properties, **both}, self.required | other.required)


class Schemas:
    """The schemas within the parameters of one tool; bounded, whatever references and alternatives they have.

    Args:
        root: the parameters, which references are within.
    """

    def __init__(self, root: Any) -> None:
        self._root = root
        self._left = 0

    def values(self, schema: Any) -> Values:
        """The values that a schema allows."""
        self._left = MAX_VISITS
        return self._values(schema, ())

    def argument(self, name: str) -> Values:
        """The values of an argument: text where the parameters do not know it."""
        schemas = [shape.properties[name] for shape in self.shapes() if name in shape.properties]
        if schemas:
            return self.values({"anyOf": schemas} if len(schemas) > 1 else schemas[0])
        others = self._root.get("additionalProperties") if isinstance(self._root, Mapping) else None
        return self.values(others) if isinstance(others, Mapping) else TEXT

    def shapes(self) -> list[ObjectShape]:
        """The alternatives of the whole object, one more than MAX_SHAPES where there are too many."""
        self._left = MAX_VISITS
        return self._shapes(self._root, ())

    def standalone(self, schema: Any) -> dict[str, Any]:
        """A schema as a document of its own, with what it refers to and the types that it has by implication."""
        names: dict[str, str] = {}
        document = self._renamed(schema, names) if isinstance(schema, Mapping) else {}
        definitions: dict[str, Any] = {}
        while len(definitions) < len(names):
            reference = next(entry for entry, name in names.items() if name not in definitions)
            definitions[names[reference]] = self._renamed(self._target(reference), names)
        types = self.values(schema).types
        implied = {} if "type" in document or types == TYPES else {"type": sorted(types)}
        return {**implied, **document, **({"$defs": definitions} if definitions else {})}

    def _values(self, schema: Any, path: tuple[str, ...]) -> Values:
        self._left -= 1
        if schema is False:
            return NOTHING
        if not isinstance(schema, Mapping) or self._left < 0 or len(path) > MAX_DEPTH:
            return Values()
        values = _own_values(schema)
        self._left -= len(values.options or ()) // VALUES_PER_VISIT
        for part, further in self._parts(schema, path):
            values &= NOTHING if further is None else self._values(part, further)
        for alternatives in _alternatives(schema):
            values &= reduce(Values.__or__, (self._values(part, (*path, "")) for part in alternatives), NOTHING)
        implied = [types for keyword, types in _IMPLIED.items() if keyword in schema] if values.types == TYPES else []
        return values & Values(frozenset[str]().union(*implied)) if implied else values

    def _shapes(self, schema: Any, path: tuple[str, ...]) -> list[ObjectShape]:
        self._left -= 1
        if not isinstance(schema, Mapping) or self._left < 0 or len(path) > MAX_DEPTH:
            return [ObjectShape({}, frozenset())]
        properties, required = schema.get("properties"), schema.get("required")
        names = frozenset(name for name in required if isinstance(name, str)) if isinstance(required, list) else frozenset[str]()
        shapes = [ObjectShape(properties if isinstance(properties, Mapping) else {}, names)]
        for part, further in self._parts(schema, path):
            shapes = _each(shapes, [] if further is None else self._shapes(part, further))
        for alternatives in _alternatives(schema):
            shapes = _each(shapes, [shape for part in alternatives for shape in self._shapes(part, (*path, ""))])
        return shapes

    def _parts(self, schema: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[tuple[Any, tuple[str, ...] | None]]:
        """Schemas that all hold beside this one, each with its path: the references that led to it, and None where they go in a circle."""
        reference = schema.get("$ref")
        if isinstance(reference, str):
            yield self._target(reference), None if reference in path else (*path, reference)
        parts = schema.get("allOf")
        for part in parts if isinstance(parts, list) else ():
            yield part, (*path, "")

    def _target(self, reference: str) -> Any:
        """What a reference within the parameters stands for; None where that is nothing."""
        if reference != "#" and not reference.startswith("#/"):
            return None
        schema = self._root
        for part in unquote(reference).split("/")[1:]:
            part = part.replace("~1", "/").replace("~0", "~")
            if isinstance(schema, list) and part.isdecimal() and int(part) < len(schema):
                schema = schema[int(part)]
            elif isinstance(schema, Mapping) and part in schema:
                schema = schema[part]
            else:
                return None
        return schema

    def _renamed(self, schema: Any, names: dict[str, str], depth: int = 0) -> Any:
        """A schema with the names of its references; new ones are added to `names`, and those to nothing are left alone."""
        if isinstance(schema, list):
            return [self._renamed(part, names, depth + 1) for part in schema]
        if not isinstance(schema, Mapping) or depth > MAX_NESTING:
            return schema
        renamed: dict[str, Any] = {}
        for keyword, part in schema.items():
            if keyword == "$ref" and isinstance(part, str) and self._target(part) is not None:
                renamed[keyword] = f"#/$defs/{names.setdefault(part, str(len(names)))}"
            elif keyword in _OF_NAMES and isinstance(part, Mapping):
                renamed[keyword] = {name: self._renamed(inner, names, depth + 1) for name, inner in part.items()}
            elif keyword not in ("$defs", "definitions"):
                renamed[keyword] = part if keyword in _OF_VALUES else self._renamed(part, names, depth + 1)
        return renamed


def _own_values(schema: Mapping[str, Any]) -> Values:
    """What `type`, `enum` and `const` of a schema say."""
    kind = schema.get("type")
    kinds = [kind] if isinstance(kind, str) else kind if _are_names(kind) else []
    values = Values(frozenset({*kinds, *(["integer"] if "number" in kinds else [])}) & TYPES) if kinds else Values()
    listed = [schema["enum"]] if isinstance(schema.get("enum"), list) else []
    for options in [*listed, *([[schema["const"]]] if "const" in schema else [])]:
        values &= Values(frozenset(map(type_of, options)), tuple(options))
    return values & Values(options=(None,)) if values.types == {"null"} else values


def _are_names(kinds: Any) -> bool:
    return isinstance(kinds, list) and all(isinstance(kind, str) for kind in kinds)


def _alternatives(schema: Mapping[str, Any]) -> Iterator[list[Any]]:
    """Lists of schemas, of each of which one holds."""
    for keyword in ("anyOf", "oneOf"):
        if isinstance(schema.get(keyword), list) and schema[keyword]:
            yield schema[keyword]


def _each(shapes: Iterable[ObjectShape], others: list[ObjectShape]) -> list[ObjectShape]:
    """Every shape with each of the others, as far as they are counted."""
    both = (shape & other for shape in shapes for other in others or [ObjectShape({}, frozenset())])
    return [shape for shape, _ in zip(both, range(MAX_SHAPES + 1), strict=False)]


def _key(value: Any) -> Any:
    """What equal JSON values have in common; true is not 1, as it is in Python."""
    return json.dumps(value, sort_keys=True) if isinstance(value, (list, dict)) else (isinstance(value, bool), value)
