"""JSON values -> frozen dataclasses, each value of the type that its field is declared with.

A manifest is somebody else's text: with a right hash of itself it still may say anything.
"""

from collections.abc import Mapping
from dataclasses import MISSING, fields
from types import NoneType, UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

Kind = TypeVar("Kind")


def decoded(kind: type[Kind], content: Any, **given: Any) -> Kind:
    """A `kind` of a JSON object's values; fields in `given` are taken as they are.

    Raises:
        ValueError: no object, a value missing or too many, or one of another type; integers are never
            negative.
    """
    if not isinstance(content, Mapping):
        raise ValueError(f"{kind.__name__}: expected an object, got {type(content).__name__}")
    declared = {field.name: field for field in fields(kind)}  # type: ignore[arg-type]
    unknown = [name for name in content if name not in declared or name in given]
    missing = [
        name
        for name, field in declared.items()
        if name not in content and name not in given and field.default is MISSING
    ]
    if unknown or missing:
        raise ValueError(
            f"{kind.__name__}: expected {', '.join(declared)}, got {', '.join(map(str, content))}"
        )
    hints = get_type_hints(kind)
    values = {name: _value(content[name], hints[name], f"{kind.__name__}.{name}") for name in content}
    return kind(**values, **given)


def _value(value: Any, hint: Any, where: str) -> Any:
    """`value` as `hint` has it; JSON's arrays are tuples."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin is UnionType:
        if value is None and NoneType in inner:
            return None
        return _value(value, next(kind for kind in inner if kind is not NoneType), where)
    if origin is tuple and isinstance(value, list):
        return tuple(_value(item, inner[0], where) for item in value)
    if hint in (str, bool, int) and type(value) is hint and not (hint is int and value < 0):
        return value
    name = getattr(hint, "__name__", str(hint))
    raise ValueError(f"{where}: expected {name}, got {value!r}")
