"""Audits on a real Ray cluster of two nodes on this machine."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.search import ray_work
from tests.search.fake_audit import FakeAudits, new_study

from kernelbraid.ir import proposing, query
from kernelbraid.search import loop
from kernelbraid.search.executors import devices_of
from kernelbraid.search.executors.cluster import ClusterLost, RayExecutor
from kernelbraid.search.proposers.knobs import KnobProposer

ray = pytest.importorskip("ray", reason="the extra `ray` is not installed")
pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]
REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Any]:
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    made.add_node(num_cpus=1)
    marks = tmp_path / "marks"
    marks.mkdir()
    paths = os.pathsep.join([str(REPOSITORY / "src"), str(REPOSITORY)])
    variables = {"KB_MARKS": str(marks), "PYTHONPATH": paths, "KERNELBRAID_HOME": str(tmp_path / "home")}
    ray.init(address=made.address, log_to_driver=False, runtime_env={"env_vars": variables})
    try:
        yield made
    finally:
        ray.shutdown()
        made.shutdown()


def marks(tmp_path: Path) -> list[list[str]]:
    return [each.name.split(".") for each in (tmp_path / "marks").iterdir() if "." in each.name]


def searched(tmp_path: Path, work: Any, audits: int = 8) -> tuple[list[str], list[str]]:
    """Search on the cluster; the sources and requests that were audited."""
    executor = RayExecutor(work=work)
    with new_study(tmp_path / "s", FakeAudits(), audits=audits) as study:
        loop.run(study, KnobProposer(), run_job=executor)
        study.store.check()
        found = query.audits(study.store)
        assert len({each.request for each in found}) == len(found) and not study.store.pending()
        assert study.budget.audited == audits
        assert not list((study.folder / "jobs").iterdir()) + list((study.folder / "results").iterdir())
        told = [each.reason for each in proposing.interruptions(study.store)]
        return [each.implementation for each in found], told


def test_both_nodes_audit_and_everything_is_recorded_once(cluster: Any, tmp_path: Path) -> None:
    assert devices_of(RayExecutor(work=ray_work.marked)) == 2
    audited, interrupted = searched(tmp_path, ray_work.marked)
    assert len({node for _, node, _ in marks(tmp_path)}) == 2, "one node did everything"
    assert not interrupted and len(set(audited)) >= 9


def test_a_lost_worker_is_recorded_and_its_part_runs_elsewhere(cluster: Any, tmp_path: Path) -> None:
    _, interrupted = searched(tmp_path, ray_work.dies_once)
    assert interrupted and all("went away" in each for each in interrupted)


def test_a_lost_node_is_left_out(cluster: Any, tmp_path: Path) -> None:
    executor = RayExecutor(work=ray_work.marked)
    [second] = [each for each in cluster.list_all_nodes() if each is not cluster.head_node]
    with new_study(tmp_path / "s", FakeAudits(), audits=6) as study:
        loop.run(study, KnobProposer(), run_job=executor, should_stop=lambda: len(marks(tmp_path)) >= 2)
        cluster.remove_node(second, allow_graceful=False)
        loop.run(study, KnobProposer(), run_job=executor)
        study.store.check()
        assert study.budget.audited == 6 and devices_of(executor) == 1


def test_a_part_that_always_loses_its_worker_stays_pending(cluster: Any, tmp_path: Path) -> None:
    with new_study(tmp_path / "s", FakeAudits(), audits=6) as study:
        with pytest.raises(ClusterLost, match="3 times; the audits stay pending"):
            loop.run(study, KnobProposer(), run_job=RayExecutor(work=ray_work.dies))
        assert len(study.store.pending()) == 1 and not query.audits(study.store)
        assert len(proposing.interruptions(study.store)) == 3
        loop.run(study, KnobProposer(), run_job=RayExecutor(work=ray_work.modelled))
        assert study.budget.audited == 6


def test_what_a_task_refuses_is_refused_here(cluster: Any, tmp_path: Path) -> None:
    with (
        new_study(tmp_path / "s", FakeAudits(), audits=6) as study,
        pytest.raises(ValueError, match="another version of the judging code"),
    ):
        loop.run(study, KnobProposer(), run_job=RayExecutor(work=ray_work.refuses))


def test_a_search_is_the_same_on_a_cluster(cluster: Any, tmp_path: Path) -> None:
    """Same seed and model: the root's and the first candidates' evidence do not depend on where they ran."""
    there, _ = searched(tmp_path, ray_work.modelled, audits=2)
    fake = FakeAudits()
    with new_study(tmp_path / "here", fake, audits=2) as study:
        loop.run(study, KnobProposer(), run_job=fake)
        here = [each.implementation for each in query.audits(study.store)]
    assert set(there[:3]) == set(here[:3])


def test_a_real_audit_on_a_cluster(cluster: Any, tmp_path: Path) -> None:
    """The shipped attention, two small workloads, its own process on the host."""
    from kernelbraid import ops
    from kernelbraid.search.study import Study

    grid = ops.get("attention").grids["study"]
    with Study.create(tmp_path / "s", "attention", workloads=grid[2:3], audits=1) as study:
        loop.run(study, KnobProposer(), run_job=RayExecutor())
        study.store.check()
        assert study.root in study.standings() and study.budget.audited == 1
