"""Opportunities from evidence: what measurements, verdicts and compiled kernels say could be faster, and why.

Each names its parents, a mechanism, the workloads it is about, the audits it rests on and a rationale with
numbers. How to do it is left to whoever proposes: `edit` stays empty.
"""

import math
import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import select

from kernelbraid.audit.timing import within_limits
from kernelbraid.contract import KnobValue
from kernelbraid.ir import query
from kernelbraid.ir.evidence import Launch, Measurement, Status
from kernelbraid.ir.schema import Opportunity
from kernelbraid.ops.installed import home
from kernelbraid.search import sass
from kernelbraid.search.measured import cold, workload_ratio
from kernelbraid.search.proposers import edits
from kernelbraid.search.standings import Standing
from kernelbraid.search.study import Study

ANALYSED = 8
"""Branch points that are analysed, the fastest first, beside the root and the incumbent."""
REJECTED = 32
"""Rejections that are analysed, the latest ones."""
WORTH = 0.05
"""Share of the aggregate that must be at stake."""
DOMINATES = 0.5
"""Share of the aggregate at which a regime is named as the one to work on."""
GAINED = 0.01
"""A move of a knob that lowered the aggregate by this much (natural log) suggests to go on."""
LOW_OCCUPANCY = 0.25
LAUNCH_MS = 0.002
"""What one more launch of a graph costs at least: its start and the wait for the kernel before."""
NARROW = 0.5
"""Share of a kernel's loads from global memory that are narrower than 64 bits a thread."""
THREADS, REGISTERS, SHARED = 2048, 65536, 228 << 10
"""Of a multiprocessor of sm_80 to sm_100: threads, registers, and at most so many bytes of shared memory."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What one analyser found."""

    parents: tuple[str, ...]
    mechanism: str
    rationale: str
    workloads: tuple[str, ...]
    evidence: tuple[str, ...]
    """Audit requests, the one it was derived from first."""


Analyser = Callable[[Study, Standing], Iterator[Finding]]


def observe(study: Study) -> int:
    """Write what the evidence so far suggests, each suggestion once; returns how many are new."""
    with study.store.read():
        standings = study.standings()
        found = list(_found(study, standings))
        known = _known(study)
    new = 0
    with study.store.transaction():
        for finding in found:
            if (finding.parents, finding.mechanism) in known:
                continue
            known.add((finding.parents, finding.mechanism))
            study.store.add_opportunity(
                parents=finding.parents,
                mechanism=finding.mechanism,
                rationale=finding.rationale,
                workloads=finding.workloads,
                evidence=finding.evidence,
                source_audit=finding.evidence[0],
            )
            new += 1
    return new


def _known(study: Study) -> set[tuple[tuple[str, ...], str]]:
    with study.store.read() as session:
        written = session.scalars(select(Opportunity).where(Opportunity.edit.is_(None)))
        return {(each.parents, each.mechanism) for each in written}


def _found(study: Study, standings: Mapping[str, Standing]) -> Iterator[Finding]:
    open_points = {each.sha256 for each in query.frontier(study.store)}
    timed = [each for each in standings.values() if each.accepted and each.timed]
    timed.sort(key=lambda each: each.log_objective or 0.0)
    points = [each for each in timed if each.sha256 in open_points][:ANALYSED]
    always = (study.root, study.incumbent)
    points += [each for each in timed if each.sha256 in always and each not in points]
    for point in points:
        for analyse in ANALYSERS:
            yield from analyse(study, point)
    for each in timed:
        yield from held_back_by_limits(study, each)
    rejected = [each for each in standings.values() if not each.accepted]
    for each in rejected[-REJECTED:]:
        yield from broken_requirements(study, each)


def to_the_bound(study: Study, point: Standing) -> Iterator[Finding]:
    """Workloads whose distance to the machine's bound is worth the most."""
    for each in cold(point.evidence):
        ms, share = _mean(each.candidate_ms), point.shares[each.workload]
        at_stake = share * (1 - each.bound_ms / ms)
        if each.bound_ms > 0 and at_stake >= WORTH:
            yield _finding(
                point,
                f"closer to the machine's bound in {each.workload}",
                f"{ms:.4g} ms, {ms / each.bound_ms:.1f} times the {each.bound_ms:.4g} ms that the measured "
                f"rates allow; at the bound the aggregate would fall by {100 * at_stake:.0f}%",
                (each.workload,),
            )


def dominating_regime(study: Study, point: Standing) -> Iterator[Finding]:
    """The regime that makes up most of the aggregate."""
    shares: dict[str, float] = {}
    for each in cold(point.evidence):
        shares[each.phase] = shares.get(each.phase, 0.0) + point.shares[each.workload]
    for phase, share in shares.items():
        if share >= DOMINATES and len(shares) > 1:
            workloads = tuple(each.workload for each in cold(point.evidence) if each.phase == phase)
            yield _finding(
                point,
                f"less time in {phase}",
                f"{phase} takes {100 * share:.0f}% of the aggregate latency",
                workloads,
            )


def knobs_at_an_edge(study: Study, point: Standing) -> Iterator[Finding]:
    """Knobs that stand at the end of their range after a move towards it gained."""
    knobs = edits.declared(study.store.source(point.sha256), study.contract)
    standings = study.standings()
    for parent in study.parents(point.sha256):
        before = standings.get(parent)
        if before is None or before.log_objective is None or point.log_objective is None:
            continue
        gain = before.log_objective - point.log_objective
        earlier = edits.values(edits.declared(study.store.source(parent), study.contract))
        for knob in knobs:
            moved = _towards_an_edge(knob, earlier.get(knob.name))
            if moved and gain > max(GAINED, math.hypot(before.error, point.error)):
                yield _finding(
                    point,
                    f"{knob.name} beyond {knob.value}, the end of its range",
                    f"the edit that moved it from {earlier[knob.name]} to {knob.value} lowered the aggregate "
                    f"by {100 * (1 - math.exp(-gain)):.1f}%, and its choices end there",
                    tuple(each.workload for each in cold(point.evidence)),
                    before.evidence.job,
                )


def _towards_an_edge(knob: edits.DeclaredKnob, earlier: KnobValue | None) -> bool:
    sizes = [choice for choice in knob.choices if isinstance(choice, int) and not isinstance(choice, bool)]
    if len(sizes) < max(2, len(knob.choices)) or not isinstance(earlier, int):
        return False
    at_top = knob.value == max(sizes) and earlier < max(sizes)
    return at_top or (knob.value == min(sizes) and earlier > min(sizes))


def held_back_by_limits(study: Study, point: Standing) -> Iterator[Finding]:
    """Gains that a limit keeps from promotion."""
    measurements = cold(point.evidence)
    if point.sha256 == study.root or (point.log_objective or 0.0) >= 0:
        return
    if within_limits(measurements):
        return
    over = [each for each in measurements if workload_ratio(each).ratio > each.limit]
    for each in over:
        yield _finding(
            point,
            f"its gain without slowing {each.workload}",
            f"its aggregate is {math.exp(point.log_objective or 0.0):.3f} of the root's, but "
            f"{each.workload} takes {workload_ratio(each).ratio:.3f} of the root's time where its limit is "
            f"{each.limit:g}",
            (each.workload,),
        )


def broken_requirements(study: Study, rejected: Standing) -> Iterator[Finding]:
    """Modifications that a bitwise relation or an accuracy bound refused."""
    if rejected.status not in (Status.BITS_UNEQUAL, Status.INACCURATE):
        return
    modification = query.modification(study.store, rejected.sha256)
    failed = next((each for each in rejected.evidence.verdicts if not each.held), None)
    if modification is None or failed is None:
        return
    seen = (
        ""
        if failed.difference is None
        else f": {failed.difference.place}, "
        + (f"{failed.difference.left} against {failed.difference.right}")
    )
    ratio = "" if failed.error is None else f", error {failed.error:.3g} times what is allowed"
    parents = tuple(sha for sha in modification.parents if query.is_verified(study.store, sha))
    if parents:
        yield Finding(
            parents,
            f"{_short(modification.hypothesis)} with {failed.requirement} held",
            f"{rejected.sha256[:12]} failed {failed.requirement}{seen}{ratio}",
            (),
            (rejected.evidence.job,),
        )


def compiled_kernels(study: Study, point: Standing) -> Iterator[Finding]:
    """Kernels that spill, or of which few fit on a multiprocessor."""
    for kernel in map(CompiledKernel.read, point.evidence.specialisations):
        if kernel is None:
            continue
        if kernel.spills:
            yield _finding(
                point,
                f"{kernel.name} without spills",
                f"{kernel.text} keeps {kernel.spills} registers in local memory",
                (),
            )
        elif kernel.occupancy < LOW_OCCUPANCY:
            yield _finding(
                point,
                f"more programs of {kernel.name} on a multiprocessor",
                f"{kernel.registers} registers a thread, {kernel.warps} warps and {kernel.shared} bytes of "
                f"shared memory let {kernel.programs} run at a time: {100 * kernel.occupancy:.0f}% of its "
                "threads",
                (),
            )


def machine_code(study: Study, point: Standing) -> Iterator[Finding]:
    """Kernels whose instructions leave some of the hardware unused; where their code is on this machine."""
    for kernel in map(CompiledKernel.read, point.evidence.specialisations):
        if kernel is None:
            continue
        digest = kernel.text.rpartition(" ")[2]
        cubin = sass.cubin_of(home() / "compiled", kernel.name.rpartition(".")[2], digest)
        if cubin is None:
            continue
        try:
            yield from _of_instructions(point, kernel, sass.mix(cubin))
        except RuntimeError:
            return  # no disassembler here


def _of_instructions(point: Standing, kernel: "CompiledKernel", mix: sass.Mix) -> Iterator[Finding]:
    if mix.architecture == "sm_90" and mix.warp_products and not mix.warp_group_products:
        yield _finding(
            point,
            f"warp-group matrix products (wgmma) in {kernel.name}",
            f"{mix.warp_products} of {mix.total} instructions of {kernel.text} are mma.sync (HMMA), none is "
            "wgmma (HGMMA), and sm_90 reaches its rate by wgmma alone",
            (),
        )
    if mix.narrow_share >= NARROW:
        widths = ", ".join(f"{count} of {bits} bits" for bits, count in mix.loads)
        yield _finding(
            point,
            f"wider loads in {kernel.name}",
            f"{100 * mix.narrow_share:.0f}% of the global loads of {kernel.text} read less than 64 bits a "
            f"thread: {widths}",
            (),
        )


def launches(study: Study, point: Standing) -> Iterator[Finding]:
    """Workloads in which starting kernels, or a wave of blocks that fills the device in part, costs much."""
    for each in cold(point.evidence):
        of = [launch for launch in point.evidence.launches if launch.workload == each.workload]
        count, ms = sum(launch.count for launch in of), _mean(each.candidate_ms)
        at_stake = point.shares[each.workload] * min(1.0, (count - 1) * LAUNCH_MS / ms)
        if at_stake >= WORTH:
            names = ", ".join(dict.fromkeys(launch.kernel for launch in of))
            yield _finding(
                point,
                f"fewer launches in {each.workload}",
                f"a call of {ms:.4g} ms launches {count:.3g} kernels ({_short(names)}); in one launch the "
                f"aggregate would fall by about {100 * at_stake:.0f}%",
                (each.workload,),
            )
        for launch in of:
            yield from _of_waves(point, each, launch, len(of))


def _of_waves(point: Standing, measurement: Measurement, launch: Launch, kernels: int) -> Iterator[Finding]:
    """Blocks that leave much of the device idle in the last wave, the kernels taken to share the time."""
    rounds = max(1, math.ceil(launch.waves))
    idle = 1 - launch.waves / rounds
    at_stake = point.shares[measurement.workload] / kernels * idle
    if launch.blocks and at_stake >= WORTH:
        yield _finding(
            point,
            f"blocks of {launch.kernel} that fill the device in {measurement.workload}",
            f"{launch.blocks} blocks where the device holds {launch.resident} at a time are "
            f"{launch.waves:.2f} waves: {100 * idle:.0f}% of the room of {rounds} stays idle",
            (measurement.workload,),
        )


ANALYSERS: tuple[Analyser, ...] = (
    to_the_bound,
    dominating_regime,
    knobs_at_an_edge,
    compiled_kernels,
    machine_code,
    launches,
)
"""Of one implementation that was timed."""


@dataclass(frozen=True, slots=True)
class CompiledKernel:
    """Resources of one compiled kernel, as a GPU's worker reports them."""

    name: str
    text: str
    warps: int
    registers: int
    spills: int
    shared: int
    """Bytes."""

    @classmethod
    def read(cls, text: str) -> "CompiledKernel | None":
        """Read `name(...) warps=.. registers=.. spills=.. shared=.. hash`; None for another text."""
        found = re.search(r"warps=(\d+) .*registers=(\d+) spills=(\d+) shared=(\d+)", text)
        if found is None:
            return None
        warps, registers, spills, shared = map(int, found.groups())
        return cls(text.partition("(")[0], text, warps, registers, spills, shared)

    @property
    def programs(self) -> int:
        """How many fit on a multiprocessor of a data-centre GPU: registers, shared memory, threads."""
        threads = 32 * self.warps
        by_registers = REGISTERS // max(1, -(-self.registers // 8) * 8 * threads)
        by_shared = SHARED // (self.shared + 1024)
        return max(1, min(by_registers, by_shared, THREADS // threads))

    @property
    def occupancy(self) -> float:
        """Share of a multiprocessor's threads that they are."""
        return self.programs * 32 * self.warps / THREADS


def _finding(
    point: Standing, mechanism: str, rationale: str, workloads: Sequence[str], *more: str
) -> Finding:
    return Finding((point.sha256,), mechanism, rationale, tuple(workloads), (point.evidence.job, *more))


def _mean(ms: Sequence[float]) -> float:
    return math.exp(statistics.fmean(map(math.log, ms)))


def _short(text: str, most: int = 60) -> str:
    return text if len(text) <= most else text[: most - 3].rstrip() + "..."
