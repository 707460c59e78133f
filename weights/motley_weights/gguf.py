"""A Hugging Face folder out of a GGUF file of a Llama model: weights as BF16, config.json, tokenizer.

    python -m motley_weights.gguf model.gguf folder

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Read are the tensor types F32, F16, BF16, Q8_0, Q4_0 and
Q4_1, and byte-level BPE tokenizers of the SmolLM family. Quantised weights keep their dequantised values, rounded to BF16.
"""

from __future__ import annotations

import dataclasses
import json
import struct
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from motley_weights import safetensors_io
from motley_weights.errors import CheckpointError, UnsupportedModelError
from motley_weights.names import ModelShape, expected_shapes

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_BLOCK = 32  # elements that share a scale in every quantised type read here
_CONTROL = 3  # token type

Floats = npt.NDArray[np.float32]


@dataclasses.dataclass(frozen=True)
class Place:
    """A tensor's shape, slowest dimension first, its type, and where its bytes begin in the file."""

    shape: tuple[int, ...]
    kind: int
    start: int


@dataclasses.dataclass(frozen=True)
class GgufFile:
    metadata: Mapping[str, Any]
    places: Mapping[str, Place]
    content: memoryview

    def tensor(self, name: str) -> Tensor:
        """float32, dequantised. CheckpointError for a type that is not read here, or a file that ends early."""
        if name not in self.places:
            raise CheckpointError(f"GGUF: tensor {name} is missing")
        place = self.places[name]
        if place.kind not in _TYPES:
            raise CheckpointError(f"GGUF: {name}: tensor type must be one of {sorted(_TYPES)}, got {place.kind}")
        elements, block_bytes, decode = _TYPES[place.kind]
        count = int(np.prod(place.shape))
        blocks, rest = divmod(count, elements)
        end = place.start + blocks * block_bytes
        if rest or end > len(self.content):
            raise CheckpointError(f"GGUF: {name}: needs bytes up to {end}, the file has {len(self.content)}")
        raw = np.frombuffer(self.content[place.start : end], np.uint8).reshape(blocks, block_bytes)
        return torch.from_numpy(np.ascontiguousarray(decode(raw))).reshape(place.shape)


def read(content: memoryview) -> GgufFile:
    """Metadata and the places of tensors. CheckpointError when the bytes are not GGUF, or end early."""
    reader = _Reader(content)
    if bytes(content[:4]) != _MAGIC:
        raise CheckpointError(f"GGUF: must begin with {_MAGIC!r}, begins with {bytes(content[:4])!r}")
    reader.at = 4
    try:
        version, tensors, pairs = reader.scalar("I"), reader.scalar("Q"), reader.scalar("Q")
        if version not in _VERSIONS:
            raise CheckpointError(f"GGUF: version must be one of {_VERSIONS}, got {version}")
        metadata = {reader.string(): reader.value(reader.scalar("I")) for _ in range(pairs)}
        found: dict[str, Place] = {}
        for _ in range(tensors):
            name = reader.string()
            shape = tuple(reader.scalar("Q") for _ in range(reader.scalar("I")))[::-1]
            found[name] = Place(shape, reader.scalar("I"), reader.scalar("Q"))
    except (struct.error, UnicodeDecodeError) as error:
        raise CheckpointError(f"GGUF: ends early or is damaged at byte {reader.at}: {error}") from error
    alignment = metadata.get("general.alignment", 32)
    data = -(-reader.at // alignment) * alignment
    return GgufFile(
        metadata,
        {name: dataclasses.replace(place, start=data + place.start) for name, place in found.items()},
        content,
    )


def hf_config(file: GgufFile) -> dict[str, Any]:
    """config.json. UnsupportedModelError for another architecture than llama; CheckpointError for a missing field."""
    metadata = file.metadata
    architecture = metadata.get("general.architecture")
    if architecture != "llama":
        raise UnsupportedModelError(f"GGUF general.architecture: must be llama, got {architecture!r}")
    scaled = [key for key in metadata if key.startswith("llama.rope.scaling.")] + (
        ["rope_freqs.weight"] if "rope_freqs.weight" in file.places else []
    )
    if scaled:
        raise UnsupportedModelError(f"GGUF {scaled[0]}: RoPE scaling is not read here")

    def need(key: str) -> Any:
        if key not in metadata:
            raise CheckpointError(f"GGUF {key}: is missing")
        return metadata[key]

    heads = need("llama.attention.head_count")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": need("llama.embedding_length"),
        "intermediate_size": need("llama.feed_forward_length"),
        "num_hidden_layers": need("llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.get("llama.attention.head_count_kv", heads),
        "head_dim": metadata.get("llama.rope.dimension_count", need("llama.embedding_length") // heads),
        "max_position_embeddings": need("llama.context_length"),
        "rms_norm_eps": _shortest(need("llama.attention.layer_norm_rms_epsilon")),
        "rope_theta": _shortest(metadata.get("llama.rope.freq_base", 10000.0)),
        "vocab_size": file.places["token_embd.weight"].shape[0] if "token_embd.weight" in file.places else 0,
        "tie_word_embeddings": "output.weight" not in file.places,
        "attention_bias": False,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
        "torch_dtype": "bfloat16",
    }


def hf_tensors(file: GgufFile, shape: ModelShape) -> Iterator[tuple[str, Tensor]]:
    """BF16 tensors under Hugging Face names, in a checkpoint's order. CheckpointError for a wrong shape."""
    for name, want in expected_shapes(shape).items():
        source = _gguf_name(name)
        tensor = file.tensor(source)
        if tuple(tensor.shape) != want:
            raise CheckpointError(f"GGUF: {source}: must have shape {want}, got {tuple(tensor.shape)}")
        if name.endswith("q_proj.weight"):
            tensor = _halves_apart(tensor, shape.heads)
        elif name.endswith("k_proj.weight"):
            tensor = _halves_apart(tensor, shape.kv_heads)
        yield name, tensor.to(torch.bfloat16)


def tokenizer_files(metadata: Mapping[str, Any]) -> dict[str, bytes]:
    """tokenizer.json and tokenizer_config.json. UnsupportedModelError for another kind of tokenizer."""
    kind = (metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre"))
    if kind != ("gpt2", "smollm"):
        raise UnsupportedModelError(f"GGUF tokenizer.ggml.model and .pre: must be ('gpt2', 'smollm'), got {kind}")
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    whole = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [
            {"id": index, "content": token, **whole}
            for index, (token, token_type) in enumerate(zip(tokens, types, strict=True))
            if token_type == _CONTROL
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level],
        },
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": [merge.split(" ", 1) for merge in metadata["tokenizer.ggml.merges"]],
        },
    }
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        index = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if index is not None:
            settings[f"{name}_token"] = tokens[index]
    if "tokenizer.chat_template" in metadata:
        settings["chat_template"] = metadata["tokenizer.chat_template"]
    return {
        "tokenizer.json": json.dumps(tokenizer, ensure_ascii=False).encode(),
        "tokenizer_config.json": json.dumps(settings, ensure_ascii=False, indent=1).encode(),
    }


def import_gguf(source: Path, folder: Path) -> None:
    """Writes a Hugging Face folder. CheckpointError or UnsupportedModelError for a file that cannot be read as one."""
    file = read(memoryview(np.memmap(source, dtype=np.uint8, mode="r")))
    config = hf_config(file)
    small = {"config.json": json.dumps(config, indent=1).encode(), **tokenizer_files(file.metadata)}
    tensors = dict(hf_tensors(file, ModelShape.from_hf_config(config)))
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / safetensors_io.SINGLE_FILE, "wb") as target:
        target.writelines(safetensors_io.chunks(tensors))
    for name, content in small.items():
        (folder / name).write_bytes(content)


# ---------------------------------------------------------------- inside

_RENAMED = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_RENAMED_OUTSIDE = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def _gguf_name(name: str) -> str:
    if name in _RENAMED_OUTSIDE:
        return _RENAMED_OUTSIDE[name]
    layer, inner = name.removeprefix("model.layers.").split(".", 1)
    return f"blk.{layer}.{_RENAMED[inner.removesuffix('.weight')]}.weight"


def _halves_apart(weight: Tensor, heads: int) -> Tensor:
    """GGUF keeps the two rows that RoPE turns together side by side; Hugging Face half a head apart. [heads x H, D]."""
    return weight.view(heads, -1, 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def _shortest(value: float) -> float:
    """The shortest decimal of a float32: 1e-05 for 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _halves(raw: npt.NDArray[np.uint8], at: int) -> Floats:
    """A float16 of each block, [blocks, 1]."""
    return np.ascontiguousarray(raw[:, at : at + 2]).view("<f2").astype(np.float32)


def _nibbles(raw: npt.NDArray[np.uint8], at: int) -> Floats:
    """[blocks, 32]: the low half of each byte, then the high halves."""
    packed = raw[:, at : at + _BLOCK // 2]
    return np.concatenate((packed & 15, packed >> 4), axis=1).astype(np.float32)


def _q8_0(raw: npt.NDArray[np.uint8]) -> Floats:
    return _halves(raw, 0) * raw[:, 2:].view(np.int8).astype(np.float32)


def _q4_0(raw: npt.NDArray[np.uint8]) -> Floats:
    return _halves(raw, 0) * (_nibbles(raw, 2) - 8)


def _q4_1(raw: npt.NDArray[np.uint8]) -> Floats:
    return _halves(raw, 0) * _nibbles(raw, 4) + _halves(raw, 2)


def _f32(raw: npt.NDArray[np.uint8]) -> Floats:
    return raw.copy().view("<f4")


def _f16(raw: npt.NDArray[np.uint8]) -> Floats:
    return raw.copy().view("<f2").astype(np.float32)


def _bf16(raw: npt.NDArray[np.uint8]) -> Floats:
    return (raw.copy().view("<u2").astype(np.uint32) << 16).view(np.float32)


# Type -> (elements of a block, its bytes, decoder of [blocks, bytes])
_TYPES: dict[int, tuple[int, int, Callable[[npt.NDArray[np.uint8]], Floats]]] = {
    0: (1, 4, _f32),
    1: (1, 2, _f16),
    2: (_BLOCK, 18, _q4_0),
    3: (_BLOCK, 20, _q4_1),
    8: (_BLOCK, 34, _q8_0),
    30: (1, 2, _bf16),
}


class _Reader:
    """Takes values off the front of the file."""

    def __init__(self, content: memoryview) -> None:
        self._content = content
        self.at = 0

    def scalar(self, kind: str) -> Any:
        (value,) = struct.unpack_from("<" + kind, self._content, self.at)
        self.at += struct.calcsize(kind)
        return value

    def string(self) -> str:
        size = self.scalar("Q")
        taken = bytes(self._content[self.at : self.at + size])
        if len(taken) < size:
            raise struct.error(f"a string of {size} bytes")
        self.at += size
        return taken.decode()

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            inner, count = self.scalar("I"), self.scalar("Q")
            return [self.value(inner) for _ in range(count)]
        if kind not in _SCALARS:
            raise CheckpointError(f"GGUF: value type {kind} at byte {self.at} is unknown")
        return self.scalar(_SCALARS[kind])


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python -m motley_weights.gguf MODEL.gguf FOLDER")
    import_gguf(Path(sys.argv[1]), Path(sys.argv[2]))
