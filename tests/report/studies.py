"""A small study with one of everything that the page shows, and one whose texts are hostile."""

from pathlib import Path

from tests.ir.plain import ROOT, answer, audited, child, new_store, promoted

from kernelbraid.contract import Source
from kernelbraid.ir.evidence import Level, Status
from kernelbraid.ir.schema import Lineage, Usage
from kernelbraid.ir.store import Store

ATTACKS = (
    "<script>window.hostile = 1</script>",
    "</script><script>window.hostile = 2</script>",
    '<img src="x" onerror="window.hostile = 3">',
    '"><svg onload="window.hostile = 4">',
    "{{ 7 * 191 }}{% raw %}",
    "<!--<script>",
    "\u202ereversed &amp; <b>",
)
HOSTILE = " ".join(ATTACKS)


def small_study(folder: Path) -> tuple[Store, dict[str, str]]:
    """A study, and the hashes of its implementations by what became of them."""
    store = new_store(folder)
    audited(store, ROOT.sha256, ratio=1.0)
    opportunity = store.add_opportunity(
        parents=[ROOT.sha256], mechanism="BLOCK 32 -> 65", edit={"knobs": {"BLOCK": 65}}, rationale="larger"
    )
    best = child(
        store,
        1,
        opportunity=opportunity.id,
        functions=("f",),
        regimes=("decode",),
        expected_effect="-10%",
        requirements_at_risk=("toy/1/batch/decode",),
        falsified_by="no gain",
    )
    promoted(store, best)
    store.decide(best, Lineage.CONTINUE, reason="it gains", decided_by="search")
    store.record_usage(Usage(purpose="search", wall_seconds=30.0, proposer_calls=2))
    broken = child(store, 2, (best,))
    audited(store, broken, Status.BITS_UNEQUAL)
    slow = child(store, 3, (best,))
    screen = audited(store, slow, ratio=1.2)
    store.promote(screen_audit=screen, full_audit=None, granted=False, reason="slower", blocked_by="noise")
    store.decide(slow, Lineage.ARCHIVE, reason="another day", decided_by="search")
    merged = child(store, 4, (best, slow), hypothesis="both at once")
    audited(store, merged, ratio=0.8)
    crashed = child(store, 5)
    audited(store, crashed, Status.CRASHED)
    pending = child(store, 6, (merged,))
    store.request_audit(pending, Level.SCREEN)
    return store, {
        "root": ROOT.sha256,
        "best": best,
        "broken": broken,
        "slow": slow,
        "merged": merged,
        "crashed": crashed,
        "pending": pending,
    }


def hostile_study(folder: Path) -> Store:
    """A study in which every text that a candidate or a proposer writes tries to run."""
    store = new_store(folder, name=f"a study {HOSTILE}")
    audited(store, ROOT.sha256)
    source = Source("".join(f"# {attack}\n" for attack in ATTACKS) + "BLOCK = 1\n", label=HOSTILE)
    opportunity = store.add_opportunity(
        parents=[ROOT.sha256], mechanism=HOSTILE, edit={HOSTILE: [HOSTILE]}, rationale=HOSTILE
    )
    added = store.add_implementation(
        source,
        parents=(ROOT.sha256,),
        hypothesis=HOSTILE,
        proposer=HOSTILE,
        functions=(HOSTILE,),
        expected_effect=HOSTILE,
        requirements_at_risk=(),
        falsified_by=HOSTILE,
        opportunity=opportunity.id,
    )
    request = store.request_audit(added.sha256, Level.SCREEN)
    store.record(answer(store, request, Status.CRASHED, reason=HOSTILE, bits_id=HOSTILE))
    store.decide(added.sha256, Lineage.ABANDON, reason=HOSTILE, decided_by=HOSTILE)
    store.record_usage(Usage(purpose=HOSTILE, wall_seconds=1.0))
    return store
