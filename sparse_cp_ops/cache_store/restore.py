"""Where a prompt begins: with pages on the device, then with pages from a store, on all ranks alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from sparse_cp_ops.cache_store.prefix_cache import PrefixCache, Tokens
from sparse_cp_ops.cache_store.store import CacheStore
from sparse_cp_ops.context_parallel.collectives import CpGroup, agree_on_minimum

# Values that a call returns -> the smallest of each on any rank.
Agree = Callable[[Callable[[], list[int]]], list[int]]


def restore_prefixes(
    prefix_cache: PrefixCache,
    store: CacheStore | None,
    prompts: Sequence[Tokens],
    group: CpGroup | None = None,
    device: torch.device | None = None,
) -> list[list[int]]:
    """Pages that hold the beginning of each prompt; what the device does not have comes from the store if it is there.

    Ranks may see a shared store at different moments, or read with different luck: they agree on what all of them have,
    in at most two small collectives for the whole batch. If one of them fails, all raise. At least one token of each
    prompt is left. What several prompts begin with is restored once, into pages that all of them hold.

    Args:
        prefix_cache: owner of the device pages; the same fingerprint as the store's.
        store: where missing pages may be, on all ranks or on none; None = nowhere.
        prompts: token ids of each request.
        group: the ranks, all of which make this call; None = one.
        device: where their collectives take place; None = on the store's device, on the CPU without a store.

    Returns:
        Pages of each prompt, held by the caller until :meth:`PrefixCache.release`; restored ones are offered already.

    Raises:
        ValueError: prefix cache and store have different fingerprints or page sizes, or some ranks have a store and
            others do not.
        RuntimeError: another rank has failed, or the store is closed.
    """
    ranks = group or CpGroup()
    where = device or (torch.device("cpu") if store is None else store.cache.device)
    held: list[list[int]] = []
    missing: list[list[bytes]] = []  # keys of each prompt that the device does not have

    def agree(values: Callable[[], list[int]]) -> list[int]:
        try:
            found = values()
        except BaseException:
            agree_on_minimum(None, ranks, where)
            raise
        return agree_on_minimum(found, ranks, where)

    def look_up() -> list[int]:
        if store is not None and store.fingerprint != prefix_cache.fingerprint:
            raise ValueError(
                "restore_prefixes: prefix_cache: expected the fingerprint of the store (PrefixCache(..., "
                "fingerprint=store.fingerprint)), got another one"
            )
        if store is not None and store.cache.page_size != prefix_cache.page_size:
            raise ValueError(
                f"restore_prefixes: prefix_cache: expected the store's {store.cache.page_size} tokens a page, got "
                f"{prefix_cache.page_size}"
            )
        # First of all prompts: where a rank fails behind this, the prefix caches of all ranks have decided the same.
        for prompt in prompts:
            held.append(prefix_cache.match_prefix(prompt))
        if store is None:
            return [0, 0, *[0] * len(prompts)]
        for prompt, pages in zip(prompts, held, strict=True):
            end = max(len(prompt) - 1, 0) // prefix_cache.page_size
            missing.append(store.page_keys(prompt)[len(pages) : end])
        return [1, -1, *(store.match(keys) for keys in missing)]

    try:
        fewest, most, *visible = agree(look_up)
        if fewest != -most:
            raise ValueError("restore_prefixes: store: expected one on all ranks or on none of them")
        if store is not None and any(visible):
            _restore(prefix_cache, store, prompts, held, [k[:n] for k, n in zip(missing, visible, strict=True)], agree)
    except BaseException:
        for pages in held:
            prefix_cache.release(pages)
        raise
    return held


def _restore(
    prefix_cache: PrefixCache,
    store: CacheStore,
    prompts: Sequence[Tokens],
    held: list[list[int]],
    visible: Sequence[Sequence[bytes]],
    agree: Agree,
) -> None:
    """Extend the pages that are held by those that come from the store; ``visible`` keys stand behind each of them."""
    targets: list[list[int]] = []
    behind: list[int] = []  # how many of a prompt's visible pages an earlier prompt restores
    asked: list[Sequence[bytes]] = []  # keys of the pages that each prompt restores
    seen: set[bytes] = set()
    try:
        for keys in visible:
            behind.append(sum(key in seen for key in keys))
            targets.append(prefix_cache.allocate(min(len(keys) - behind[-1], prefix_cache.available)))
            asked.append(keys[behind[-1] :][: len(targets[-1])])
            seen.update(asked[-1])
        restored = agree(lambda: [store.read(keys, pages) for keys, pages in zip(asked, targets, strict=True)])
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
        prefix_cache.insert(prompt[: len(pages) * prefix_cache.page_size], pages)
