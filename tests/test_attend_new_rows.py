from typing import Any

import pytest
import torch
from op_samples import sample
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from sparse_cp_ops import ops, reference

NAMES = [argument.name for argument in torch.ops.sparse_cp_ops.attend_new_rows.default._schema.arguments]
WRITTEN = ("q", "mla_cache", "indexer_cache")


def arguments(device: str, count: int = 10, **changes: Any) -> dict[str, Any]:
    return dict(zip(NAMES, sample("attend_new_rows", device, count), strict=True)) | changes


def clones(given: dict[str, Any], device: str | None = None) -> dict[str, Any]:
    return {name: v.to(device).clone() if isinstance(v, Tensor) else v for name, v in given.items()}


def step_by_step(a: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """The same by the ops that it is made of."""
    rows, table = (a["positions"], a["cos_sin_cache"]), a["block_table"]
    where = (table, a["req_ids"], a["kv_lens"])
    records, k_records = (a["mla_cache"].new_empty(len(a["q"]), width) for width in (656, 132))
    ops.pack_mla_kv(a["compressed_kv"], a["k_pe"], *rows, records, True, a["scale_format"])
    scales = (a["index_weight_scale"], a["scale_format"], a["index_q_absmax"])
    q_fp8, q_weights = ops.quant_q_k_cp(
        a["index_q"], a["index_k"], a["index_weights"], *rows, k_records, a["index_interleaved"], True, *scales
    )
    caches = (a["mla_cache"], a["indexer_cache"])
    ops.write_kv_cache(records, k_records, a["req_ids"], a["positions"], table, *caches)
    selection = (a["topk"], a["workspace_bytes"], a["index_precision"])
    indices = ops.indexer_topk_ragged_cp(q_fp8, q_weights, caches[1], *where, *selection)
    ops.rope_(a["q"][:, : a["queries"].shape[1], 512:], *rows, True, a["queries"][..., -64:])
    modes = (a["softmax_scale"], a["precision"], a["batch_invariant"])
    out, _ = ops.sparse_mla_fp8_cp(a["q"], caches[0], indices, *where, *modes)
    return out, indices


def assert_same_bits(actual: Tensor, expected: Tensor) -> None:
    assert torch.equal(actual.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"index_interleaved": True, "scale_format": "fp32", "batch_invariant": True},
        {"index_precision": "f16", "index_q_absmax": 0.875, "precision": "fp8", "workspace_bytes": 1 << 20},
    ],
)
@pytest.mark.parametrize("count", [1, 10, 37])
def test_the_bits_of_its_steps(device: str, count: int, changes: dict[str, Any]) -> None:
    given = arguments(device, count, **changes)
    one_by_one = clones(given)
    out, indices = ops.attend_new_rows(**given)
    expected, expected_indices = step_by_step(one_by_one)
    assert_same_bits(out, expected)
    assert_same_bits(indices, expected_indices)
    for name in WRITTEN:
        assert_same_bits(given[name], one_by_one[name])


def test_matches_reference(device: str) -> None:
    given = arguments(device)
    theirs = clones(given, "cpu")
    out, indices = ops.attend_new_rows(**given)
    expected, expected_indices = reference.attend_new_rows(**theirs)
    # Fewer keys than topk: all are picked, whatever their scores. The bound of out is that of sparse_mla_fp8_cp.
    assert torch.equal(indices.cpu(), expected_indices)
    torch.testing.assert_close(out.cpu().double(), expected, atol=1e-3, rtol=2.01 / 128)
    for name in WRITTEN:
        assert_same_bits(given[name].cpu(), theirs[name])


def test_strided_inputs_are_read_in_place(device: str) -> None:
    given = arguments(device)
    expected = clones(given)
    for name in ("queries", "compressed_kv", "k_pe", "index_q", "index_k", "index_weights"):
        wide = torch.cat([given[name], torch.full_like(given[name], torch.nan)], dim=-1)
        given[name] = wide[..., : given[name].shape[-1]]
    out, _ = ops.attend_new_rows(**given)
    expected_out, _ = ops.attend_new_rows(**expected)
    assert_same_bits(out, expected_out)
    assert_same_bits(given["indexer_cache"], expected["indexer_cache"])


def test_compiles(device: str) -> None:
    given, counter = arguments(device), CompileCounter()
    expected = clones(given)
    compiled = torch.compile(ops.attend_new_rows, fullgraph=True, backend=counter)
    out, _ = compiled(**given)
    assert counter.frame_count == 1
    assert_same_bits(out, ops.attend_new_rows(**expected)[0])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": torch.zeros(10, 16, 576)}, "q: expected dtype bfloat16, got float32"),
        ({"queries": torch.zeros(10, 17, 192).bfloat16()}, "queries: expected at most 16 heads as in q"),
        ({"queries": torch.zeros(10, 16, 63).bfloat16()}, "queries: .* of at least 64 values"),
        ({"queries": torch.zeros(10, 192).bfloat16()}, "queries: expected 3 dimensions, got 2"),
        ({"q": torch.zeros(1, 16, 576).bfloat16().expand(10, -1, -1)}, "q: expected memory without overlap"),
        ({"q": torch.zeros(10, 16, 1152).bfloat16()[..., ::2]}, "q: expected a contiguous last dimension"),
        ({"compressed_kv": torch.zeros(9, 512).bfloat16()}, r"compressed_kv: expected shape \[10, 512\]"),
        ({"k_pe": torch.zeros(10, 32).bfloat16()}, r"k_pe: expected shape \[10, 64\]"),
        ({"index_q": torch.zeros(10, 8, 64).bfloat16()}, r"index_q: expected shape \[10, \*, 128\]"),
        ({"index_k": torch.zeros(10, 128)}, "index_k: expected dtype bfloat16, got float32"),
        ({"index_weights": torch.zeros(10, 9)}, r"index_weights: expected shape \[10, 8\]"),
        ({"positions": torch.zeros(10)}, "positions: expected dtype int32"),
        ({"mla_cache": torch.zeros(6, 16, 656)}, "mla_cache: expected dtype uint8"),
        ({"kv_lens": torch.zeros(9).int()}, r"kv_lens: expected shape \[10\]"),
        ({"scale_format": "ue4"}, "scale_format: expected"),
        ({"index_precision": "high"}, 'index_precision: expected "fp32" or "f16"'),
        ({"index_q_absmax": 0.0}, "index_q_absmax: expected a value in"),
        ({"index_weight_scale": float("inf")}, "index_weight_scale: expected a finite"),
        ({"topk": 65}, "topk: expected a multiple of 64"),
        ({"softmax_scale": float("nan")}, "softmax_scale: expected a finite number"),
    ],
)
def test_arguments_are_named_in_errors(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match="^" + message):
        ops.attend_new_rows(**arguments("cpu", **changes))


def test_types_are_named_in_errors() -> None:
    for name, value in (("queries", [1.0]), ("topk", 64.0), ("precision", 1), ("batch_invariant", 1)):
        with pytest.raises(TypeError, match=rf"attend_new_rows: {name}: expected .*, got {type(value).__name__}"):
            ops.attend_new_rows(**arguments("cpu", **{name: value}))


@pytest.mark.parametrize("written", WRITTEN)
@pytest.mark.parametrize("read", [name for name in NAMES[:12] if name != "q"])
def test_what_is_written_has_memory_of_its_own(written: str, read: str, device: str) -> None:
    """Its steps know their own arguments alone: a cache over ``kv_lens`` would be written before those are read."""
    given = arguments(device)
    bytes_needed = max(given[name].nbytes for name in (written, read))
    memory = torch.zeros(bytes_needed, dtype=torch.uint8, device=device)
    for name in (written, read):
        given[name] = memory[: given[name].nbytes].view(given[name].dtype).view(given[name].shape).copy_(given[name])
    before = memory.clone()
    with pytest.raises(ValueError, match=rf"^{written}: expected memory of its own .* overlaps {read}"):
        ops.attend_new_rows(**given)
    assert torch.equal(memory, before)


@pytest.mark.parametrize("cache", WRITTEN[1:])
def test_queries_are_not_in_a_cache(cache: str, device: str) -> None:
    given = arguments(device)
    memory = torch.zeros(max(given["q"].nbytes, given[cache].nbytes), dtype=torch.uint8, device=device)
    for name in ("q", cache):
        given[name] = memory[: given[name].nbytes].view(given[name].dtype).view(given[name].shape)
    with pytest.raises(ValueError, match=rf"^{cache}: expected memory of its own .* overlaps q"):
        ops.attend_new_rows(**given)
