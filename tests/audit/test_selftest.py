"""What the self-test concludes, and its hostile sources; that audits reject them is the slow test."""

import ast
import math
import random
from pathlib import Path
from typing import Any

import pytest
from tests.audit.left import no_process_left

from kernelbraid import ops
from kernelbraid.audit.fixtures import FIXTURES, for_device, named
from kernelbraid.audit.selftest import Kept, Pair, _Selftest, cheapest, passed, selftest, smallest_gain, walk
from kernelbraid.audit.timing import Sequential, Step
from kernelbraid.audit.tripwires import scan
from kernelbraid.contract import Source
from kernelbraid.ir.evidence import AuditEvidence, Status

RULE = Sequential()


def pairs(count: int, spread: float) -> list[Pair]:
    rng = random.Random(3)

    def side() -> list[float]:
        return [10 * (1 + rng.gauss(0, spread)) for _ in range(RULE.most)]

    return [(side(), side()) for _ in range(count)]


def test_walk_stops_at_the_first_decision() -> None:
    assert walk(RULE, [5.0] * 8, [10.0] * 8) is Step.PROVEN
    assert walk(RULE, [20.0], [10.0]) is Step.HOPELESS
    assert walk(RULE, [5.0], [10.0]) is Step.CONTINUE


def test_smallest_gain_grows_with_noise_and_is_proven_in_its_share() -> None:
    quiet, noisy = pairs(50, 0.002), pairs(50, 0.02)
    gains = smallest_gain(RULE, quiet), smallest_gain(RULE, noisy)
    assert 0.005 < gains[0] < gains[1] < 0.5
    for trials, gain in zip((quiet, noisy), gains, strict=True):
        proven = [walk(RULE, [ms * (1 - gain) for ms in ours], theirs) for ours, theirs in trials]
        assert proven.count(Step.PROVEN) >= 0.8 * len(trials)


def test_identical_sources_are_hardly_ever_proven() -> None:
    proven = sum(walk(RULE, *pair) is Step.PROVEN for pair in pairs(300, 0.03))
    assert proven <= 3


def test_passed() -> None:
    good = {"unexpected": [], "promoted_exploits": 0, "false_promotions": 3, "trials": 300}
    assert passed(good)
    assert not passed({**good, "false_promotions": 4})
    assert not passed({**good, "promoted_exploits": 1})
    assert not passed({**good, "unexpected": ["hung"]})
    assert passed({**good, "trials": 0, "false_promotions": 0})


def test_fixtures_are_distinct_and_parse() -> None:
    honest = Source("def attention(q, out):\n    out[...] = q\n")
    names = [fixture.name for fixture in FIXTURES]
    assert len(set(names)) == len(names) >= 25
    for fixture in FIXTURES:
        source = fixture.source(honest, ["attention"])
        tree = ast.parse(source.text)
        assert {"_exploit", "attention"} <= {n.name for n in tree.body if isinstance(n, ast.FunctionDef)}
    with pytest.raises(ValueError, match="no fixture 'kind'"):
        named(["kind"])


def test_fixtures_that_expect_a_tripwire_alone_touch_one() -> None:
    honest = Source("def attention(q, out):\n    out[...] = q\n")
    for fixture in FIXTURES:
        found = scan(fixture.source(honest, ["attention"]).text)
        if fixture.expected == (Status.TRIPWIRE,):
            assert found, fixture.name
        if fixture.name.endswith("_hidden"):
            assert not found, f"{fixture.name} is not hidden: {found[0]}"


def test_cheapest_workloads_differ_in_phase() -> None:
    workloads = cheapest(ops.get("attention"))
    assert len({each.phase for each in workloads}) == len(workloads) == 2


class Interrupted:
    """Measurements and audits without processes; interrupted at one of them if told so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, stop_at: float = math.inf) -> None:
        self.stop_at = stop_at
        self.asked: list[str] = []
        monkeypatch.setattr(_Selftest, "_programs", lambda test: ("programs",))
        monkeypatch.setattr(_Selftest, "_pair", lambda test, programs, rule, whole: self.pair(whole))
        monkeypatch.setattr(_Selftest, "_audit", lambda test, root, candidate: self.audit(candidate))

    def _step(self, what: str) -> None:
        if len(self.asked) == self.stop_at:
            raise KeyboardInterrupt
        self.asked.append(what)

    def pair(self, whole: bool) -> Pair | None:
        self._step("pair")
        number = self.asked.count("pair")
        if number == 3:
            return None
        faster = 0.5 if number in (4, 5) else 1.0  # proven once, and confirmed
        ours = [10.0 * faster + 0.01 * round for round in range(RULE.most)]
        return ours, [10.0 + 0.01 * round for round in range(RULE.most)]

    def audit(self, candidate: Source) -> RuntimeError:
        self._step("audit")
        return RuntimeError(candidate.label)


def test_a_self_test_goes_on_where_it_was(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Interrupted anywhere, also between a trial that was proven once and its confirmation."""

    def ran(folder: Path, trials: int = 6) -> dict[str, Any]:
        return selftest(
            ops.get("attention"),
            nothing,
            trials=trials,
            fixtures=FIXTURES[:2],
            folder=folder,
            progress=said.append,
        )

    said: list[str] = []
    calm = Interrupted(monkeypatch)
    expected = ran(tmp_path / "calm")
    assert expected["proven_once"] == expected["false_promotions"] == expected["failed_trials"] == 1
    assert not list((tmp_path / "calm").iterdir()), "what is done is not gone on with"
    steps = len(calm.asked)
    assert steps == 4 + 7 and not any("goes on" in each for each in said)
    for stop in range(steps):
        folder = tmp_path / str(stop)
        fake = Interrupted(monkeypatch, stop)
        with pytest.raises(KeyboardInterrupt):
            ran(folder)
        fake.stop_at = math.inf
        said.clear()
        found = ran(folder)
        assert found == expected and fake.asked == calm.asked, f"interrupted at step {stop}"
        assert any(f"goes on after {stop} steps" in each for each in said) == (stop > 0)
    fake = Interrupted(monkeypatch, 8)
    with pytest.raises(KeyboardInterrupt):
        ran(tmp_path / "other")
    fake.stop_at = math.inf
    ran(tmp_path / "other", trials=5)
    assert len(fake.asked) == 8 + 4 + 6, "another self-test begins at its own start"


def test_what_a_self_test_keeps(tmp_path: Path) -> None:
    with Kept("subject", tmp_path) as kept:
        assert not kept and kept.of("a", lambda: [1.5, None]) == [1.5, None]
        assert kept.of("a", lambda: 1 / 0) == [1.5, None]
        with pytest.raises(ValueError, match="the same self-test runs already"), Kept("subject", tmp_path):
            pass
        with Kept("another", tmp_path) as other:
            assert not other
    kept.path.write_bytes(kept.path.read_bytes() + b'["b", [1')
    with Kept("subject", tmp_path) as kept:
        assert len(kept) == 1 and "a" in kept and "b" not in kept
        assert kept.of("b", lambda: 0.1) == 0.1
    with Kept("subject", tmp_path) as kept:
        assert len(kept) == 2 and kept.of("b", lambda: 1 / 0) == 0.1
        kept.clear()
    assert not kept.path.exists()


def nothing(evidence: AuditEvidence) -> bool:
    return False


@pytest.mark.slow
def test_audits_reject_hostile_candidates(tmp_path: Path) -> None:
    chosen = named(
        ["raising", "counts_calls", "keeps_the_last_answer", "daemonising_hidden", "executes_a_string"]
    )
    with no_process_left():
        document = selftest(ops.get("attention"), nothing, trials=1, fixtures=chosen, folder=tmp_path)
    observed = {each["name"]: each["observed"] for each in document["fixtures"]}
    assert observed["raising"] == "crashed"
    assert observed["counts_calls"] == "bits_unequal"
    assert observed["daemonising_hidden"] == "tampered"
    assert observed["executes_a_string"] == "tripwire"
    assert document["promoted_exploits"] == 0
    assert not {each.name for each in chosen} & set(document["unexpected"])


def test_fixtures_are_for_the_cpu() -> None:
    with pytest.raises(ValueError, match="written for the CPU, not for cuda"):
        selftest(ops.get("attention", "cuda"), nothing, trials=0, fixtures=FIXTURES[:1])
    assert for_device("cuda") == () and for_device("cpu") == FIXTURES
