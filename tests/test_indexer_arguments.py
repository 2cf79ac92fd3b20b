"""What the two indexer ops refuse, and how they behave under torch.compile."""

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from indexer_cases import IndexerCase, random_case
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from sparse_cp_ops import ops

ROWS = [(0, 100), (1, 70), (-1, 0), (0, 99)]


def arguments_of(case: IndexerCase) -> dict[str, Any]:
    return {field.name: getattr(case, field.name) for field in fields(case)}


def both_ops(arguments: dict[str, Any]) -> list[Callable[[], Tensor]]:
    return [
        lambda: ops.indexer_topk_ragged_cp(**arguments, topk=64),
        lambda: ops.indexer_scores_ragged_cp(**arguments, width=100),
    ]


def misaligned(t: Tensor) -> Tensor:
    raw = torch.zeros(t.numel() + 1, dtype=torch.uint8, device=t.device)
    return raw[1:].view(t.shape)


WRONG: list[tuple[str, Callable[[Tensor], Tensor], str]] = [
    ("q_fp8", lambda t: t[0], "q_fp8: expected 3 dimensions, got 2"),
    ("q_fp8", lambda t: t.view(torch.float8_e4m3fn), "q_fp8: expected dtype uint8, got float8_e4m3fn"),
    ("q_fp8", lambda t: t[..., :64], r"q_fp8: expected shape \[\*, \*, 128\], got \[4, 16, 64\]"),
    ("q_fp8", lambda t: t[:, :12], "q_fp8: expected 8, 16, 24, 32, 40, 48, 56 or 64 heads, got 12"),
    ("q_fp8", lambda t: t.repeat(1, 5, 1)[:, :72], "q_fp8: expected 8, .* or 64 heads, got 72"),
    ("q_fp8", lambda t: t[:, :0], "q_fp8: expected 8, .* or 64 heads, got 0"),
    ("q_fp8", lambda t: t.transpose(0, 1).contiguous().transpose(0, 1), "q_fp8: expected a contiguous tensor"),
    ("q_fp8", misaligned, "q_fp8: expected data aligned to 16 bytes"),
    ("q_weights", lambda t: t.bfloat16(), "q_weights: expected dtype float32, got bfloat16"),
    ("q_weights", lambda t: t[:, :8], r"q_weights: expected shape \[4, 16\], got \[4, 8\]"),
    ("q_weights", lambda t: t.t().contiguous().t(), "q_weights: expected a contiguous tensor"),
    ("indexer_cache", lambda t: t[0], "indexer_cache: expected 2 dimensions, got 1"),
    ("indexer_cache", lambda t: t.int(), "indexer_cache: expected dtype uint8, got int32"),
    ("indexer_cache", lambda t: t[:, : 48 * 132], r"indexer_cache: expected .* got shape \[\d+, 6336\]"),
    ("indexer_cache", lambda t: t[:, : 64 * 128], r"indexer_cache: expected .* got shape \[\d+, 8192\]"),
    ("indexer_cache", lambda t: t.t().contiguous().t(), "indexer_cache: expected a contiguous last dimension"),
    ("indexer_cache", misaligned, "indexer_cache: expected data aligned to 16 bytes"),
    (
        "indexer_cache",
        lambda t: torch.cat([t, t[:, :8]], 1)[:, : 64 * 132],
        "indexer_cache: expected a page stride that is a multiple of 16 bytes, got 8456",
    ),
    ("block_table", lambda t: t[0], "block_table: expected 2 dimensions, got 1"),
    ("block_table", lambda t: t.long(), "block_table: expected dtype int32, got int64"),
    ("block_table", lambda t: t.t().contiguous().t(), "block_table: expected a contiguous last dimension"),
    ("req_ids", lambda t: t.long(), "req_ids: expected dtype int32, got int64"),
    ("req_ids", lambda t: t[:3], r"req_ids: expected shape \[4\], got \[3\]"),
    ("req_ids", lambda t: t.repeat_interleave(2)[::2], "req_ids: expected a contiguous tensor"),
    ("kv_lens", lambda t: t.short(), "kv_lens: expected dtype int32, got int16"),
    ("kv_lens", lambda t: t.unsqueeze(0), "kv_lens: expected 1 dimensions, got 2"),
    ("kv_lens", lambda t: t.repeat_interleave(2)[::2], "kv_lens: expected a contiguous tensor"),
]


@pytest.mark.parametrize(("name", "change", "message"), WRONG)
def test_tensors_are_named_in_errors(device: str, name: str, change: Callable[[Tensor], Tensor], message: str) -> None:
    arguments = arguments_of(random_case(ROWS, heads=16).to(device))
    arguments[name] = change(arguments[name])
    for call in both_ops(arguments):
        with pytest.raises(ValueError, match=message):
            call()


def test_positions_fit_32_bits(device: str) -> None:
    arguments = arguments_of(random_case(ROWS, page_size=64).to(device))
    arguments["block_table"] = torch.zeros(1, 2**25, dtype=torch.int32, device=device)
    for call in both_ops(arguments):
        with pytest.raises(ValueError, match=r"block_table: expected at most 33554431 columns \(32-bit positions\)"):
            call()


def test_numbers_and_precision(device: str) -> None:
    tensors = random_case(ROWS).to(device).tensors
    for topk in (0, -64, 63, 100, 2112):
        with pytest.raises(ValueError, match=f"topk: expected a multiple of 64 from 64 to 2048, got {topk}"):
            ops.indexer_topk_ragged_cp(*tensors, topk)
    for workspace in (-1, 1, 2**20 - 1):
        with pytest.raises(ValueError, match=f"workspace_bytes: expected 0 .* or at least 1048576, got {workspace}"):
            ops.indexer_topk_ragged_cp(*tensors, 64, workspace)
    with pytest.raises(ValueError, match="width: expected at least 0, got -1"):
        ops.indexer_scores_ragged_cp(*tensors, -1)
    with pytest.raises(ValueError, match='precision: expected "fp32" or "f16", got "fp8"'):
        ops.indexer_scores_ragged_cp(*tensors, 10, "fp8")
    with pytest.raises(ValueError, match='precision: expected "fp32" or "f16", got "bf16"'):
        ops.indexer_topk_ragged_cp(*tensors, 64, 0, "bf16")


def test_wrong_types() -> None:
    case = random_case(ROWS)
    for name in arguments_of(case):
        for call in both_ops(arguments_of(case) | {name: [1]}):
            with pytest.raises(TypeError, match=rf"indexer_\w+: {name}: expected a torch\.Tensor, got list"):
                call()
    with pytest.raises(TypeError, match="topk: expected int, got float"):
        ops.indexer_topk_ragged_cp(*case.tensors, 64.0)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="workspace_bytes: expected int, got bool"):
        ops.indexer_topk_ragged_cp(*case.tensors, 64, True)
    with pytest.raises(TypeError, match="width: expected int, got str"):
        ops.indexer_scores_ragged_cp(*case.tensors, "8")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="precision: expected str, got NoneType"):
        ops.indexer_scores_ragged_cp(*case.tensors, 8, None)  # type: ignore[arg-type]


@pytest.mark.cuda
def test_devices_are_named_in_errors() -> None:
    case = random_case(ROWS)
    for name in list(arguments_of(case))[1:]:
        arguments = arguments_of(case.to("cuda"))
        arguments[name] = arguments[name].cpu()
        for call in both_ops(arguments):
            with pytest.raises(ValueError, match=rf"{name}: expected device cuda:0 \(that of q_fp8\), got cpu"):
                call()


def test_grad_is_refused(device: str) -> None:
    case = random_case(ROWS).to(device)
    arguments = arguments_of(replace(case, q_weights=case.q_weights.clone().requires_grad_()))
    for call in both_ops(arguments):
        with pytest.raises(RuntimeError, match="q_weights requires grad"):
            call()
        with torch.no_grad():
            call()


def change_entry(name: str, index: tuple[int, ...], value: int) -> Callable[[IndexerCase], None]:
    def change(case: IndexerCase) -> None:
        getattr(case, name)[index] = value

    return change


@pytest.mark.parametrize(
    ("change", "precision", "message"),
    [
        (
            change_entry("req_ids", (1,), 2),
            "fp32",
            r"req_ids: row 1: expected -1 \(a pad\) or a request in \[0, 2\), got 2",
        ),
        (change_entry("req_ids", (3,), -2), "fp32", "req_ids: row 3: .* got -2"),
        (change_entry("kv_lens", (0,), 129), "fp32", "kv_lens: row 0, request 0: expected 0..128 .* got 129"),
        (change_entry("kv_lens", (3,), -4), "fp32", "kv_lens: row 3, request 0: .* got -4"),
        (
            change_entry("block_table", (0, 1), 1_000),
            "fp32",
            r"block_table: request 0, position 64: expected a page in \[0, \d+\), got 1000",
        ),
        (change_entry("block_table", (1, 0), -1), "fp32", "block_table: request 1, position 0: .* got -1"),
        (change_entry("q_fp8", (1, 5, 9), 0xB7), "f16", r"q_fp8: row 1, head 5: .* \|q8\| <= 0.875"),
    ],
)
def test_value_checks(
    device: str,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[IndexerCase], None],
    precision: str,
    message: str,
) -> None:
    case = random_case(ROWS).encoded_for_f16()
    case.q_fp8[0, 0, 0] = 0x7F  # NaN is a bad query, not one of the wrong encoding
    monkeypatch.setenv("SPARSE_CP_OPS_CHECK", "1")
    for call in both_ops(arguments_of(case.to(device)) | {"precision": precision}):
        call()
    change(case)
    for call in both_ops(arguments_of(case.to(device)) | {"precision": precision}):
        with pytest.raises(ValueError, match=message):
            call()
    monkeypatch.setenv("SPARSE_CP_OPS_CHECK", "0")
    for call in both_ops(arguments_of(case.to(device)) | {"precision": precision}):
        call()


@pytest.mark.parametrize("heads", [8, 64])
def test_opcheck(device: str, heads: int) -> None:
    # Queries of 448 may score NaN in "f16", which opcheck would not find equal to itself.
    tensors = random_case(ROWS, heads, page_size=32).encoded_for_f16().to(device).tensors
    torch.library.opcheck(torch.ops.sparse_cp_ops.indexer_topk_ragged_cp.default, (*tensors, 64, 0))
    torch.library.opcheck(torch.ops.sparse_cp_ops.indexer_scores_ragged_cp.default, (*tensors, 80, "f16"))


@pytest.mark.parametrize("op", ["topk", "scores"])
def test_compiles_once_for_all_lengths(device: str, op: str) -> None:
    counter = CompileCounter()

    def topk(case: tuple[Tensor, ...], width: int) -> Tensor:
        return ops.indexer_topk_ragged_cp(*case, 64)

    def scores(case: tuple[Tensor, ...], width: int) -> Tensor:
        return ops.indexer_scores_ragged_cp(*case, width)

    function = topk if op == "topk" else scores
    torch.compiler.reset()
    compiled = torch.compile(function, fullgraph=True, backend=counter)
    for length in range(2, 52):
        rows = [(row % 2, 3 * length + row) for row in range(length)]
        tensors = random_case(rows, heads=8, page_size=16).to(device).tensors
        assert torch.equal(compiled(tensors, 2 * length + 1), function(tensors, 2 * length + 1))
    assert counter.frame_count - 1 <= 2  # recompiles


def test_fake_results_have_the_right_metadata() -> None:
    case = random_case(ROWS)
    meta = tuple(t.to("meta") for t in case.tensors)
    for result, expected in [
        (ops.indexer_topk_ragged_cp(*meta, 64), ops.indexer_topk_ragged_cp(*case.tensors, 64)),
        (ops.indexer_scores_ragged_cp(*meta, 70), ops.indexer_scores_ragged_cp(*case.tensors, 70)),
    ]:
        assert (result.dtype, result.shape, result.stride()) == (expected.dtype, expected.shape, expected.stride())
