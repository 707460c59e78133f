"""Which modules a quantised view quantises, which share a scale, and the configuration files that say so to an engine.
Pure.

The one table is `_QUANTISED`. SGLang's loaders (Fp8Config, ModelOptFp4Config, Qwen3MoeForCausalLM) build quantised
parameters for the linear layers of attention and MLP and for experts; the router ("mlp.gate") is made without a
quantisation config, the embedding and the norms are no linear layers, and the head is excluded by name.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from motley_api.keys import VIEW_BF16, VIEW_FP8, VIEW_NVFP4
from torch import Tensor

from motley_weights.codecs import fp8, nvfp4

_QUANTISED = re.compile(
    r"model\.layers\.\d+\."
    r"(?:self_attn\.(?:q|k|v|o)_proj|mlp\.(?:experts\.\d+\.)?(?:gate|up|down)_proj)"
    r"\.weight"
)
_FUSED = re.compile(r"(.*\.)(?:(?P<qkv>self_attn\.(?:q|k|v)_proj)|(?P<gate_up>(?:gate|up)_proj))\.weight")
_ROUTER = re.compile(r"(model\.layers\.\d+\.mlp\.gate)\.weight")
_HEAD = "lm_head"
_EMBEDDING = "model.embed_tokens"


@functools.lru_cache(maxsize=1 << 16)
def is_quantised(name: str) -> bool:
    """Whether quantised views store the tensor `name` quantised. Everything else stays BF16 in every view."""
    return _QUANTISED.fullmatch(name) is not None


@functools.lru_cache(maxsize=1 << 16)
def fusion_group(name: str) -> tuple[str, int] | None:
    """(key, number of members) of the matrices that an engine folds together with `name`; None when it stands alone.

    q, k and v are three; gate and up are two. They must share a tensor scale in nvfp4: engines keep only the largest.
    """
    match = _FUSED.fullmatch(name)
    if match is None or not is_quantised(name):
        return None
    return (match[1] + "qkv_proj", 3) if match["qkv"] else (match[1] + "gate_up_proj", 2)


def fusion_groups(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    """Tensors in their order, those of one fusion group together as soon as its last member came.

    A group that never completes (a model without gates) comes at the end. Holds only incomplete groups in memory.
    """
    waiting: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors:
        group = fusion_group(name)
        if group is None:
            yield {name: tensor}
            continue
        key, size = group
        members = waiting.setdefault(key, {})
        members[name] = tensor
        if len(members) == size:
            yield waiting.pop(key)
    yield from waiting.values()


def bf16_modules(names: Iterable[str]) -> list[str]:
    """Linear modules among `names` that quantised views leave in BF16, sorted, the head always included."""
    routers = {match[1] for name in names if (match := _ROUTER.fullmatch(name))}
    return [_HEAD, *sorted(routers)]


def view_model_files(view: str, config: Mapping[str, Any], names: Iterable[str]) -> dict[str, bytes]:
    """config.json of a view (and hf_quant_config.json for nvfp4), from the model's own config and its tensor names.

    A quantisation that the source model was stored in is dropped: views are made from BF16 tensors.
    """
    skipped = bf16_modules(names)
    plain = {key: value for key, value in config.items() if key not in ("quantization_config", "torch_dtype", "dtype")}
    plain["dtype"] = plain["torch_dtype"] = "bfloat16"  # old and new spelling: engines and transformers read either
    quantisation, more_files = _QUANTISATION[view](skipped) if view in _QUANTISATION else (None, {})
    if quantisation is not None:
        plain["quantization_config"] = quantisation
    return {"config.json": _json(plain), **{name: _json(content) for name, content in more_files.items()}}


_Quantisation = tuple[dict[str, Any] | None, dict[str, dict[str, Any]]]


def _bf16_quantisation(skipped: list[str]) -> _Quantisation:
    return None, {}


def _fp8_quantisation(skipped: list[str]) -> _Quantisation:
    config = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [fp8.BLOCK, fp8.BLOCK],
        "modules_to_not_convert": [*skipped, _EMBEDDING],
    }
    return config, {}


def _nvfp4_quantisation(skipped: list[str]) -> _Quantisation:
    producer = {"name": "modelopt", "version": "written by motley"}  # names the layout: engines look for it
    part = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": nvfp4.BLOCK}
    config = {
        "config_groups": {"group_0": {"input_activations": part, "weights": part, "targets": ["Linear"]}},
        "ignore": skipped,
        "quant_algo": "NVFP4",
        "producer": producer,
        "quant_method": "modelopt",
    }
    legacy = {
        "producer": producer,
        "quantization": {
            "quant_algo": "NVFP4",
            "kv_cache_quant_algo": None,
            "group_size": nvfp4.BLOCK,
            "exclude_modules": skipped,
        },
    }
    return config, {"hf_quant_config.json": legacy}


_QUANTISATION: dict[str, Callable[[list[str]], _Quantisation]] = {
    VIEW_BF16: _bf16_quantisation,
    VIEW_FP8: _fp8_quantisation,
    VIEW_NVFP4: _nvfp4_quantisation,
}


def _json(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=2, sort_keys=True) + "\n").encode()
