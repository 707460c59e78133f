"""Reading Hugging Face folders."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch
from motley_weights.checkpoints import model_dir_files, read_checkpoint
from motley_weights.errors import CheckpointError, UnsupportedModelError

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 4,
    "vocab_size": 5,
    "max_position_embeddings": 8,
}
ONE, TWO = torch.arange(4.0).to(torch.bfloat16), torch.ones(2, 3)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def shard(folder: Path) -> None:
    safetensors.torch.save_file({"one": ONE}, folder / "model-00001-of-00002.safetensors")
    safetensors.torch.save_file({"two": TWO}, folder / "model-00002-of-00002.safetensors")
    weight_map = {"one": "model-00001-of-00002.safetensors", "two": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_a_single_file_is_read(folder: Path):
    safetensors.torch.save_file({"one": ONE, "two": TWO}, folder / "model.safetensors")
    config, tensors = read_checkpoint(folder)
    assert config == CONFIG
    assert sorted(tensors) == ["one", "two"]
    assert torch.equal(tensors["one"], ONE)
    assert torch.equal(tensors["two"], TWO)


def test_shards_are_read_and_only_those_asked_for(folder: Path):
    shard(folder)
    tensors = read_checkpoint(str(folder)).tensors
    assert len(tensors) == 2
    (folder / "model-00001-of-00002.safetensors").write_bytes(b"not looked at")
    assert torch.equal(tensors["two"], TWO)
    with pytest.raises(CheckpointError, match="model-00001-of-00002"):
        tensors["one"]
    with pytest.raises(KeyError):
        tensors["three"]


def test_a_path_that_does_not_exist_says_what_it_must_be(tmp_path: Path):
    with pytest.raises(
        CheckpointError, match=r"nowhere: model path must be a folder with config\.json and safetensors"
    ):
        read_checkpoint(tmp_path / "nowhere")


def test_a_folder_without_config_or_weights_says_so(folder: Path, tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"must hold model\.safetensors or model\.safetensors\.index\.json"):
        read_checkpoint(folder)
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        read_checkpoint(tmp_path / "empty")


def test_an_absent_shard_is_named(folder: Path):
    shard(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(
        CheckpointError, match=r"model-00002-of-00002\.safetensors is named in .*index\.json but is not there"
    ):
        read_checkpoint(folder)


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff"])
def test_a_config_that_is_no_json_object_is_refused(folder: Path, content: bytes):
    (folder / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        read_checkpoint(folder)


@pytest.mark.parametrize("content", [b"{", b"{}", b'{"weight_map": 3}', b'{"weight_map": {"a": "../b"}}'])
def test_a_damaged_index_is_refused(folder: Path, content: bytes):
    (folder / "model.safetensors.index.json").write_bytes(content)
    with pytest.raises(CheckpointError, match="weights are not readable"):
        read_checkpoint(folder)


def test_a_truncated_file_is_refused(folder: Path):
    safetensors.torch.save_file({"one": ONE, "two": TWO}, folder / "model.safetensors")
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[:-5])
    with pytest.raises(CheckpointError, match="not readable"):
        read_checkpoint(folder).tensors["two"]


def test_an_unknown_architecture_names_what_is_supported(folder: Path):
    (folder / "config.json").write_text(json.dumps({**CONFIG, "architectures": ["GPT2LMHeadModel"]}))
    with pytest.raises(UnsupportedModelError, match=r"must be one of LlamaForCausalLM, .*, got GPT2LMHeadModel"):
        read_checkpoint(folder)


def test_small_files_beside_the_weights_are_collected(folder: Path):
    (folder / "tokenizer.json").write_bytes(b"{}")
    (folder / "notes.txt").write_bytes(b"not for an engine")
    assert sorted(model_dir_files(folder)) == ["config.json", "tokenizer.json"]
