"""One pod on a virtual node: from being bound to being gone. The counterpart of kubelet's pod worker."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import signal
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

import aiohttp

from motley_local import probes
from motley_local.nodes import NODE_ADDRESS, timestamp
from motley_local.podspec import (
    ConfigError,
    Image,
    Mount,
    PodFacts,
    container_argv,
    container_environment,
    resolve_image,
    rewrite_paths,
    service_environment,
)
from motley_local.podstatus import (
    BACKOFF_RESET_S,
    ContainerState,
    Running,
    Terminated,
    Waiting,
    pod_status,
    restart_delay_s,
    should_restart,
)
from motley_local.runner import Launch, Process, Runner, StartError
from motley_local.volumes import container_mounts, plain_folder, text_files, token_requests, write_atomically

Object = dict[str, Any]

RETRY_S = 1.0  # after something that a pod needs was missing
LEAST_TERM_S = 2.0  # what SIGTERM gets even when a preStop hook used up the grace
FORCED_GRACE_S = 2.0  # a pod whose object is already gone
LOGS_KEPT = 2  # of one container: the running one and the one before
TOKEN_REFRESH_SHARE = 0.8
TERMINATION_MESSAGE_LINES = 80


class Host(Protocol):
    """What a pod needs from the agent that runs it."""

    runner: Runner
    folder: Path
    http: aiohttp.ClientSession
    api_server: tuple[str, int]

    def lookup(self, kind: str, namespace: str, name: str) -> Mapping[str, Any] | None: ...
    def services(self) -> Sequence[Mapping[str, Any]]: ...
    def current(self, namespace: str, name: str) -> Object | None: ...
    def allocatable(self, node: str) -> Mapping[str, str]: ...
    def claim_path(self, namespace: str, claim: str) -> Path | None: ...
    def take_ip(self) -> str: ...
    def give_back_ip(self, ip: str) -> None: ...
    def image_env(self, image: Image, pod_folder: Path) -> dict[str, str]: ...
    def image_mounts(self, image: Image, pod_folder: Path) -> list[Mount]: ...
    def hosts_text(self, pod: Object, pod_ip: str) -> str: ...
    def publish(self, pod: Pod) -> None: ...
    def record(self, pod: Object, kind: str, reason: str, message: str) -> None: ...
    async def request_token(self, pod: Object, audience: str, seconds: int) -> str: ...
    async def finish(self, pod: Pod) -> None: ...


class Pod(Protocol):
    """A pod that the agent looks after, with or without processes."""

    pod: Object
    ip: str

    def start(self) -> None: ...
    def update(self, pod: Object) -> None: ...
    def status(self, previous: Mapping[str, Any]) -> Object: ...
    def refresh(self) -> None: ...
    async def terminate(self, grace_s: float, *, report: bool) -> None: ...
    async def lose_power(self) -> None: ...
    def log_path(self, container: str, previous: bool) -> Path | None: ...


def now_text() -> str:
    return timestamp(datetime.now(UTC))


def hostname_of(pod: Object) -> str:
    return str(pod["spec"].get("hostname") or pod["metadata"]["name"])[:63]


def is_finished(pod: Object) -> bool:
    return (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed")


@dataclass
class _Container:
    """A container's declaration, its state, and its process while it runs."""

    spec: Object
    state: ContainerState
    process: Process | None = None
    starts: int = 0


def _containers(specs: Sequence[Object], statuses: Sequence[Object], lost: bool) -> list[_Container]:
    """Containers of a pod that may have run before its node lost power."""
    known = {one["name"]: one for one in statuses}
    made = []
    for spec in specs:
        state = ContainerState(spec["name"], spec.get("image", ""), restart_policy=spec.get("restartPolicy", ""))
        before = known.get(spec["name"]) or {}
        if lost and before.get("containerID"):
            started = ((before.get("state") or {}).get("running") or {}).get("startedAt") or now_text()
            state.last = Terminated(137, "ContainerStatusUnknown", started, now_text(), "the node was lost", signal=9)
            state.restarts = int(before.get("restartCount", 0)) + 1
        made.append(_Container(spec, state, starts=state.restarts))
    return made


class ProcessPod:
    """A pod whose containers are processes of this machine."""

    def __init__(self, pod: Object, host: Host) -> None:
        self.pod = pod
        self.host = host
        self.ip = NODE_ADDRESS if pod["spec"].get("hostNetwork") else host.take_ip()
        self.folder: Path = host.folder / "pods" / pod["metadata"]["uid"]
        status = pod.get("status") or {}
        spec = pod["spec"]
        self.policy = spec.get("restartPolicy", "Always")
        self.init = _containers(spec.get("initContainers") or (), status.get("initContainerStatuses") or (), False)
        self.main = _containers(spec["containers"], status.get("containerStatuses") or (), True)
        self.started_at = status.get("startTime") or now_text()
        self.override: tuple[str, str, str] | None = None
        self.stopping = asyncio.Event()
        self._folders: dict[str, Path] = {}
        self._text_volumes: frozenset[str] = frozenset()
        self._tokens: dict[str, str] = {}
        self._task: asyncio.Task[None] | None = None
        self._helpers: set[asyncio.Task[None]] = set()
        self._terminating = False

    # What the agent asks for.

    def start(self) -> None:
        if self.policy == "Never" and any(one.state.last is not None for one in self.main):
            for one in self.main:
                one.state.state = one.state.last or Waiting("ContainerStatusUnknown")
            self.host.publish(self)
            return
        self._task = asyncio.create_task(self._run(), name=f"pod {self.pod['metadata']['name']}")

    def update(self, pod: Object) -> None:
        self.pod = pod

    @property
    def facts(self) -> PodFacts:
        return PodFacts(self.ip, NODE_ADDRESS, self.host.allocatable(self.pod["spec"]["nodeName"]))

    def status(self, previous: Mapping[str, Any]) -> Object:
        return pod_status(
            self.pod,
            init=[one.state for one in self.init],
            main=[one.state for one in self.main],
            pod_ip=self.ip,
            host_ip=NODE_ADDRESS,
            start_time=self.started_at,
            now=now_text(),
            previous=previous,
            override=self.override,
        )

    def refresh(self) -> None:
        """Bring mounted ConfigMaps and Secrets, and the hosts file, up to date."""
        if not self._folders:
            return
        self._write_hosts()
        for volume in self.pod["spec"].get("volumes") or ():
            if volume["name"] in self._text_volumes:
                # A source that went away leaves the files as they were.
                with contextlib.suppress(ConfigError):
                    self._write_text_volume(volume)

    def log_path(self, container: str, previous: bool) -> Path | None:
        """Log of the container's present run, or of the one before it; None where there is none."""
        for one in [*self.main, *self.init]:
            if one.spec["name"] == container:
                number = one.starts - (2 if previous else 1)
                return self._log_file(container, number) if number >= 0 else None
        return None

    async def terminate(self, grace_s: float, *, report: bool) -> None:
        """End the pod gracefully, then remove what it left; with ``report`` also its object."""
        if self._terminating:
            return
        self._terminating = True
        self.stopping.set()
        await self._stop_containers(grace_s)
        await self._finish_tasks()
        if report:
            self.host.publish(self)
            await self.host.finish(self)
        await self._clean_up()

    async def lose_power(self) -> None:
        """End everything at once and tell nobody."""
        self._terminating = True
        self.stopping.set()
        for one in [*self.init, *self.main]:
            if one.process is not None:
                await self.host.runner.kill(one.process)
        await self._finish_tasks()
        await self._clean_up()

    # From bound to ended.

    async def _run(self) -> None:
        self.host.publish(self)
        try:
            await self._prepare_volumes()
            if deadline_s := self.pod["spec"].get("activeDeadlineSeconds"):
                self._help(self._enforce_deadline(float(deadline_s)))
            if await self._run_init():
                await asyncio.gather(*(self._run_container(one, self.policy) for one in self.main))
                await self._stop_sidecars()
        except asyncio.CancelledError:
            raise
        finally:
            self.host.publish(self)

    def _help(self, work: Awaitable[None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        assert isinstance(task, asyncio.Task)
        self._helpers.add(task)
        task.add_done_callback(self._helpers.discard)
        return task

    async def _finish_tasks(self) -> None:
        tasks = [*self._helpers, *([self._task] if self._task else [])]
        for task in self._helpers:
            task.cancel()
        if self._task is not None:
            # The run notices `stopping` by itself; it is cancelled only where it waits for something else.
            await asyncio.wait([self._task], timeout=LEAST_TERM_S)
            self._task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _clean_up(self) -> None:
        await asyncio.to_thread(shutil.rmtree, self.folder, True)
        if self.ip != NODE_ADDRESS:
            self.host.give_back_ip(self.ip)

    async def _pause(self, seconds: float) -> bool:
        """Wait; whether the pod is being stopped."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.stopping.wait(), seconds)
        return self.stopping.is_set()

    async def _enforce_deadline(self, deadline_s: float) -> None:
        await asyncio.sleep(deadline_s)
        self.override = ("Failed", "DeadlineExceeded", "Pod was active on the node longer than the specified deadline")
        self.stopping.set()
        await self._stop_containers(float(self.pod["spec"].get("terminationGracePeriodSeconds", 30)))
        self.host.publish(self)

    # Volumes.

    async def _prepare_volumes(self) -> None:
        told = ""
        while True:
            try:
                for audience, seconds in token_requests(self.pod).items():
                    if audience not in self._tokens:
                        self._tokens[audience] = await self.host.request_token(self.pod, audience, seconds)
                        self._help(self._renew_token(audience, seconds))
                self._make_volumes()
                return
            except (ConfigError, OSError, RuntimeError) as error:
                if str(error) != told:
                    told = str(error)
                    self.host.record(self.pod, "Warning", "FailedMount", told)
            if await self._pause(RETRY_S):
                return

    def _make_volumes(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        for name in ("home", "tmp"):
            (self.folder / name).mkdir(exist_ok=True)
        folders: dict[str, Path] = {}
        text: set[str] = set()
        for volume in self.pod["spec"].get("volumes") or ():
            name = volume["name"]
            if text_files(self.pod, volume, self.facts, self.host.lookup, self._tokens) is not None:
                folders[name] = self.folder / "volumes" / name
                text.add(name)
            else:
                folders[name] = plain_folder(volume, self._claim_path(volume), self.folder / "volumes" / name)
        self._folders, self._text_volumes = folders, frozenset(text)
        for volume in self.pod["spec"].get("volumes") or ():
            if volume["name"] in text:
                self._write_text_volume(volume)
        self._write_hosts()

    def _claim_path(self, volume: Object) -> Path | None:
        if "persistentVolumeClaim" not in volume:
            return None
        claim = volume["persistentVolumeClaim"]["claimName"]
        path = self.host.claim_path(self.pod["metadata"]["namespace"], claim)
        if path is None:
            raise ConfigError(f"persistentvolumeclaim {claim!r} is not bound to a volume of this machine")
        return path

    def _write_text_volume(self, volume: Object) -> None:
        found = text_files(self.pod, volume, self.facts, self.host.lookup, self._tokens)
        if found is None:
            return
        files, mode = found
        if not self.host.runner.isolation.mounts and "configMap" in volume:
            mounts = self._all_mounts()
            files = {name: _rewritten_bytes(data, mounts) for name, data in files.items()}
        write_atomically(self._folders[volume["name"]], files, mode)

    def _all_mounts(self) -> list[Mount]:
        mounts: list[Mount] = []
        for one in [*self.init, *self.main]:
            mounts += self.host.image_mounts(resolve_image(one.spec.get("image", "")), self.folder)
            for declared in one.spec.get("volumeMounts") or ():
                if declared["name"] in self._folders and not declared.get("subPath"):
                    mounts.append(Mount(str(self._folders[declared["name"]]), declared["mountPath"]))
        return mounts

    def _write_hosts(self) -> None:
        path = self.folder / "hosts"
        text = self.host.hosts_text(self.pod, self.ip)
        if not path.exists():
            path.write_text(text)
        elif path.read_text() != text:
            # The file is bind-mounted, so it must stay the same file: written over in one call, then cut to length.
            with path.open("r+b") as file:
                file.write(text.encode())
                file.truncate()

    async def _renew_token(self, audience: str, seconds: int) -> None:
        while True:
            await asyncio.sleep(seconds * TOKEN_REFRESH_SHARE)
            with contextlib.suppress(RuntimeError, aiohttp.ClientError, OSError):
                self._tokens[audience] = await self.host.request_token(self.pod, audience, seconds)
                self.refresh()

    # Containers.

    async def _run_init(self) -> bool:
        """Run init containers one after another; whether all did well."""
        for one in self.main:
            one.state.state = Waiting("PodInitializing") if self.init else Waiting("ContainerCreating")
        for one in self.init:
            if one.state.restart_policy == "Always":
                self._help(self._run_container(one, "Always"))
                while not one.state.started:
                    if await self._pause(0.1):
                        return False
                continue
            policy = "Never" if self.policy == "Never" else "OnFailure"
            await self._run_container(one, policy)
            if not (isinstance(one.state.state, Terminated) and one.state.state.exit_code == 0):
                return False
            one.state.ready = True
            self.host.publish(self)
        return not self.stopping.is_set()

    async def _stop_sidecars(self) -> None:
        sidecars = [one for one in self.init if one.process is not None]
        if sidecars:
            self.stopping.set()
            grace_s = float(self.pod["spec"].get("terminationGracePeriodSeconds", 30))
            await asyncio.gather(*(self._stop_container(one, grace_s) for one in sidecars))

    async def _run_container(self, one: _Container, policy: str) -> None:
        """Run a container, again and again as its policy says."""
        in_a_row = 0
        while not self.stopping.is_set():
            begun_s = time.monotonic()
            ended = await self._run_once(one)
            if ended is None:
                continue
            one.state.ready, one.state.started = False, False
            if self.stopping.is_set() or not should_restart(policy, ended.exit_code):
                one.state.state = ended
                self.host.publish(self)
                return
            one.state.last = ended
            if time.monotonic() - begun_s >= BACKOFF_RESET_S:
                in_a_row = 0
            delay_s = restart_delay_s(in_a_row)
            in_a_row += 1
            if delay_s > 0:
                name = f"container={one.spec['name']} pod={self.pod['metadata']['name']}"
                message = f"back-off {delay_s:g}s restarting failed {name}"
                one.state.state = Waiting("CrashLoopBackOff", message)
                self.host.record(self.pod, "Warning", "BackOff", message)
                self.host.publish(self)
                if await self._pause(delay_s):
                    return
            one.state.restarts += 1

    async def _run_once(self, one: _Container) -> Terminated | None:
        """One run from start to end; None when it could not be tried yet, after a pause."""
        begun_at = now_text()
        try:
            launch = self._launch(one)
            process = await self.host.runner.start(launch)
        except _ImageError as error:
            one.state.state = Waiting("ErrImagePull", str(error))
            self.host.record(self.pod, "Warning", "Failed", str(error))
            self.host.publish(self)
            await self.stopping.wait()
            return None
        except ConfigError as error:
            if one.state.state != Waiting("CreateContainerConfigError", str(error)):
                one.state.state = Waiting("CreateContainerConfigError", str(error))
                self.host.record(self.pod, "Warning", "Failed", str(error))
                self.host.publish(self)
            await self._pause(RETRY_S)
            return None
        except StartError as error:
            one.starts += 1
            self.host.record(self.pod, "Warning", "Failed", str(error))
            return Terminated(128, "StartError", begun_at, now_text(), f"failed to start: {error}")
        one.starts += 1
        self._drop_old_logs(one)
        return await self._follow(one, process)

    async def _follow(self, one: _Container, process: Process) -> Terminated:
        one.process = process
        one.state.state = Running(now_text())
        one.state.container_id = f"process://{process.launch.container_id}"
        startup = one.spec.get("startupProbe")
        one.state.started = startup is None
        one.state.ready = one.state.started and one.spec.get("readinessProbe") is None
        self.host.record(self.pod, "Normal", "Started", f"Started container {one.spec['name']}")
        self.host.publish(self)
        watcher = asyncio.create_task(self._probe(one, process))
        try:
            # Deletion may have come while the process was being started.
            if self.stopping.is_set():
                self._help(self._stop_container(one, float(self.pod["spec"].get("terminationGracePeriodSeconds", 30))))
            code = await asyncio.shield(process.exit_code)
        except asyncio.CancelledError:
            await self.host.runner.kill(process)
            raise
        finally:
            watcher.cancel()
            await asyncio.gather(watcher, return_exceptions=True)
            one.process = None
        self.host.runner.kill_leftovers(process)
        return self._ending(one, process, code)

    def _ending(self, one: _Container, process: Process, code: int) -> Terminated:
        started_at = one.state.state.started_at if isinstance(one.state.state, Running) else now_text()
        exit_code = code if code >= 0 else 128 - code
        message = ""
        if exit_code != 0 and one.spec.get("terminationMessagePolicy") == "FallbackToLogsOnError":
            lines = process.launch.log_path.read_text(errors="replace").splitlines()[-TERMINATION_MESSAGE_LINES:]
            message = "\n".join(lines)[-2048:]
        return Terminated(
            exit_code=exit_code,
            reason="Completed" if exit_code == 0 else "Error",
            started_at=started_at,
            finished_at=now_text(),
            message=message,
            signal=-code if code < 0 else 0,
            container_id=f"process://{process.launch.container_id}",
        )

    def _launch(self, one: _Container) -> Launch:
        """Put together what a container runs with.

        Raises:
            ConfigError: something it refers to is missing.
        """
        image = resolve_image(one.spec.get("image", ""))
        metadata, spec = self.pod["metadata"], self.pod["spec"]
        service_env = service_environment(
            self.host.services(),
            metadata["namespace"],
            self.host.api_server,
            spec.get("enableServiceLinks") is not False,
        )
        env = container_environment(self.pod, one.spec, service_env, self.facts, self.host.lookup)
        hostname = hostname_of(self.pod)
        env = {**self.host.image_env(image, self.folder), "HOSTNAME": hostname, **env}
        argv = container_argv(one.spec, env, image.command)
        cwd = one.spec.get("workingDir") or image.working_dir
        volume_mounts = container_mounts(one.spec, self._folders, self._text_volumes, env)
        own = self.host.image_mounts(image, self.folder)
        taken = {mount.target for mount in volume_mounts}
        mounts = [mount for mount in own if mount.target not in taken] + volume_mounts
        if self.host.runner.isolation.mounts:
            if "/etc/hosts" not in taken:
                mounts.append(Mount(str(self.folder / "hosts"), "/etc/hosts"))
        else:
            argv = [rewrite_paths(part, mounts) for part in argv]
            env = {name: rewrite_paths(value, mounts) for name, value in env.items()}
            cwd = rewrite_paths(cwd, mounts)
        if not image.known and shutil.which(argv[0], path=env.get("PATH")) is None and not Path(argv[0]).is_absolute():
            raise _ImageError(
                f"failed to pull image {one.spec.get('image')!r}: the local cluster pulls no images, "
                f"and this machine has no program {argv[0]!r}"
            )
        return Launch(
            container_id=uuid.uuid4().hex,
            argv=argv,
            env=env,
            cwd=cwd,
            mounts=mounts,
            hostname=hostname,
            folder=self.folder / "containers" / one.spec["name"],
            log_path=self._log_file(one.spec["name"], one.starts),
        )

    def _log_file(self, container: str, number: int) -> Path:
        return self.folder / "logs" / container / f"{number}.log"

    def _drop_old_logs(self, one: _Container) -> None:
        self._log_file(one.spec["name"], one.starts - 1 - LOGS_KEPT).unlink(missing_ok=True)

    # Probes and hooks.

    def _target(self, one: _Container, process: Process) -> probes.Target:
        async def execute(argv: list[str], timeout_s: float) -> tuple[int, str]:
            return await self.host.runner.execute(process, argv, timeout_s)

        return probes.Target(one.spec, self.ip, execute, self.host.http)

    async def _probe(self, one: _Container, process: Process) -> None:
        target = self._target(one, process)
        hook = (one.spec.get("lifecycle") or {}).get("postStart")
        if hook is not None:
            ok, message = await probes.check(
                hook, target, float(self.pod["spec"].get("terminationGracePeriodSeconds", 30))
            )
            if not ok:
                self.host.record(self.pod, "Warning", "FailedPostStartHook", message)
                self._help(self._stop_container(one, LEAST_TERM_S))
                return

        async def on_alive(kind: str, ok: bool, message: str) -> None:
            if not ok:
                self.host.record(self.pod, "Warning", "Unhealthy", f"{kind} probe failed: {message}")
                grace_s = float(self.pod["spec"].get("terminationGracePeriodSeconds", 30))
                self._help(self._stop_container(one, grace_s))

        async def on_ready(ok: bool, message: str) -> None:
            one.state.ready = ok
            if not ok:
                self.host.record(self.pod, "Warning", "Unhealthy", f"Readiness probe failed: {message}")
            self.host.publish(self)

        async def on_started(ok: bool, message: str) -> None:
            if ok:
                one.state.started = True
                one.state.ready = one.spec.get("readinessProbe") is None
                self.host.publish(self)
            else:
                await on_alive("Startup", ok, message)

        if (startup := one.spec.get("startupProbe")) is not None:
            await probes.watch(startup, target, on_started, stop_after_success=True)
        running = []
        if (readiness := one.spec.get("readinessProbe")) is not None:
            running.append(probes.watch(readiness, target, on_ready))
        if (liveness := one.spec.get("livenessProbe")) is not None:
            running.append(probes.watch(liveness, target, lambda ok, message: on_alive("Liveness", ok, message)))
        await asyncio.gather(*running)

    async def _stop_containers(self, grace_s: float) -> None:
        running = [one for one in [*self.init, *self.main] if one.process is not None]
        await asyncio.gather(*(self._stop_container(one, grace_s) for one in running))

    async def _stop_container(self, one: _Container, grace_s: float) -> None:
        """preStop, SIGTERM, and after the grace SIGKILL."""
        process = one.process
        if process is None:
            return
        deadline_s = time.monotonic() + grace_s
        hook = (one.spec.get("lifecycle") or {}).get("preStop")
        if hook is not None and grace_s > 0:
            ok, message = await probes.check(hook, self._target(one, process), grace_s)
            if not ok:
                self.host.record(self.pod, "Warning", "FailedPreStopHook", message)
        process.signal(signal.SIGTERM)
        left_s = max(deadline_s - time.monotonic(), LEAST_TERM_S if grace_s > 0 else 0.0)
        if not process.exit_code.done():
            await asyncio.wait([process.exit_code], timeout=left_s)
        await self.host.runner.kill(process)


class _ImageError(ConfigError):
    """There is no program for a container whose image is not one of ours."""


def _rewritten_bytes(data: bytes, mounts: Sequence[Mount]) -> bytes:
    try:
        return rewrite_paths(data.decode(), mounts).encode()
    except UnicodeDecodeError:
        return data


class ProcesslessPod:
    """A pod with nothing behind it: Running and Ready from the start, gone as soon as it is deleted. For tests of scale."""

    def __init__(self, pod: Object, host: Host) -> None:
        self.pod = pod
        self.host = host
        self.ip = host.take_ip()
        self.started_at = (pod.get("status") or {}).get("startTime") or now_text()
        self.states = [
            ContainerState(
                spec["name"],
                spec.get("image", ""),
                state=Running(self.started_at),
                ready=True,
                started=True,
                container_id=f"none://{pod['metadata']['uid']}/{spec['name']}",
            )
            for spec in pod["spec"]["containers"]
        ]

    def start(self) -> None:
        self.host.publish(self)

    def update(self, pod: Object) -> None:
        self.pod = pod

    def status(self, previous: Mapping[str, Any]) -> Object:
        return pod_status(
            self.pod,
            init=[],
            main=self.states,
            pod_ip=self.ip,
            host_ip=NODE_ADDRESS,
            start_time=self.started_at,
            now=now_text(),
            previous=previous,
        )

    def refresh(self) -> None:
        return None

    async def terminate(self, grace_s: float, *, report: bool) -> None:
        if report:
            await self.host.finish(self)
        self.host.give_back_ip(self.ip)

    async def lose_power(self) -> None:
        self.host.give_back_ip(self.ip)

    def log_path(self, container: str, previous: bool) -> Path | None:
        return None


class FinishedPod(ProcesslessPod):
    """A pod that had ended, or was being deleted, before this agent saw it: nothing is run, only its deletion is carried out."""

    def start(self) -> None:
        return None

    def status(self, previous: Mapping[str, Any]) -> Object:
        return dict(previous)


MakePod = Callable[[Object, Host], Pod]
