"""Entries as files of a folder, shared by any number of processes.

A file appears under its name only when it is complete and on disk: it is written elsewhere, fsynced, renamed, and the
folder is fsynced. So a process may be killed at any point. Files are read with ``preadv`` and not mapped: a mapped file
that shrinks, or whose disk fails, would end the process with SIGBUS instead of being a miss.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
import shutil
import stat
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

from sparse_cp_ops.cache_store.backend import StoredEntry
from sparse_cp_ops.cache_store.entry import HEADER_BYTES

logger = logging.getLogger(__name__)

_SUFFIX = ".page"
# A writer's folder gets its lock right after it is made; one that has none after this time belongs to a dead process.
_STALE_SECONDS = 60.0
_WRITER = re.compile("[0-9a-f]{32}")  # anything else in the folder of writers is nothing of ours


class FileBackend:
    """``<root>/<first two digits>/<key>.page``; temporary files in ``<root>/writers/<one folder a process>``.

    The least recently used files leave when the byte budget is used up. Several processes may write: each looks at the
    whole folder again after a sixty-fourth of the budget, so that they overrun it together by that much each.
    """

    def __init__(self, root: str, entry_bytes: int | None, budget_bytes: int | None = None) -> None:
        """Open or make the folder.

        Args:
            root: the folder.
            entry_bytes: length of every entry; None to inspect only.
            budget_bytes: of all entries together; None = as much as the disk has.

        Raises:
            ValueError: the budget is below one entry.
            PermissionError: everybody may write to the folder, or it belongs to another user.
            OSError: the folder can't be made or used.
        """
        if budget_bytes is not None and entry_bytes is not None and budget_bytes < entry_bytes:
            raise ValueError(
                f"CacheStore.open: url: disk: expected at least {entry_bytes} bytes (an entry), got {budget_bytes}"
            )
        self._root = Path(root)
        if entry_bytes is not None and not self._root.is_dir():
            self._root.mkdir(parents=True, exist_ok=True, mode=0o700)
            _sync_folder(self._root.parent)
        status = self._root.stat()
        # Whoever writes here decides what models read: checksums are against accidents, not against people.
        if status.st_mode & stat.S_IWOTH or status.st_uid not in (0, os.geteuid()):
            raise PermissionError(f"{root}: expected a folder of this user to which not everybody may write")
        self._entry_bytes = entry_bytes
        self._budget = budget_bytes
        self._own_folder: Path | None = None
        self._lock_file = -1
        self._used: int | None = None  # bytes at the last look at the folder, plus what was written since
        self._written_since = 0

    def present(self, keys: Sequence[bytes]) -> list[bool]:
        """Which files are there, with the right length."""
        return [self._length(self._path(key)) == self._entry_bytes for key in keys]

    def put(self, entries: Sequence[tuple[bytes, memoryview]]) -> list[bool]:
        """Write files that are not there; True = they are there, even after the power fails.

        A full disk or a folder that may only be read refuses files; those that are there can be read all the same.
        """
        written: list[bool] = []
        problem = None
        for key, content in entries:
            try:
                self._write(self._path(key), content)
                written.append(True)
            except OSError as error:
                problem = error
                written.append(False)
        if problem is not None:
            logger.warning("%d of %d pages are not written (%s)", written.count(False), len(written), problem)
        for folder in {self._path(key).parent for (key, _), there in zip(entries, written, strict=True) if there}:
            _sync_folder(folder)
        return written

    def get(self, entries: Sequence[tuple[bytes, memoryview]]) -> list[bool]:
        """Read files; one of another length, of another kind or that can't be read is a miss."""
        found = []
        for key, content in entries:
            try:
                found.append(self._read(self._path(key), content))
            except OSError as error:
                logger.warning("miss: %s", error)
                found.append(False)
        return found

    def touch(self, keys: Sequence[bytes]) -> None:
        """Used now, the first of a request last: a chain of pages without its head is useless."""
        for key in reversed(keys):
            with contextlib.suppress(OSError):  # evicted meanwhile, or a folder that may only be read
                _used_now(self._path(key))

    def remove(self, key: bytes) -> None:
        """Unlink a file."""
        self._path(key).unlink(missing_ok=True)

    def entries(self) -> Iterator[StoredEntry]:
        """All files, with the beginning of each."""
        for _, size, path in sorted(self._scan(), key=lambda file: file[2]):
            header, problem = b"", None
            try:
                header = _beginning(path)
            except FileNotFoundError:
                continue  # evicted meanwhile
            except OSError as error:
                problem = error.strerror or str(error)
            yield StoredEntry(path.stem, size, header, problem)

    def close(self) -> None:
        """Remove this process's temporary files."""
        if self._own_folder is not None:
            shutil.rmtree(self._own_folder, ignore_errors=True)
            os.close(self._lock_file)
            self._own_folder = None

    def _path(self, key: bytes) -> Path:
        name = key.hex()
        return self._root / name[:2] / (name + _SUFFIX)

    def _length(self, path: Path) -> int | None:
        try:
            _refuse_link(path.parent)
            status = path.lstat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        return status.st_size if stat.S_ISREG(status.st_mode) else None

    def _read(self, path: Path, content: memoryview) -> bool:
        _refuse_link(path.parent)
        try:
            file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError:
            return False
        try:
            size = os.fstat(file).st_size
            if size != len(content):
                logger.warning("miss: %s has %d bytes, expected %d", path.name, size, len(content))
                return False
            done = 0
            while done < len(content):
                count = os.preadv(file, [content[done:]], done)
                if count == 0:
                    logger.warning("miss: %s ended at byte %d while it was read", path.name, done)
                    return False
                done += count
            return True
        finally:
            os.close(file)

    def _write(self, path: Path, content: memoryview) -> None:
        if self._length(path) == len(content):
            return
        self._make_room(len(content))
        self._make_folder(self._root)  # somebody may have emptied or removed it
        _refuse_link(path.parent)
        self._make_folder(path.parent)
        temporary = self._writer_folder() / path.name
        file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            written = 0
            while written < len(content):
                written += os.write(file, content[written:])
            _used_now(file)
            os.fsync(file)
            os.rename(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):  # what went wrong first is what counts
                os.unlink(temporary)
            raise
        finally:
            os.close(file)

    def _make_folder(self, folder: Path) -> None:
        if not folder.is_dir():
            folder.mkdir(mode=0o700, exist_ok=True)
            _sync_folder(folder.parent)

    def _writer_folder(self) -> Path:
        """This process's folder for temporary files, marked by a lock that ends with the process."""
        if self._own_folder is not None and not self._own_folder.is_dir():
            self.close()
        if self._own_folder is None:
            writers = self._root / "writers"
            _refuse_link(writers)
            self._make_folder(writers)
            _remove_left_over(writers)
            folder = writers / uuid.uuid4().hex
            folder.mkdir(mode=0o700)
            self._lock_file = os.open(folder / "lock", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._own_folder = folder
        return self._own_folder

    def _scan(self) -> list[tuple[int, int, Path]]:
        """Time of last use, size and path of every entry."""
        files = []
        for folder in os.scandir(self._root):
            if len(folder.name) != 2 or not folder.is_dir(follow_symlinks=False):
                continue
            with contextlib.suppress(FileNotFoundError):  # somebody removes the folder
                for file in os.scandir(folder.path):
                    if file.name.endswith(_SUFFIX):
                        with contextlib.suppress(FileNotFoundError):
                            status = file.stat(follow_symlinks=False)
                            if stat.S_ISDIR(status.st_mode):
                                continue  # nothing of ours, and it can't be unlinked
                            files.append((status.st_mtime_ns, status.st_size, Path(file.path)))
        return files

    def _make_room(self, nbytes: int) -> None:
        """Remove the least recently used files if the budget would be overrun."""
        if self._budget is None:
            return
        self._written_since += nbytes
        if (
            self._used is None
            or self._used + nbytes > self._budget
            or self._written_since > max(self._budget // 64, nbytes)
        ):
            files = sorted(self._scan())
            self._used, self._written_since = sum(size for _, size, _ in files), nbytes
            if self._used + nbytes > self._budget:
                # A little more than needed, so that not every entry costs a look at the whole folder.
                target = max(0, self._budget - max(self._budget // 64, nbytes))
                for _, size, path in files:
                    if self._used <= target:
                        break
                    path.unlink(missing_ok=True)
                    self._used -= size
        self._used += nbytes


def _refuse_link(folder: Path) -> None:
    """A link in the place of one of the store's folders leads to files that are not the store's."""
    if folder.is_symlink():
        raise NotADirectoryError(errno.ENOTDIR, "expected a folder, got a link", str(folder))


def _beginning(path: Path) -> bytes:
    """As many bytes as a header has, of a regular file: a pipe would wait for a writer for ever."""
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise OSError(errno.EINVAL, "no regular file", str(path))
        return os.pread(file, HEADER_BYTES, 0)
    finally:
        os.close(file)


def _used_now(file: Path | int) -> None:
    """By the clock of the process: that of the file system ticks so rarely that many files would get the same time."""
    now = time.time_ns()
    os.utime(file, ns=(now, now))


def _sync_folder(folder: Path) -> None:
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _remove_left_over(writers: Path) -> None:
    """Temporary files of processes that were killed: nobody holds the lock of their folder any more."""
    for folder in writers.iterdir():
        if not _WRITER.fullmatch(folder.name) or folder.is_symlink():
            continue
        with contextlib.suppress(OSError):  # somebody else removes it, or its process lives
            if time.time() - folder.stat().st_mtime < _STALE_SECONDS:
                continue
            lock = os.open(folder / "lock", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)
