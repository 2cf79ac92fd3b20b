"""What the modules need to know about a model, in one frozen object."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sparse_cp_ops.kv_cache import PAGE_SIZES

KV_LORA_RANK = 512
ROPE_DIM = 64
INDEX_HEAD_DIM = 128
# Head counts of the attention kernels; MlaAttention pads other counts to the next one.
ATTENTION_HEADS = (8, 16, 32, 64, 128)
MAX_TOPK = 2048
MIN_WORKSPACE = 1 << 20  # bytes that the top-k op needs whatever the shape
# Largest |value| of the encoded indexer queries. With 448 the half-precision sum over 128 products could overflow.
Q_ABSMAX = {"fp32": 448.0, "f16": 0.875}


@dataclass(frozen=True)
class YarnScaling:
    """YaRN parameters (https://arxiv.org/abs/2309.00071), named as in Hugging Face configs.

    ``attention_factor`` multiplies cosines and sines; None derives it from ``factor``, ``mscale``, ``mscale_all_dim``.
    """

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        for name in ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow"):
            value = getattr(self, name)
            if not _is_number(value) or value <= 0:
                raise ValueError(f"YarnScaling: {name}: expected a finite number > 0, got {value!r}")
        for name in ("mscale", "mscale_all_dim", "attention_factor"):
            value = getattr(self, name)
            if value is not None and not _is_number(value):
                raise ValueError(f"YarnScaling: {name}: expected a finite number or None, got {value!r}")

    def softmax_factor(self) -> float:
        """What YaRN multiplies the softmax scale by: the square of ``0.1 * mscale_all_dim * ln(factor) + 1``."""
        return yarn_mscale(self.factor, self.mscale_all_dim) ** 2 if self.mscale_all_dim else 1.0


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """Attention temperature of YaRN for a context stretched by ``factor``."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


@dataclass(frozen=True)
class MlaConfig:
    """Dimensions, scales and modes of a model with multi-head latent attention and a lightning indexer.

    Args:
        hidden_size: width of the hidden states.
        num_heads: attention heads of the model, at most 128.
        q_lora_rank: width of the compressed query.
        qk_nope_head_dim: part of a query head without position.
        v_head_dim: width of a value head.
        index_n_heads: heads of the indexer, a multiple of 8 up to 64.
        index_topk: keys that a row attends to, a multiple of 64 up to 2048.
        softmax_scale: multiplies the attention logits; ``mla_softmax_scale`` computes it.
        num_layers: layers of the model.
        max_positions: rows of the RoPE table; longer requests are refused.
        kv_lora_rank, qk_rope_head_dim, index_head_dim: fixed by the record layouts to 512, 64 and 128.
        rms_norm_eps: epsilon of the two latent RMSNorms.
        attention_bias: whether the first projections and the output projection have a bias.
        indexer_interleaved: RoPE pairs of the indexer: False (i, i + 32) as in DeepSeek-V3.2, True (2i, 2i + 1) as in
            GLM-5.
        indexer_types: "full" or "shared" a layer (a shared layer reuses the picks of the last full one); () = all full.
        scale_format: "ue8m0" (scales are powers of two) or "fp32", for everything the package writes.
        precision: of the indexer scores, "fp32" or the declared fast mode "f16".
        attention_precision: "high" or the declared fast mode "fp8".
        quantise: False runs plain PyTorch without FP8 and Hadamard (one rank; to compare with a reference).
        page_size: tokens a cache page, one of 16, 32, 64, 128.
        workspace_bytes: limit for the temporary memory of the top-k; 0 = the op's default.
        rope_theta: base of the RoPE frequencies.
        yarn: YaRN parameters, None for plain RoPE.

    Raises:
        ValueError: a dimension that the kernels don't support, or an unknown mode.
    """

    hidden_size: int
    num_heads: int
    q_lora_rank: int
    qk_nope_head_dim: int
    v_head_dim: int
    index_n_heads: int
    index_topk: int
    softmax_scale: float
    num_layers: int
    max_positions: int
    kv_lora_rank: int = KV_LORA_RANK
    qk_rope_head_dim: int = ROPE_DIM
    index_head_dim: int = INDEX_HEAD_DIM
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    indexer_interleaved: bool = False
    indexer_types: tuple[str, ...] = ()
    scale_format: str = "ue8m0"
    precision: str = "fp32"
    attention_precision: str = "high"
    quantise: bool = True
    page_size: int = 64
    workspace_bytes: int = 0
    rope_theta: float = 10000.0
    yarn: YarnScaling | None = None

    def __post_init__(self) -> None:
        fixed = {"kv_lora_rank": KV_LORA_RANK, "qk_rope_head_dim": ROPE_DIM, "index_head_dim": INDEX_HEAD_DIM}
        for name, value in fixed.items():
            _require(getattr(self, name) == value, name, f"{value}, which the record layout fixes", getattr(self, name))
        for name in ("hidden_size", "q_lora_rank", "qk_nope_head_dim", "v_head_dim", "num_layers", "max_positions"):
            _require(_is_int(getattr(self, name), 1), name, "an int >= 1", getattr(self, name))
        _require(
            _is_int(self.num_heads, 1) and self.num_heads <= ATTENTION_HEADS[-1],
            "num_heads",
            f"1 to {ATTENTION_HEADS[-1]}",
            self.num_heads,
        )
        _require(
            _is_int(self.index_n_heads, 8) and self.index_n_heads % 8 == 0 and self.index_n_heads <= 64,
            "index_n_heads",
            "a multiple of 8 up to 64",
            self.index_n_heads,
        )
        _require(
            _is_int(self.index_topk, 64) and self.index_topk % 64 == 0 and self.index_topk <= MAX_TOPK,
            "index_topk",
            f"a multiple of 64 up to {MAX_TOPK}",
            self.index_topk,
        )
        _require(
            _is_int(self.page_size, 1) and self.page_size in PAGE_SIZES,
            "page_size",
            f"one of {PAGE_SIZES}",
            self.page_size,
        )
        _require(self.scale_format in ("ue8m0", "fp32"), "scale_format", "'ue8m0' or 'fp32'", self.scale_format)
        _require(self.precision in Q_ABSMAX, "precision", "'fp32' or 'f16'", self.precision)
        _require(
            self.attention_precision in ("high", "fp8"),
            "attention_precision",
            "'high' or 'fp8'",
            self.attention_precision,
        )
        _require(
            _is_int(self.workspace_bytes, 0) and (self.workspace_bytes == 0 or self.workspace_bytes >= MIN_WORKSPACE),
            "workspace_bytes",
            f"0 or an int >= {MIN_WORKSPACE}",
            self.workspace_bytes,
        )
        for name in ("softmax_scale", "rope_theta"):
            value = getattr(self, name)
            _require(_is_number(value) and value > 0, name, "a finite number > 0", value)
        _require(
            _is_number(self.rms_norm_eps) and self.rms_norm_eps >= 0,
            "rms_norm_eps",
            "a finite number >= 0",
            self.rms_norm_eps,
        )
        for name in ("attention_bias", "indexer_interleaved", "quantise"):
            _require(isinstance(getattr(self, name), bool), name, "a bool", getattr(self, name))
        _require(self.yarn is None or isinstance(self.yarn, YarnScaling), "yarn", "a YarnScaling or None", self.yarn)
        # A list would make the config unhashable.
        _require(isinstance(self.indexer_types, tuple), "indexer_types", "a tuple", self.indexer_types)
        if self.indexer_types:
            types = self.indexer_types
            _require(len(types) == self.num_layers, "indexer_types", f"{self.num_layers} entries", len(types))
            _require(set(types) <= {"full", "shared"}, "indexer_types", "'full' or 'shared' a layer", types)
            _require(types[0] == "full", "indexer_types", "a 'full' first layer", types[0])

    def has_indexer(self, layer_id: int) -> bool:
        """Whether a layer picks its own keys; otherwise it takes the picks of the last layer that does."""
        if not 0 <= layer_id < self.num_layers:
            raise ValueError(f"MlaConfig: layer_id: expected 0 to {self.num_layers - 1}, got {layer_id}")
        return not self.indexer_types or self.indexer_types[layer_id] == "full"

    @property
    def qk_head_dim(self) -> int:
        """Width of a query head before absorption."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def q_absmax(self) -> float:
        """Largest magnitude of the encoded indexer queries, as ``quant_q_k_cp`` and the top-k op have to agree on."""
        return Q_ABSMAX[self.precision]

    @property
    def index_weight_scale(self) -> float:
        """What the head weights of the indexer are multiplied by: ``128^-0.5 * index_n_heads^-0.5``."""
        return float(self.index_head_dim**-0.5 * self.index_n_heads**-0.5)

    @classmethod
    def from_hf(cls, config: Any, **overrides: Any) -> MlaConfig:
        """Read a Hugging Face ``DeepseekV32Config`` or ``GlmMoeDsaConfig`` (transformers 4 or 5 spelling of RoPE).

        Args:
            config: the model's config.
            overrides: fields of MlaConfig that replace what the config says, for example ``quantise=False``.

        Raises:
            ValueError: another model type, another kind of RoPE, or dimensions the kernels don't support.
        """
        model_type = getattr(config, "model_type", None)
        if model_type not in ("deepseek_v32", "glm_moe_dsa"):
            raise ValueError(
                f"MlaConfig: config: expected model_type 'deepseek_v32' or 'glm_moe_dsa', got {model_type!r}"
            )
        theta, yarn = _rope_from_hf(config)
        fields: dict[str, Any] = {
            "hidden_size": config.hidden_size,
            "num_heads": config.num_attention_heads,
            "q_lora_rank": config.q_lora_rank,
            "qk_nope_head_dim": config.qk_nope_head_dim,
            "v_head_dim": config.v_head_dim,
            "index_n_heads": config.index_n_heads,
            "index_topk": config.index_topk,
            "num_layers": config.num_hidden_layers,
            "max_positions": config.max_position_embeddings,
            "kv_lora_rank": config.kv_lora_rank,
            "qk_rope_head_dim": config.qk_rope_head_dim,
            "index_head_dim": config.index_head_dim,
            "attention_bias": config.attention_bias,
            "indexer_interleaved": model_type == "glm_moe_dsa",
            "indexer_types": tuple(getattr(config, "indexer_types", None) or ()),
            "rope_theta": theta,
            "yarn": yarn,
            "softmax_scale": mla_softmax_scale(config.qk_nope_head_dim + config.qk_rope_head_dim, yarn),
        }
        return cls(**{**fields, **overrides})


def kernel_heads(count: int) -> int:
    """Heads of the attention kernel that computes ``count`` heads."""
    for supported in ATTENTION_HEADS:
        if supported >= count:
            return supported
    raise ValueError(f"num_heads: expected at most {ATTENTION_HEADS[-1]}, got {count}")


def mla_softmax_scale(qk_head_dim: int, yarn: YarnScaling | None = None) -> float:
    """``qk_head_dim^-0.5``, times YaRN's factor: 0.135234 for DeepSeek-V3.2, 1/16 for GLM-5."""
    return float(qk_head_dim**-0.5) * (yarn.softmax_factor() if yarn else 1.0)


def _rope_from_hf(config: Any) -> tuple[float, YarnScaling | None]:
    """Base and YaRN parameters from ``rope_parameters`` (transformers 5) or ``rope_theta`` and ``rope_scaling`` (4)."""
    found = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    parameters: Mapping[str, Any] = found
    theta = parameters.get("rope_theta") or getattr(config, "rope_theta", None) or 10000.0
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind == "default":
        return float(theta), None
    if kind != "yarn":
        raise ValueError(f"MlaConfig: config.rope_parameters: expected rope_type 'default' or 'yarn', got {kind!r}")
    original = parameters.get("original_max_position_embeddings") or config.max_position_embeddings
    yarn = YarnScaling(
        factor=parameters.get("factor") or config.max_position_embeddings / original,
        original_max_position_embeddings=original,
        beta_fast=parameters.get("beta_fast") or 32.0,
        beta_slow=parameters.get("beta_slow") or 1.0,
        mscale=parameters.get("mscale"),
        mscale_all_dim=parameters.get("mscale_all_dim"),
        attention_factor=parameters.get("attention_factor"),
        truncate=parameters.get("truncate", True),
    )
    return float(theta), yarn


def _is_int(value: object, minimum: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= minimum


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _require(holds: bool, name: str, expected: str, got: object) -> None:
    if not holds:
        raise ValueError(f"MlaConfig: {name}: expected {expected}, got {got!r}")
