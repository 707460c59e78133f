"""Writes the golden files of the codecs beside this script. Needs nvidia-modelopt; see README.md."""

from pathlib import Path

import safetensors.torch
import torch
from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor
from torch import Tensor

from weights import slow_reference

HERE = Path(__file__).parent
LAYER = "model.layers.0."
K = 144  # 9 blocks of 16; two blocks of 128, the second partial
ROWS = {
    "self_attn.q_proj": 8,
    "self_attn.k_proj": 4,
    "self_attn.v_proj": 4,
    "mlp.experts.0.gate_proj": 6,
    "mlp.experts.0.up_proj": 6,
    "mlp.experts.0.down_proj": 130,
}
SHARED_SCALE = [
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("mlp.experts.0.gate_proj", "mlp.experts.0.up_proj"),
]


def inputs() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(20)
    tensors: dict[str, Tensor] = {}
    for order, (module, rows) in enumerate(ROWS.items()):
        magnitude = 10 ** torch.linspace(-4, 2 - order / 2, rows).unsqueeze(1)
        weight = torch.randn(rows, K, generator=generator) * magnitude
        weight[1, 16:48] = 0.0
        weight[2, :16] = torch.tensor(
            [6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, -6, -0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5]
        )
        tensors[f"{LAYER}{module}.weight"] = weight.to(torch.bfloat16)
    tensors[f"{LAYER}mlp.gate.weight"] = torch.randn(4, K, generator=generator).to(torch.bfloat16)
    tensors[f"{LAYER}input_layernorm.weight"] = torch.ones(K, dtype=torch.bfloat16)
    return tensors


def nvfp4(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    stored = {name: tensor for name, tensor in tensors.items() if "_proj" not in name}
    groups = [[f"{LAYER}{module}.weight" for module in group] for group in SHARED_SCALE]
    grouped = {name for group in groups for name in group}
    groups += [[name] for name in tensors if "_proj" in name and name not in grouped]
    for group in groups:
        scale_2 = torch.stack(
            [NVFP4QTensor.get_weights_scaling_factor_2(tensors[name].float()) for name in group]
        ).max()
        for name in group:
            quantised, scale, _ = NVFP4QTensor.quantize(tensors[name].float(), 16, weights_scaling_factor_2=scale_2)
            prefix = name.removesuffix(".weight")
            stored[name] = quantised._quantized_data
            stored[f"{prefix}.weight_scale"] = scale
            stored[f"{prefix}.weight_scale_2"] = scale_2.clone()
            stored[f"{prefix}.input_scale"] = torch.tensor(1.0)
    return stored


def fp8(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    stored: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if "_proj" in name:
            codes, stored[f"{name}_scale_inv"] = slow_reference.fp8(tensor)
            stored[name] = codes.view(torch.float8_e4m3fn)
        else:
            stored[name] = tensor
    return stored


if __name__ == "__main__":
    given = inputs()
    for file, content in {"input": given, "nvfp4": nvfp4(given), "fp8": fp8(given)}.items():
        safetensors.torch.save_file(content, HERE / f"{file}.safetensors")
