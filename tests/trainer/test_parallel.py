"""However the gang is laid out, a step is the same step."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from trainer.kit import write_model

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    root = tmp_path_factory.mktemp("layouts")
    write_model(root / "model")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    program = Path(__file__).with_name("parallel_pod.py")
    command = [sys.executable, str(program), str(root)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    return root, done


def result(runs, name):
    root, done = runs
    path = root / f"{name}.json"
    assert path.exists(), f"{name} did not finish: {done.stdout} {done.stderr[-3000:]}"
    return json.loads(path.read_text())


@pytest.mark.parametrize("layout", ["data-2", "tensor-2", "expert-2"])
def test_losses_norms_and_mismatch_equal_one_process(runs, layout):
    want, got = result(runs, "one"), result(runs, layout)
    for want_step, got_step in zip(want["steps"], got["steps"], strict=True):
        assert got_step == pytest.approx(want_step, rel=2e-4, abs=1e-6)
    assert got["told"] == b"\0\1told".hex()


@pytest.mark.parametrize("layout", ["data-2", "tensor-2", "expert-2"])
def test_published_weights_equal_one_process(runs, layout):
    import torch
    from safetensors.torch import load_file

    result(runs, layout)
    root, _ = runs
    want, got = load_file(root / "one.safetensors"), load_file(root / f"{layout}.safetensors")
    before = load_file(root / "model" / "model.safetensors")
    assert sorted(got) == sorted(want)
    moved = 0.0
    for name in want:
        # within one BF16 rounding of each other, and away from where they began
        torch.testing.assert_close(got[name].float(), want[name].float(), rtol=2**-7, atol=1e-4)
        moved = max(moved, (want[name].float() - before[name].float()).abs().max().item())
    assert moved > 5e-3


@pytest.mark.parametrize(("layout", "source"), [("one-from-tensor-2", "tensor-2"), ("tensor-2-from-one", "one")])
def test_a_checkpoint_of_one_layout_goes_on_in_another(runs, layout, source):
    # Step 1 over again from the state after step 1: the numbers of a third step, equal in both layouts.
    first, second = result(runs, "one-from-tensor-2"), result(runs, "tensor-2-from-one")
    for left, right in zip(first["steps"], second["steps"], strict=True):
        assert left == pytest.approx(right, rel=2e-4, abs=1e-6)
    fresh = result(runs, source)["steps"][0]
    assert result(runs, layout)["steps"][0] != pytest.approx(fresh, rel=1e-3)
