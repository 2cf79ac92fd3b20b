"""Part 7: a transformers model of two layers of DeepSeek-V3.2's shape reads 32K tokens of text and decodes.

The text is Python's own documentation, a token a byte. Weights are random: what counts is time, memory, and that pieces
(chunks, prefix hits, single decode steps) give what one forward over everything gives.
"""

from __future__ import annotations

import gc
import pydoc_data.topics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from sparse_cp_ops.bench.layer.model import Bench

TOKENS = 32768
SHARED = 24576  # tokens that the second prompt shares with the first one
CHUNK = 8192
STEPS = 64
EAGER_CHUNK = 1024  # transformers' eager attention holds [heads, chunk, keys] several times


def run(bench: Bench) -> dict[str, Any]:
    """Tokens a second, memory and differences of this package and of transformers' own attention."""
    try:
        from sparse_cp_ops.integrations.transformers import SparseCpModel
    except ImportError as error:
        return {"missing": str(error)}
    total, shared, chunk = bench.tokens(TOKENS), bench.tokens(SHARED), bench.tokens(CHUNK)
    text = list(_text(2 * total))
    first = text[:total]
    second = first[:shared] + text[total : 2 * total - shared]  # the same beginning, another end
    prompt, forced = second[:-STEPS], second[-STEPS:]
    model = _model(bench)
    pages = 4 * -(-total // 64) + 8

    routes = _Routes(model)
    pieces = SparseCpModel(model, num_pages=pages, max_positions=2 * total)
    warm, _ = pieces.prefill([text[total : total + chunk]])
    pieces.decode(warm, [1])
    pieces.release(warm)
    found: dict[str, Any] = {"tokens": total, "chunk": chunk, "steps": STEPS}
    memory = _Memory(bench)
    with_clock = _Clock(bench)
    requests, _ = with_clock("prefill", total, lambda: pieces.prefill([first], chunk_tokens=chunk))
    pieces.release(requests)
    routes.clear()
    requests, logits = with_clock(
        "prefill with a prefix hit", len(prompt), lambda: pieces.prefill([prompt], chunk_tokens=chunk)
    )
    found["prefix_hit"] = requests[0].prefix_hit
    rows = [logits]

    def decode() -> None:
        rows.extend(pieces.decode(requests, [token]) for token in forced)

    with_clock("decode", STEPS, decode)
    found["ours_bytes"] = memory.peak()
    got, got_routes = torch.cat(rows).float(), routes.last(STEPS + 1)
    found["ours"] = with_clock.rates

    # The same tokens in one forward, nothing cached before it.
    whole = SparseCpModel(model, num_pages=pages, max_positions=2 * total)
    _, logits = whole.prefill([second], logits="all")
    expected = logits[-STEPS - 1 :].float()
    same = (got_routes == routes.last(STEPS + 1)).all(dim=1)
    found["rows_with_other_experts"] = int((~same).sum())
    found["relative_difference"] = _relative(got[same], expected[same])
    found["largest_step_difference"] = max(_relative(a, b) for a, b in zip(got[same], expected[same], strict=True))
    found["same_first_token"] = float((got.argmax(-1) == expected.argmax(-1)).float().mean())
    found["bound"] = _bf16_bound(model)
    del whole, logits
    gc.collect()
    found["transformers"] = _transformers(bench, model, prompt, forced)
    return found


def _text(count: int) -> bytes:
    """Real text: the language reference that pydoc carries, repeated with other line numbers if it is too short."""
    topics = "\n".join(pydoc_data.topics.topics.values()).encode()
    return (topics * -(-count // len(topics)))[:count]


def _model(bench: Bench) -> Any:
    from transformers import DeepseekV32Config, DeepseekV32ForCausalLM

    config, tiny = bench.config, bench.scale > 1
    hf = DeepseekV32Config(
        vocab_size=256,
        hidden_size=config.hidden_size,
        intermediate_size=128 if tiny else 18432,
        moe_intermediate_size=64 if tiny else 2048,
        num_hidden_layers=2,
        first_k_dense_replace=1,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_heads,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        q_lora_rank=config.q_lora_rank,
        qk_nope_head_dim=config.qk_nope_head_dim,
        v_head_dim=config.v_head_dim,
        index_n_heads=config.index_n_heads,
        index_topk=config.index_topk,
        max_position_embeddings=config.max_positions,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    torch.manual_seed(0)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(bench.device):
            return DeepseekV32ForCausalLM._from_config(hf, attn_implementation="eager").train(False)  # type: ignore[no-untyped-call]
    finally:
        torch.set_default_dtype(default)


class _Routes:
    """Which experts each token went to. Another rounding can change that, and with it the token's whole result, so
    rows are compared where both runs took the same experts."""

    def __init__(self, model: Any) -> None:
        self._experts: list[Tensor] = []
        for layer in model.model.layers:
            if hasattr(layer.mlp, "gate"):
                layer.mlp.gate.register_forward_hook(lambda _module, _inputs, out: self._experts.append(out[2]))

    def clear(self) -> None:
        self._experts.clear()

    def last(self, rows: int) -> Tensor:
        """[rows, experts a token], sorted, of the last tokens; the model has one layer with experts."""
        return torch.cat(self._experts)[-rows:].sort(dim=1).values


class _Clock:
    """Seconds and tokens a second of named steps; the device is idle before and after each."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self.rates: dict[str, dict[str, float]] = {}

    def __call__(self, name: str, tokens: int, call: Callable[[], Any]) -> Any:
        self._wait()
        start = time.perf_counter()
        result = call()
        self._wait()
        seconds = time.perf_counter() - start
        self.rates[name] = {"seconds": seconds, "tokens_per_s": tokens / seconds}
        return result

    def _wait(self) -> None:
        if self._bench.device.type == "cuda":
            torch.cuda.synchronize()


class _Memory:
    """Peak of allocated memory above what is there at the start."""

    def __init__(self, bench: Bench) -> None:
        self._cuda = bench.device.type == "cuda"
        if self._cuda:
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            self._start = torch.cuda.memory_allocated()

    def peak(self) -> int | None:
        return torch.cuda.max_memory_allocated() - self._start if self._cuda else None


def _relative(got: Tensor, expected: Tensor) -> float:
    return float((got - expected).norm() / expected.norm())


def _bf16_bound(model: nn.Module) -> float:
    """What GEMMs of other row counts may change, relative to the logits' norm.

    A bf16 result that was summed in another order can round to its neighbour, 2^-8 away relative to itself; with
    random signs the norm of such differences is at most 2^-8 of the norm per rounded tensor. Independent errors add in
    squares: a layer rounds 12 tensors on the way of the residual stream (norm, latents, queries, values, output, three
    of the MLP, the sums), beside the last norm and the head.
    """
    roundings = 12 * len(model.model.layers) + 2  # type: ignore[arg-type, union-attr]
    return float(2.0**-8 * roundings**0.5)


@torch.no_grad()
def _transformers(bench: Bench, model: Any, prompt: list[int], forced: list[int]) -> dict[str, Any]:
    """transformers' own eager attention, in chunks that fit, with its own cache."""
    from transformers import DynamicCache

    clock, memory, chunk = _Clock(bench), _Memory(bench), bench.tokens(EAGER_CHUNK)
    cache = DynamicCache(config=model.config)
    tokens = torch.tensor([prompt + forced], device=bench.device)

    def forward(start: int, end: int) -> None:
        model(tokens[:, start:end], past_key_values=cache, use_cache=True, logits_to_keep=1)

    def prefill() -> None:
        for start in range(0, len(prompt), chunk):
            forward(start, min(start + chunk, len(prompt)))

    def decode() -> None:
        for i in range(len(prompt), len(prompt) + len(forced)):
            forward(i, i + 1)

    try:
        clock("prefill", len(prompt), prefill)
        clock("decode", len(forced), decode)
    except torch.OutOfMemoryError as error:
        return {"does_not_fit": str(error).splitlines()[0], "chunk": chunk}
    return {"chunk": chunk, "bytes": memory.peak(), **clock.rates}
