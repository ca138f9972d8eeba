"""Check every relation and accuracy bound of attention on this machine, and print what was compared.

`kernelbraid verify attention --local` does the same over the whole domain, and writes a certificate.
"""

import sys

from kernelbraid.audit.verify import verify
from kernelbraid.ir.evidence import Level
from kernelbraid.ops import get

if __name__ == "__main__":
    report = verify(get("attention"), level=Level.SCREEN)
    for verdict in report.verdicts:
        outcome = "held" if verdict.held else "does not hold"
        print(f"{verdict.requirement}: {verdict.comparisons:,} compared, {outcome}")
    print(f"{report.comparisons:,} comparisons, {report.unequal} unequal, {report.seconds:.1f} s")
    sys.exit(0 if report.held else 1)
