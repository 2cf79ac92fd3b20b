"""DeepSeek-V3.2 and GLM-5 of Hugging Face transformers with this package's attention, caches and context parallelism.

::

    model = DeepseekV32ForCausalLM.from_pretrained(...)
    sparse = SparseCpModel(model, parallelism_config, group, num_pages=4096)
    requests, logits = sparse.prefill([prompt_a, prompt_b])      # on every rank, with the same prompts
    logits = sparse.decode(requests, logits.argmax(-1).tolist())
    sparse.release(requests)
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sparse_cp_ops.cache_store import (
    CacheStore,
    CacheWriter,
    PrefixCache,
    block_table,
    create_cache_writer,
    restore_prefixes,
)
from sparse_cp_ops.config import ParallelismConfig
from sparse_cp_ops.context_parallel.collectives import gather_hidden_states, gather_last_tokens, take_local_rows
from sparse_cp_ops.context_parallel.plan import CpPlan
from sparse_cp_ops.kv_cache import PagedKvCache
from sparse_cp_ops.nn.inputs import AttentionInputs
from sparse_cp_ops.nn.mla_attention import MlaAttention
from sparse_cp_ops.nn.mla_config import MlaConfig
from sparse_cp_ops.nn.sparse_mla import SparseMlaImpl, get_mla_impl
from sparse_cp_ops.nn.unquantised import UnquantisedKvCache

try:
    from transformers import DeepseekV32ForCausalLM, GlmMoeDsaForCausalLM
except ImportError as error:
    raise ImportError(
        "sparse_cp_ops.integrations.transformers needs transformers with DeepSeek-V3.2 and GLM-5 (tested with 5.17.0): "
        "pip install 'transformers==5.17.0'"
    ) from error

Prompt = Sequence[int] | Tensor
Logits = Literal["last", "all"]
OnPicks = Callable[[int, CpPlan, Tensor], None]


@dataclass(eq=False)
class Request:
    """A running request: what the cache holds of it. Made by :meth:`SparseCpModel.prefill`.

    Attributes:
        tokens: the tokens whose keys are in the cache, from the first on.
        pages: their pages in order, held until :meth:`SparseCpModel.release`.
        prefix_hit: how many of the prompt's tokens were there already, on the device or in the store.
        released: whether it has ended; its pages may hold other tokens by now.
    """

    tokens: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    prefix_hit: int = 0
    released: bool = False


@dataclass(frozen=True)
class _Forward:
    """What the attention layers need to know of the running forward; handed down through the decoder layers."""

    cache: PagedKvCache | UnquantisedKvCache
    impl: SparseMlaImpl
    plan: CpPlan
    on_picks: OnPicks | None


class _HfAttention(MlaAttention):
    """MlaAttention with the calling convention of transformers' decoder layers."""

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        sparse_cp_forward: _Forward,
        prev_topk_indices: Tensor | None = None,
        **unused: object,
    ) -> tuple[Tensor | None, ...]:
        now = sparse_cp_forward
        out, picks = super().forward(hidden_states[0], now.cache, now.impl, now.plan, prev_topk_indices)
        if now.on_picks is not None:
            now.on_picks(self.layer_id, now.plan, picks)
        # GLM's decoder layers pass the picks on, DeepSeek's have no use for them.
        return (out[None], None, picks) if self.mla_config.indexer_interleaved else (out[None], None)


class SparseCpModel:
    """A ``DeepseekV32ForCausalLM`` or ``GlmMoeDsaForCausalLM`` whose attention is replaced by this package's.

    All weights are shared with the given model, which itself stays as it is. During prefill under context parallelism
    each rank computes its own rows through the whole model (MLPs and experts are replicated); hidden states travel
    once, at the end. Every rank calls the same methods with the same arguments and gets the same logits.

    Attributes:
        config: dimensions and modes of the attention.
        cache: the paged caches of all layers.
        prefix_cache: which pages hold which tokens.
        store: where pages go to and come from beyond the device; None = nowhere.
    """

    def __init__(
        self,
        model: DeepseekV32ForCausalLM | GlmMoeDsaForCausalLM,
        parallelism_config: ParallelismConfig | None = None,
        group: dist.ProcessGroup | None = None,
        *,
        num_pages: int,
        page_size: int = 64,
        store_url: str | None = None,
        model_id: str = "",
        **config_overrides: Any,
    ) -> None:
        """Build the attention layers around the model's weights, and allocate the caches on its device.

        Args:
            model: the model, all of it on one device; put into evaluation mode.
            parallelism_config: how the ranks share the work; None = one rank.
            group: the tensor-parallel ranks; None = this process alone.
            num_pages: pages of the cache, shared by running requests and kept prefixes.
            page_size: tokens a page.
            store_url: a store for the pages of prefills, see :meth:`CacheStore.open`; None = none.
            model_id: tells the pages of this model from those of others in a store: name and version of the weights;
                not empty with ``store_url``.
            config_overrides: other fields of :class:`MlaConfig`, for example ``quantise=False`` or ``precision="f16"``.

        Raises:
            TypeError: another kind of model.
            ValueError: a model on several devices, dimensions or modes that are not supported, or a store without a
                ``model_id``.
        """
        if not isinstance(model, (DeepseekV32ForCausalLM, GlmMoeDsaForCausalLM)):
            raise TypeError(
                "SparseCpModel: model: expected a DeepseekV32ForCausalLM or GlmMoeDsaForCausalLM, "
                f"got {type(model).__name__}"
            )
        devices = {parameter.device for parameter in model.parameters()}
        if len(devices) != 1:
            raise ValueError(f"SparseCpModel: model: expected all parameters on one device, got {devices}")
        self.device = devices.pop()
        parallelism_config = parallelism_config or ParallelismConfig()
        model.train(False)
        self.config = MlaConfig.from_hf(model.config, page_size=page_size, **config_overrides)
        self.impl = get_mla_impl(self.config, parallelism_config, group)
        self.embed_tokens, self.norm, self.lm_head = model.model.embed_tokens, model.model.norm, model.lm_head
        self.layers = [
            _with_attention(layer, _share_weights(layer.self_attn, self.config, layer_id, parallelism_config, group))
            for layer_id, layer in enumerate(model.model.layers[: self.config.num_layers])
        ]
        self.cache: PagedKvCache | UnquantisedKvCache
        if self.config.quantise:
            owners = [self.config.has_indexer(layer_id) for layer_id in range(self.config.num_layers)]
            self.cache = PagedKvCache(self.config.num_layers, num_pages, page_size, self.device, owners)
        else:
            # float64 models keep their precision: that is how to tell rounding from faults.
            dtype = torch.promote_types(model.dtype, torch.float32)
            self.cache = UnquantisedKvCache(self.config.num_layers, num_pages, page_size, self.device, dtype)
        self.store: CacheStore | None = None
        fingerprint = b""
        if store_url is not None:
            if not isinstance(self.cache, PagedKvCache):
                raise ValueError("SparseCpModel: store_url: expected None with quantise=False, got a store")
            if not isinstance(model_id, str) or not model_id:  # else models of the same layout would share pages
                raise ValueError(
                    "SparseCpModel: model_id: expected the name and version of the weights beside store_url, "
                    f"got {model_id!r}"
                )
            self.store = CacheStore.open(store_url, self.cache, f"{model_id} {_numerics(self.config)}")
            fingerprint = self.store.fingerprint
        self.prefix_cache = PrefixCache(num_pages, page_size, fingerprint)

    def prefill(
        self,
        prompts: Sequence[Prompt],
        *,
        logits: Logits = "last",
        chunk_tokens: int | None = None,
        on_picks: OnPicks | None = None,
    ) -> tuple[list[Request], Tensor]:
        """Start requests: reuse the cached pages that their prompts begin with, compute the rest.

        Args:
            prompts: token ids of each request, at least one each.
            logits: "last" for those of each prompt's last token, "all" for those of every token that was computed.
            chunk_tokens: most tokens of one forward; None = all in one.
            on_picks: called as ``on_picks(layer_id, plan, picks)`` with what each layer of each forward picked for this
                rank's rows, int32 [L, topk].

        Returns:
            The requests, and logits [B, vocab] or [T, vocab]: the computed tokens of request after request.

        Raises:
            ValueError: an empty prompt or a prompt beyond the model's positions.
            OutOfPagesError: the cache is too small; nothing is held then.
        """
        waiting = [_token_list(f"prompts[{index}]", prompt) for index, prompt in enumerate(prompts)]
        if chunk_tokens is not None and chunk_tokens < 1:
            raise ValueError(f"SparseCpModel: chunk_tokens: expected at least 1, got {chunk_tokens}")
        requests: list[Request] = []
        try:
            found = restore_prefixes(self.prefix_cache, self.store, waiting, self.impl.group, self.device)
            for prompt, pages in zip(waiting, found, strict=True):
                hit = len(pages) * self.config.page_size
                requests.append(Request(prompt[:hit], pages, hit))
            parts: list[list[Tensor]] = [[] for _ in prompts]
            for chunk in _chunks([len(p) - r.prefix_hit for p, r in zip(waiting, requests, strict=True)], chunk_tokens):
                batch = [requests[index] for index, _ in chunk]
                new = [waiting[index][len(requests[index].tokens) :][:count] for index, count in chunk]
                for (index, _), rows in zip(chunk, self._extend(batch, new, True, logits, on_picks), strict=True):
                    parts[index].append(rows)
        except BaseException:
            self.release(requests)
            raise
        for request in requests:
            self.prefix_cache.insert(request.tokens, request.pages)
        keep = slice(None) if logits == "all" else slice(-1, None)
        return requests, torch.cat([rows for of_request in parts for rows in of_request[keep]])

    def extend(
        self,
        requests: Sequence[Request],
        new_tokens: Sequence[Prompt],
        *,
        logits: Logits = "last",
        on_picks: OnPicks | None = None,
    ) -> Tensor:
        """Append any number of tokens to running requests in one forward: a mixed batch of prefill and decode rows.

        Args:
            requests: the requests.
            new_tokens: token ids for each, at least one.
            logits, on_picks: as in :meth:`prefill`.

        Returns:
            Logits [B, vocab], or [T, vocab] in packed order.
        """
        new = [_token_list(f"new_tokens[{index}]", tokens) for index, tokens in enumerate(new_tokens)]
        return torch.cat(self._extend(requests, new, True, logits, on_picks))

    def decode(self, requests: Sequence[Request], tokens: Sequence[int], *, on_picks: OnPicks | None = None) -> Tensor:
        """Append one token to each request; logits [B, vocab] of what comes next."""
        return torch.cat(self._extend(requests, [[int(token)] for token in tokens], False, "last", on_picks))

    def release(self, requests: Sequence[Request]) -> None:
        """End requests. Their full pages stay in the cache until their room is needed, for prompts that begin alike."""
        for request in requests:
            if not request.released:
                self.prefix_cache.insert(request.tokens, request.pages)
                self.prefix_cache.release(request.pages)
                request.pages, request.released = [], True

    @torch.no_grad()
    def _extend(
        self,
        requests: Sequence[Request],
        new_tokens: list[list[int]],
        is_prefill: bool,
        logits: Logits,
        on_picks: OnPicks | None,
    ) -> list[Tensor]:
        """One forward; logits [1, vocab] or [new tokens, vocab] of each request."""
        if len(requests) != len(new_tokens):
            raise ValueError(f"SparseCpModel: new_tokens: expected {len(requests)} as requests, got {len(new_tokens)}")
        if len({id(request) for request in requests}) != len(requests):
            raise ValueError("SparseCpModel: requests: expected each request once, got one of them twice")
        if any(request.released for request in requests):
            raise ValueError("SparseCpModel: requests: expected running requests, got one that was released")
        if logits not in ("last", "all"):
            raise ValueError(f"SparseCpModel: logits: expected 'last' or 'all', got {logits!r}")
        lengths = [len(tokens) for tokens in new_tokens]
        added = self._allocate(requests, lengths)
        try:
            tables = [[*request.pages, *pages] for request, pages in zip(requests, added, strict=True)]
            for request, pages in zip(requests, tables, strict=True):
                self.prefix_cache.require_private(pages[len(request.tokens) // self.config.page_size :])
            inputs = AttentionInputs(
                is_prefill,
                torch.tensor(lengths, dtype=torch.int32),
                torch.tensor([len(request.tokens) for request in requests], dtype=torch.int32),
                block_table(tables, self.device),
                self.prefix_cache.decisions,
            )
            writer = None
            if self.store is not None:
                sequences = [request.tokens + tokens for request, tokens in zip(requests, new_tokens, strict=True)]
                writer = create_cache_writer(self.store, inputs, sequences, tables, self.impl.group)
            with writer or nullcontext():
                hidden, plan = self._run_layers(new_tokens, inputs, on_picks, writer)
            gather = gather_last_tokens if logits == "last" else gather_hidden_states
            rows: Tensor = self.lm_head(gather(hidden, plan, self.impl.group))
        except BaseException:
            for pages in added:
                self.prefix_cache.release(pages)
            raise
        for request, tokens, pages in zip(requests, new_tokens, added, strict=True):
            request.tokens += tokens
            request.pages += pages
        return list(rows.split([1] * len(requests) if logits == "last" else lengths))

    def _run_layers(
        self,
        new_tokens: list[list[int]],
        inputs: AttentionInputs,
        on_picks: OnPicks | None,
        writer: CacheWriter | None,
    ) -> tuple[Tensor, CpPlan]:
        """Hidden states of this rank's rows behind the last norm, [L, hidden_size]."""
        plan = self.impl.prepare(inputs)
        tokens = torch.tensor([token for of_request in new_tokens for token in of_request], device=self.device)
        if plan.use_cp:
            tokens = take_local_rows(tokens, plan)
        now = _Forward(self.cache, self.impl, plan, on_picks)
        hidden, picks = self.embed_tokens(tokens)[None], None
        for layer_id, layer in enumerate(self.layers):
            result = layer(hidden, attention_mask=None, sparse_cp_forward=now, prev_topk_indices=picks)
            hidden, picks = result if isinstance(result, tuple) else (result, None)
            if writer is not None:
                writer.write_layer(layer_id)
        return self.norm(hidden)[0], plan

    def _allocate(self, requests: Sequence[Request], lengths: list[int]) -> list[list[int]]:
        """Pages that the new tokens need beyond those that the requests hold."""
        page_size = self.config.page_size
        added: list[list[int]] = []
        try:
            for request, length in zip(requests, lengths, strict=True):
                needed = -(-(len(request.tokens) + length) // page_size)
                added.append(self.prefix_cache.allocate(needed - len(request.pages)))
        except BaseException:
            for pages in added:
                self.prefix_cache.release(pages)
            raise
        return added


def _numerics(config: MlaConfig) -> str:
    """What the records depend on besides the weights: overrides may change it. The fast modes write the same ones."""
    names = ("index_topk", "softmax_scale", "rope_theta", "yarn", "indexer_interleaved", "rms_norm_eps")
    return " ".join([config.scale_format, *(f"{name}={getattr(config, name)}" for name in names)])


def _share_weights(
    attention: nn.Module,
    config: MlaConfig,
    layer_id: int,
    parallelism_config: ParallelismConfig,
    group: dist.ProcessGroup | None,
) -> _HfAttention:
    """This package's layer around the very parameters of transformers' layer."""
    ours = _HfAttention(config, layer_id, parallelism_config, group, device="meta")
    # keep_vars: the parameters themselves and no detached aliases, so that later updates of either are seen by both.
    ours.load_state_dict(attention.state_dict(keep_vars=True), strict=True, assign=True)
    ours.refresh_rope_table()
    return ours


def _with_attention(layer: nn.Module, attention: _HfAttention) -> nn.Module:
    """A decoder layer like the given one, with the same parts except for the attention."""
    if "forward" in vars(layer):
        raise ValueError(
            "SparseCpModel: model: a decoder layer's forward is wrapped (device_map?), which is not supported"
        )
    ours = copy.copy(layer)
    ours._modules = dict(layer._modules)
    ours.self_attn = attention
    return ours


def _token_list(name: str, tokens: Prompt) -> list[int]:
    found = [int(token) for token in (tokens.tolist() if isinstance(tokens, Tensor) else tokens)]
    if not found:
        raise ValueError(f"SparseCpModel: {name}: expected at least one token, got none")
    return found


def _chunks(lengths: list[int], chunk_tokens: int | None) -> list[list[tuple[int, int]]]:
    """Forwards as lists of (request, tokens): request after request, at most ``chunk_tokens`` in each forward."""
    budget = chunk_tokens or max(sum(lengths), 1)
    forwards: list[list[tuple[int, int]]] = [[]]
    room = budget
    for request, length in enumerate(lengths):
        while length:
            if not room:
                forwards.append([])
                room = budget
            count = min(length, room)
            forwards[-1].append((request, count))
            length -= count
            room -= count
    return forwards
