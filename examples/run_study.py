"""Search for a faster attention for two minutes from Python, and print what became of it.

Run it again with the same folder to go on where it was.
"""

import sys
from pathlib import Path

from kernelbraid import Study
from kernelbraid.search import loop
from kernelbraid.search.proposers.knobs import KnobProposer

ROOT = Path(__file__).parent / "roots" / "straightforward.py"

if __name__ == "__main__":
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "studies/example")
    study = Study.open(folder) if folder.exists() else Study.create(folder, "attention", ROOT, minutes=2)
    with study:
        ending = loop.run(study, KnobProposer(), progress=lambda each: print(each.stage, each.message))
        found = study.summary()
    counts = f"{found['audited']} audited, {found['verified']} verified"
    print(f"{ending}: {counts}, speedup {found['speedup']:.2f}")
