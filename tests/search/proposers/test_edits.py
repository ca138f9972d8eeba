"""Knob declarations are read without running them, and an edit changes one literal's bytes and no others."""

from dataclasses import dataclass

import pytest

from kernelbraid.contract import Contract, Knob, KnobKind, Source
from kernelbraid.search.proposers import edits

CONTRACT = Contract(
    operator="toy",
    version=1,
    dtypes=("float32",),
    axes=(),
    exclusions=(),
    rounding_points=(),
    elementary_operations=(),
    reduction_orders=(),
    special_values=(),
    knobs=(Knob("chunk", (256, 512, 1024), 512, "keys per chunk"),),
    relations=(),
    accuracy=(),
)

TEXT = """# Größe: keys per chunk — CHUNK = 256 in a comment stays
KNOBS = {
    "CHUNK": ("numeric", (256, 512, 1024)),
    "SCORES": ("schedule", ("by_key", "by_lane")),
    "SHIFT": ("schedule", (-1, 0, 0x10)),
}
µ = "é"; CHUNK = 0x200  # é CHUNK
SCORES: str = 'by_key'
SHIFT = (
    -1
)


def entry():
    CHUNK = 7
    return "CHUNK = 512", CHUNK, SCORES, SHIFT
"""


def replaced(old: str, new: str) -> str:
    assert TEXT.count(old) == 1
    return TEXT.replace(old, new)


def test_declared_reads_values_kinds_and_choices_in_order() -> None:
    knobs = edits.declared(Source(TEXT), CONTRACT)
    assert [(k.name, k.kind, k.value) for k in knobs] == [
        ("CHUNK", KnobKind.NUMERIC, 512),
        ("SCORES", KnobKind.SCHEDULE, "by_key"),
        ("SHIFT", KnobKind.SCHEDULE, -1),
    ]
    assert knobs[2].choices == (-1, 0, 16) and knobs[2].alternatives == (0, 16)
    assert knobs[1].selects_variant and not knobs[0].selects_variant


@dataclass
class Case:
    edit: dict[str, int | str]
    old: str
    new: str


@pytest.mark.parametrize(
    "case",
    [
        Case({"CHUNK": 1024}, "CHUNK = 0x200", "CHUNK = 1024"),
        Case({"SCORES": "by_lane"}, "'by_key'", "'by_lane'"),
        Case({"SHIFT": 16}, "    -1\n", "    16\n"),
        Case({"CHUNK": 512}, "CHUNK = 0x200", "CHUNK = 0x200"),
    ],
)
@pytest.mark.parametrize("ending", ["\n", "\r\n"])
def test_an_edit_changes_one_literal_and_no_other_byte(case: Case, ending: str) -> None:
    source = Source(TEXT.replace("\n", ending))
    edited = edits.apply(source, case.edit, CONTRACT)
    assert edited.text.encode() == replaced(case.old, case.new).replace("\n", ending).encode()


def test_several_edits_at_once_and_back_again() -> None:
    source = Source(TEXT.replace("0x200", "512"))
    changed = edits.apply(source, {"SHIFT": 0, "CHUNK": 256, "SCORES": "by_lane"}, CONTRACT)
    settings = edits.values(edits.declared(changed, CONTRACT))
    assert settings == {"CHUNK": 256, "SCORES": "by_lane", "SHIFT": 0}
    back = edits.apply(changed, {"SHIFT": -1, "CHUNK": 512, "SCORES": "by_key"}, CONTRACT)
    assert back.sha256 == source.sha256
    assert edits.differences(settings, edits.values(edits.declared(source, CONTRACT))) == {
        "CHUNK": 512,
        "SCORES": "by_key",
        "SHIFT": -1,
    }


def test_skeleton_ignores_literals_of_knobs_and_nothing_else() -> None:
    source = Source(TEXT)
    edited = edits.apply(source, {"CHUNK": 1024, "SCORES": "by_lane"}, CONTRACT)
    assert edits.skeleton(source, CONTRACT) == edits.skeleton(edited, CONTRACT)
    other = Source(replaced("    CHUNK = 7", "    CHUNK = 8"))
    assert edits.skeleton(source, CONTRACT) != edits.skeleton(other, CONTRACT)


def test_a_source_without_knobs_has_none() -> None:
    assert edits.declared(Source("def entry():\n    return 1\n"), CONTRACT) == ()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def entry(:\n", "not valid Python"),
        ("KNOBS = make()\n", "literal dictionary"),
        ("KNOBS = {'A': 3}\nA = 1\n", "literal dictionary"),
        ("KNOBS = {}\nKNOBS = {}\n", "assigned once"),
        ("KNOBS = {'A': ('magic', (1, 2))}\nA = 1\n", "kind of knob A"),
        ("KNOBS = {'A': ('schedule', ())}\nA = 1\n", "choices of knob A"),
        ("KNOBS = {'A': ('schedule', (1, 'x'))}\nA = 1\n", "distinct and of one type"),
        ("KNOBS = {'A': ('schedule', (1, 1))}\nA = 1\n", "distinct and of one type"),
        ("KNOBS = {'A': ('schedule', ('x\"', 'y'))}\nA = 'y'\n", "plain words"),
        ("KNOBS = {'A': ('schedule', (True, False))}\nA = True\n", "tuple of integers or strings"),
        ("KNOBS = {'A': ('schedule', (1, 2))}\n", "exactly once"),
        ("KNOBS = {'A': ('schedule', (1, 2))}\nA = 1\nA = 2\n", "exactly once"),
        ("KNOBS = {'A': ('schedule', (1, 2))}\nA = 3\n", "one of"),
        ("KNOBS = {'A': ('schedule', (1, 2))}\nA = len('x')\n", "one of"),
        ("KNOBS = {'CHUNK': ('numeric', (512, 4096))}\nCHUNK = 512\n", "must stay within"),
        ("KNOBS = {'BLOCK': ('numeric', (1, 2))}\nBLOCK = 1\n", "no numeric knob BLOCK"),
    ],
)
def test_bad_declarations_are_refused_by_name(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        edits.declared(Source(text), CONTRACT)


@pytest.mark.parametrize("edit", [{"NOPE": 1}, {"CHUNK": 128}, {"SCORES": "by_row"}])
def test_bad_edits_are_refused(edit: dict[str, int | str]) -> None:
    with pytest.raises(ValueError, match=r"must be one of|declares no knob"):
        edits.apply(Source(TEXT), edit, CONTRACT)
