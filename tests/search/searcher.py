"""A process that searches a study on modelled audits, to be killed: `tests.search.searcher FOLDER`."""

import sys
import time
from pathlib import Path

from tests.search.fake_audit import FakeAudits, reopened

from kernelbraid.search import loop
from kernelbraid.search.proposers.knobs import KnobProposer


def main(folder: Path) -> None:
    loop.CONFIRMING_SHARE = 0.0  # on the way it depends on the clock, of which a kill takes some
    fake = FakeAudits(before=lambda where: time.sleep(0.01))
    with reopened(folder, fake) as study:
        print("searching", flush=True)
        print(loop.run(study, KnobProposer(), run_job=fake), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
