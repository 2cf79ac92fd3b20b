"""Where a prompt begins: with pages on the device, then with pages from a store, on all ranks alike."""

from __future__ import annotations

from collections.abc import Sequence

from sparse_cp_ops.cache_store.prefix_cache import PrefixCache, Tokens
from sparse_cp_ops.cache_store.store import CacheStore
from sparse_cp_ops.context_parallel.collectives import CpGroup, agree_on_minimum


def restore_prefixes(
    prefix_cache: PrefixCache, store: CacheStore | None, prompts: Sequence[Tokens], group: CpGroup | None = None
) -> list[list[int]]:
    """Pages that hold the beginning of each prompt; what the device does not have comes from the store if it is there.

    Ranks may see a shared store at different moments, or read with different luck: they agree on what all of them have,
    in two small collectives for the whole batch (none without a store). At least one token of each prompt is left. What
    several prompts begin with is restored once, into pages that all of them hold.

    Args:
        prefix_cache: owner of the device pages; the same fingerprint as the store's.
        store: where missing pages may be; None = nowhere.
        prompts: token ids of each request.
        group: the ranks, all of which make this call; None = one.

    Returns:
        Pages of each prompt, held by the caller until :meth:`PrefixCache.release`; restored ones are offered already.

    Raises:
        ValueError: prefix cache and store have different fingerprints.
    """
    if store is not None and store.fingerprint != prefix_cache.fingerprint:
        raise ValueError(
            "restore_prefixes: prefix_cache: expected the fingerprint of the store (PrefixCache(..., "
            "fingerprint=store.fingerprint)), got another one"
        )
    held: list[list[int]] = []
    try:
        for prompt in prompts:
            held.append(prefix_cache.match_prefix(prompt))
        if store is not None:
            _restore(prefix_cache, store, prompts, held, group or CpGroup())
    except BaseException:
        for pages in held:
            prefix_cache.release(pages)
        raise
    return held


def _restore(
    prefix_cache: PrefixCache, store: CacheStore, prompts: Sequence[Tokens], held: list[list[int]], group: CpGroup
) -> None:
    page_size, device = prefix_cache.page_size, store.cache.device
    missing = [
        store.page_keys(prompt)[len(pages) : max(len(prompt) - 1, 0) // page_size]
        for prompt, pages in zip(prompts, held, strict=True)
    ]
    visible = agree_on_minimum([store.match(keys) for keys in missing], group, device)
    targets: list[list[int]] = []
    restored: list[int] = []
    behind: list[int] = []  # how many of a prompt's missing pages an earlier prompt restores
    asked: set[bytes] = set()
    try:
        for keys, count in zip(missing, visible, strict=True):
            behind.append(sum(key in asked for key in keys[:count]))
            targets.append(prefix_cache.allocate(min(count - behind[-1], prefix_cache.available)))
            own = keys[behind[-1] :][: len(targets[-1])]
            asked.update(own)
            restored.append(store.read(own, targets[-1]))
        restored = agree_on_minimum(restored, group, device)
    except BaseException:
        for pages in targets:
            prefix_cache.release(pages)
        raise
    for prompt, pages, fresh, count, shared in zip(prompts, held, targets, restored, behind, strict=True):
        if shared:  # offered by now, unless they could not be restored: then nothing behind them is of use
            wanted = len(pages) + shared
            matched = prefix_cache.match_prefix(prompt)  # may go on with pages that had lost their beginning
            prefix_cache.release(pages + matched[wanted:])
            pages[:] = matched[:wanted]
            if len(pages) < wanted:
                count = 0
        prefix_cache.release(fresh[count:])
        pages += fresh[:count]
        prefix_cache.insert(prompt[: len(pages) * page_size], pages)
