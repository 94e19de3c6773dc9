"""What layer specs call a parameter. Ours has every norm and every expert apart; Transformer Engine's fuses them."""

from __future__ import annotations

import re
from collections.abc import Container

_FUSED = (
    (r"input_layernorm\.weight$", r"self_attention.linear_qkv.layer_norm_weight"),
    (r"pre_mlp_layernorm\.weight$", r"mlp.linear_fc1.layer_norm_weight"),
    (r"experts\.local_experts\.(\d+)\.(linear_fc\d)\.weight$", r"experts.\2.weight\1"),
)


def parameter_of(name: str, parameters: Container[str]) -> str:
    """`name` as it is among `parameters`, whichever spec they were built from. Raises KeyError.

    >>> parameter_of("decoder.layers.3.input_layernorm.weight",
    ...              ["decoder.layers.3.self_attention.linear_qkv.layer_norm_weight"])
    'decoder.layers.3.self_attention.linear_qkv.layer_norm_weight'
    """
    if name in parameters:
        return name
    for pattern, fused in _FUSED:
        other, found = re.subn(pattern, fused, name)
        if found and other in parameters:
            return other
    raise KeyError(name)
