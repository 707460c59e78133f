"""Names of what the operator makes, once. Children are named after their run or group; admission bounds those names."""

from __future__ import annotations

from urllib.parse import urlsplit

CONFIG_DIR = "/etc/motley"
RUN_DIR, FLEET_DIR, GROUP_DIR = f"{CONFIG_DIR}/run", f"{CONFIG_DIR}/fleet", f"{CONFIG_DIR}/group"
SCRATCH_DIR = "/scratch"


def token(run: str) -> str:
    return f"{run}-token"


def run_config(run: str) -> str:
    return f"{run}-config"


def fleet(run: str) -> str:
    return f"{run}-fleet"


def router(run: str) -> str:
    return f"{run}-router"


def rollout(run: str) -> str:
    return f"{run}-rollout"


def trainer(run: str) -> str:
    """The gang's Job, and the ClusterIP Service of its first pod."""
    return f"{run}-trainer"


def gang(run: str) -> str:
    """The headless Service that gives each pod of a gang a DNS name."""
    return f"{run}-gang"


def inline_group(run: str, group: str) -> str:
    return f"{run}-{group}"


def group_config(group: str) -> str:
    return f"{group}-config"


def url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def store_mount(store_url: str) -> str | None:
    """Where a claim is mounted for a store that is a path; None for object stores."""
    parts = urlsplit(store_url)
    return parts.path if parts.scheme in ("file", "") and parts.path.startswith("/") else None
