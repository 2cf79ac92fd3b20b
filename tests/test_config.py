import copy
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sparse_cp_ops import _config
from sparse_cp_ops.config import CPRotateMethod, FMHAType, ParallelismConfig, PrefillCPConfig

FIELDS = [
    "tp_size",
    "tp_rank",
    "ep_size",
    "ep_rank",
    "dp_size",
    "dp_rank",
    "pp_size",
    "pp_rank",
    "world_size",
    "world_rank",
    "local_world_size",
    "local_rank",
    "ffn_sp_size",
    "ffn_sp_rank",
    "enable_sp",
    "prefill_cp_config",
    "use_ub_comm",
]
PREFILL = PrefillCPConfig(
    method=CPRotateMethod.ALL_GATHER_WITH_OVERLAP,
    comm_buffer_size=1 << 20,
    kv_cache_sharded=True,
    prefill_cp_size=4,
    min_tokens=7,
    min_kv_work=2**40,
    split="interleave",
    decode_mode="head_slice",
)
# Every field has a value of its own, so that two exchanged ones show.
STATE: tuple[Any, ...] = (8, 3, 16, 15, 7, 6, 5, 4, 128, 100, 9, 2, 13, 12, True, PREFILL, True)
PARALLEL = ParallelismConfig(**dict(zip(FIELDS, STATE, strict=True)))


def load(kind: type, state: object) -> Any:
    value = kind.__new__(kind)
    value.__setstate__(state)
    return value


def test_enum_values_are_the_published_ones() -> None:
    assert [(m.name, int(m)) for m in CPRotateMethod] == [
        ("DISABLED", 0),
        ("ALL_GATHER", 1),
        ("ALL_GATHER_WITH_OVERLAP", 2),
        ("ALLTOALL", 3),
        ("PREFILL_CP", 4),
        ("UNKNOWN", 5),
    ]
    assert {"NONE", "FLASH_INFER", "SPARSE_FLASHMLA", "CP_SPARSE_FLASHMLA"} <= {t.name for t in FMHAType}
    assert FMHAType.NONE == 0


def test_defaults() -> None:
    config = PrefillCPConfig()
    assert config.method is CPRotateMethod.DISABLED
    assert config.comm_buffer_size == 512 * 2**20
    assert (config.kv_cache_sharded, config.prefill_cp_size) == (False, 0)
    assert (config.split, config.decode_mode) == ("interleave", "replicated")
    parallel = ParallelismConfig()
    assert [getattr(parallel, name) for name in FIELDS] == [1, 0] * 7 + [False, config, False]


def test_every_field_keeps_its_value() -> None:
    assert tuple(getattr(PARALLEL, name) for name in FIELDS) == STATE
    assert ParallelismConfig(*STATE) == PARALLEL


@pytest.mark.parametrize("method", list(CPRotateMethod))
def test_enabled_methods(method: CPRotateMethod) -> None:
    config = PrefillCPConfig(method=method)
    assert config.is_enabled() == (method in (1, 2, 3))
    assert config.is_prefill_enabled() == (method == 4)
    parallel = ParallelismConfig(tp_size=4, tp_rank=2, ep_size=4, prefill_cp_config=config)
    assert parallel.tp_size == 4
    assert parallel.get_attn_tp_size() == (1 if config.is_enabled() else 4)
    assert parallel.get_attn_tp_rank() == (0 if config.is_enabled() else 2)
    assert parallel.is_tp_equal_ep()
    assert parallel.is_attn_tp_equal_ep() == (not config.is_enabled())
    alone = ParallelismConfig(tp_size=4, ep_size=1, prefill_cp_config=config)
    assert not alone.is_tp_equal_ep()
    assert alone.is_attn_tp_equal_ep() == config.is_enabled()


def test_a_batch_pays_only_above_both_thresholds() -> None:
    config = PrefillCPConfig(min_tokens=10, min_kv_work=100)
    assert [config.pays(*work) for work in [(10, 100), (9, 10**12), (10**6, 99), (11, 101)]] == [
        True,
        False,
        False,
        True,
    ]


@pytest.mark.parametrize("value", [PREFILL, PARALLEL, *CPRotateMethod, *FMHAType], ids=lambda v: type(v).__name__)
def test_round_trips(value: Any) -> None:
    copies = [copy.copy(value), copy.deepcopy(value), copy.deepcopy([value])[0]]
    copies += [pickle.loads(pickle.dumps(value, protocol)) for protocol in range(pickle.HIGHEST_PROTOCOL + 1)]
    for other in copies:
        assert type(other) is type(value)
        assert other == value
        assert hash(other) == hash(value)
        assert repr(other) == repr(value)


def test_repr_is_the_constructor_call() -> None:
    for value in (PREFILL, PARALLEL, PrefillCPConfig(), ParallelismConfig()):
        assert eval(repr(value)) == value


def test_equality_sees_every_field() -> None:
    values = dict(zip(FIELDS, STATE, strict=True))
    changed: dict[str, Any] = {name: value + 1 for name, value in values.items() if name.endswith("_size")}
    changed |= {name: value - 1 for name, value in values.items() if name.endswith("_rank")}
    changed |= {"enable_sp": False, "prefill_cp_config": PrefillCPConfig(), "use_ub_comm": False}
    assert sorted(changed) == sorted(FIELDS)
    others = [ParallelismConfig(**{**values, name: value}) for name, value in changed.items()]
    assert all(other != PARALLEL for other in others)
    assert len({PARALLEL, *others}) == len(others) + 1
    assert PARALLEL != STATE
    assert PrefillCPConfig() != PREFILL


def test_values_are_immutable() -> None:
    with pytest.raises(AttributeError):
        PARALLEL.tp_size = 2  # type: ignore[misc]
    with pytest.raises(AttributeError):
        PREFILL.split = "zigzag"  # type: ignore[misc]
    PARALLEL.__setstate__(ParallelismConfig().__getstate__())  # of no effect on a finished value
    assert PARALLEL.tp_size == 8


def test_parallelism_pickle_versions() -> None:
    assert PARALLEL.__getstate__() == STATE
    old = load(ParallelismConfig, STATE[:16])
    assert tuple(getattr(old, name) for name in FIELDS) == (*STATE[:16], False)
    with pytest.warns(UserWarning, match="has 19 entries, this version knows 17"):
        assert load(ParallelismConfig, (*STATE, "from", "the future")) == PARALLEL


def test_prefill_pickle_versions() -> None:
    state = PREFILL.__getstate__()
    assert state == (2, 1 << 20, True, 4, 7, 2**40, "interleave", "head_slice")
    old = load(PrefillCPConfig, state[:4])
    assert old == PrefillCPConfig(CPRotateMethod.ALL_GATHER_WITH_OVERLAP, 1 << 20, True, 4)
    with pytest.warns(UserWarning, match="PrefillCPConfig state: has 9 entries, this version knows 8"):
        assert load(PrefillCPConfig, (*state, None)) == PREFILL


@pytest.mark.filterwarnings("error")
def test_a_warning_turned_error_is_raised() -> None:
    with pytest.raises(UserWarning, match="18 entries"):
        load(ParallelismConfig, (*STATE, 1))


def replaced(state: tuple[Any, ...], i: int, value: object) -> tuple[Any, ...]:
    return (*state[:i], value, *state[i + 1 :])


@pytest.mark.parametrize(
    ("kind", "state", "error", "message"),
    [
        (ParallelismConfig, STATE[:15], ValueError, "ParallelismConfig state: expected 16 or 17 entries, got 15"),
        (ParallelismConfig, (), ValueError, "expected 16 or 17 entries, got 0"),
        (ParallelismConfig, list(STATE), TypeError, "ParallelismConfig state: expected a tuple, got list"),
        (ParallelismConfig, replaced(STATE, 3, "0"), TypeError, r"entry 3 \(ep_rank\): expected int, got str"),
        (ParallelismConfig, replaced(STATE, 0, True), TypeError, r"entry 0 \(tp_size\): expected int, got bool"),
        (ParallelismConfig, replaced(STATE, 8, 2**70), ValueError, r"entry 8 \(world_size\): expected a 64-bit int"),
        (ParallelismConfig, replaced(STATE, 14, 1), TypeError, r"entry 14 \(enable_sp\): expected bool, got int"),
        (ParallelismConfig, replaced(STATE, 15, None), TypeError, "expected PrefillCPConfig, got NoneType"),
        (ParallelismConfig, replaced(STATE, 16, 0), TypeError, r"entry 16 \(use_ub_comm\): expected bool, got int"),
        (ParallelismConfig, replaced(STATE, 1, 8), ValueError, r"tp_rank: expected a rank in \[0, 8\)"),
        (PrefillCPConfig, (2, 1, True), ValueError, "PrefillCPConfig state: expected 4 or 8 entries, got 3"),
        (PrefillCPConfig, (2, 1, True, 4, 5), ValueError, "expected 4 or 8 entries, got 5"),
        (PrefillCPConfig, (6, 1, True, 4), ValueError, r"entry 0 \(method\): expected a CPRotateMethod value"),
        (PrefillCPConfig, ("a", 1, True, 4), TypeError, r"entry 0 \(method\): expected int, got str"),
        (PrefillCPConfig, (2, 1, True, 4, 5, 6, 7, "replicated"), TypeError, r"entry 6 \(split\): expected str"),
    ],
)
def test_bad_states_say_what_is_wrong(kind: type, state: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        load(kind, state)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: ParallelismConfig(tp_size=0), ValueError, "tp_size: expected a size >= 1, got 0"),
        (lambda: ParallelismConfig(ffn_sp_rank=1), ValueError, r"ffn_sp_rank: expected a rank in \[0, 1\)"),
        (lambda: ParallelismConfig(dp_rank=-1), ValueError, r"dp_rank: expected a rank .* got -1"),
        (lambda: ParallelismConfig(pp_size="2"), TypeError, "pp_size: expected int, got str"),
        (lambda: ParallelismConfig(use_ub_comm=1), TypeError, "use_ub_comm: expected bool, got int"),
        (lambda: ParallelismConfig(prefill_cp_config={}), TypeError, "expected PrefillCPConfig, got dict"),
        (lambda: ParallelismConfig(2, 2), ValueError, r"tp_rank: expected a rank in \[0, 2\)"),
        (lambda: PrefillCPConfig(method=1), TypeError, "method: expected CPRotateMethod, got int"),
        (lambda: PrefillCPConfig(comm_buffer_size=-1), ValueError, "comm_buffer_size: expected bytes >= 0"),
        (lambda: PrefillCPConfig(prefill_cp_size=-1), ValueError, "prefill_cp_size: expected a size >= 0"),
        (lambda: PrefillCPConfig(min_tokens=-5), ValueError, "min_tokens: expected a count >= 0, got -5"),
        (lambda: PrefillCPConfig(min_kv_work=-5), ValueError, "min_kv_work: expected a count >= 0, got -5"),
        (lambda: PrefillCPConfig(min_tokens=1.5), TypeError, "min_tokens: expected int, got float"),
        (lambda: PrefillCPConfig(split="rings"), ValueError, "split: expected 'zigzag' or 'interleave', got 'rings'"),
        (lambda: PrefillCPConfig(decode_mode="x"), ValueError, "decode_mode: expected 'replicated', 'head_slice' or"),
    ],
)
def test_bad_values_are_named(make: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


def test_stub_matches_the_module(tmp_path: Path) -> None:
    """In a package of its own: beside the real one mypy would read all of torch first."""
    package = tmp_path / "sparse_cp_ops"
    package.mkdir()
    (package / "__init__.py").touch()
    for path in Path(_config.__file__).parent.glob("_config*"):
        shutil.copy(path, package)
    result = subprocess.run(
        [sys.executable, "-m", "mypy.stubtest", "sparse_cp_ops._config"],
        cwd=tmp_path,
        env=os.environ | {"MYPYPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
