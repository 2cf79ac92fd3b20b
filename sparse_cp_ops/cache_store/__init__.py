"""Reuse of computed pages: shared between requests on the device, and kept as bytes beyond it."""

from sparse_cp_ops.cache_store.prefix_cache import OutOfPagesError, PrefixCache, block_table, page_keys
from sparse_cp_ops.cache_store.restore import restore_prefixes
from sparse_cp_ops.cache_store.stats import StoreStats
from sparse_cp_ops.cache_store.store import CacheStore
from sparse_cp_ops.cache_store.writer import CacheWriter, create_cache_writer

__all__ = [
    "CacheStore",
    "CacheWriter",
    "OutOfPagesError",
    "PrefixCache",
    "StoreStats",
    "block_table",
    "create_cache_writer",
    "page_keys",
    "restore_prefixes",
]
