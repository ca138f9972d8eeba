"""A static look at a source before it runs: what an implementation has no business with.

A tripwire, not a verdict: it stops what an eager optimizer reaches for, early and with a clear reason. What
gets past it meets separate processes, fresh inputs and comparison of bits.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass

MOST_BYTES = 1 << 20
"""Length of a source."""

MODULES = frozenset(
    {
        "__future__",
        "collections",
        "collections.abc",
        "concurrent",
        "concurrent.futures",
        "contextlib",
        "dataclasses",
        "enum",
        "functools",
        "itertools",
        "llvmlite",
        "llvmlite.ir",
        "math",
        "numba",
        "numpy",
        "operator",
        "os",
        "threading",
        "typing",
    }
)
"""Modules an implementation may import; of `PACKAGES` also every submodule that is not closed."""

PACKAGES = ("numba", "numpy")
CLOSED = ("numba.cuda", "numba.pycc", "numpy.ctypeslib", "numpy.f2py", "numpy.testing", "numpy.distutils")

OS_NAMES = frozenset({"cpu_count", "getpid", "register_at_fork", "sched_getaffinity"})
"""What an implementation may use of `os`."""

NAMES = frozenset(
    {
        "__builtins__",
        "__import__",
        "__loader__",
        "__spec__",
        "breakpoint",
        "compile",
        "delattr",
        "eval",
        "exec",
        "globals",
        "input",
        "locals",
        "memoryview",
        "open",
        "setattr",
        "vars",
    }
)
"""Built-in names that reach around the language."""

ATTRIBUTES = frozenset(
    {
        "DataSource",
        "ProcessPoolExecutor",
        "binding",
        "co_code",
        "ctypeslib",
        "cuda",
        "f_back",
        "f_builtins",
        "f_globals",
        "f_locals",
        "fromfile",
        "genfromtxt",
        "gi_frame",
        "load_library_permanently",
        "loadtxt",
        "memmap",
        "modules",
        "objmode",
        "savetxt",
        "savez",
        "savez_compressed",
        "setflags",
        "tb_frame",
        "tofile",
        "writeable",
    }
)
"""Attributes that read or write files, frames or modules, or lift the protection of an input."""

FILES = frozenset({"load", "save"})
"""Functions of numpy that touch files and share their names with harmless methods."""

OPERATORS = frozenset(
    f"__{prefix}{name}__"
    for name in (
        "add",
        "sub",
        "mul",
        "matmul",
        "truediv",
        "floordiv",
        "mod",
        "and",
        "or",
        "xor",
        "lshift",
        "rshift",
    )
    for prefix in ("", "r", "i")
) | {"__neg__", "__invert__", "__lt__", "__le__", "__gt__", "__ge__", "__eq__", "__ne__", "__hash__"}

DUNDERS = OPERATORS | {
    "__call__",
    "__contains__",
    "__doc__",
    "__enter__",
    "__exit__",
    "__getitem__",
    "__init__",
    "__iter__",
    "__len__",
    "__name__",
    "__post_init__",
    "__slots__",
}
"""The only double-underscore names that an implementation may mention."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Something an implementation may not use."""

    line: int
    what: str

    def __str__(self) -> str:
        return f"line {self.line}: {self.what}"


def scan(text: str) -> tuple[Finding, ...]:
    """List what a source uses that implementations may not, in the order of its lines.

    Raises:
        SyntaxError: the text is not Python.
        ValueError: it is longer than a source may be, or holds a null character.
    """
    if len(text.encode()) > MOST_BYTES:
        raise ValueError(f"a source has at most {MOST_BYTES >> 10} KiB, this one has {len(text) >> 10}")
    try:
        tree = ast.parse(text)
    except RecursionError as error:
        raise ValueError("the source is nested too deeply") from error
    found = [finding for node in ast.walk(tree) for finding in _look(node)]
    return tuple(sorted(set(found), key=lambda finding: (finding.line, finding.what)))


def _look(node: ast.AST) -> Iterator[Finding]:
    line = getattr(node, "lineno", 0)
    match node:
        case ast.Import(names=names):
            for alias in names:
                yield from _module(line, alias.name)
                if alias.name == "os" and alias.asname:
                    yield Finding(line, "os under another name")
        case ast.ImportFrom(module=module, names=names, level=level):
            yield from _import_from(line, module or "", [alias.name for alias in names], level)
        case ast.Name(id=name):
            if name in NAMES or (_dunder(name) and name not in DUNDERS):
                yield Finding(line, f"the name {name}")
        case ast.Attribute(value=ast.Name(id="os"), attr=attribute):
            if attribute not in OS_NAMES:
                yield Finding(line, f"os.{attribute}")
        case ast.Attribute(value=ast.Name(id="np" | "numpy"), attr=attribute) if attribute in FILES:
            yield Finding(line, f"numpy.{attribute}")
        case ast.Attribute(attr=attribute):
            if attribute in ATTRIBUTES or (_dunder(attribute) and attribute not in DUNDERS):
                yield Finding(line, f"the attribute {attribute}")
        case ast.Call(func=ast.Name(id="getattr"), args=arguments):
            yield from _getattr(line, arguments)
        case ast.Call(keywords=keywords):
            for keyword in keywords:
                if keyword.arg == "forceobj":
                    yield Finding(line, "object mode")
        case _:
            return


def _module(line: int, name: str) -> Iterator[Finding]:
    known = name in MODULES or name.partition(".")[0] in PACKAGES
    if not known or any(name == closed or name.startswith(f"{closed}.") for closed in CLOSED):
        yield Finding(line, f"import of {name}")


def _import_from(line: int, module: str, names: list[str], level: int) -> Iterator[Finding]:
    if level:
        yield Finding(line, "a relative import")
        return
    yield from _module(line, module)
    for name in names:
        if name == "*":
            yield Finding(line, f"import of everything in {module}")
        elif module == "os" and name not in OS_NAMES:
            yield Finding(line, f"os.{name}")
        elif name in ATTRIBUTES or name in FILES or f"{module}.{name}" in CLOSED or _dunder(name):
            yield Finding(line, f"{name} of {module}")


def _getattr(line: int, arguments: list[ast.expr]) -> Iterator[Finding]:
    """`getattr` may name an attribute that one may also write out; anything computed hides its target.

    Except on an LLVM builder, whose instructions code that writes code picks by name.
    """
    if arguments and ast.unparse(arguments[0]).split(".")[-1] == "builder":
        return
    name = arguments[1] if len(arguments) > 1 else None
    if not isinstance(name, ast.Constant) or not isinstance(name.value, str):
        yield Finding(line, "getattr with a computed name")
    elif name.value in ATTRIBUTES or _dunder(name.value):
        yield Finding(line, f"getattr of {name.value}")


def _dunder(name: str) -> bool:
    return len(name) > 4 and name.startswith("__") and name.endswith("__")
