import random

import pytest
import torch

from sparse_cp_ops.cache_store import OutOfPagesError, PrefixCache, block_table, page_keys

PAGE = 16


def tokens(*parts: tuple[int, int]) -> list[int]:
    """Token runs: (seed, length) each."""
    return [random.Random(f"{seed}.{i}").randrange(1000) for seed, length in parts for i in range(length)]


def compute(cache: PrefixCache, prompt: list[int]) -> tuple[list[int], int]:
    """What an engine does with a prompt: match, allocate the rest, write, insert. Returns pages and matched tokens."""
    matched = cache.match_prefix(prompt)
    pages = matched + cache.allocate(-(-len(prompt) // cache.page_size) - len(matched))
    cache.insert(prompt, pages)
    return pages, len(matched) * cache.page_size


def test_keys_are_chained_over_full_pages() -> None:
    prompt = tokens((1, 3 * PAGE + 5))
    keys = page_keys(prompt, PAGE)
    assert len(keys) == 3
    assert len({*keys}) == 3
    assert keys == page_keys(torch.tensor(prompt), PAGE) == page_keys(torch.tensor(prompt, dtype=torch.int32), PAGE)
    assert keys[:2] == page_keys(prompt[: 2 * PAGE], PAGE)
    # The same tokens behind another beginning are another page.
    other = [prompt[0] + 1, *prompt[1:]]
    assert not {*keys} & {*page_keys(other, PAGE)}
    assert not {*keys} & {*page_keys(prompt, PAGE, b"another model")}
    assert not {*keys} & {*page_keys(prompt, 2 * PAGE)}
    assert page_keys([], PAGE) == []


def test_what_gives_no_keys_is_named() -> None:
    with pytest.raises(TypeError, match=r"tokens: expected integers of at most 64 bits, got torch\.bfloat16"):
        page_keys(torch.ones(PAGE, dtype=torch.bfloat16), PAGE)
    with pytest.raises(TypeError, match="page_keys: fingerprint: expected bytes, got bytearray"):
        page_keys([1] * PAGE, PAGE, bytearray(b"model"))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="PrefixCache: fingerprint: expected bytes, got str"):
        PrefixCache(1, PAGE, "model")  # type: ignore[arg-type]


def test_ids_beyond_int64_are_refused() -> None:
    unsigned = torch.tensor([*range(PAGE)], dtype=torch.uint64)
    assert page_keys(unsigned, PAGE) == page_keys([*range(PAGE)], PAGE)
    for beyond in ([2**63] * PAGE, torch.tensor([2**63] * PAGE, dtype=torch.uint64)):
        with pytest.raises(ValueError, match=f"expected ids of at most {2**63 - 1}, got {2**63}"):
            page_keys(beyond, PAGE)


@pytest.mark.parametrize("length", [1, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE, 2 * PAGE + 1, 3 * PAGE - 1])
def test_match_leaves_a_token_to_compute_and_shares_full_pages_only(length: int) -> None:
    cache = PrefixCache(8, PAGE)
    prompt = tokens((2, length))
    pages, matched = compute(cache, prompt)
    assert matched == 0
    again = cache.match_prefix(prompt)
    assert again == pages[: (length - 1) // PAGE]
    cache.release(again)
    longer = cache.match_prefix(prompt + tokens((3, 2 * PAGE)))
    assert longer == pages[: length // PAGE]


def test_common_beginnings_share_pages_until_the_first_difference() -> None:
    cache = PrefixCache(16, PAGE)
    first, _ = compute(cache, tokens((1, 2 * PAGE), (2, PAGE)))
    second, matched = compute(cache, tokens((1, 2 * PAGE), (3, PAGE)))
    assert matched == 2 * PAGE
    assert second[:2] == first[:2]
    assert second[2] != first[2]
    cache.release(first)
    third, matched = compute(cache, tokens((1, 2 * PAGE), (2, PAGE), (4, 3)))
    assert matched == 3 * PAGE
    assert third[:3] == first


def test_two_requests_that_compute_the_same_pages_at_once() -> None:
    cache = PrefixCache(8, PAGE)
    prompt = tokens((5, 2 * PAGE + 1))
    first, second = (cache.allocate(3) for _ in range(2))
    cache.insert(prompt, first)
    cache.insert(prompt, second)
    cache.release(second)
    assert cache.match_prefix(prompt) == first[:2]
    # The second one's pages were private: they are free and can all be given out while the first ones are held.
    assert {*cache.allocate(5)} == {*range(8)} - {*first}


def test_pages_in_use_are_never_given_away_and_the_oldest_chain_goes_first_from_its_end() -> None:
    cache = PrefixCache(6, PAGE)
    old, new = tokens((1, 3 * PAGE)), tokens((2, 2 * PAGE))
    old_pages, _ = compute(cache, old)
    new_pages, _ = compute(cache, new)
    cache.release(old_pages)
    cache.release(new_pages)
    assert cache.available == 6
    cache.allocate(2)  # the free page and the end of the older chain
    assert cache.match_prefix([*old, 0]) == old_pages[:2]
    with pytest.raises(OutOfPagesError, match=r"at most 2 .* got 3"):
        cache.allocate(3)
    assert {*cache.allocate(2)} == {*new_pages}
    assert cache.match_prefix([*new, 0]) == []
    with pytest.raises(OutOfPagesError, match="at most 0"):
        cache.allocate(1)


def test_pages_held_twice_are_kept_until_both_release() -> None:
    cache = PrefixCache(2, PAGE)
    prompt = tokens((1, PAGE + 1))
    pages, _ = compute(cache, prompt)
    again = cache.match_prefix(prompt)
    cache.release(pages)
    with pytest.raises(OutOfPagesError):
        cache.allocate(2)
    cache.release(again)
    assert {*cache.allocate(2)} == {0, 1}


def test_a_fork_shares_full_pages_and_gets_its_own_last_one() -> None:
    cache = PrefixCache(6, PAGE)
    pages = cache.allocate(3)
    forked = cache.fork(pages, 2 * PAGE + 1)
    assert forked[:2] == pages[:2]
    assert forked[2] not in pages
    cache.require_private([pages[2], forked[2]])
    for page in pages[:2]:
        with pytest.raises(ValueError, match=f"got {page}, which is not held by exactly one"):
            cache.require_private([page])
    assert cache.fork(pages[:2], 2 * PAGE) == pages[:2]
    cache.release(pages)
    cache.release(pages[:2])
    cache.require_private(forked)
    cache.insert(tokens((1, 2 * PAGE)), forked)
    with pytest.raises(ValueError, match=f"got {forked[0]}, which is offered"):
        cache.require_private(forked)
    with pytest.raises(ValueError, match="expected 3 for 33 tokens, got 2"):
        cache.fork(forked[:2], 2 * PAGE + 1)
    with pytest.raises(ValueError, match=f"pages that are held, got {pages[2]}"):
        cache.fork([pages[2]], 1)
    cache.allocate(cache.available)
    before = cache.decisions
    with pytest.raises(OutOfPagesError):
        cache.fork(forked, 2 * PAGE + 1)
    assert cache.decisions == before


def test_misuse_is_refused_and_changes_nothing() -> None:
    cache = PrefixCache(4, PAGE)
    pages = cache.allocate(2)
    with pytest.raises(ValueError, match="at least 3, got 2"):
        cache.insert(tokens((1, 3 * PAGE)), pages)
    with pytest.raises(ValueError, match="pages that are held, got 3"):
        cache.release([*pages, 3])
    with pytest.raises(ValueError, match="pages that are held, got 9"):
        cache.insert(tokens((1, PAGE)), [9])
    with pytest.raises(TypeError, match=r"PrefixCache\.release: pages: expected ints, got int"):
        cache.release(pages[0])  # type: ignore[arg-type]
    cache.release(pages)
    with pytest.raises(ValueError, match="pages that are held"):
        cache.release(pages[:1])
    assert cache.available == 4


def test_random_traffic_never_mixes_up_contents() -> None:
    """Against a model that remembers which tokens were written to which page."""
    rng = random.Random(7)
    cache = PrefixCache(24, PAGE)
    contents: dict[int, tuple[int, ...]] = {}
    running: list[list[int]] = []
    hits = 0
    for _ in range(600):
        if running and (rng.random() < 0.5 or cache.available < 5):
            cache.release(running.pop(rng.randrange(len(running))))
            continue
        prompt = tokens(
            (rng.randrange(3), PAGE), (rng.randrange(3), PAGE), (rng.randrange(3), PAGE + rng.randrange(PAGE))
        )
        matched = cache.match_prefix(prompt)
        hits += len(matched)
        for i, page in enumerate(matched):
            assert contents[page] == tuple(prompt[: (i + 1) * PAGE])
        held = {page for pages in running for page in pages}
        fresh = cache.allocate(-(-len(prompt) // PAGE) - len(matched))
        assert not {*fresh} & (held | {*matched})
        pages = matched + fresh
        for i in range(len(matched), len(pages)):
            contents[pages[i]] = tuple(prompt[: (i + 1) * PAGE])
        cache.insert(prompt, pages)
        running.append(pages)
    assert hits > 100
    for pages in running:
        cache.release(pages)
    assert cache.available == 24


def test_block_table_pads_with_minus_one(device: str) -> None:
    table = block_table([[3, 1], [], [7, 0, 2]], device)
    assert table.device.type == device
    assert table.cpu().tolist() == [[3, 1, -1], [-1, -1, -1], [7, 0, 2]]
    assert block_table([]).shape == (0, 1)
