"""Column types of the records: JSON with a stated form, and numbers that SQLite alone would not keep."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, is_dataclass
from typing import Any

from sqlalchemy import Dialect, String, Text
from sqlalchemy.types import TypeDecorator

from kernelbraid.contract import Workload
from kernelbraid.ir.evidence import Difference, environment_from_json


class Json(TypeDecorator[Any]):
    """JSON text in the table, a value in the record; non-finite floats become the texts `nan` and `inf`."""

    impl = Text
    cache_ok = True

    def __init__(self, decode: Callable[[Any], Any]) -> None:
        super().__init__()
        self.decode = decode

    def process_bind_param(self, value: Any, dialect: Dialect) -> str | None:
        if value is None:
            return None
        return json.dumps(plain(value), separators=(",", ":"), ensure_ascii=False, allow_nan=False)

    def process_result_value(self, value: Any, dialect: Dialect) -> Any:
        return None if value is None else self.decode(json.loads(value))


class AnyFloat(TypeDecorator[float]):
    """A float that may be NaN, which SQLite's own would turn into NULL; kept as text."""

    impl = String
    cache_ok = True

    def process_bind_param(self, value: float | None, dialect: Dialect) -> str | None:
        return None if value is None else repr(float(value))

    def process_result_value(self, value: Any, dialect: Dialect) -> float | None:
        return None if value is None else float(value)


class WideInt(TypeDecorator[int]):
    """An integer of any width, such as 128 bits of entropy; SQLite's own have 64."""

    impl = String
    cache_ok = True

    def process_bind_param(self, value: int | None, dialect: Dialect) -> str | None:
        return None if value is None else str(value)

    def process_result_value(self, value: Any, dialect: Dialect) -> int | None:
        return None if value is None else int(value)


def plain(value: Any) -> Any:
    """Return the JSON form of a value: records as objects, tuples as lists, non-finite floats as texts."""
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value))
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value


def _texts(data: Any) -> tuple[str, ...]:
    if not all(isinstance(item, str) for item in data):
        raise TypeError("expected a list of texts")
    return tuple(data)


def _floats(data: Any) -> tuple[float, ...]:
    return tuple(float(item) for item in data)


def _pairs(data: Any) -> tuple[tuple[str, Any], ...]:
    return tuple((name, value) for name, value in data)


def _axes(data: Any) -> tuple[dict[str, int], ...]:
    return tuple({name: int(value) for name, value in item.items()} for item in data)


def _workloads(data: Any) -> tuple[Workload, ...]:
    def axes(items: Any) -> tuple[tuple[str, int | tuple[int, ...]], ...]:
        return tuple((name, tuple(value) if isinstance(value, list) else value) for name, value in items)

    return tuple(Workload(**{**item, "axes": axes(item["axes"])}) for item in data)


def _workload(data: Any) -> Workload:
    return _workloads([data])[0]


def _checks(data: Any) -> tuple[dict[str, Any], ...]:
    return tuple(dict(item) for item in data)


def _difference(data: Any) -> Difference:
    return Difference(**data)


TEXTS = Json(_texts)
FLOATS = Json(_floats)
PAIRS = Json(_pairs)
AXES = Json(_axes)
WORKLOADS = Json(_workloads)
WORKLOAD = Json(_workload)
CHECKS = Json(_checks)
DIFFERENCE = Json(_difference)
ENVIRONMENT = Json(environment_from_json)
ANY = Json(lambda data: data)
