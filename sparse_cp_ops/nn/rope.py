"""The one place that turns a model's RoPE parameters into the table that every RoPE of the package reads."""

import math
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from sparse_cp_ops.nn.mla_config import MlaConfig, YarnScaling, yarn_mscale

_Key = tuple[float, YarnScaling | None, int, int, torch.device]
# Layers built on one device share one table (42 MB at 163,840 positions). Weak: it goes with the last layer.
_tables: WeakValueDictionary[_Key, Tensor] = WeakValueDictionary()


def build_cos_sin_cache(config: MlaConfig, device: torch.device | str | None = None) -> Tensor:
    """f32 [max_positions, rope_dim]: cosines of the rope_dim/2 frequencies, then their sines, YaRN applied.

    Layers of one configuration and device get the same tensor; nobody may write to it.

    Args:
        config: the model's configuration.
        device: where the table lives; None = torch's default device.
    """
    target = torch.device(device) if device is not None else torch.get_default_device()
    if target.type == "cuda" and target.index is None:
        target = torch.device("cuda", torch.cuda.current_device())
    key = (config.rope_theta, config.yarn, config.max_positions, config.qk_rope_head_dim, target)
    table = _tables.get(key)
    if table is None:
        # Built on the CPU, so that every device reads the same numbers, and never as an inference tensor, which a
        # later call outside inference mode could not use.
        with torch.inference_mode(False), torch.no_grad():
            table = _cos_sin_table(config).to(target)
        if target.type != "meta":
            _tables[key] = table
    return table


def _cos_sin_table(config: MlaConfig) -> Tensor:
    frequencies, factor = rope_frequencies(config)
    positions = torch.arange(config.max_positions, dtype=torch.float32, device="cpu")
    # fp32 angles, as the models compute them: an angle of 160,000 is rounded by up to 160,000 * 2^-24 = 0.01.
    angles = positions[:, None] * frequencies[None, :]
    return torch.cat([angles.cos() * factor, angles.sin() * factor], dim=-1)


def rope_frequencies(config: MlaConfig) -> tuple[Tensor, float]:
    """Inverse frequencies f32 [rope_dim/2] on the CPU, and the factor of cosines and sines (1 without YaRN).

    YaRN (https://arxiv.org/abs/2309.00071, section 3.2) keeps the frequencies that turn more than ``beta_fast`` times
    within the original context, divides those that turn less than ``beta_slow`` times by ``factor``, and blends
    linearly between the two.
    """
    dim = config.qk_rope_head_dim
    exponents = torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim
    wavelengths = config.rope_theta**exponents
    yarn = config.yarn
    if yarn is None:
        return 1.0 / wavelengths, 1.0

    def pair_that_turns(rotations: float) -> float:
        original = yarn.original_max_position_embeddings
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(config.rope_theta))

    first, last = pair_that_turns(yarn.beta_fast), pair_that_turns(yarn.beta_slow)
    if yarn.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    if first == last:
        last += 0.001  # a step instead of a ramp
    ramp = ((torch.arange(dim // 2, dtype=torch.float32, device="cpu") - first) / (last - first)).clamp(0, 1)
    keep = 1 - ramp
    frequencies = (1.0 / (yarn.factor * wavelengths)) * (1 - keep) + (1.0 / wavelengths) * keep
    return frequencies, _yarn_attention_factor(yarn)


def _yarn_attention_factor(yarn: YarnScaling) -> float:
    if yarn.attention_factor is not None:
        return yarn.attention_factor
    if yarn.mscale and yarn.mscale_all_dim:
        return yarn_mscale(yarn.factor, yarn.mscale) / yarn_mscale(yarn.factor, yarn.mscale_all_dim)
    return yarn_mscale(yarn.factor)
