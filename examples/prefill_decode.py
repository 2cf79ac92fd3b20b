"""Prefill on one group of processes, decode in another process: only a cache store connects them.

Two ranks prefill prompts under context parallelism and store the pages, each rank its share. They end. A decode process
starts, finds the pages in the store, computes the few tokens behind the last full page of each prompt, and goes on. One
process that does everything itself must come to the same tokens and logits, and the pages must be the same bytes.
"""

from __future__ import annotations

import argparse
import datetime
import sys
import tempfile
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from hf_reference import relate_indexers, small_model
from torch import Tensor

from sparse_cp_ops.cache_store import page_keys
from sparse_cp_ops.config import CPRotateMethod, ParallelismConfig, PrefillCPConfig
from sparse_cp_ops.integrations.transformers import SparseCpModel

PAGE_SIZE = 16
# Ranks that wait for one that failed get an error within this time.
GROUP_TIMEOUT = datetime.timedelta(seconds=60)
DEADLINE = 300.0  # seconds for each group of processes
FLUSH_SECONDS = 60.0  # until the store has acknowledged all pages, each of which a file store fsyncs
# float64: a GEMM's rounding depends on the number of rows by 1e-16 only; anything above this is a fault.
BOUND = 1e-9


@dataclass(frozen=True)
class Settings:
    """What all processes are told. Nothing else passes between prefill and decode but the store."""

    store_url: str
    prompts: list[list[int]]
    ranks: int
    steps: int

    def model(self, rank: int = 0, ranks: int = 1, store: bool = True) -> SparseCpModel:
        """The same weights in every process, around a cache of its own."""
        torch.set_num_threads(1)
        model = small_model("deepseek_v32", dtype=torch.float64, num_hidden_layers=2)
        relate_indexers(model)
        cp = PrefillCPConfig(method=CPRotateMethod.ALL_GATHER_WITH_OVERLAP, min_tokens=0, min_kv_work=0)
        tokens = sum(len(prompt) + self.steps + PAGE_SIZE for prompt in self.prompts)
        return SparseCpModel(
            model,
            ParallelismConfig(tp_size=ranks, tp_rank=rank, prefill_cp_config=cp),
            dist.group.WORLD if ranks > 1 else None,
            num_pages=-(-tokens // PAGE_SIZE),
            page_size=PAGE_SIZE,
            max_positions=max(map(len, self.prompts)) + self.steps,
            store_url=self.store_url if store else None,
            model_id="small random weights 0",
        )


def pages_of(model: SparseCpModel, pages: list[int]) -> list[Tensor]:
    """The bytes of some pages, both caches of all layers."""
    cache: Any = model.cache
    return [array[pages].clone() for array in (*cache.mla, *cache.indexer) if array is not None]


def prefill(rank: int, settings: Settings, folder: str) -> None:
    """One rank of the prefill group."""
    rendezvous = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=settings.ranks, timeout=GROUP_TIMEOUT)
    model = settings.model(rank, settings.ranks)
    start = time.perf_counter()
    requests, _ = model.prefill(settings.prompts)
    seconds = time.perf_counter() - start
    assert model.store is not None
    complete = model.store.flush(FLUSH_SECONDS)
    full = [request.pages[: len(request.tokens) // PAGE_SIZE] for request in requests]
    report = {
        "seconds": seconds,
        "complete": complete,
        "stored": model.store.stats.stored,
        "hits": [request.prefix_hit for request in requests],
        "pages": [pages_of(model, pages) for pages in full],
    }
    torch.save(report, f"{folder}/prefill{rank}.pt")
    model.store.close()
    dist.destroy_process_group()


def decode(_: int, settings: Settings, folder: str) -> None:
    """The decode process."""
    model = settings.model()
    start = time.perf_counter()
    requests, logits = model.prefill(settings.prompts)
    seconds = time.perf_counter() - start
    hits = [request.prefix_hit for request in requests]
    loaded = [pages_of(model, request.pages[: hit // PAGE_SIZE]) for request, hit in zip(requests, hits, strict=True)]
    tokens, steps = generate(model, requests, logits, settings.steps)
    assert model.store is not None
    report = {"seconds": seconds, "hits": hits, "pages": loaded, "tokens": tokens, "logits": steps}
    torch.save(report, f"{folder}/decode.pt")
    model.store.close()


def generate(model: SparseCpModel, requests: Any, logits: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """Greedy tokens [steps, B] and the logits [steps + 1, B, vocab] that they come from."""
    tokens, all_logits = [], [logits]
    for _ in range(steps):
        tokens.append(all_logits[-1].argmax(-1))
        all_logits.append(model.decode(requests, tokens[-1].tolist()))
    return torch.stack(tokens), torch.stack(all_logits)


def run_processes(role: Any, count: int, settings: Settings, folder: str) -> None:
    """Start processes of one role and wait for their end; a traceback in one of them is raised here."""
    processes = mp.spawn(role, (settings, folder), count, join=False)
    end = time.monotonic() + DEADLINE
    try:
        while not processes.join(timeout=1.0):
            if time.monotonic() > end:
                raise TimeoutError(f"{role.__name__} did not finish within {DEADLINE:.0f} s")
    finally:
        for process in processes.processes:
            process.kill()


def check(prefills: list[dict[str, Any]], decoded: dict[str, Any], settings: Settings) -> list[str]:
    """What is not as it should be."""
    faults = []
    distinct = {key for prompt in settings.prompts for key in page_keys(prompt, PAGE_SIZE)}
    loadable = [(len(prompt) - 1) // PAGE_SIZE for prompt in settings.prompts]
    if not all(report["complete"] for report in prefills):
        faults.append("the store did not acknowledge all pages in time")
    if sum(report["stored"] for report in prefills) != len(distinct):
        faults.append(f"{[report['stored'] for report in prefills]} pages were stored, expected {len(distinct)} in all")
    if decoded["hits"] != [pages * PAGE_SIZE for pages in loadable]:
        faults.append(f"decode has loaded {decoded['hits']} tokens, expected all full pages of {loadable}")
    for rank, report in enumerate(prefills):
        for pages, loaded, count in zip(report["pages"], decoded["pages"], loadable, strict=True):
            if not all(torch.equal(ours[:count], theirs) for ours, theirs in zip(pages, loaded, strict=True)):
                faults.append(f"loaded pages differ from those of prefill rank {rank}")
    alone = settings.model(store=False)
    requests, logits = alone.prefill(settings.prompts)
    tokens, all_logits = generate(alone, requests, logits, settings.steps)
    difference = float((all_logits - decoded["logits"]).abs().max())
    if not torch.equal(tokens, decoded["tokens"]) or not difference <= BOUND:
        faults.append(f"the continuation differs from one process's: logits by {difference:.1e}, bound {BOUND:.0e}")
    return faults


def main(arguments: list[str] | None = None) -> int:
    """Run the example; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", help="URL of the store (default: file:// in a temporary folder)")
    parser.add_argument("--ranks", type=int, default=2, help="prefill processes (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=16, help="tokens to decode (default: %(default)s)")
    options = parser.parse_args(arguments)
    story = list(b"A page that one machine has computed, another machine need not compute again. " * 4)
    with tempfile.TemporaryDirectory() as folder:
        url = options.store or f"file://{folder}/store?memory=64MiB"
        settings = Settings(url, [story, story[:100] + list(b" Why?"), story[7:39]], options.ranks, options.steps)
        run_processes(prefill, options.ranks, settings, folder)
        run_processes(decode, 1, settings, folder)
        prefills = [torch.load(f"{folder}/prefill{rank}.pt") for rank in range(options.ranks)]
        decoded = torch.load(f"{folder}/decode.pt")
    faults = check(prefills, decoded, settings)
    shares = " + ".join(f"{report['stored']}" for report in prefills)
    print(f"prompts of {[len(prompt) for prompt in settings.prompts]} tokens, pages of {PAGE_SIZE}")
    print(f"prefill: {prefills[0]['seconds']:.2f} s on {options.ranks} ranks, which stored {shares} pages")
    print(f"decode: loaded {decoded['hits']} tokens, first logits after {decoded['seconds']:.2f} s")
    print(f"tokens: {[bytes(column.tolist()) for column in decoded['tokens'].T]}")
    for fault in faults:
        print(f"WRONG: {fault}")
    if not faults:
        print("loaded pages are the prefill's bit for bit, and the continuation is that of one process")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
