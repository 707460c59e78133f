"""One line on stderr for each event: event=… key=value …"""

from __future__ import annotations

import json
import sys


def log(event: str, **fields: object) -> None:
    told = " ".join(f"{key}={_quoted(value)}" for key, value in fields.items())
    print(f"event={event} {told}".rstrip(), file=sys.stderr, flush=True)


def _quoted(value: object) -> str:
    text = str(value)
    return json.dumps(text) if not text or any(character in text for character in ' "=\n\r\t') else text
