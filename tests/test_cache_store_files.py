"""file:// in one process: permissions, budget, damage. What killed processes leave is in test_store_stress.py."""

import contextlib
import fcntl
import io
import logging
import os
import shutil
import stat
from pathlib import Path

import pytest
import xxhash
from store_harness import FLUSH_SECONDS, keys_of, memory_for, read_back, small_cache, store_pages

from sparse_cp_ops.__main__ import main
from sparse_cp_ops.cache_store import CacheStore
from sparse_cp_ops.cache_store import store as store_module
from sparse_cp_ops.cache_store.backend import StoreUrl, parse_bytes
from sparse_cp_ops.cache_store.entry import _FIELDS, HEADER_BYTES, MAGIC, VERSION, EntryLayout
from sparse_cp_ops.cache_store.file_backend import FileBackend

ENTRY = EntryLayout(small_cache(), "").entry_bytes


def open_store(root: Path, options: str = "", model: str = "", **times: float) -> CacheStore:
    return CacheStore.open(f"file://{root}?memory={8 * ENTRY}{options}", small_cache(), model, **times)


def files_of(root: Path) -> list[Path]:
    return sorted(root.glob("??/*.page"))


def path_of(root: Path, key: bytes) -> Path:
    return root / key.hex()[:2] / f"{key.hex()}.page"


def test_pages_survive_the_process_and_nobody_else_may_read_them(tmp_path: Path) -> None:
    root = tmp_path / "new" / "store"
    store = open_store(root)
    keys = keys_of(store, 5)
    assert store_pages(store, keys) == keys
    assert files_of(root) == sorted(path_of(root, key) for key in keys)
    for path in [root, *root.rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600)
    store.close()
    assert not list((root / "writers").iterdir())
    reading = open_store(root)
    assert reading.match(keys) == 5
    assert read_back(reading, keys) == 5
    assert reading.stats.backend_hits == 5
    assert read_back(open_store(root, model="other"), keys_of(open_store(root, model="other"), 5)) == 0


def test_a_page_that_is_there_is_not_written_again(tmp_path: Path) -> None:
    first, second = open_store(tmp_path), open_store(tmp_path)
    keys = keys_of(first, 2)
    store_pages(first, keys)
    before = [path.stat().st_ino for path in files_of(tmp_path)]
    assert store_pages(second, keys) == keys
    assert [path.stat().st_ino for path in files_of(tmp_path)] == before


@pytest.mark.parametrize("damage", ["truncated", "longer", "empty", "flipped", "directory", "link", "fifo"])
def test_damaged_files_are_misses_and_are_replaced(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store(tmp_path)
    keys = keys_of(store, 3)
    store_pages(store, keys)
    path = path_of(tmp_path, keys[1])
    content = path.read_bytes()
    path.unlink()
    if damage == "directory":
        path.mkdir()
    elif damage == "link":
        (tmp_path / "elsewhere").write_bytes(content)
        path.symlink_to(tmp_path / "elsewhere")
    elif damage == "fifo":
        os.mkfifo(path)
    else:
        changed = {
            "truncated": content[:-1],
            "longer": content + b"x",
            "empty": b"",
            "flipped": content[:5000] + bytes([content[5000] ^ 128]) + content[5001:],
        }
        path.write_bytes(changed[damage])
    reading = open_store(tmp_path)
    with caplog.at_level(logging.WARNING):
        assert read_back(reading, keys) == 1
    assert "miss" in caplog.text
    if damage == "directory":
        # Nothing of ours, and nothing that could be replaced; the others are there already.
        assert store_pages(open_store(tmp_path), keys) == [keys[0], keys[2]]
        assert not [path for path in tmp_path.glob("writers/*/*") if path.name != "lock"]
        return
    again = open_store(tmp_path)
    assert store_pages(again, keys) == keys
    assert path.read_bytes() == content
    assert read_back(open_store(tmp_path), keys) == 3


def test_the_budget_holds_and_the_least_recently_used_files_leave(tmp_path: Path) -> None:
    store = open_store(tmp_path, f"&disk={6 * ENTRY + 100}")
    first, second, third = (keys_of(store, 2, seed) for seed in range(3))
    for keys in (first, second):
        store_pages(store, keys)
    reading = open_store(tmp_path)
    assert read_back(reading, first) == 2
    reading.close(FLUSH_SECONDS)  # that it was used is written down behind the read
    store_pages(store, third)
    assert sum(path.stat().st_size for path in files_of(tmp_path)) <= 6 * ENTRY
    fourth = keys_of(store, 2, 4)
    store_pages(store, fourth)
    assert sum(path.stat().st_size for path in files_of(tmp_path)) <= 6 * ENTRY
    reading = open_store(tmp_path)
    assert [reading.match(keys) for keys in (first, fourth)] == [2, 2]
    # Of the second chain the end left first.
    assert reading.match(second) < 2
    assert path_of(tmp_path, fourth[1]).exists()
    with pytest.raises(ValueError, match=rf"disk: expected at least {ENTRY} bytes \(an entry\), got 1000"):
        open_store(tmp_path, "&disk=1000")


def test_of_a_long_chain_the_end_leaves_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "BATCH", 2)
    store = open_store(tmp_path, f"&disk={8 * ENTRY}")
    keys = keys_of(store, 6)
    store_pages(store, keys)

    def assert_ordered() -> None:
        times = [path_of(tmp_path, key).stat().st_mtime_ns for key in keys]
        assert times == sorted(times, reverse=True)
        assert len(set(times)) == len(times)

    assert_ordered()
    for key in keys:
        os.utime(path_of(tmp_path, key), (0, 0))
    reading = open_store(tmp_path)
    assert read_back(reading, keys) == 6
    reading.close(FLUSH_SECONDS)  # what it has begun is done
    assert path_of(tmp_path, keys[-1]).stat().st_mtime > 0
    assert_ordered()


def test_what_is_no_entry_neither_stops_eviction_nor_look_ups(tmp_path: Path) -> None:
    store = open_store(tmp_path, f"&disk={2 * ENTRY}")
    foreign = tmp_path / "ab" / "folder.page"
    foreign.mkdir(parents=True)
    os.utime(foreign, (0, 0))
    for seed in range(3):
        keys = keys_of(store, 1, seed)
        assert store_pages(store, keys) == keys
    assert foreign.is_dir()
    hidden = keys_of(store, 1, seed=9)
    path_of(tmp_path, hidden[0]).parent.write_text("a file in the place of a folder")
    assert store.match(hidden) == 0
    assert store_pages(store, hidden) == []
    assert store.stats.backend_errors == 0
    more = keys_of(store, 1, seed=10)
    assert store_pages(store, more) == more


@pytest.mark.parametrize("root_too", [True, False])
def test_a_folder_that_somebody_empties_is_used_again(tmp_path: Path, root_too: bool) -> None:
    root = tmp_path / "store"
    store = open_store(root)
    store_pages(store, keys_of(store, 2))
    for path in [root] if root_too else list(root.iterdir()):
        shutil.rmtree(path)
    keys = keys_of(store, 2, seed=1)
    assert store_pages(store, keys) == keys
    assert stat.S_IMODE(root.stat().st_mode) == 0o700
    assert read_back(open_store(root), keys) == 2
    store.close()
    assert not list((root / "writers").iterdir())


def test_a_full_disk_or_an_unusable_folder_is_a_refusal(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(tmp_path)
    keys, earlier = keys_of(store, 2), keys_of(store, 3, seed=1)
    other = open_store(tmp_path)
    assert store_pages(other, earlier) == earlier
    other.close()

    def no_space(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched, caplog.at_level(logging.WARNING):
        patched.setattr(os, "write", no_space)
        assert store_pages(store, keys) == []
    assert "No space left on device" in caplog.text
    assert files_of(tmp_path) == sorted(path_of(tmp_path, key) for key in earlier)
    assert [path.name for folder in (tmp_path / "writers").iterdir() for path in folder.iterdir()] == ["lock"]
    assert read_back(store, keys) == 2  # from memory
    assert read_back(store, earlier) == 3  # what is there can be read


def test_folders_of_others_are_refused(tmp_path: Path) -> None:
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    with pytest.raises(PermissionError, match="to which not everybody may write"):
        open_store(open_to_all)
    os.chown(tmp_path, 12345, -1)
    if os.geteuid() == 12345 or tmp_path.stat().st_uid != 12345:
        return
    with pytest.raises(PermissionError, match="of this user"):
        open_store(tmp_path)


def test_left_over_files_of_dead_writers_go_and_those_of_living_ones_stay(tmp_path: Path) -> None:
    dead, alive, young = (tmp_path / "writers" / (digit * 32) for digit in "dab")
    for folder in (dead, alive, young):
        folder.mkdir(parents=True)
        (folder / "something.page").write_bytes(b"half")
    for folder in (dead, alive):
        os.utime(folder, (0, 0))
    with open(alive / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.utime(alive, (0, 0))
        store = open_store(tmp_path)
        store_pages(store, keys_of(store, 1))
        assert not dead.exists()
        assert (alive / "something.page").exists()
        assert (young / "something.page").exists()


def test_what_is_nothing_of_ours_in_the_folder_of_writers_stays(tmp_path: Path) -> None:
    elsewhere, notes, link = (
        tmp_path / "elsewhere",
        tmp_path / "store/writers/notes",
        tmp_path / "store/writers" / ("e" * 32),
    )
    for folder in (elsewhere, notes):
        folder.mkdir(parents=True)
        (folder / "text").write_text("mine")
        os.utime(folder, (0, 0))
    link.symlink_to(elsewhere)
    store = open_store(tmp_path / "store")
    keys = keys_of(store, 1)
    assert store_pages(store, keys) == keys
    for folder in (elsewhere, notes):
        assert [path.name for path in folder.iterdir()] == ["text"]


@pytest.mark.parametrize("linked", ["entry", "folder", "writers"])
def test_links_are_not_followed(tmp_path: Path, linked: str) -> None:
    root, elsewhere = tmp_path / "store", tmp_path / "elsewhere"
    store = open_store(root)
    keys = keys_of(store, 1)
    store_pages(store, keys)
    store.close()
    path = {"entry": path_of(root, keys[0]), "folder": path_of(root, keys[0]).parent, "writers": root / "writers"}[
        linked
    ]
    path.rename(elsewhere)
    path.symlink_to(elsewhere)
    before = sorted(elsewhere.rglob("*"))
    again = open_store(root)
    assert again.match(keys) == (linked == "writers")
    assert read_back(again, keys) == (linked == "writers")
    more = keys if linked == "folder" else keys_of(again, 1, seed=1)
    assert store_pages(again, more) == (more if linked == "entry" else [])
    assert again.stats.backend_errors == 0
    assert sorted(elsewhere.rglob("*")) == before


def test_inspection_changes_nothing(tmp_path: Path) -> None:
    store = open_store(tmp_path, model="V3.2")
    keys = keys_of(store, 3)
    store_pages(store, keys)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    found = list(FileBackend(str(tmp_path), None).entries())
    assert [entry.name for entry in found] == sorted(key.hex() for key in keys)
    assert {entry.size for entry in found} == {ENTRY}
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
    with pytest.raises(FileNotFoundError):
        FileBackend(str(tmp_path / "nothing"), None)
    assert not (tmp_path / "nothing").exists()


def test_verifying_does_not_count_as_use(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = open_store(tmp_path)
    store_pages(store, keys_of(store, 3))
    before = {path: path.stat().st_mtime_ns for path in files_of(tmp_path)}
    assert inspect(f"file://{tmp_path}", "--verify") == 0
    assert "3 entries" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in files_of(tmp_path)} == before


def inspect(*arguments: str) -> int:
    return main(["cache", "inspect", *arguments])


def test_the_command_shows_models_and_finds_damage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for model, count in (("V3.2", 4), ("GLM-5\x1b[31m", 2)):
        store = open_store(tmp_path, model=model)
        keys = keys_of(store, count)
        store_pages(store, keys)
    assert inspect(f"file://{tmp_path}") == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    mebibytes = f"{4 * ENTRY / 2**20:.1f}"
    assert rows[0][:2] == ["model", "fingerprint"]
    assert [row[:1] + row[2:] for row in rows[1:3]] == [
        ["GLM-5?[31m", "16", "3", "2", "2", f"{2 * ENTRY / 2**20:.1f}"],
        ["V3.2", "16", "3", "2", "4", mebibytes],
    ]
    assert inspect(f"file://{tmp_path}", "--verify") == 0
    assert "6 entries" in (out := capsys.readouterr().out)
    assert "all verified" in out
    flipped, short = (path_of(tmp_path, key) for key in keys)
    flipped.write_bytes(flipped.read_bytes()[:-1] + b"?")
    assert inspect(f"file://{tmp_path}") == 0
    capsys.readouterr()
    short.write_bytes(short.read_bytes()[:-1])
    assert inspect(f"file://{tmp_path}", "--verify") == 1
    out = capsys.readouterr().out
    assert f"damaged: {flipped.stem}: its bytes have lost their checksum" in out
    assert f"damaged: {short.stem}: it has {ENTRY - 257} bytes, its header says {ENTRY - 256}" in out
    for url, message in (
        (f"file://{tmp_path}/nothing", "No such file"),
        ("memory://", "lives and ends with its process"),
        ("ftp://x", "expected one of"),
    ):
        assert inspect(url) == 2
        assert message in capsys.readouterr().err


def test_names_that_the_terminal_cannot_show(tmp_path: Path) -> None:
    store = open_store(tmp_path, model="Mod\N{LATIN SMALL LETTER E WITH GRAVE}le")
    store_pages(store, keys_of(store, 1))
    terminal = io.TextIOWrapper(io.BytesIO(), "ascii")
    with contextlib.redirect_stdout(terminal):
        assert inspect(f"file://{tmp_path}") == 0
    terminal.seek(0)
    assert "Mod?le" in terminal.read()


def test_the_command_waits_for_no_pipe_and_reads_no_giant(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = open_store(tmp_path)
    keys = keys_of(store, 2)
    store_pages(store, keys)
    giant = path_of(tmp_path, keys[0])
    payload = 2**40
    fields = _FIELDS.pack(MAGIC, VERSION, HEADER_BYTES, payload, keys[0], b"f" * 16, b"c" * 16, 16, 3, 2, 0, b"")
    giant.write_bytes((fields + xxhash.xxh3_128_digest(fields)).ljust(HEADER_BYTES, b"\0"))
    os.truncate(giant, HEADER_BYTES + payload)  # a hole: it takes no room
    (folder := tmp_path / "zz").mkdir()
    os.mkfifo(folder / "pipe.page")
    (folder / "loop.page").symlink_to("loop.page")
    (folder / "link.page").symlink_to(path_of(tmp_path, keys[1]))
    assert inspect(f"file://{tmp_path}", "--verify") == 1
    out = capsys.readouterr().out
    assert "1 entries" in out
    assert f"damaged: {keys[0].hex()}: it has {HEADER_BYTES + payload} bytes, at most {2**30} are verified" in out
    assert "damaged: pipe: no regular file" in out
    assert "damaged: loop: Too many levels of symbolic links" in out
    assert "damaged: link: Too many levels of symbolic links" in out


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("memory://?memory", r"url: expected scheme://place\?name=value, got 'memory://\?memory' \(bad query field"),
        ("mooncake://host:99999?metadata=x", "url: expected scheme.* got 'mooncake://host:99999.*Port out of range"),
        ("mooncake://[::1?metadata=x", "url: expected scheme.* got 'mooncake.*Invalid IPv6 URL"),
        ("file:///folder\tname", r"no control characters and no spaces around it, got 'file:///folder\\tname'"),
        (" file:///folder", "no control characters and no spaces around it"),
        ("file:///folder%00name", "expected a folder without %00"),
        ("redis://host", "expected one of memory://, file://, mooncake://, got 'redis://host'"),
        ("/tmp/x", "expected one of memory://"),
        ("memory://?budget=1", "expected options memory, got 'budget'"),
        ("memory://?memory=1&memory=2", "expected each option once"),
        ("memory://?memory=lots", "memory: expected a number of bytes such as 4GiB, got 'lots'"),
        ("memory://?memory=-1", "got '-1'"),
        ("memory://?memory=10", r"budget_bytes: expected at least \d+ \(a page of all layers\), got 10"),
        ("file://host/folder", "expected file:///absolute/folder"),
        ("file://", "expected file:///absolute/folder"),
        ("file:///folder#1?disk=1GiB", "# in a folder as %23"),
        ("file:///tmp?disk=0", r"disk: expected at least \d+ bytes"),
        ("memory://4GiB", "expected options behind ?"),
    ],
)
def test_urls_that_are_refused(url: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CacheStore.open(url, small_cache())


def test_urls_and_sizes(tmp_path: Path) -> None:
    assert parse_bytes("x", "3") == 3
    assert parse_bytes("x", "2KiB") == 2048
    assert parse_bytes("x", "1TiB") == 2**40
    assert StoreUrl.parse("file:///a%20b").path == "/a b"
    assert os.fsencode(StoreUrl.parse("file:///%ff%C3%BC").path) == b"/\xff\xc3\xbc"
    assert os.fsencode(StoreUrl.parse("file:///\N{LATIN SMALL LETTER U WITH DIAERESIS}").path) == b"/\xc3\xbc"
    store = CacheStore.open("memory://?memory=1MiB", small_cache())
    assert not store.shared
    assert len(store.memory) == 2**20 // ENTRY
    assert store_pages(store, keys_of(store, 2)) == keys_of(store, 2)
    with pytest.raises(TypeError, match="url: expected str, got PosixPath"):
        CacheStore.open(tmp_path, small_cache())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="cache: expected a PagedKvCache"):
        CacheStore.open("memory://", None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"CacheStore\.open: model: expected str, got int"):
        CacheStore.open("memory://", small_cache(), 3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="model: expected text that UTF-8 can hold, got "):
        CacheStore(small_cache(), memory_for(small_cache(), 1), "\udc80")
    for seconds in (-1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=f"timeout: expected 0 to .* s, got {seconds}"):
            CacheStore(small_cache(), memory_for(small_cache(), 1), timeout=seconds)
        with pytest.raises(ValueError, match="patience: expected 0 to"):
            CacheStore.open("memory://?memory=1MiB", small_cache(), patience=seconds)
