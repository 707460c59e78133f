"""Which version an agent advertises, and when."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from agent.rig import CONFIG, Rig, publish
from engine import tiny
from motley_sampler.agent.views import Identity, Move, decide
from motley_sampler.engines.protocol import EngineError
from motley_sampler.engines.reference.engine import ReferenceEngine
from motley_weights.manifest import MANIFEST_FILE, Pointer, decode_manifest, digest, encode_manifest, encode_pointer
from motley_weights.pulling import entry_of
from safetensors.torch import load_file, save_file

A, B = Identity(3, "a"), Identity(4, "b")


@pytest.mark.parametrize(
    ("served", "pointed", "want"),
    [
        (None, None, Move.STAY),
        (None, A, Move.ADVANCE),
        (A, None, Move.STAY),  # an unreadable past is no reason to stop
        (A, A, Move.STAY),
        (A, B, Move.ADVANCE),
        (B, A, Move.REWIND),
        (A, Identity(3, "other"), Move.REWIND),  # the number came again with other weights
    ],
)
def test_only_the_pointer_decides(served: Identity | None, pointed: Identity | None, want: Move) -> None:
    assert decide(served, pointed) is want


async def test_nothing_is_advertised_before_the_first_version(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    await rig.agent.look()
    assert (rig.state.version, rig.state.ready, rig.state.reason) == (-1, False, "Loading")


@pytest.mark.parametrize(
    ("precision", "gpu"), [("BF16", "A100-80GB"), ("BF16", "RTX-PRO-6000"), ("FP8", "H200"), ("NVFP4", "B300")]
)
async def test_each_view_conforms_and_is_advertised(make_rig: Callable[..., Rig], precision: str, gpu: str) -> None:
    rig = make_rig(precision=precision, gpu_type=gpu)
    for version in (1, 2):
        publish(rig, version)
        await rig.agent.look()
        assert (rig.state.version, rig.state.ready, rig.state.message) == (version, True, "")
        assert rig.state.logprob_mode == "AfterFilter"
        assert rig.state.canary_max_abs_diff is not None
        assert rig.state.canary_max_abs_diff < 0.3
    assert (rig.state.turns, rig.state.generated_tokens) == (0, 0)  # canaries are not work


async def test_a_broken_store_leaves_what_is_served_alone(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    publish(rig, 1)
    await rig.agent.look()
    publish(rig, 2)
    root = Path(rig.settings.store_url.removeprefix("file://"))
    weights = next((root / "run/views/bf16/v000002").glob("*.safetensors"))
    content = bytearray(weights.read_bytes())
    content[-7] ^= 1
    weights.write_bytes(content)
    await rig.agent.look()
    assert (rig.state.version, rig.state.ready) == (1, True)
    assert "changed: SHA-256 must be" in rig.state.message
    content[-7] ^= 1
    weights.write_bytes(content)
    await rig.agent.look()
    assert rig.state.version == 2


def republish(rig: Rig, version: int, change: Callable[[Path], None]) -> None:
    """A version of a publisher gone wrong: other files than an encoder writes, under a manifest that is right about them."""
    folder = Path(rig.settings.store_url.removeprefix("file://")) / f"run/views/{rig.settings.view}/v{version:06d}"
    change(folder)
    manifest = decode_manifest((folder / MANIFEST_FILE).read_bytes(), where="test")
    files = {name: entry_of(folder / name) for name in manifest.files}
    content = encode_manifest(msgspec.structs.replace(manifest, files=files, stored=files))
    (folder / MANIFEST_FILE).write_bytes(content)
    (folder.parent / "latest").write_bytes(encode_pointer(Pointer(version=version, manifest_sha256=digest(content))))


def of_unknown_dtype(folder: Path) -> None:
    """F4 is no dtype of any safetensors reader that engines have."""
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes().replace(b'"BF16"', b'"F4"  ', 1))


def of_another_dtype(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes().replace(b'"BF16"', b'"F16" ', 1))


def of_another_view(folder: Path) -> None:
    tiny.write_view(folder, "fp8", CONFIG, tiny.tensors(CONFIG))


def without_its_last_tensor(folder: Path) -> None:
    save_file(dict(list(load_file(folder / "model.safetensors").items())[:-1]), folder / "model.safetensors")


@pytest.mark.parametrize(
    ("change", "want"),
    [
        (of_unknown_dtype, "dtype must be BF16 in view bf16, got F4"),
        (of_another_dtype, "dtype must be BF16 in view bf16, got F16"),
        (of_another_view, "in view bf16"),
        (without_its_last_tensor, "missing in view bf16"),
    ],
)
async def test_a_version_that_is_not_the_view_of_the_model_never_reaches_the_engine(
    make_rig: Callable[..., Rig], change: Callable[[Path], None], want: str
) -> None:
    """It would take down every engine of the view: they go on with the version before, and say why."""
    rig = make_rig()
    publish(rig, 1)
    await rig.agent.look()
    client = await rig.client()
    publish(rig, 2)
    republish(rig, 2, change)
    await rig.agent.look()
    assert (rig.state.version, rig.state.ready, rig.state.reason) == (1, True, "")
    assert want in rig.state.message
    assert (await client.post("/generate", json=tiny.body(tiny.prompt(5), 4))).status == 200
    publish(rig, 3)
    await rig.agent.look()
    assert (rig.state.version, rig.state.ready, rig.state.message) == (3, True, "")
    await client.close()


async def test_an_unreadable_pointer_leaves_what_is_served_alone(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    publish(rig, 1)
    await rig.agent.look()
    pointer = Path(rig.settings.store_url.removeprefix("file://")) / "run/views/bf16/latest"
    pointer.write_bytes(b"{half")
    await rig.agent.look()
    pointer.unlink()
    await rig.agent.look()
    assert (rig.state.version, rig.state.ready) == (1, True)


async def test_sixteen_live_requests_survive_a_publish_and_say_where_they_began_and_ended(
    make_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """None is aborted; their age counts from the version that they began with."""
    rig = make_rig()
    publish(rig, 1)
    await rig.agent.look()
    client = await rig.client()
    scheduler = rig.engine._scheduler
    assert scheduler is not None
    begun: set[int] = set()
    step = scheduler.step

    def waits_for_the_publish() -> None:
        time.sleep(0.002)
        if scheduler.version == 2 or len(begun) < 16:
            step()

    monkeypatch.setattr(scheduler, "step", waits_for_the_publish)

    async def follow(number: int) -> dict[str, Any]:
        body = {**tiny.body(tiny.prompt(5, seed=number), 110, session_id=f"s{number}"), "stream": True}
        answer = await client.post("/generate", json=body)
        last: dict[str, Any] = {}
        async for line in answer.content:
            if line.startswith(b"data: {"):
                last = msgspec.json.decode(line.removeprefix(b"data: "))
                begun.add(number)
        return last

    live = [asyncio.create_task(follow(number)) for number in range(16)]
    await tiny.until(lambda: len(begun) == 16)
    publish(rig, 2)
    await rig.agent.look()
    replies = await asyncio.gather(*live)
    assert {reply["meta_info"]["finish_reason"]["type"] for reply in replies} == {"length"}
    assert {len(reply["output_ids"]) for reply in replies} == {110}
    stamps = {(reply["meta_info"]["start_version"], reply["meta_info"]["end_version"]) for reply in replies}
    assert stamps == {(1, 2)}
    assert (rig.state.version, rig.state.ready) == (2, True)
    await client.close()


async def test_an_explicit_rewind_is_followed_also_when_the_number_comes_again(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    for version in (1, 2, 3):
        publish(rig, version)
    await rig.agent.look()
    assert rig.state.version == 3
    rig.store.rewind("bf16", 1)
    # The agent looks again only after the resumed trainer is at 3 once more, with other weights.
    publish(rig, 2, seed=12)
    publish(rig, 3, seed=13)
    before = rig.agent.standing.prompt_logprobs
    await rig.agent.look()
    after = rig.agent.standing.prompt_logprobs
    assert (rig.state.version, rig.state.ready) == (3, True)
    assert before is not None
    assert after is not None
    assert abs(before - after).max() > 0.5
    rig.store.rewind("bf16", 1)
    await rig.agent.look()
    assert (rig.state.version, rig.state.ready) == (1, True)


async def test_what_was_drawn_from_weights_that_a_rewind_undid_is_void(make_rig: Callable[..., Rig]) -> None:
    """Also when the number comes again: the resumed trainer's version 3 is another one than the version 3 of the tokens."""
    rig = make_rig()
    for version in (1, 2, 3):
        publish(rig, version)
    await rig.agent.look()
    client = await rig.client()
    await client.post("/pause_generation")
    under_way = asyncio.create_task(client.post("/generate", json=tiny.body(tiny.prompt(5), 100)))
    await tiny.until(lambda: rig.agent.in_flight == 1)
    rig.store.rewind("bf16", 2)
    publish(rig, 3, seed=13)
    await client.post("/continue_generation")
    await rig.agent.look()
    assert (rig.state.version, rig.state.ready) == (3, True)
    answer = await under_way
    assert answer.status == 503
    assert (await client.post("/generate", json=tiny.body(tiny.prompt(5), 4))).status == 200
    await client.close()


async def test_a_reply_whose_version_was_never_applied_is_void_and_nobody_waits_for_it(
    make_rig: Callable[..., Rig],
) -> None:
    class NamesAnother(ReferenceEngine):
        async def generate(self, body: dict[str, Any], *, counted: bool = True) -> Any:
            reply: Any = await super().generate(body, counted=counted)
            if counted:  # the canary hears the truth
                reply["meta_info"]["weight_versions"][0]["version"] = "99"
            return reply

    rig = make_rig(engine_type=NamesAnother)
    publish(rig, 1)
    await rig.agent.look()
    client = await rig.client()
    answer = await asyncio.wait_for(client.post("/generate", json=tiny.body(tiny.prompt(5), 4)), 30)
    assert answer.status == 503
    assert (await answer.json())["error"]["message"].startswith("VersionMismatch")
    await client.close()


async def test_while_the_rewound_version_cannot_be_pulled_nothing_is_served(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    for version in (1, 2):
        publish(rig, version)
    await rig.agent.look()
    rig.store.rewind("bf16", 1)
    shutil.rmtree(Path(rig.settings.store_url.removeprefix("file://")) / "run/views/bf16/v000001")
    await rig.agent.look()
    assert (rig.state.ready, rig.state.reason) == (False, "Rewinding")


async def test_pulled_folders_are_bounded(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(keep_versions=1)
    for version in range(1, 6):
        publish(rig, version)
        await rig.agent.look()
    kept = sorted(path.name for path in (rig.settings.scratch / "views/bf16").iterdir())
    assert kept == ["v000004", "v000005"]


class FailsToLoad(ReferenceEngine):
    """Its third load, of version 2, fails half-way: the answer of the update is an error."""

    loads = 0

    def _load(self, folder: Path) -> object:  # type: ignore[override]
        type(self).loads += 1
        if type(self).loads == 2:
            raise EngineError("device lost half-way")
        return super()._load(folder)


async def test_an_update_that_fails_half_way_is_never_advertised_and_is_tried_again(
    make_rig: Callable[..., Rig],
) -> None:
    FailsToLoad.loads = 0
    rig = make_rig(engine_type=FailsToLoad)
    publish(rig, 1)
    await rig.agent.look()
    publish(rig, 2)
    await rig.agent.look()
    assert (rig.state.version, rig.state.ready, rig.state.reason) == (1, False, "LoadFailed")
    assert rig.state.message == "device lost half-way"
    await rig.agent.look()
    assert (rig.state.version, rig.state.ready, rig.state.reason) == (2, True, "")


class NeverLoads(ReferenceEngine):
    def _load(self, folder: Path) -> object:  # type: ignore[override]
        raise EngineError("no such device")


async def test_after_some_failures_the_process_gives_up_to_be_replaced(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(engine_type=NeverLoads, max_failures=3)
    publish(rig, 1)
    code = await asyncio.wait_for(rig.agent.run(), 30)
    assert code == 3
    assert (rig.agent.standing.failures, rig.state.reason) == (3, "LoadFailed")


async def test_the_loop_follows_the_pointer(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    running = asyncio.create_task(rig.agent.run())
    for version in (1, 2):
        publish(rig, version)
        await tiny.until(lambda want=version: rig.state.version == want)  # type: ignore[misc]
    rig.agent.leave()
    assert await asyncio.wait_for(running, 30) == 0
