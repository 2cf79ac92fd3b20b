"""PrefixCache against a model of device memory that remembers every write, under random traffic.

Requests start, go on, fork, end or fail; several run at once on few pages. Each write is checked against who else can
read that page, each hit against what was written.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from sparse_cp_ops.cache_store import OutOfPagesError, PrefixCache

PAGE = 4
PAGES = 10
# Two tokens, so that prompts often begin alike.
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=4 * PAGE)


@dataclass(eq=False)
class Running:
    tokens: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)


class PrefixCacheMachine(RuleBasedStateMachine):
    requests = Bundle("requests")

    def __init__(self) -> None:
        super().__init__()
        self.ranks = [PrefixCache(PAGES, PAGE, b"model") for _ in range(2)]
        self.cache = self.ranks[0]
        # What was written to each slot of each page last, and by which request's tokens.
        self.memory: list[list[int | None]] = [[None] * PAGE for _ in range(PAGES)]
        self.running: list[Running] = []

    def on_all_ranks(self, method: str, *arguments: object) -> list[int]:
        """Every rank makes the same call and decides alike."""
        results = [getattr(rank, method)(*arguments) for rank in self.ranks]
        assert results[0] == results[1]
        return results[0] or []

    def write(self, request: Running, tokens: list[int]) -> None:
        """One forward: pages for the new tokens, then their bytes. OutOfPagesError leaves the request as it was."""
        start, end = len(request.tokens), len(request.tokens) + len(tokens)
        free = self.cache.available
        needed = -(-end // PAGE) - len(request.pages)
        if needed > free:
            for rank in self.ranks:
                with pytest.raises(OutOfPagesError):
                    rank.allocate(needed)
            raise OutOfPagesError
        request.pages += self.on_all_ranks("allocate", needed)
        self.cache.require_private(request.pages[start // PAGE :])
        request.tokens += tokens
        for position in range(start, end):
            page = request.pages[position // PAGE]
            # Nobody else reads what is written here.
            assert sum(page in other.pages for other in self.running if other is not request) == 0
            self.memory[page][position % PAGE] = request.tokens[position]

    def read(self, request: Running) -> None:
        for position, token in enumerate(request.tokens):
            assert self.memory[request.pages[position // PAGE]][position % PAGE] == token

    @rule(target=requests, prompt=TOKENS)
    def start(self, prompt: list[int]) -> Running:
        request = Running()
        request.pages = self.on_all_ranks("match_prefix", prompt)
        hit = len(request.pages) * PAGE
        assert hit < len(prompt)
        request.tokens = prompt[:hit]
        self.running.append(request)
        self.read(request)
        try:
            self.write(request, prompt[hit:])
        except OutOfPagesError:
            pass  # it goes on with what was there, and may try again
        else:
            self.on_all_ranks("insert", request.tokens, request.pages)
        return request

    @rule(request=requests, tokens=TOKENS)
    def go_on(self, request: Running, tokens: list[int]) -> None:
        before = list(request.tokens), list(request.pages)
        try:
            self.write(request, tokens)
        except OutOfPagesError:
            assert (request.tokens, request.pages) == before

    @rule(request=requests)
    def offer(self, request: Running) -> None:
        self.on_all_ranks("insert", request.tokens, request.pages)

    @rule(target=requests, request=requests)
    def fork(self, request: Running) -> Running:
        other = Running(list(request.tokens))
        try:
            other.pages = self.on_all_ranks("fork", request.pages, len(request.tokens))
        except OutOfPagesError:
            assert self.cache.available == 0
            with pytest.raises(OutOfPagesError):
                self.ranks[1].fork(request.pages, len(request.tokens))
            other.tokens = []
        if other.pages and other.pages[-1] != request.pages[-1]:
            self.memory[other.pages[-1]] = list(self.memory[request.pages[-1]])
        self.running.append(other)
        return other

    @rule(request=consumes(requests), offered=st.booleans())
    def end(self, request: Running, offered: bool) -> None:
        if offered:
            self.on_all_ranks("insert", request.tokens, request.pages)
        self.on_all_ranks("release", request.pages)
        self.running.remove(request)

    @invariant()
    def running_requests_keep_their_content(self) -> None:
        for request in self.running:
            self.read(request)

    @invariant()
    def every_page_is_accounted_for(self) -> None:
        held = Counter(page for request in self.running for page in request.pages)
        assert self.cache.available == PAGES - len(held)
        for page in range(PAGES):
            # Exactly as many holders as there are requests with the page.
            self.ranks[1]._require_held("test", {page: held[page]})
            with pytest.raises(ValueError, match="pages that are held"):
                self.cache._require_held("test", {page: held[page] + 1})

    @invariant()
    def ranks_agree(self) -> None:
        assert self.ranks[0].decisions == self.ranks[1].decisions

    def teardown(self) -> None:
        for request in self.running:
            self.on_all_ranks("release", request.pages)
        assert self.cache.available == PAGES
        assert {*self.on_all_ranks("allocate", PAGES)} == {*range(PAGES)}


TestPrefixCache = PrefixCacheMachine.TestCase
TestPrefixCache.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize(
    ("method", "arguments"),
    [
        ("match_prefix", ([1, 2, 3],)),
        ("match_prefix", ([1] * PAGE + [3],)),
        ("allocate", (1,)),
        ("fork", ([0, 1], 2 * PAGE)),
        ("insert", ([5] * PAGE, [0])),
        ("release", ([1],)),
    ],
)
def test_a_call_that_only_one_rank_makes_shows(method: str, arguments: tuple[object, ...]) -> None:
    one, other = (PrefixCache(PAGES, PAGE) for _ in range(2))
    assert one.allocate(2) == other.allocate(2)
    assert one.decisions == other.decisions
    getattr(one, method)(*arguments)
    assert one.decisions != other.decisions
    getattr(other, method)(*arguments)
    assert one.decisions == other.decisions
