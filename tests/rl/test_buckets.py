"""Decode steps of fixed sizes, without a GPU: what is padded, how often a step is made, what is replayed."""

import pytest
import torch
from tests.rl.engines import contents, decoder, engine, requests

from kernelbraid.models.model import Cache
from kernelbraid.rl.buckets import (
    MOST_MISSING,
    Buckets,
    context_of,
    padded,
    rows_of,
    scratch_pages,
    uses_graphs,
)
from kernelbraid.rl.records import Sampling
from kernelbraid.rl.requests import group


def test_sizes() -> None:
    assert [rows_of(n, 64) for n in (1, 2, 3, 5, 8, 9, 64, 65)] == [1, 2, 4, 8, 8, 16, 64, None]
    assert rows_of(3, 3) is None
    assert [context_of(n, 5000) for n in (1, 1024, 1025, 4097)] == [1024, 1024, 2048, 5000]
    assert context_of(5, 100) == 100 and context_of(2, 3) == MOST_MISSING
    assert max(rows_of(n, 256) - n for n in range(1, 257)) == MOST_MISSING


def test_graphs_are_for_gpus_and_operators_that_do_not_wait() -> None:
    gpu, cpu = torch.device("cuda", 1), torch.device("cpu")
    assert uses_graphs(None, gpu, False) and not uses_graphs(None, gpu, True)
    assert not uses_graphs(None, cpu, False) and uses_graphs(True, cpu, True)
    assert not uses_graphs(False, gpu, False) and uses_graphs(True, gpu, False)
    with pytest.raises(ValueError, match="graphs must be off or None: the decoder's operators read device"):
        uses_graphs(True, gpu, True)


@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_no_two_rows_write_at_one_place(page_size: int) -> None:
    scratch = range(100, 100 + scratch_pages(page_size))
    given = padded(
        [7, 9], [[4, 2], [5]], [page_size + 1, 1],
        rows=8, columns=9, context=64, scratch=scratch,
    )  # fmt: skip
    places = set()
    for table, length in zip(given.page_table.tolist(), given.lengths.tolist(), strict=True):
        page, slot = table[(length - 1) // page_size], (length - 1) % page_size
        places.add((page, slot))
    assert len(places) == 8 and given.longest == 64
    assert {page for page, _ in places} <= {2, 5, *scratch}
    assert given.ids.tolist() == [7, 9, 0, 0, 0, 0, 0, 0]
    assert all(x.dtype == torch.int32 for x in (given.ids, given.page_table, given.lengths))


def test_each_size_is_captured_once_and_replayed_on_the_same_tensors() -> None:
    made, captures, replays = decoder(), [], []
    cache = Cache.empty(made.config, 12, 4, made.weights.norm)

    def capture(step):
        captures.append(step)

        def replay():
            replays.append(step)
            return step()

        return replay

    buckets = Buckets(made, cache, range(10, 12), largest=8, most=40, capture=capture)
    with torch.no_grad():
        one = buckets.run([3], [[0]], [1])
        again = buckets.run([3], [[5]], [1])
        other = buckets.run([4], [[5]], [1])
        three = buckets.run([3, 3, 4], [[1], [2], [3]], [1, 1, 1])
    assert buckets.run([0] * 9, [[0]] * 9, [1] * 9) is None
    assert len(captures) == 2 and len(replays) == 4 and set(buckets.steps) == {(1, 40), (4, 40)}
    assert one is not None and again is not None and other is not None and three is not None
    assert torch.equal(one, again) and not torch.equal(one, other)
    assert torch.equal(three, torch.cat([one, one, other]))


def test_padding_that_writes_into_pages_of_requests_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    right = contents(engine(page_size=4).generate(requests()))
    assert contents(engine(page_size=4, graphs=True).generate(requests())) == right
    made = engine(page_size=4, graphs=True)
    assert made._buckets is not None
    made._buckets._scratch = list(range(len(made._buckets._scratch)))
    assert contents(made.generate(requests())) != right


def test_a_cache_of_fewer_tokens_than_rows_are_padded() -> None:
    asked = group([1], Sampling(max_tokens=1 + 1), prompt_index=0, samples=5)
    found = [engine(cache_tokens=15, page_size=1, graphs=graphs).generate(asked) for graphs in (False, True)]
    assert contents(found[0]) == contents(found[1])
    small = group([1], Sampling(max_tokens=2), prompt_index=0, samples=1)
    assert len(engine(cache_tokens=3, page_size=1, graphs=True).generate(small)) == 1
