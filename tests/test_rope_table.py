"""The RoPE table against transformers' own rotary modules, and MlaConfig against the models' configs."""

import dataclasses
import gc
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import DeepseekV32Config, GlmMoeDsaConfig
from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32Attention, DeepseekV32RotaryEmbedding
from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import GlmMoeDsaAttention, GlmMoeDsaRotaryEmbedding

from sparse_cp_ops.nn import MlaConfig, YarnScaling, build_cos_sin_cache, mla_softmax_scale

# rope_scaling of DeepSeek-V3.2's published config.json
YARN = {
    "type": "yarn",
    "factor": 40,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
YARN_VARIANTS = {
    "published": YARN,
    "mscale differs": {**YARN, "mscale": 1.3, "mscale_all_dim": 0.7},
    "no mscale": {key: value for key, value in YARN.items() if not key.startswith("mscale")},
    "attention factor": {**YARN, "attention_factor": 1.25},
    "untruncated": {**YARN, "truncate": False},
    "narrow ramp": {**YARN, "beta_fast": 2, "beta_slow": 2, "truncate": False},
    "stretched twice": {**YARN, "factor": 2, "original_max_position_embeddings": 32768},
    "shrunk": {**YARN, "factor": 0.5},
}


def small(config_class: type, **fields: Any) -> Any:
    """A config whose attention modules are quick to build; RoPE as given."""
    sizes = {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 8, "q_lora_rank": 32}
    return config_class(**{**sizes, "num_hidden_layers": 2, "max_position_embeddings": 8192, **fields})


def their_table(rotary: torch.nn.Module, positions: int, dim: int) -> torch.Tensor:
    """Cosines, then sines of transformers' module, one of its two equal halves each."""
    cos, sin = rotary(torch.empty(1), torch.arange(positions)[None])
    return torch.cat([cos[0, :, : dim // 2], sin[0, :, : dim // 2]], dim=-1)


@pytest.mark.parametrize("scaling", list(YARN_VARIANTS.values()), ids=list(YARN_VARIANTS))
def test_yarn_table_is_that_of_transformers(scaling: dict[str, Any]) -> None:
    hf = small(DeepseekV32Config, rope_scaling=dict(scaling), rope_theta=10000.0)
    config = MlaConfig.from_hf(hf)
    table = build_cos_sin_cache(config)
    assert table.shape == (8192, 64)
    assert table.dtype == torch.float32
    expected = their_table(DeepseekV32RotaryEmbedding(hf), 8192, 64)
    # The same fp32 operations in the same order; the vectorised sine may differ in its last bit.
    torch.testing.assert_close(table, expected, atol=2e-7, rtol=0)


@pytest.mark.parametrize("theta", [10000.0, 1_000_000.0])
@pytest.mark.parametrize(
    ("config_class", "rotary_class"),
    [(DeepseekV32Config, DeepseekV32RotaryEmbedding), (GlmMoeDsaConfig, GlmMoeDsaRotaryEmbedding)],
)
def test_plain_table_is_that_of_transformers(config_class: type, rotary_class: type, theta: float) -> None:
    hf = small(config_class, rope_parameters={"rope_type": "default", "rope_theta": theta})
    table = build_cos_sin_cache(MlaConfig.from_hf(hf))
    torch.testing.assert_close(table, their_table(rotary_class(hf), 8192, 64), atol=2e-7, rtol=0)


def test_layers_of_one_device_share_the_table_and_free_it() -> None:
    config = MlaConfig.from_hf(small(DeepseekV32Config, max_position_embeddings=300))
    with torch.inference_mode():
        first = build_cos_sin_cache(config, "cpu")
    assert not first.is_inference()
    assert build_cos_sin_cache(dataclasses.replace(config, num_layers=7)) is first
    other = build_cos_sin_cache(dataclasses.replace(config, max_positions=200))
    assert other.shape == (200, 64)
    address = first.data_ptr()
    first.zero_()
    del first
    gc.collect()
    fresh = build_cos_sin_cache(config)
    assert fresh.any(), f"the zeroed table at {address} was still in use"


def test_table_on_the_requested_device(device: str) -> None:
    config = MlaConfig.from_hf(small(DeepseekV32Config, rope_scaling=dict(YARN)))
    table = build_cos_sin_cache(config, device)
    assert table.device.type == device
    assert torch.equal(table.cpu(), build_cos_sin_cache(config, "cpu"))


def test_softmax_scales_of_the_published_models() -> None:
    v32 = MlaConfig.from_hf(DeepseekV32Config(rope_scaling=dict(YARN)))
    assert v32.softmax_scale == pytest.approx(0.135234, abs=5e-7)  # 192^-0.5 * (0.1 ln 40 + 1)^2
    assert MlaConfig.from_hf(GlmMoeDsaConfig()).softmax_scale == 256**-0.5
    assert mla_softmax_scale(192, v32.yarn) == v32.softmax_scale
    assert mla_softmax_scale(256, None) == 256**-0.5
    # Without mscale_all_dim YaRN leaves the scale alone.
    assert mla_softmax_scale(192, YarnScaling(40, 4096)) == 192**-0.5


@pytest.mark.parametrize("scaling", list(YARN_VARIANTS.values()), ids=list(YARN_VARIANTS))
def test_softmax_scale_is_that_of_transformers(scaling: dict[str, Any]) -> None:
    hf = small(DeepseekV32Config, rope_scaling=dict(scaling))
    assert MlaConfig.from_hf(hf).softmax_scale == pytest.approx(DeepseekV32Attention(hf, 0).scaling, rel=1e-12)
    glm = small(GlmMoeDsaConfig)
    assert MlaConfig.from_hf(glm).softmax_scale == pytest.approx(GlmMoeDsaAttention(glm, 0).scaling, rel=1e-12)


def test_config_of_the_published_models() -> None:
    v32 = MlaConfig.from_hf(DeepseekV32Config(rope_scaling=dict(YARN)))
    assert (v32.num_heads, v32.qk_nope_head_dim, v32.v_head_dim, v32.q_lora_rank) == (128, 128, 128, 1536)
    assert (v32.index_n_heads, v32.hidden_size, v32.index_topk) == (64, 7168, 2048)
    assert not v32.indexer_interleaved
    assert v32.yarn == YarnScaling(40, 4096, mscale=1.0, mscale_all_dim=1.0)
    assert all(v32.has_indexer(layer) for layer in range(61))
    glm = MlaConfig.from_hf(GlmMoeDsaConfig(index_topk_pattern="FSSF" + "F" * 74))
    assert (glm.num_heads, glm.qk_nope_head_dim, glm.v_head_dim, glm.q_lora_rank) == (64, 192, 256, 2048)
    assert (glm.index_n_heads, glm.hidden_size) == (32, 6144)
    assert glm.indexer_interleaved
    assert [glm.has_indexer(layer) for layer in range(5)] == [True, False, False, True, True]
    # GLM-5 sets rms_norm_eps to 1e-5, but transformers builds the latent norms with 1e-6.
    assert glm.rms_norm_eps == 1e-6
    assert MlaConfig.from_hf(GlmMoeDsaConfig(), rms_norm_eps=1e-5).rms_norm_eps == 1e-5


def test_older_spelling_of_the_rope_fields() -> None:
    """transformers 4 configs have rope_theta and rope_scaling instead of rope_parameters."""
    hf = DeepseekV32Config(rope_scaling=dict(YARN), rope_theta=50000.0)
    old = SimpleNamespace(**{**hf.to_dict(), "model_type": "deepseek_v32"})
    old.rope_scaling, old.rope_theta, old.rope_parameters = dict(YARN), 50000.0, None
    assert MlaConfig.from_hf(old) == MlaConfig.from_hf(hf)


def test_modes_follow_the_precision() -> None:
    config = MlaConfig.from_hf(small(DeepseekV32Config, index_n_heads=16))
    assert (config.precision, config.q_absmax) == ("fp32", 448.0)
    assert dataclasses.replace(config, precision="f16").q_absmax == 0.875
    assert config.index_weight_scale == pytest.approx(128**-0.5 * 16**-0.5)
    hash(config)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("kv_lora_rank", 256, "kv_lora_rank: expected 512"),
        ("qk_rope_head_dim", 32, "qk_rope_head_dim: expected 64"),
        ("index_head_dim", 64, "index_head_dim: expected 128"),
        ("num_heads", 130, "num_heads: expected 1 to 128, got 130"),
        ("num_heads", 0, "num_heads"),
        ("index_n_heads", 12, "index_n_heads: expected a multiple of 8"),
        ("index_n_heads", 72, "index_n_heads"),
        ("index_topk", 100, "index_topk: expected a multiple of 64"),
        ("index_topk", 4096, "index_topk"),
        ("page_size", 48, "page_size: expected one of"),
        ("scale_format", "fp16", "scale_format"),
        ("precision", "bf16", "precision"),
        ("attention_precision", "low", "attention_precision"),
        ("workspace_bytes", -1, "workspace_bytes"),
        ("softmax_scale", 0.0, "softmax_scale"),
        ("hidden_size", 64.0, "hidden_size: expected an int"),
        ("indexer_types", ("full",), "indexer_types: expected 2 entries"),
        ("indexer_types", ("full", "none"), "indexer_types"),
        ("indexer_types", ("shared", "full"), "a 'full' first layer"),
    ],
)
def test_unsupported_values_are_refused_by_name(field: str, value: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MlaConfig.from_hf(small(DeepseekV32Config), **{field: value})


def test_other_models_and_other_rope_are_refused() -> None:
    with pytest.raises(ValueError, match="got 'llama'"):
        MlaConfig.from_hf(SimpleNamespace(model_type="llama"))
    scaling = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    with pytest.raises(ValueError, match="rope_type 'default' or 'yarn', got 'linear'"):
        MlaConfig.from_hf(small(DeepseekV32Config, rope_parameters=scaling))
    with pytest.raises(ValueError, match="factor"):
        YarnScaling(0.0, 4096)
    with pytest.raises(ValueError, match="original_max_position_embeddings"):
        YarnScaling(2.0, 0)
    with pytest.raises(ValueError, match="layer_id: expected 0 to 1, got 2"):
        MlaConfig.from_hf(small(DeepseekV32Config)).has_indexer(2)
