"""Inputs that no caller should give: an error that names the argument, or what the documentation says; never a crash, a
wrong answer or an access outside the tensors."""

import copy
import ctypes
import math
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from guarded_memory import guarded
from op_samples import sample, tensors, with_hostile_ints
from test_every_op import assert_same_bits, op, run_on_clones
from torch import Tensor

from sparse_cp_ops import _config, ops
from sparse_cp_ops._autograd import OP_NAMES
from sparse_cp_ops.cache_store import CacheStore, PrefixCache
from sparse_cp_ops.cache_store.prefix_cache import page_keys
from sparse_cp_ops.config import ParallelismConfig, PrefillCPConfig
from sparse_cp_ops.context_parallel.plan import CpPlan
from sparse_cp_ops.kv_cache import PagedKvCache
from sparse_cp_ops.nn import AttentionInputs, MlaConfig, get_mla_impl
from sparse_cp_ops.nn.mla_config import YarnScaling
from sparse_cp_ops.nn.sparse_mla import require_current


def with_random_bytes(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Caches, records and encoded queries of arbitrary bits: NaN, infinities, negative and huge scales."""
    return tuple(
        torch.randint(0, 256, a.shape, dtype=torch.uint8) if isinstance(a, Tensor) and a.dtype == torch.uint8 else a
        for a in args
    )


def touch_only_own_memory() -> None:
    """Every op between forbidden pages; runs in a process of its own, which an access outside the tensors kills."""
    for attempt in range(12):
        torch.manual_seed(attempt)
        for name in OP_NAMES:
            args = with_hostile_ints(sample(name, "cpu"))
            if attempt % 3 == 0:
                args = with_random_bytes(args)
            args = tuple(guarded(a, attempt % 2 == 0) if isinstance(a, Tensor) else a for a in args)
            op(name)(*args)
    # And the guard works: a process that reads one byte more is killed.
    last = guarded(torch.ones(5, dtype=torch.uint8), True)
    reader = os.fork()
    if reader == 0:
        ctypes.string_at(last.data_ptr(), 6)
        os._exit(0)
    assert os.WIFSIGNALED(os.waitpid(reader, 0)[1])
    print("all ops stayed inside")


def test_no_op_leaves_its_tensors() -> None:
    tests = Path(__file__).parent
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tests), str(tests.parent)]), "OMP_NUM_THREADS": "1"}
    program = "import test_hostile_inputs; test_hostile_inputs.touch_only_own_memory()"
    child = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", program], env=environment, capture_output=True, text=True
    )
    assert child.returncode == 0, child.stderr
    assert "all ops stayed inside" in child.stdout


@pytest.mark.parametrize("name", OP_NAMES)
def test_hostile_values_give_the_same_bits_at_every_call(name: str) -> None:
    args = with_random_bytes(with_hostile_ints(sample(name, "cpu")))
    if name in ("write_cache_store", "read_cache_store", "write_kv_cache", "attend_new_rows"):
        args = with_random_bytes(sample(name, "cpu"))  # two rows on one target: either wins
    assert_same_bits(run_on_clones(name, args), run_on_clones(name, args))


@pytest.mark.parametrize("name", [name for name in OP_NAMES if name != "expand_cp_plan"])  # one tensor
def test_a_meta_tensor_among_real_ones_is_refused(device: str, name: str) -> None:
    args = sample(name, device)
    for i, argument in enumerate(args):
        if isinstance(argument, Tensor):
            mixed = (*args[:i], argument.to("meta"), *args[i + 1 :])
            with pytest.raises(ValueError, match=r"\w+: expected device \w+"):
                op(name)(*mixed)
    on_meta = tuple(a.to("meta") if isinstance(a, Tensor) else a for a in args)
    assert all(result.is_meta for result in tensors(op(name)(*on_meta)))


def written_and_read(name: str, args: tuple[Any, ...]) -> tuple[list[int], list[int]]:
    written, read = [], []
    for i, (argument, value) in enumerate(zip(op(name)._schema.arguments, args, strict=False)):
        if isinstance(value, Tensor):
            (written if argument.alias_info is not None else read).append(i)
    return written, read


@pytest.mark.parametrize("name", ["rope_", "quant_q_k_cp", "pack_mla_kv", "write_kv_cache"])
def test_what_is_written_must_not_be_read(device: str, name: str) -> None:
    args = sample(name, device)
    for target in written_and_read(name, args)[0]:
        for source in written_and_read(name, args)[1]:
            size = args[target].numel() * args[target].element_size()
            memory = torch.zeros(2 * size + 2**20, dtype=torch.uint8, device=device)
            replaced = list(args)
            replaced[target] = memory[:size].view(args[target].dtype).view(args[target].shape)
            start = size - 16  # the last 16 bytes of what is written
            size = args[source].numel() * args[source].element_size()
            replaced[source] = memory[start : start + size].view(args[source].dtype).view(args[source].shape)
            schema = op(name)._schema.arguments
            message = f"{schema[target].name}: expected memory of its own .* overlaps {schema[source].name}"
            with pytest.raises(ValueError, match=message):
                op(name)(*replaced)


def test_caches_may_share_pages_of_bytes(device: str) -> None:
    args = list(sample("write_kv_cache", device))
    expected = [clone.clone() for clone in args[5:7]]
    op("write_kv_cache")(*args[:5], *expected)
    pages, size = args[5].shape[:2]
    both = torch.cat([args[5].view(pages, -1), args[6]], dim=1)
    mla, index = both[:, : size * 656].view(pages, size, 656), both[:, size * 656 :]
    op("write_kv_cache")(*args[:5], mla, index)
    assert torch.equal(mla, expected[0])
    assert torch.equal(index, expected[1])


@pytest.mark.parametrize(
    ("position", "value", "message"),
    [
        (4, 2, r"req_ids: row 1: expected -1 \(a pad\) or a request in \[0, 2\), got 2"),
        (4, -(2**31), r"req_ids: row 1: .* got -2147483648"),
        (5, 49, r"kv_lens: row 1, request 1: expected 0..48 .* got 49"),
        (5, -1, r"kv_lens: row 1, request 1: .* got -1"),
    ],
)
def test_attention_checks_its_rows(
    device: str, monkeypatch: pytest.MonkeyPatch, position: int, value: int, message: str
) -> None:
    args = sample("sparse_mla_fp8_cp", device)
    args[position][1] = value
    op("sparse_mla_fp8_cp")(*args)
    monkeypatch.setenv("SPARSE_CP_OPS_CHECK", "1")
    with pytest.raises(ValueError, match=message):
        op("sparse_mla_fp8_cp")(*args)


def test_threads_do_not_disturb_each_other() -> None:
    args = {name: sample(name, "cpu") for name in OP_NAMES}
    expected = {name: run_on_clones(name, args[name]) for name in OP_NAMES}
    failures: list[str] = []

    def call_all() -> None:
        for name in OP_NAMES * 4:
            try:
                assert_same_bits(run_on_clones(name, args[name]), expected[name])
            except AssertionError:
                failures.append(name)

    threads = [threading.Thread(target=call_all) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def topk(value: Any) -> object:
    return ops.indexer_topk_ragged_cp(*sample("indexer_topk_ragged_cp", "cpu")[:6], value)


def scale_format(value: Any) -> object:
    return ops.pack_mla_kv(*sample("pack_mla_kv", "cpu")[:6], value)


def softmax_scale(value: Any) -> object:
    return ops.sparse_mla_fp8_cp(*sample("sparse_mla_fp8_cp", "cpu")[:6], value)


WRAPPED: list[tuple[Callable[[], object], type[Exception], str]] = [
    (lambda: topk(2**63), ValueError, "topk: expected a 64-bit int, got 9223372036854775808"),
    (lambda: topk(np.int64(64)), TypeError, "topk: expected int, got int64"),
    (lambda: scale_format("fp32\0"), ValueError, r"scale_format: expected printable text, got 'fp32\\x00'"),
    (lambda: scale_format("\ud800"), ValueError, r"scale_format: expected printable text, got '\\ud800'"),
    (lambda: softmax_scale(np.float32(1)), TypeError, "softmax_scale: expected float, got float32"),
    (lambda: softmax_scale(1e39), ValueError, "softmax_scale: expected a finite number"),
    (lambda: CpPlan.build([1], [1], page_size=2**70), ValueError, "page_size: expected a 64-bit int"),
    (lambda: CpPlan.build([1], [1], split="\ud800"), ValueError, "split: expected printable text"),
    (lambda: PrefillCPConfig(split="\ud800"), ValueError, r"split: expected text that UTF-8 can encode, got '\\ud800'"),
]


@pytest.mark.parametrize(("call", "error", "message"), WRAPPED)
def test_numbers_and_texts_that_cpp_cannot_take(
    call: Callable[[], object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        call()


def test_the_widest_block_table_counts_in_columns() -> None:
    wide = torch.zeros(1, 1, dtype=torch.int32).expand(1, 2**60)
    assert CpPlan.build([100], [1], block_table=wide).local_rows == 100


def test_lengths_with_a_stride_of_partial_elements() -> None:
    lengths = np.zeros(3, dtype=[("pad", "i1"), ("length", "<i4")])["length"]
    with pytest.raises(ValueError, match="new_lens: expected a stride of whole elements, got 5 bytes"):
        _config.plan_requests(lengths, lengths, 0, 1, "zigzag", 64, None, None)


@pytest.mark.parametrize("table", [np.zeros((2, 2)), np.zeros((2, 3)), np.zeros(6), np.zeros((2, 3)).T])
def test_request_tables_of_another_shape(table: np.ndarray[Any, Any]) -> None:
    lengths = np.ones(3, dtype=np.int32)
    with pytest.raises(ValueError, match=r"table: expected a contiguous array of shape \[>= 3, 2\]"):
        _config.plan_requests(lengths, lengths, 0, 1, "zigzag", 64, None, None, table.astype(np.int32, order="K"))


@pytest.mark.parametrize("kind", [PrefillCPConfig, ParallelismConfig])
def test_a_config_without_a_state_is_the_default_one(kind: type) -> None:
    bare = [kind.__new__(kind) for _ in range(100)]
    assert all(config == kind() and repr(config) == repr(kind()) for config in bare)
    assert hash(bare[0]) == hash(kind())
    assert copy.deepcopy(bare[0]) == pickle.loads(pickle.dumps(bare[0])) == kind()
    stateless = pickle.loads(pickle.dumps(kind, 2)[:-1] + b")\x81.")  # NEWOBJ, then nothing
    assert stateless == kind()
    assert ParallelismConfig(prefill_cp_config=PrefillCPConfig.__new__(PrefillCPConfig)) == ParallelismConfig()
    for state in (None, (), (1,), [1, 2, False, 0], "state"):
        with pytest.raises((TypeError, ValueError), match="state: expected"):
            kind.__new__(kind).__setstate__(state)


def test_a_copied_plan_becomes_stale_with_the_original() -> None:
    def inputs() -> AttentionInputs:
        lengths = torch.tensor([3], dtype=torch.int32)
        return AttentionInputs(True, lengths, lengths * 0, torch.zeros(1, 1, dtype=torch.int32))

    impl = get_mla_impl(mla_config(), ParallelismConfig())
    plan = impl.prepare(inputs())
    copies = [copy.copy(plan), copy.deepcopy(plan)]
    for each in copies:
        assert require_current(each) is each
    with pytest.raises(ValueError, match="stale"):
        require_current(pickle.loads(pickle.dumps(plan)))
    impl.prepare(inputs())
    for each in copies:
        with pytest.raises(ValueError, match="stale"):
            require_current(each)


def mla_config(**changes: Any) -> MlaConfig:
    fields: dict[str, Any] = {
        "hidden_size": 64, "num_heads": 8, "q_lora_rank": 32, "qk_nope_head_dim": 16, "v_head_dim": 16,
        "index_n_heads": 8, "index_topk": 64, "softmax_scale": 0.1, "num_layers": 2, "max_positions": 128,
    }  # fmt: skip
    return MlaConfig(**{**fields, **changes})


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("softmax_scale", [0, -1.0, math.nan, math.inf, "0.1", None, True]),
        ("rope_theta", [0, -1.0, math.nan, math.inf, "1e4"]),
        ("rms_norm_eps", [-1e-6, math.nan, math.inf, None]),
        ("workspace_bytes", [-1, 1, 2**20 - 1, 1e9, True]),
        ("page_size", [0, 63, 64.0, "64", True]),
        ("attention_bias", ["false", 0, None]),
        ("indexer_interleaved", ["false", 1]),
        ("quantise", ["no", 0]),
        ("indexer_types", [["full", "full"], "full", None]),
        ("yarn", [{"factor": 40.0}, 40.0]),
    ],
)
def test_mla_config_refuses(name: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(ValueError, match=f"MlaConfig: {name}: expected"):
            mla_config(**{name: value})


def test_yarn_refuses() -> None:
    for name in ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow"):
        for value in (0, -1.0, math.nan, math.inf, "40", None):
            with pytest.raises(ValueError, match=f"YarnScaling: {name}: expected"):
                YarnScaling(**({"factor": 40.0, "original_max_position_embeddings": 4096} | {name: value}))
    with pytest.raises(ValueError, match="YarnScaling: mscale: expected"):
        YarnScaling(40.0, 4096, mscale=math.nan)


def test_paged_cache_refuses() -> None:
    for name, value in [("num_layers", 1.5), ("num_layers", True), ("num_pages", "2"), ("page_size", 64.0)]:
        with pytest.raises(TypeError, match=f"PagedKvCache: {name}: expected int"):
            PagedKvCache(**({"num_layers": 1, "num_pages": 1} | {name: value}))
    cache = PagedKvCache(2, 1, 16)
    for layer in (-1, 2):
        with pytest.raises(ValueError, match=f"layer_id: expected 0 to 1, got {layer}"):
            cache.layer(layer)


def test_modules_refuse_layers_that_count_from_the_end() -> None:
    config = mla_config(page_size=16)
    impl = get_mla_impl(config, ParallelismConfig())
    cache = PagedKvCache(2, 4, 16)
    lengths = torch.tensor([3], dtype=torch.int32)
    plan = impl.prepare(AttentionInputs(True, lengths, lengths * 0, torch.zeros(1, 1, dtype=torch.int32)))
    picks = torch.zeros(3, 64, dtype=torch.int32)
    q = torch.zeros(3, 8, 576, dtype=torch.bfloat16)
    for layer in (-1, 2):
        pending = impl.start_kv_write(impl.new_kv_records(plan, 0), plan)
        for call in (
            lambda: impl.finish_kv_write(pending, cache, layer, plan),  # noqa: B023
            lambda: impl.forward(q, cache, layer, picks, plan),  # noqa: B023
        ):
            with pytest.raises(ValueError, match=f"layer_id: expected 0 to 1, got {layer}"):
                call()


@pytest.mark.parametrize(
    "tokens",
    [[1.5, 2.5], torch.tensor([1.0, 2.0]), ["1", "2"], [True, False], [None, 1], [2**70, 1], b"ab"],
)
def test_tokens_that_are_no_integers(tokens: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="tokens: expected"):
        page_keys(tokens, 2)


def test_tokens_of_another_shape() -> None:
    for tokens in ([[1, 2], [3, 4]], torch.ones(2, 2, dtype=torch.int64), torch.tensor(3)):
        with pytest.raises(ValueError, match="tokens: expected 1 dimension"):
            page_keys(tokens, 2)
    for page_size in (0, -1):
        with pytest.raises(ValueError, match="page_size: expected at least 1"):
            page_keys([1, 2], page_size)
    assert page_keys(np.array([1, 2], dtype=np.uint8), 2) == page_keys(torch.tensor([1, 2]), 2) == page_keys([1, 2], 2)


def test_prefix_cache_refuses() -> None:
    for arguments in ((-1, 16), (4, 0), (4, -1)):
        with pytest.raises(ValueError, match=r"PrefixCache: .*expected at least"):
            PrefixCache(*arguments)
    cache = PrefixCache(4, 2)
    for count, error in ((-1, ValueError), (2.0, TypeError), ("1", TypeError), (True, TypeError)):
        with pytest.raises(error, match=r"PrefixCache\.allocate: count: expected"):
            cache.allocate(count)
    with pytest.raises(TypeError, match=r"PrefixCache.release: pages\[0\]: expected int, got str"):
        cache.release(["0"])
    assert cache.available == 4


def test_a_page_is_released_as_often_as_it_is_held() -> None:
    cache = PrefixCache(4, 2)
    pages = cache.allocate(2)
    for given in ([pages[0], pages[0]], [*pages, pages[1]], [pages[0], 3], [pages[0], -1], [pages[0], 99]):
        with pytest.raises(ValueError, match=r"PrefixCache\.release: pages: expected pages that are held"):
            cache.release(given)
    cache.insert([1, 2, 3, 4], pages)
    assert cache.match_prefix([1, 2, 3, 4, 5]) == pages
    cache.release([*pages, *pages])  # two requests at once
    assert cache.available == 4
    with pytest.raises(ValueError, match="expected pages that are held"):
        cache.release(pages)


def test_pages_from_tensors_are_the_same_pages() -> None:
    cache = PrefixCache(4, 2)
    pages = cache.allocate(2)
    cache.insert([1, 2, 3, 4], torch.tensor(pages))
    cache.release(np.array(pages))
    assert cache.match_prefix([1, 2, 3, 4, 5]) == pages
    cache.release(torch.tensor(pages))
    assert sorted(cache.allocate(4)) == [0, 1, 2, 3]


def test_cache_store_refuses() -> None:
    cache = PagedKvCache(2, 4, 16)
    with pytest.raises(TypeError, match="CacheStore: cache: expected a PagedKvCache"):
        CacheStore(None, 1 << 20)  # type: ignore[arg-type]
    for budget in (1e6, "1", None, True):
        with pytest.raises(TypeError, match="CacheStore: budget_bytes: expected int"):
            CacheStore(cache, budget)  # type: ignore[arg-type]
    store = CacheStore(cache, 4 * cache.page_bytes)
    for page in (-1, 4, 2**40):
        with pytest.raises(ValueError, match=rf"CacheStore.writer: pages: expected pages in \[0, 4\), got {page}"):
            store.writer([b"a" * 16], [page])
        with pytest.raises(ValueError, match=rf"CacheStore.read: pages: expected pages in \[0, 4\), got {page}"):
            store.read([b"a" * 16], [page])
    with pytest.raises(ValueError, match=r"CacheStore\.read: pages: expected different pages"):
        store.read([b"a" * 16, b"b" * 16], [1, 1])
    with pytest.raises(TypeError, match=r"CacheStore.read: pages\[0\]: expected int, got str"):
        store.read([b"a" * 16], ["1"])  # type: ignore[list-item]


def test_a_layer_counts_once_and_by_its_own_number() -> None:
    cache = PagedKvCache(2, 4, 16)
    store = CacheStore(cache, 4 * cache.page_bytes)
    writer = store.writer([b"a" * 16], [1])
    assert writer is not None
    writer.write_layer(1)
    writer.write_layer(1)
    for layer in (-1, 2):
        with pytest.raises(ValueError, match=f"layer_id: expected 0 to 1, got {layer}"):
            writer.write_layer(layer)
    writer.finish()
    assert store.match([b"a" * 16]) == 0  # layer 0 was never written
    assert store.writer([b"a" * 16], [1]) is not None
