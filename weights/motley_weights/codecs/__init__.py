"""View codecs: one BF16 tensor in, the tensors that an engine loads out, and back. Pure.

A view is a name. `encode` and `decode` work on single tensors or whole mappings; `encode_group` is what a publisher
calls, because some modules must share a scale (see `modules.fusion_group`).
"""

from motley_weights.codecs.modules import (
    bf16_modules,
    fusion_group,
    fusion_groups,
    is_quantised,
    view_model_files,
)
from motley_weights.codecs.views import (
    ENCODER_VERSION,
    VIEWS,
    ViewCodec,
    absolute_max,
    codec,
    decode,
    encode,
    encode_group,
)

__all__ = [
    "ENCODER_VERSION",
    "VIEWS",
    "ViewCodec",
    "absolute_max",
    "bf16_modules",
    "codec",
    "decode",
    "encode",
    "encode_group",
    "fusion_group",
    "fusion_groups",
    "is_quantised",
    "view_model_files",
]
