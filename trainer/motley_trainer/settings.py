"""What the trainer is told: environment and run.json. Read once, then passed around."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import fsspec
from motley_api import keys
from motley_api.resources.rlrun import RLRunSpec
from pydantic import ValidationError

ENV_SOCKET = "MOTLEY_BUFFER_SOCKET"  # the supervisor's own, for its training processes
ENV_LEFT = "MOTLEY_LEFT_EARLY"  # likewise: the file that says that the gang left, after a save, before the last step
ENV_INDEX = "JOB_COMPLETION_INDEX"  # Kubernetes' own, of an Indexed Job


class SettingsError(ValueError):
    """The environment or run.json is not usable; the message names the field."""


@dataclass(frozen=True)
class Settings:
    run: str
    run_uid: str
    namespace: str
    token: str
    pod_name: str
    pod_ip: str
    store_url: str
    scratch: Path
    fleet_file: Path | None
    index: int  # of this pod in the gang
    spec: RLRunSpec

    @property
    def run_url(self) -> str:
        return f"{self.store_url.rstrip('/')}/{self.run}"

    def local_run_folder(self) -> Path | None:
        """The run's folder when the store is a file system; None for an object store."""
        fs, path = fsspec.core.url_to_fs(self.run_url)
        return Path(path) if "file" in (fs.protocol if isinstance(fs.protocol, tuple) else (fs.protocol,)) else None

    def durable_folder(self, name: str) -> Path:
        """<store>/<run>/<name> where the store is a file system, else a folder of the pod, which dies with it."""
        root = self.local_run_folder() or self.scratch / "durable"
        folder = root / name
        folder.mkdir(parents=True, exist_ok=True)
        return folder


def from_environment(environment: Mapping[str, str] = os.environ) -> Settings:
    """Errors: SettingsError naming every variable that is missing, or the field of run.json that is wrong."""
    needed = (keys.ENV_RUN, keys.ENV_RUN_CONFIG, keys.ENV_TOKEN, keys.ENV_POD_IP, keys.ENV_STORE_URL)
    missing = [name for name in needed if not environment.get(name)]
    if missing:
        raise SettingsError(f"environment: {', '.join(missing)} must be set")
    config = Path(environment[keys.ENV_RUN_CONFIG])
    try:
        spec = RLRunSpec.model_validate_json(config.read_bytes())
    except (OSError, ValidationError) as error:
        raise SettingsError(f"{keys.ENV_RUN_CONFIG}: {config}: {error}") from error
    fleet = environment.get(keys.ENV_FLEET)
    return Settings(
        run=environment[keys.ENV_RUN],
        run_uid=environment.get(keys.ENV_RUN_UID, environment[keys.ENV_RUN]),
        namespace=environment.get(keys.ENV_NAMESPACE, "default"),
        token=environment[keys.ENV_TOKEN],
        pod_name=environment.get(keys.ENV_POD_NAME, "trainer-0"),
        pod_ip=environment[keys.ENV_POD_IP],
        store_url=environment[keys.ENV_STORE_URL],
        scratch=Path(environment.get(keys.ENV_SCRATCH, "/tmp")),
        fleet_file=Path(fleet) if fleet else None,
        index=int(environment.get(ENV_INDEX, "0")),
        spec=spec,
    )
