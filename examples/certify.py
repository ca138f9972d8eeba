"""Check every relation of attention on this machine, without a certificate, and print what was compared."""

from kernelbraid.audit.verify import verify
from kernelbraid.ir.evidence import Level
from kernelbraid.ops import get

if __name__ == "__main__":
    report = verify(get("attention"), level=Level.SCREEN)
    for verdict in report.verdicts:
        outcome = "held" if verdict.held else "BROKEN"
        print(f"{verdict.requirement}: {verdict.comparisons:,} compared, {outcome}")
    print(f"{report.comparisons:,} comparisons, {report.unequal} unequal, {report.seconds:.1f} s")
