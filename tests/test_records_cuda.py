"""What only a CUDA device can show of the five record ops: graphs, streams, synchronisation, allocations, devices."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from record_cases import assert_same_bytes, random_positions, rope_table
from stream_gate import StreamGate
from torch import Tensor

from sparse_cp_ops import ops

pytestmark = pytest.mark.cuda

PAGES, PAGE_SIZE = 9, 32


@dataclass
class Layer:
    """Inputs and outputs of one layer's record ops; ``fill`` draws new inputs into the same memory."""

    q: Tensor
    k: Tensor
    weights: Tensor
    latent: Tensor
    positions: Tensor
    req_ids: Tensor
    block_table: Tensor
    table: Tensor
    mla_records: Tensor
    k_records: Tensor
    mla_cache: Tensor
    indexer_cache: Tensor

    @classmethod
    def make(cls, rows: int, device: str) -> "Layer":
        def bytes_of(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.uint8, device=device)

        layer = cls(
            torch.zeros(rows, 16, 128, device=device).bfloat16(),
            torch.zeros(rows, 128, device=device).bfloat16(),
            torch.zeros(rows, 16, device=device),
            torch.zeros(rows, 576, device=device).bfloat16(),
            torch.zeros(rows, dtype=torch.int32, device=device),
            torch.zeros(rows, dtype=torch.int32, device=device),
            torch.zeros(2, PAGES, dtype=torch.int32, device=device),
            rope_table().to(device),
            bytes_of(rows, 656),
            bytes_of(rows, 132),
            bytes_of(PAGES, PAGE_SIZE, 656),
            bytes_of(PAGES, PAGE_SIZE * 132),
        )
        layer.fill(rows)
        return layer

    def fill(self, used_rows: int) -> None:
        """Random inputs; rows from ``used_rows`` on are pads."""
        for x in (self.q, self.k, self.weights, self.latent):
            x.copy_(torch.randn(x.shape))
        rows = len(self.positions)
        positions = torch.randperm(97)[:rows].int()
        positions[used_rows:] = 0
        self.positions.copy_(positions)
        self.req_ids.copy_(torch.where(torch.arange(rows) < used_rows, 1, -1))
        self.block_table.copy_(torch.randperm(PAGES).repeat(2).view(2, PAGES))
        self.mla_cache.zero_()
        self.indexer_cache.zero_()

    def run(self) -> tuple[Tensor, ...]:
        ops.rope_(self.q[..., 64:], self.positions, self.table, True)
        q_fp8, q_weights = ops.quant_q_k_cp(
            self.q, self.k, self.weights, self.positions, self.table, self.k_records, False, True, 0.1, "ue8m0"
        )
        latent, k_pe = self.latent.split([512, 64], dim=1)
        ops.pack_mla_kv(latent, k_pe, self.positions, self.table, self.mla_records, True, "fp32")
        ops.write_kv_cache(
            self.mla_records,
            self.k_records,
            self.req_ids,
            self.positions,
            self.block_table,
            self.mla_cache,
            self.indexer_cache,
        )
        kv = ops.dequantize_kv(self.mla_cache, self.positions.long())
        return q_fp8, q_weights, kv, self.q, self.mla_records, self.k_records, self.mla_cache, self.indexer_cache

    def on_cpu(self) -> "Layer":
        return Layer(**{name: value.cpu().clone() for name, value in vars(self).items()})


def assert_same_as_cpu(actual: tuple[Tensor, ...], cpu: Layer) -> None:
    for index, (a, b) in enumerate(zip(actual, cpu.run(), strict=True)):
        assert_same_bytes(a, b, f"tensor {index}")


def test_cpu_and_cuda_write_the_same_bytes() -> None:
    for rows in (1, 40, 97):
        layer = Layer.make(rows, "cuda")
        cpu = layer.on_cpu()
        assert_same_as_cpu(layer.run(), cpu)


def test_graph_replays_with_changed_lengths() -> None:
    layer = Layer.make(60, "cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        layer.run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = layer.run()
    for used_rows in (60, 1, 33, 0):
        layer.fill(used_rows)
        cpu = layer.on_cpu()
        graph.replay()
        assert_same_as_cpu(captured, cpu)


def test_nothing_synchronises() -> None:
    layer = Layer.make(20, "cuda")
    layer.run()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        layer.run()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_runs_on_the_current_stream() -> None:
    """Inputs that another stream writes late: an op on the wrong stream would read the old ones."""
    layer, late = Layer.make(50, "cuda"), Layer.make(50, "cuda")
    cpu = late.on_cpu()
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        layer.run()  # what the stream needs for the first time is there before it is held
        side.synchronize()
        with StreamGate(side) as gate:
            for name, value in vars(late).items():
                getattr(layer, name).copy_(value)
            actual = layer.run()
            torch.cuda.default_stream().synchronize()
            assert gate.is_closed
    assert_same_as_cpu(actual, cpu)


def test_only_results_are_allocated() -> None:
    layer = Layer.make(30, "cuda")
    layer.run()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    results = layer.run()
    slots = 1  # positions.long() for dequantize_kv
    assert torch.cuda.memory_stats()["allocation.all.allocated"] - before == 3 + slots
    assert len(results) == 8


def test_value_checks_are_left_out_of_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Layer.make(10, "cuda")
    layer.run()
    monkeypatch.setenv("SPARSE_CP_OPS_CHECK", "1")
    layer.positions.fill_(10_000)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layer.run()
    graph.replay()
    assert layer.q[..., 64:].isnan().all()
    with pytest.raises(ValueError, match=r"positions: row 0: .* got 10000"):
        layer.run()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda x: ops.rope_(x.q, x.positions.cpu(), rope_table(128).cuda(), True),
            r"positions: expected device cuda:0 \(that of x\), got cpu",
        ),
        (
            lambda x: ops.rope_(x.q, x.positions, rope_table(128), True),
            r"cos_sin_cache: expected device cuda:0 \(that of x\), got cpu",
        ),
        (
            lambda x: ops.dequantize_kv(x.mla_cache, x.positions.long().cpu()),
            r"slots: expected device cuda:0 \(that of kv_cache\), got cpu",
        ),
        (
            lambda x: ops.write_kv_cache(
                x.mla_records, None, None, None, None, x.mla_cache.cpu(), None, x.positions.long()
            ),
            r"mla_cache: expected device cuda:0 \(that of mla_records\), got cpu",
        ),
        (
            lambda x: ops.pack_mla_kv(
                x.latent[:, :512], x.latent[:, 512:], x.positions, x.table, x.mla_records.cpu(), True, "ue8m0"
            ),
            r"records: expected device cuda:0 \(that of compressed_kv\), got cpu",
        ),
        (
            lambda x: ops.quant_q_k_cp(
                x.q, x.k.cpu(), x.weights, x.positions, x.table, x.k_records, True, True, 1.0, "ue8m0"
            ),
            r"k: expected device cuda:0 \(that of q\), got cpu",
        ),
    ],
)
def test_other_device_is_named(call: Callable[[Layer], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(Layer.make(5, "cuda"))


@pytest.mark.parametrize("device", [f"cuda:{i}" for i in range(1, max(2, torch.cuda.device_count()))])
def test_other_devices_than_the_current_one(device: str) -> None:
    """With one GPU there is nothing to switch to: the current device is then given by index."""
    if torch.cuda.device_count() == 1:
        device = "cuda:0"
    layer = Layer.make(25, device)
    cpu = layer.on_cpu()
    actual = layer.run()
    torch.cuda.synchronize(device)
    assert_same_as_cpu(actual, cpu)


def test_positions_far_outside_are_never_read() -> None:
    """Positions whose table row would lie far beyond mapped memory."""
    x = torch.randn(64, 4, 64, device="cuda")
    positions = random_positions(64, outside=1).cuda()
    ops.rope_(x, positions, rope_table().cuda(), False)
    torch.cuda.synchronize()
    assert x.isnan().all()
