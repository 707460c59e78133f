"""`motley router`: one process a run, configured by its environment (see motley_api.keys)."""

from __future__ import annotations

import json
import os
import pathlib
import sys
from collections.abc import Mapping
from typing import Any

from aiohttp import web
from motley_api import keys

from motley_sampler.router import completions, proxy
from motley_sampler.router.server import Router, Settings, build_app
from motley_sampler.router.wire import log

GRACE_S = 20.0  # for relayed requests in flight at SIGTERM


class ConfigError(Exception):
    """An environment that the router cannot run in."""


def settings_from(environment: Mapping[str, str]) -> Settings:
    """Raises ConfigError naming the variable that is missing or unusable."""
    token = environment.get(keys.ENV_TOKEN, "")
    if not token:
        raise ConfigError(f"{keys.ENV_TOKEN} must be set")
    fleet = environment.get(keys.ENV_FLEET)
    model: dict[str, Any] = {}
    if run_config := environment.get(keys.ENV_RUN_CONFIG):
        try:
            model = json.loads(pathlib.Path(run_config).read_text()).get("model", {})
        except (OSError, ValueError) as error:
            raise ConfigError(f"{keys.ENV_RUN_CONFIG}={run_config} must be a readable JSON file: {error}") from error
    return Settings(
        token=token,
        fleet_path=pathlib.Path(fleet) if fleet else None,
        model_source=model.get("source", ""),
        context_length=model.get("contextLength", 0),
        model_name=environment.get(keys.ENV_RUN, "motley"),
    )


def build(router: Router) -> web.Application:
    """The control API and the proxy beside it."""
    app = build_app(router)
    relay = proxy.Proxy(router)
    proxy.add_routes(app, relay)
    completions.add_routes(app, completions.Completions(relay))
    return app


def main() -> None:
    try:
        settings = settings_from(os.environ)
        address = os.environ.get(keys.ENV_POD_IP, "")
        if not address:
            raise ConfigError(f"{keys.ENV_POD_IP} must be set: the address to listen on")
    except ConfigError as error:
        log("config-error", error=error)
        sys.exit(keys.EXIT_CONFIG)
    router = Router(settings)
    router.read_fleet()
    log("start", address=address, port=keys.ROUTER_PORT, fleet=settings.fleet_path or "none")
    web.run_app(
        build(router),
        host=address,
        port=keys.ROUTER_PORT,
        shutdown_timeout=GRACE_S,
        access_log=None,
        print=None,
        handle_signals=True,
    )
    log("stop")


if __name__ == "__main__":
    main()
