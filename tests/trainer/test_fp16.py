"""FP16 training: the loss is scaled, an overflow is computed again at a lower scale, and the step is that of FP32."""

import pytest
import torch
from trainer.kit import write_model
from trainer.test_step import RECIPE, batch_of, on_policy, samples, weights


@pytest.fixture
def engine_in(one_process, tmp_path):
    from motley_trainer.megatron.engine import AdamSettings, Engine
    from motley_weights.checkpoints import read_checkpoint
    from motley_weights.names import ModelShape

    def make(dtype):
        checkpoint = read_checkpoint(write_model(tmp_path / "model"))
        engine = Engine(
            ModelShape.from_hf_config(checkpoint.config),
            one_process,
            AdamSettings(
                1e-2, 0.9, 0.98, 1e-3, 0.0, 1.0
            ),  # a large epsilon: Adam's first step must not blow rounding up
            dtype=dtype,
            context_length=128,
        )
        engine.load_weights(checkpoint.tensors)
        engine.build_optimizer()
        return engine

    return make


def scale_of(engine) -> float:
    return float(engine._optimizer.get_loss_scale())


def test_a_step_in_fp16_is_the_step_in_fp32_up_to_its_rounding(engine_in):
    from motley_trainer.step import train_step

    want, got = engine_in(torch.float32), engine_in(torch.float16)
    before = weights(want)
    batch = batch_of([on_policy(want, trajectory) for trajectory in samples()])
    outcomes = [train_step(engine, batch, RECIPE, learning_rate=1e-2) for engine in (want, got)]
    assert not outcomes[1].skipped
    assert outcomes[1].grad_norm == pytest.approx(outcomes[0].grad_norm, rel=2e-2)
    moved = 0.0
    after = weights(got)
    for name, tensor in weights(want).items():
        moved = max(moved, (tensor - before[name]).abs().max().item())
        torch.testing.assert_close(after[name].float(), tensor, rtol=2e-2, atol=2e-3)
    assert moved > 5e-3


def test_an_overflow_lowers_the_scale_and_the_batch_is_trained_on_all_the_same(engine_in):
    from motley_trainer.step import train_step

    engine = engine_in(torch.float16)
    for scaler in engine._scalers():
        scaler._scale.fill_(2.0**40)
    before = weights(engine)
    outcome = train_step(engine, batch_of(samples()), RECIPE, learning_rate=1e-2)
    assert not outcome.skipped
    assert outcome.blamed == ()
    assert scale_of(engine) < 2.0**40
    assert any(not torch.equal(before[name], tensor) for name, tensor in weights(engine).items())


def test_a_loss_that_is_not_finite_is_skipped_at_once_and_leaves_the_scale(engine_in):
    from motley_trainer.step import train_step

    engine = engine_in(torch.float16)
    with torch.no_grad():
        engine._bare.decoder.final_layernorm.weight[0] = float("nan")
    scale = scale_of(engine)
    assert train_step(engine, batch_of(samples()), RECIPE, learning_rate=1e-2).skipped
    assert scale_of(engine) == scale


def test_bf16_and_fp32_have_no_scale(engine_in):
    engine = engine_in(torch.float32)
    loss = torch.tensor(3.0)
    assert engine.scaled(loss) is loss
    assert not engine.lower_loss_scale()
