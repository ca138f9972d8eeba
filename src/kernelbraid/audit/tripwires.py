"""A static look at a source before it runs: what an implementation has no business with.

A tripwire, not a verdict: it stops what an eager optimizer reaches for, early and with a clear reason. What
gets past it meets separate processes, fresh inputs and comparison of bits.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass

MOST_BYTES = 1 << 20
"""Length of a source."""

_PLAIN_MODULES = frozenset(
    {
        "__future__",
        "collections",
        "collections.abc",
        "contextlib",
        "dataclasses",
        "enum",
        "functools",
        "itertools",
        "math",
        "operator",
        "typing",
    }
)

MODULES = {
    "cpu": _PLAIN_MODULES
    | {"concurrent", "concurrent.futures", "llvmlite", "llvmlite.ir", "numba", "numpy", "os", "threading"},
    "cuda": _PLAIN_MODULES | {"torch", "triton"},
}
"""Modules an implementation may import, by backend; of `PACKAGES` also every submodule that is not closed.

Work on a GPU needs no thread: one could give the device more to do after its worker has answered.
"""

PACKAGES = {"cpu": ("numba", "numpy"), "cuda": ("triton",)}
CLOSED = (
    "numba.cuda",
    "numba.pycc",
    "numpy.ctypeslib",
    "numpy.distutils",
    "numpy.f2py",
    "numpy.testing",
    "triton._C",
    "triton._filecheck",
    "triton._internal_testing",
    "triton.backends",
    "triton.compiler",
    "triton.errors",
    "triton.instrumentation",
    "triton.knobs",
    "triton.profiler",
    "triton.runtime",
    "triton.testing",
    "triton.tools.build_extern",
    "triton.tools.compile",
    "triton.tools.disasm",
    "triton.tools.link",
)

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

_EVERYWHERE = frozenset(
    {
        "DataSource",
        "ProcessPoolExecutor",
        "binding",
        "co_code",
        "ctypeslib",
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
ATTRIBUTES = {
    "cpu": _EVERYWHERE | {"cuda"},
    "cuda": _EVERYWHERE
    | {
        "CUDAGraph",
        "CUDAPluggableAllocator",
        "MemPool",
        "UntypedStorage",
        "backends",
        "classes",
        "compiler",
        "cudart",
        "distributed",
        "from_file",
        "graphs",
        "hub",
        "knobs",
        "memory",
        "multiprocessing",
        "ops",
        "package",
        "runtime",
        "serialization",
        "set_per_process_memory_fraction",
        "share_memory_",
        "storage",
        "testing",
        "untyped_storage",
        "utils",
    },
}
"""Attributes that read or write files, frames or modules, or lift the protection of an input, by backend."""

FILES = frozenset({"load", "save"})
"""Functions of numpy and torch that touch files and share their names with harmless methods."""

LIBRARIES = frozenset({"numpy", "torch", "triton"})
"""Their attributes may not be replaced; of torch and triton none that is private may be used."""

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


def scan(text: str, backend: str = "cpu") -> tuple[Finding, ...]:
    """List what a source uses that implementations may not, in the order of its lines.

    Args:
        text: the source.
        backend: `cpu` or `cuda`.

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
    look = _Look(backend, _libraries(tree))
    found = [finding for node in ast.walk(tree) for finding in look.at(node)]
    return tuple(sorted(set(found), key=lambda finding: (finding.line, finding.what)))


def _libraries(tree: ast.AST) -> dict[str, str]:
    """Names by which a source knows modules of libraries."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.partition(".")[0]
                names[alias.asname or top] = top
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {alias.asname or alias.name: node.module.partition(".")[0] for alias in node.names}
    return {name: library for name, library in names.items() if library in LIBRARIES}


class _Look:
    """Looks at one node of a source after the other."""

    def __init__(self, backend: str, libraries: dict[str, str]) -> None:
        self._backend = backend
        self._attributes = ATTRIBUTES[backend]
        self._libraries = libraries

    def at(self, node: ast.AST) -> Iterator[Finding]:
        line = getattr(node, "lineno", 0)
        match node:
            case ast.Import(names=names):
                for alias in names:
                    yield from self._module(line, alias.name)
                    if alias.name in ("os", "torch") and alias.asname:
                        yield Finding(line, f"{alias.name} under another name")
            case ast.ImportFrom(module=module, names=names, level=level):
                yield from self._import_from(line, module or "", [alias.name for alias in names], level)
            case ast.Name(id=name):
                if name in NAMES or (_dunder(name) and name not in DUNDERS):
                    yield Finding(line, f"the name {name}")
            case ast.Attribute():
                yield from self._attribute(line, node)
            case ast.Call(func=ast.Name(id="getattr"), args=arguments):
                yield from self._getattr(line, arguments)
            case ast.Call(keywords=keywords):
                for keyword in keywords:
                    if keyword.arg == "forceobj":
                        yield Finding(line, "object mode")
            case _:
                return

    def _attribute(self, line: int, node: ast.Attribute) -> Iterator[Finding]:
        root, name = _root(node), node.attr
        library = self._libraries.get(root)
        if isinstance(node.value, ast.Name) and root == "os":
            if name not in OS_NAMES:
                yield Finding(line, f"os.{name}")
        elif isinstance(node.value, ast.Name) and root in ("np", "numpy", "torch") and name in FILES:
            yield Finding(line, f"{'numpy' if root == 'np' else root}.{name}")
        elif name in self._attributes or (_dunder(name) and name not in DUNDERS):
            yield Finding(line, f"the attribute {name}")
        elif library is not None and not isinstance(node.ctx, ast.Load):
            yield Finding(line, f"replaces {name} of {library}")
        elif library in ("torch", "triton") and name.startswith("_"):
            yield Finding(line, f"{name} of {library}")

    def _module(self, line: int, name: str) -> Iterator[Finding]:
        known = name in MODULES[self._backend] or name.partition(".")[0] in PACKAGES[self._backend]
        if not known or any(name == closed or name.startswith(f"{closed}.") for closed in CLOSED):
            yield Finding(line, f"import of {name}")

    def _import_from(self, line: int, module: str, names: list[str], level: int) -> Iterator[Finding]:
        if level:
            yield Finding(line, "a relative import")
            return
        yield from self._module(line, module)
        top = module.partition(".")[0]
        for name in names:
            if name == "*":
                yield Finding(line, f"import of everything in {module}")
            elif module == "os" and name not in OS_NAMES:
                yield Finding(line, f"os.{name}")
            elif (
                name in self._attributes or name in FILES or f"{module}.{name}" in CLOSED or _dunder(name)
            ) or (top in ("torch", "triton") and name.startswith("_")):
                yield Finding(line, f"{name} of {module}")

    def _getattr(self, line: int, arguments: list[ast.expr]) -> Iterator[Finding]:
        """`getattr` may name an attribute that one may also write out; anything computed hides its target.

        Except on an LLVM builder, whose instructions code that writes code picks by name.
        """
        if arguments and ast.unparse(arguments[0]).split(".")[-1] == "builder":
            return
        name = arguments[1] if len(arguments) > 1 else None
        if not isinstance(name, ast.Constant) or not isinstance(name.value, str):
            yield Finding(line, "getattr with a computed name")
        elif name.value in self._attributes or _dunder(name.value):
            yield Finding(line, f"getattr of {name.value}")


def _root(node: ast.expr) -> str:
    """The name that a chain of attributes begins with; empty where it begins otherwise."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def _dunder(name: str) -> bool:
    return len(name) > 4 and name.startswith("__") and name.endswith("__")
