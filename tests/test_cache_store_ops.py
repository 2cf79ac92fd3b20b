"""write_cache_store and read_cache_store: the same copy in two directions."""

from typing import Any

import pytest
import torch
from builders import far_apart, random_indexer_cache, random_mla_cache
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from sparse_cp_ops import ops, reference

DIRECTIONS = ["write_cache_store", "read_cache_store"]
PAGES, SLOTS = 9, 6
# (page, store slot): -1, ids just and far outside, a page read twice.
PAIRS = [(3, 5), (8, 0), (-1, 1), (2, -1), (PAGES, 2), (2, SLOTS), (2**31 - 1, 2**62), (-(2**31), 3), (0, 4)]


class Layer:
    """The caches and the store of one layer, and the call in one of the directions."""

    def __init__(self, device: str, page_size: int = 64, indexer: bool = True, store_device: str | None = None) -> None:
        def pages(count: int, where: str) -> tuple[Tensor, Tensor | None]:
            mla = random_mla_cache(count, page_size)
            index = random_indexer_cache(count, page_size) if indexer else None
            if where == "pinned":
                return mla.pin_memory(), None if index is None else index.pin_memory()
            return mla.to(where), None if index is None else index.to(where)

        self.mla_cache, self.indexer_cache = pages(PAGES, device)
        self.mla_store, self.indexer_store = pages(SLOTS, store_device or device)
        pairs = torch.tensor(PAIRS)
        self.page_ids, self.store_slots = pairs[:, 0].int().to(device), pairs[:, 1].contiguous().to(device)

    def arguments(self, direction: str, **changed: Any) -> tuple[Any, ...]:
        names = {
            "write_cache_store": "mla_cache indexer_cache page_ids store_slots mla_store indexer_store",
            "read_cache_store": "mla_store indexer_store store_slots page_ids mla_cache indexer_cache",
        }[direction].split()
        values = {**vars(self), **changed}
        return tuple(values[name] for name in names)

    def targets(self, direction: str) -> list[Tensor]:
        mla, index = self.arguments(direction)[-2:]
        return [mla] if index is None else [mla, index]

    def expected(self, direction: str) -> list[Tensor]:
        copies = [None if a is None else a.cpu().clone() for a in self.arguments(direction)]
        getattr(reference, direction)(*copies)
        return [a for a in copies[-2:] if a is not None]


def copied_pairs(layer: Layer, direction: str) -> int:
    source, target = layer.arguments(direction)[0].cpu(), layer.arguments(direction)[4].cpu()
    return sum(bool((page == other).all()) for page in target for other in source)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("page_size", [16, 32, 64, 128])
@pytest.mark.parametrize("indexer", [True, False])
def test_matches_reference(device: str, direction: str, page_size: int, indexer: bool) -> None:
    layer = Layer(device, page_size, indexer)
    expected = layer.expected(direction)
    getattr(ops, direction)(*layer.arguments(direction))
    for mine, theirs in zip(layer.targets(direction), expected, strict=True):
        assert torch.equal(mine.cpu(), theirs)
    assert copied_pairs(layer, direction) == 3  # the valid ones


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_strided_pages_are_used_in_place(device: str, direction: str) -> None:
    """A layer's pages within [pages, layers, ...] buffers; nothing beside them is touched."""
    layer = Layer(device)
    whole = {
        name: torch.full((value.shape[0], 3, *value.shape[1:]), 9, dtype=torch.uint8, device=device)
        for name, value in vars(layer).items()
        if name.endswith(("cache", "store"))
    }
    for name, buffer in whole.items():
        buffer[:, 1] = getattr(layer, name)
        setattr(layer, name, buffer[:, 1])
    expected = layer.expected(direction)
    getattr(ops, direction)(*layer.arguments(direction))
    for mine, theirs in zip(layer.targets(direction), expected, strict=True):
        assert torch.equal(mine.cpu(), theirs)
    assert all(buffer[:, ::2].eq(9).all() for buffer in whole.values())


def test_round_trip_through_a_store(device: str) -> None:
    """Wiped pages come back bit for bit, both caches, into other pages."""
    layer = Layer(device)
    before = [layer.mla_cache.clone(), layer.indexer_cache.clone()]
    pages = torch.tensor([8, 1, 3, 0], dtype=torch.int32, device=device)
    slots = torch.tensor([2, 5, 0, 1], device=device)
    ops.write_cache_store(*layer.arguments("write_cache_store", page_ids=pages, store_slots=slots))
    layer.mla_cache.fill_(255)
    layer.indexer_cache.fill_(255)
    other = pages.flip(0).contiguous()
    ops.read_cache_store(*layer.arguments("read_cache_store", page_ids=other, store_slots=slots))
    for cache, old in zip([layer.mla_cache, layer.indexer_cache], before, strict=True):
        assert torch.equal(cache[other.long()], old[pages.long()])
        assert cache[torch.tensor([2, 4, 5, 6, 7], device=device)].eq(255).all()


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_empty(device: str, direction: str) -> None:
    layer = Layer(device)
    expected = [t.clone() for t in layer.targets(direction)]
    nothing = {"page_ids": layer.page_ids[:0], "store_slots": layer.store_slots[:0]}
    getattr(ops, direction)(*layer.arguments(direction, **nothing))
    no_store = {"mla_store": layer.mla_store[:0], "indexer_store": layer.indexer_store[:0]}
    getattr(ops, direction)(*layer.arguments(direction, **no_store))
    assert all(torch.equal(a, b) for a, b in zip(layer.targets(direction), expected, strict=True))


def test_pages_beyond_2_gib(device: str) -> None:
    """The last page of 52,000 starts 2.03 GiB into its tensor; untouched zero pages cost no memory on the CPU."""
    count = 52_000
    store = torch.zeros(count, 64, 656, dtype=torch.uint8, device=device)
    layer = Layer(device, indexer=False)
    pages = torch.tensor([3, 7], dtype=torch.int32, device=device)
    slots = torch.tensor([count - 1, 17], device=device)
    ops.write_cache_store(layer.mla_cache, None, pages, slots, store, None)
    assert torch.equal(store[count - 1], layer.mla_cache[3])
    assert torch.equal(store[17], layer.mla_cache[7])
    before = layer.mla_cache.clone()
    ops.read_cache_store(store, None, slots, pages.flip(0).contiguous(), layer.mla_cache, None)
    assert torch.equal(layer.mla_cache[7], before[3])
    assert torch.equal(layer.mla_cache[3], before[7])


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("far", ["cache", "store"])
def test_indexer_pages_beyond_2_gib(device: str, direction: str, far: str) -> None:
    layer = Layer(device, page_size=16)
    expected = layer.expected(direction)
    name = f"indexer_{far}"
    setattr(layer, name, far_apart(getattr(layer, name), device))
    getattr(ops, direction)(*layer.arguments(direction))
    for mine, theirs in zip(layer.targets(direction), expected, strict=True):
        assert torch.equal(mine.cpu(), theirs)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_70000_pairs(device: str, direction: str) -> None:
    """More than a grid's y and z dimensions hold; all but some at both ends and at that border are skipped."""
    layer = Layer(device, page_size=16)
    page_ids, slots = torch.full((70_000,), -1, dtype=torch.int32), torch.full((70_000,), -1)
    for pair, (page, slot) in {0: (3, 5), 65_535: (8, 0), 65_536: (0, 4), 69_999: (6, 2)}.items():
        page_ids[pair], slots[pair] = page, slot
    layer.page_ids, layer.store_slots = page_ids.to(device), slots.to(device)
    expected = layer.expected(direction)
    getattr(ops, direction)(*layer.arguments(direction))
    for mine, theirs in zip(layer.targets(direction), expected, strict=True):
        assert torch.equal(mine.cpu(), theirs)
    assert copied_pairs(layer, direction) == 4


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_value_checks(device: str, direction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARSE_CP_OPS_CHECK", "1")
    layer = Layer(device)
    call = getattr(ops, direction)

    def pairs(pages: list[int], slots: list[int]) -> tuple[Any, ...]:
        return layer.arguments(
            direction,
            page_ids=torch.tensor(pages, dtype=torch.int32, device=device),
            store_slots=torch.tensor(slots, device=device),
        )

    call(*pairs([0, -1, 2], [1, 1, -1]))
    with pytest.raises(ValueError, match=r"page_ids: pair 1: expected -1 or a page in \[0, 9\), got 9"):
        call(*pairs([0, 9], [1, 2]))
    with pytest.raises(ValueError, match=r"store_slots: pair 0: expected -1 or a slot in \[0, 6\), got -2"):
        call(*pairs([0, 8], [-2, 2]))
    twice = ([0, 1, 2], [3, 4, 3]) if direction == "write_cache_store" else ([3, 4, 3], [0, 1, 2])
    with pytest.raises(ValueError, match="pair 2: expected a target of its own, got 3, the target of pair 0"):
        call(*pairs(*twice))
    call(*pairs(*reversed(twice)))  # one source for two targets


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_arguments_are_named_in_errors(device: str, direction: str) -> None:
    layer = Layer(device)
    call = getattr(ops, direction)
    with pytest.raises(TypeError, match=r"page_ids: expected a torch\.Tensor, got list"):
        call(*layer.arguments(direction, page_ids=[1]))
    with pytest.raises(TypeError, match=r"indexer_store: expected a torch\.Tensor, got int"):
        call(*layer.arguments(direction, indexer_store=3))
    for changed, message in [
        ({"indexer_store": None}, "indexer_cache, indexer_store: expected both or neither, got only indexer_cache"),
        ({"indexer_cache": None}, "indexer_cache, indexer_store: expected both or neither, got only indexer_store"),
        ({"mla_cache": layer.mla_cache[0]}, "mla_cache: expected 3 dimensions, got 2"),
        ({"mla_cache": layer.mla_cache.char()}, "mla_cache: expected dtype uint8, got int8"),
        ({"mla_cache": layer.mla_cache[:, :48]}, "mla_cache: expected a page_size of 16, 32, 64 or 128"),
        ({"mla_cache": layer.mla_cache[..., :640]}, r"mla_cache: expected shape \[\*, \*, 656\]"),
        ({"mla_cache": layer.mla_cache.repeat(1, 2, 1)[:, ::2]}, "mla_cache: expected contiguous pages"),
        ({"indexer_cache": layer.indexer_cache[:3]}, r"indexer_cache: expected shape \[9, 8448\], got \[3, 8448\]"),
        ({"mla_store": layer.mla_store[:, :32], "indexer_store": layer.indexer_store[:, :4224]}, "page_size of 64"),
        ({"mla_store": layer.mla_store.int()}, "mla_store: expected dtype uint8, got int32"),
        ({"page_ids": layer.page_ids.long()}, "page_ids: expected dtype int32, got int64"),
        ({"page_ids": layer.page_ids[None]}, "page_ids: expected 1 dimensions, got 2"),
        ({"store_slots": layer.store_slots.int()}, "store_slots: expected dtype int64, got int32"),
        ({"store_slots": layer.store_slots[:2]}, r"store_slots: expected shape \[9\], got \[2\]"),
        ({"store_slots": layer.store_slots.repeat(2)[::2]}, "store_slots: expected a contiguous tensor"),
    ]:
        with pytest.raises(ValueError, match=message):
            call(*layer.arguments(direction, **changed))
    unaligned = torch.zeros(SLOTS, 8448 + 8, dtype=torch.uint8, device=device)[:, :8448]
    with pytest.raises(ValueError, match="indexer_store: expected a stride that is a multiple of 16 bytes"):
        call(*layer.arguments(direction, indexer_store=unaligned))
    target = "store" if direction == "write_cache_store" else "cache"
    overlapping = getattr(layer, f"mla_{target}")[:1].expand(len(getattr(layer, f"mla_{target}")), -1, -1)
    with pytest.raises(ValueError, match=f"mla_{target}: expected memory without overlap because it is written"):
        call(*layer.arguments(direction, **{f"mla_{target}": overlapping}))


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_opcheck(device: str, direction: str) -> None:
    op = getattr(torch.ops.sparse_cp_ops, direction).default
    torch.library.opcheck(op, Layer(device, 16).arguments(direction))
    torch.library.opcheck(op, Layer(device, 16, indexer=False).arguments(direction))


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_compiles_once_for_all_lengths(device: str, direction: str) -> None:
    counter = CompileCounter()
    torch.compiler.reset()
    compiled = torch.compile(getattr(ops, direction), fullgraph=True, backend=counter)
    for n in range(2, 52):
        layer = Layer(device, 16)
        ids = torch.arange(n, device=device)  # those above the store are skipped
        layer.page_ids, layer.store_slots = ids.int(), ids
        expected = layer.expected(direction)
        compiled(*layer.arguments(direction))
        for mine, theirs in zip(layer.targets(direction), expected, strict=True):
            assert torch.equal(mine.cpu(), theirs)
    assert counter.frame_count - 1 <= 2  # recompiles


@pytest.mark.cuda
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("indexer", [True, False])
def test_pinned_store_beside_cuda_caches(direction: str, indexer: bool) -> None:
    layer = Layer("cuda", indexer=indexer, store_device="pinned")
    expected = layer.expected(direction)
    getattr(ops, direction)(*layer.arguments(direction))
    torch.cuda.synchronize()
    for mine, theirs in zip(layer.targets(direction), expected, strict=True):
        assert torch.equal(mine.cpu(), theirs)


@pytest.mark.cuda
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_host_stores_that_no_kernel_can_reach(direction: str) -> None:
    call = getattr(ops, direction)
    layer = Layer("cuda", store_device="cpu")
    with pytest.raises(ValueError, match="mla_store: expected pinned host memory beside CUDA caches"):
        call(*layer.arguments(direction))
    with pytest.raises(ValueError, match="indexer_store: expected pinned host memory beside CUDA caches"):
        call(*layer.arguments(direction, mla_store=layer.mla_store.pin_memory()))
    with pytest.raises(ValueError, match=r"indexer_store: expected device cpu .*got cuda:0"):
        call(
            *layer.arguments(
                direction, mla_store=layer.mla_store.pin_memory(), indexer_store=layer.indexer_store.cuda()
            )
        )
    on_device = Layer("cuda")
    with pytest.raises(ValueError, match=r"mla_store: expected device cpu .*got cuda:0"):
        call(*on_device.arguments(direction, **vars(Layer("cpu")) | {"mla_store": on_device.mla_store}))


@pytest.mark.cuda
@pytest.mark.parametrize("store_device", ["cuda", "pinned"])
def test_graph_replays_with_other_pairs(store_device: str) -> None:
    layer = Layer("cuda", store_device=store_device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ops.write_cache_store(*layer.arguments("write_cache_store"))
    for first in (0, 3):
        layer.page_ids.copy_(torch.arange(first, first + len(PAIRS)).int())
        layer.store_slots.copy_(torch.arange(len(PAIRS)))
        expected = layer.expected("write_cache_store")
        graph.replay()
        torch.cuda.synchronize()
        for mine, theirs in zip(layer.targets("write_cache_store"), expected, strict=True):
            assert torch.equal(mine.cpu(), theirs)
