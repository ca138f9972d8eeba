"""Knobs read by a template are those that the parser reads."""

import pytest
from tests.search.fake_audit import OPERATOR, ROOT

from kernelbraid.contract import Source
from kernelbraid.search.proposers import edits
from kernelbraid.search.proposers.templates import Template, Templates

CONTRACT = OPERATOR.contract


def test_every_edit_reads_as_parsed() -> None:
    templates = Templates()
    for knob in edits.declared(ROOT, CONTRACT):
        for value in knob.choices:
            edited = edits.apply(ROOT, {knob.name: value, "CHUNK": 256}, CONTRACT)
            known = templates.read(edited, CONTRACT)
            assert known == (edits.declared(edited, CONTRACT), edits.skeleton(edited, CONTRACT))
    assert len(templates._known) == 1, "more than one was parsed"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("CHUNK = 1024", "CHUNK = 1025"),
        ("CHUNK = 1024", "CHUNK = 1024; KEY_BLOCK = 16"),
        ("CHUNK = 1024", "CHUNK = 1024  # more"),
        ('SCORES = "key_by_key"', 'SCORES = "nothing"'),
        ("return None", "return 1"),
        ("def schedule", "CHUNK = 512\n\n\ndef schedule"),
    ],
)
def test_anything_else_is_parsed(old: str, new: str) -> None:
    template = Template.of(ROOT, CONTRACT)
    assert old in ROOT.text and template.read(ROOT.text) == template.knobs
    assert template.read(ROOT.text.replace(old, new)) is None
    assert template.read(ROOT.text + "\n") is None


def test_a_source_without_knobs() -> None:
    assert Templates().read(Source("x = 1\n"), CONTRACT)[0] == ()
