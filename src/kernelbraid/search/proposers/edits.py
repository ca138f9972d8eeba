"""Knobs as a source declares them, read without executing it, and edits that change their literals alone.

A source names its knobs in a literal module-level dictionary and assigns each one a literal of its own:

    KNOBS = {"CHUNK": ("numeric", (512, 1024)), "SCORES": ("schedule", ("by_key", "by_lane"))}
    CHUNK = 1024
    SCORES = "by_key"

An edit replaces the characters of such literals; every other byte stays.
"""

import ast
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kernelbraid.contract import Contract, KnobKind, KnobValue, Source, content_hash

Edits = Mapping[str, KnobValue]
"""Knob name -> new value."""


@dataclass(frozen=True, slots=True)
class DeclaredKnob:
    """One knob of one source, with the place of its literal."""

    name: str
    kind: KnobKind
    choices: tuple[KnobValue, ...]
    value: KnobValue
    start: int
    """First byte of the literal in the UTF-8 source."""
    stop: int

    @property
    def selects_variant(self) -> bool:
        """Whether its values name written-out pieces of code rather than sizes."""
        return isinstance(self.value, str)

    @property
    def alternatives(self) -> tuple[KnobValue, ...]:
        return tuple(choice for choice in self.choices if choice != self.value)


def declared(source: Source, contract: Contract) -> tuple[DeclaredKnob, ...]:
    """Return the knobs of a source in the order it declares them; none if it has no KNOBS.

    Raises ValueError if the source does not parse, a declaration is not literal, a knob has no literal
    assignment or more than one, its value is not among its choices, or a numeric choice lies outside the
    contract's range.
    """
    tree = _parse(source)
    assignments = _assignments(tree)
    if "KNOBS" not in assignments:
        return ()
    table = _table(assignments["KNOBS"])
    offsets = _line_offsets(source.text)
    knobs = tuple(_knob(name, spec, assignments, offsets) for name, spec in table.items())
    for knob in knobs:
        _check(knob, contract)
    return knobs


def values(knobs: Iterable[DeclaredKnob]) -> dict[str, KnobValue]:
    return {knob.name: knob.value for knob in knobs}


def differences(before: Edits, after: Edits) -> dict[str, KnobValue]:
    """Return what `after` sets differently from `before`."""
    return {name: value for name, value in after.items() if before.get(name) != value}


def apply(source: Source, edits: Edits, contract: Contract, *, label: str = "") -> Source:
    """Return the source with the literals of the named knobs replaced and every other byte as it was.

    Raises ValueError if a knob is not declared or a value is not one of its choices.
    """
    knobs = {knob.name: knob for knob in declared(source, contract)}
    for name, value in edits.items():
        if name not in knobs:
            raise ValueError(f"the source declares no knob {name}; it has {', '.join(knobs) or 'none'}")
        if value not in knobs[name].choices:
            raise ValueError(f"{name} must be one of {knobs[name].choices}, got {value!r}")
    data = source.text.encode()
    for knob in sorted(knobs.values(), key=lambda k: k.start, reverse=True):
        if knob.name in edits and edits[knob.name] != knob.value:
            literal = _literal(edits[knob.name], data[knob.start : knob.stop])
            data = data[: knob.start] + literal + data[knob.stop :]
    edited = Source(data.decode(), label or source.label)
    assert values(declared(edited, contract)) == {**values(knobs.values()), **edits}
    return edited


def skeleton(source: Source, contract: Contract) -> str:
    """Return a hash of the source without its knobs' literals: what knob edits leave alone."""
    data = source.text.encode()
    for knob in sorted(declared(source, contract), key=lambda k: k.start, reverse=True):
        data = data[: knob.start] + data[knob.stop :]
    return content_hash(data.decode())


def _parse(source: Source) -> ast.Module:
    try:
        return ast.parse(source.text)
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"the source {source.label or source.short} is not valid Python: {error}") from error


def _assignments(tree: ast.Module) -> dict[str, list[ast.expr]]:
    """Module-level assignments to a single name, with every value given."""
    found: dict[str, list[ast.expr]] = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            found.setdefault(node.targets[0].id, []).append(node.value)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            found.setdefault(node.target.id, []).append(node.value)
    return found


def _table(expressions: list[ast.expr]) -> dict[str, tuple[KnobKind, tuple[KnobValue, ...]]]:
    if len(expressions) != 1:
        raise ValueError("KNOBS must be assigned once, as a literal dictionary")
    try:
        table = ast.literal_eval(expressions[0])
        items = [(name, kind, given) for name, (kind, given) in table.items()]
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError("KNOBS must be a literal dictionary from names to (kind, choices)") from error
    return {_name(name): (_kind(name, kind), _choices(name, given)) for name, kind, given in items}


def _name(name: object) -> str:
    if not isinstance(name, str) or not name.isidentifier():
        raise ValueError(f"a knob's name must be an identifier, got {name!r}")
    return name


def _kind(name: str, kind: object) -> KnobKind:
    kinds = {each.value: each for each in KnobKind}
    if not isinstance(kind, str) or kind not in kinds:
        raise ValueError(f"the kind of knob {name} must be one of {tuple(kinds)}, got {kind!r}")
    return kinds[kind]


def _choices(name: str, given: object) -> tuple[KnobValue, ...]:
    if not isinstance(given, tuple) or not given or any(type(item) not in (int, str) for item in given):
        raise ValueError(f"the choices of knob {name} must be a tuple of integers or strings, got {given!r}")
    if len({type(item) for item in given}) != 1 or len(set(given)) != len(given):
        raise ValueError(f"the choices of knob {name} must be distinct and of one type, got {given!r}")
    if any(isinstance(item, str) and not item.replace("-", "_").isidentifier() for item in given):
        raise ValueError(f"the choices of knob {name} must be plain words, got {given!r}")
    return tuple(given)


def _knob(
    name: str,
    spec: tuple[KnobKind, tuple[KnobValue, ...]],
    assignments: Mapping[str, list[ast.expr]],
    offsets: list[int],
) -> DeclaredKnob:
    found = assignments.get(name, [])
    if len(found) != 1:
        raise ValueError(f"knob {name} must be assigned exactly once at module level, found {len(found)}")
    node = found[0]
    try:
        value = ast.literal_eval(node)
    except ValueError:
        value = None
    kind, choices = spec
    if type(value) not in (int, str) or value not in choices:
        raise ValueError(f"knob {name} must be assigned a literal, one of {choices}")
    assert node.end_lineno is not None and node.end_col_offset is not None
    start = offsets[node.lineno - 1] + node.col_offset
    stop = offsets[node.end_lineno - 1] + node.end_col_offset
    return DeclaredKnob(name, kind, choices, value, start, stop)


def _check(knob: DeclaredKnob, contract: Contract) -> None:
    if knob.kind is not KnobKind.NUMERIC:
        return
    allowed = {each.name.upper(): each.choices for each in contract.knobs}
    if knob.name not in allowed:
        names = ", ".join(allowed) or "none"
        raise ValueError(f"{contract.name} has no numeric knob {knob.name}; it has {names}")
    outside = [choice for choice in knob.choices if choice not in allowed[knob.name]]
    if outside:
        raise ValueError(f"numeric knob {knob.name} must stay within {allowed[knob.name]}, got {outside}")


def _line_offsets(text: str) -> list[int]:
    """Byte offset of each line, lines split as the tokenizer splits them."""
    offsets = [0]
    for line in text.encode().splitlines(keepends=True):
        offsets.append(offsets[-1] + len(line))
    return offsets


def _literal(value: KnobValue, old: bytes) -> bytes:
    """Write a value, a string in the quotes of the literal it replaces."""
    if isinstance(value, int):
        return str(value).encode()
    quote = b"'" if old.startswith(b"'") else b'"'
    return quote + value.encode() + quote


def functions_using(source: Source, names: Iterable[str]) -> tuple[str, ...]:
    """Return the module-level functions that read any of the knobs, directly or through other constants."""
    wanted = set(names)
    tree = _parse(source)
    assignments = {name: found for name, found in _assignments(tree).items() if name != "KNOBS"}
    growing = True
    while growing:
        through = {name for name, found in assignments.items() if any(_reads(node, wanted) for node in found)}
        growing = not through <= wanted
        wanted |= through
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    return tuple(node.name for node in functions if _reads(node, wanted))


def _reads(tree: ast.AST, names: set[str]) -> bool:
    return any(isinstance(node, ast.Name) and node.id in names for node in ast.walk(tree))
