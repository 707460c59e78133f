"""Logging to stderr as key=value lines."""

from __future__ import annotations

import logging
import sys


def configure(component: str) -> None:
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.INFO,
        format=f"time=%(asctime)s level=%(levelname)s component={component} %(message)s",
        datefmt="%Y-%m-%dT%H:%M:%S%z",
    )
    for chatty, level in (("aiohttp.access", logging.WARNING), ("torch", logging.WARNING), ("megatron", logging.ERROR)):
        logging.getLogger(chatty).setLevel(level)
