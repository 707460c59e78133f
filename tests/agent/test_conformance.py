"""Engines that compute or report something else than they are taken for are found out before a sample of theirs counts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from agent.rig import Rig, publish
from engine import tiny
from motley_sampler.agent import conformance
from motley_sampler.agent.conformance import SAMPLINGS, Drawn, Mode, nearest_mode
from motley_sampler.engines.reference.engine import ReferenceEngine
from motley_sampler.engines.reference.precision import Linear
from motley_sampler.engines.reference.weights import Experts, Weights

Json = dict[str, Any]


def _scale(linear: Linear, factor: float) -> None:
    linear.weight = linear.weight * factor


class WrongExpertScale(ReferenceEngine):
    """One expert of one layer is loaded with a scale that is 30% off, from version 2 on."""

    def _load(self, folder: Path) -> Weights:
        weights = super()._load(folder)
        experts = weights.layers[0].mlp
        if folder.name != "v000001" and isinstance(experts, Experts) and experts.dense is not None:
            down = experts.dense.down
            factors = torch.ones(down.weight.shape[-3])
            factors[3] = 1.3
            down.weight = down.weight * factors[:, None, None]
        return weights


class WrongAttentionScale(ReferenceEngine):
    def _load(self, folder: Path) -> Weights:
        weights = super()._load(folder)
        if folder.name != "v000001":
            _scale(weights.layers[1].out, 1.1)
        return weights


class OldWeightsNewLabel(ReferenceEngine):
    """Answers 200 to an update, says the new version, and computes with what it had."""

    first: Weights | None = None

    def _load(self, folder: Path) -> Weights:
        loaded = super()._load(folder)
        self.first = self.first or loaded
        return self.first


class NewWeightsOldLabel(ReferenceEngine):
    async def update(self, folder: Path, version: int) -> None:
        await super().update(folder, version - 1)


class _Lies(ReferenceEngine):
    """Changes the replies it gives."""

    def change(self, reply: Json) -> None:
        raise NotImplementedError

    async def generate(self, body: Json, *, counted: bool = True) -> Json | list[Json]:
        reply = await super().generate(body, counted=counted)
        assert isinstance(reply, dict)
        self.change(reply)
        return reply


class LogprobsBeforeTemperature(_Lies):
    """As SGLang does under SGLANG_RETURN_ORIGINAL_LOGPROB=1."""

    async def generate(self, body: Json, *, counted: bool = True) -> Json | list[Json]:
        reply = await super().generate(body, counted=counted)
        assert isinstance(reply, dict)
        forced = {
            "input_ids": body["input_ids"] + reply["output_ids"],
            "sampling_params": {"max_new_tokens": 0},
            "return_logprob": True,
            "logprob_start_len": len(body["input_ids"]) - 1,
        }
        plain = await ReferenceEngine.generate(self, forced, counted=False)
        assert isinstance(plain, dict)
        reply["meta_info"]["output_token_logprobs"] = plain["meta_info"]["input_token_logprobs"][1:]
        return reply

    def change(self, reply: Json) -> None:
        pass


class SupportBeforeFilter(_Lies):
    """Log-probs of candidates that are not renormalised over the candidates."""

    def change(self, reply: Json) -> None:
        meta = reply["meta_info"]
        for token, row, ids, values in zip(
            reply["output_ids"],
            meta["output_token_logprobs"],
            meta["output_token_sampling_mask"],
            meta["output_token_sampling_logprobs"],
            strict=True,
        ):
            shift = row[0] - values[ids.index(token)]
            values[:] = [value + shift for value in values]


class SupportCutShort(_Lies):
    """Reports the eight best candidates only, renormalised."""

    def change(self, reply: Json) -> None:
        meta = reply["meta_info"]
        for index, token in enumerate(reply["output_ids"]):
            ids, values = meta["output_token_sampling_mask"][index], meta["output_token_sampling_logprobs"][index]
            kept = sorted({*range(min(4, len(ids))), ids.index(token)})
            total = np.log(sum(np.exp(values[place]) for place in kept))
            meta["output_token_sampling_mask"][index] = [ids[place] for place in kept]
            meta["output_token_sampling_logprobs"][index] = [values[place] - total for place in kept]


class LogprobsAfterFilter(_Lies):
    """Renormalised over the candidates where SGLang's are not."""

    def change(self, reply: Json) -> None:
        meta = reply["meta_info"]
        columns = (
            meta["output_token_logprobs"],
            meta["output_token_sampling_mask"],
            meta["output_token_sampling_logprobs"],
        )
        for row, ids, values in zip(*columns, strict=True):
            row[0] = values[ids.index(row[1])]


class _Draws(ReferenceEngine):
    """With other parameters than it is asked for, and reports truly what it did."""

    sampling: ClassVar[Json]

    async def generate(self, body: Json, *, counted: bool = True) -> Json | list[Json]:
        return await super().generate(
            {**body, "sampling_params": body["sampling_params"] | self.sampling}, counted=counted
        )


class IgnoresTemperature(_Draws):
    sampling: ClassVar[Json] = {"temperature": 1.0}


class IgnoresTopP(_Draws):
    sampling: ClassVar[Json] = {"top_p": 1.0}


class IgnoresTopK(_Draws):
    sampling: ClassVar[Json] = {"top_k": 60}


class SpanCutShort(_Lies):
    """The labels are right and leave the last token out."""

    def change(self, reply: Json) -> None:
        reply["meta_info"]["weight_versions"][0]["end"] -= 1


class WrongCandidate(_Lies):
    """The numbers are right, of other candidates."""

    def change(self, reply: Json) -> None:
        for token, ids in zip(reply["output_ids"], reply["meta_info"]["output_token_sampling_mask"], strict=True):
            place = next((place for place, candidate in enumerate(ids) if candidate != token), None)
            if place is not None:
                ids[place] = next(other for other in range(tiny.VOCAB) if other not in ids)


class SwappedCandidates(_Lies):
    """Right candidates and the right number for the drawn one; the numbers of the others are mixed up."""

    def change(self, reply: Json) -> None:
        meta = reply["meta_info"]
        columns = (reply["output_ids"], meta["output_token_sampling_mask"], meta["output_token_sampling_logprobs"])
        for token, ids, values in zip(*columns, strict=True):
            others = [place for place, candidate in enumerate(ids) if candidate != token]
            for place, value in zip(others, [values[place] for place in reversed(others)], strict=True):
                values[place] = value


class NullLogprob(_Lies):
    def change(self, reply: Json) -> None:
        reply["meta_info"]["input_token_logprobs"][3][0] = None


class NoSupports(_Lies):
    def change(self, reply: Json) -> None:
        del reply["meta_info"]["output_token_sampling_mask"]


@pytest.mark.parametrize("precision", ["BF16", "FP8", "NVFP4"])
@pytest.mark.parametrize(
    ("engine", "want"),
    [
        (WrongExpertScale, "CanaryFailed"),
        (WrongAttentionScale, "CanaryFailed"),
        (OldWeightsNewLabel, "VersionMismatch"),
        (NewWeightsOldLabel, "VersionMismatch"),
    ],
)
async def test_wrong_weights_are_quarantined(
    make_rig: Callable[..., Rig], engine: type[ReferenceEngine], want: str, precision: str
) -> None:
    rig = make_rig(engine_type=engine, precision=precision, gpu_type="B200")
    publish(rig, 1)
    await rig.agent.look()
    assert rig.state.ready, rig.state.message
    publish(rig, 2)
    await rig.agent.look()
    assert (rig.state.ready, rig.state.version, rig.state.reason) == (False, 1, want)
    assert rig.state.message


@pytest.mark.parametrize(
    ("engine", "want_reason", "want_mode"),
    [
        (LogprobsBeforeTemperature, "ModeMismatch", "BeforeTemperature"),
        (SupportBeforeFilter, "SupportMismatch", "Unknown"),
        (SupportCutShort, "SupportMismatch", "Unknown"),
        (LogprobsAfterFilter, "ModeMismatch", "AfterFilter"),
        (IgnoresTemperature, "SupportMismatch", "Unknown"),
        (IgnoresTopP, "SupportMismatch", "Unknown"),
        (IgnoresTopK, "SupportMismatch", "Unknown"),
        (WrongCandidate, "SupportMismatch", "Unknown"),
        (SwappedCandidates, "SupportMismatch", "AfterFilter"),
        (SpanCutShort, "VersionMismatch", "Unknown"),
        (NullLogprob, "CanaryFailed", "Unknown"),
        (NoSupports, "CanaryFailed", "Unknown"),
    ],
)
async def test_wrong_reports_are_refused_before_any_sample(
    make_rig: Callable[..., Rig], engine: type[ReferenceEngine], want_reason: str, want_mode: str
) -> None:
    rig = make_rig(engine_type=engine)
    publish(rig, 1)
    await rig.agent.look()
    assert (rig.state.ready, rig.state.version) == (False, -1)
    assert (rig.state.reason, rig.state.logprob_mode) == (want_reason, want_mode)
    client = await rig.client()
    answer = await client.post("/generate", json=tiny.body(tiny.prompt(5)))
    assert answer.status == 503
    await client.close()


@pytest.mark.parametrize(
    ("precision", "served"), [("FP8", "bf16"), ("NVFP4", "bf16"), ("NVFP4", "fp8"), ("BF16", "fp8")]
)
async def test_another_view_of_the_same_weights_is_found_out(
    make_rig: Callable[..., Rig], precision: str, served: str, tmp_path: Path
) -> None:
    """The version is right, the model is right, and the numbers are those of another precision."""
    other = tiny.write_view(tmp_path / "other", served, tiny.moe_config(), tiny.tensors(tiny.moe_config(), seed=1))

    class ServesAnotherView(ReferenceEngine):
        def _load(self, folder: Path) -> Weights:
            return super()._load(other)

    rig = make_rig(engine_type=ServesAnotherView, precision=precision, gpu_type="B200")
    publish(rig, 1)
    await rig.agent.look()
    assert (rig.state.ready, rig.state.reason) == (False, "CanaryFailed"), rig.state.canary_max_abs_diff


async def test_a_small_step_of_training_is_told_from_no_step(make_rig: Callable[..., Rig]) -> None:
    """Weights that differ by one part in 300 pass when served, and are missed when not."""
    config, base = tiny.moe_config(), tiny.tensors(tiny.moe_config(), seed=1)
    generator = torch.Generator().manual_seed(5)
    stepped = {
        k: (v.float() * (1 + torch.randn(v.shape, generator=generator) / 300)).bfloat16() for k, v in base.items()
    }
    for engine, want in ((ReferenceEngine, ""), (OldWeightsNewLabel, "VersionMismatch")):
        rig = make_rig(engine_type=engine)
        verdicts = []
        for version, weights in ((1, base), (2, stepped)):
            name = f"{engine.__name__}-{version}"
            folder = tiny.write_view(rig.settings.scratch / name, "bf16", config, weights)
            verdicts.append(await rig.agent.apply_folder(folder, version))
        assert [verdict.reason for verdict in verdicts] == ["", want]


async def test_a_clean_reload_brings_the_engine_back(make_rig: Callable[..., Rig]) -> None:
    class CorruptOnce(ReferenceEngine):
        loads = 0

        def _load(self, folder: Path) -> Weights:
            weights = super()._load(folder)
            type(self).loads += 1
            if type(self).loads == 2:
                _scale(weights.layers[0].qkv, 1.2)
            return weights

    rig = make_rig(engine_type=CorruptOnce)
    for version in (1, 2):
        publish(rig, version)
        await rig.agent.look()
    assert rig.state.reason == "CanaryFailed"
    await rig.agent.look()
    assert (rig.state.ready, rig.state.version, rig.agent.standing.failures) == (True, 2, 0)


async def test_tokens_of_an_unproven_version_wait_for_its_verdict_and_are_void_if_it_is_bad(
    make_rig: Callable[..., Rig],
) -> None:
    rig = make_rig(engine_type=WrongAttentionScale)
    publish(rig, 1)
    await rig.agent.look()
    client = await rig.client()
    judged = asyncio.Event()
    verdict_may_come = asyncio.Event()
    real_run = conformance.run

    async def held(*args: Any, **kwargs: Any) -> conformance.Verdict:
        judged.set()
        await verdict_may_come.wait()
        return await real_run(*args, **kwargs)

    conformance_run, conformance.run = conformance.run, held
    try:
        publish(rig, 2)
        looking = asyncio.create_task(rig.agent.look())
        await judged.wait()
        request = asyncio.create_task(client.post("/generate", json=tiny.body(tiny.prompt(5), 4)))
        await tiny.until(lambda: rig.engine.load().turns == 1)  # the engine is done with it
        assert not request.done()
        verdict_may_come.set()
        answer = await request
        await looking
    finally:
        conformance.run = conformance_run
    assert answer.status == 503
    assert "CanaryFailed" in (await answer.json())["error"]["message"]
    await client.close()


def _drawn(seed: int) -> list[Drawn]:
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(16):
        ids = rng.permutation(30)[:7].astype(np.int64)
        made.append(Drawn(int(ids[0]), 0.0, ids, np.zeros(7), rng.normal(0, 2, 30), SAMPLINGS[0]))
    return made


@pytest.mark.parametrize("mode", [Mode.AFTER_FILTER, Mode.AFTER_TEMPERATURE, Mode.BEFORE_TEMPERATURE])
def test_each_mode_is_recognised_through_noise(mode: Mode) -> None:
    drawn = _drawn(0)
    noise = np.random.default_rng(1).normal(0, 0.02, len(drawn))
    got, error = nearest_mode(drawn, [token.log_prob(mode) + e for token, e in zip(drawn, noise, strict=True)])
    assert got is mode
    assert error == pytest.approx(np.abs(noise).mean())


def test_a_null_logprob_has_no_mode() -> None:
    assert nearest_mode(_drawn(0), [float("nan")] * 16)[0] is Mode.UNKNOWN
