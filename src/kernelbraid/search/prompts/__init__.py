"""The texts that a language model is given; a study keeps the ones that it was made with."""

from importlib.resources import files

NAMES = ("rules", "evidence", "candidate")


def shipped() -> dict[str, str]:
    """Return the prompts of this version, name -> text."""
    folder = files(__package__)
    return {name: (folder / f"{name}.md").read_text(encoding="utf-8") for name in NAMES}
