"""Answers in one shape, bodies with a limit, and the token check. Shared by the control API and the proxy."""

from __future__ import annotations

import hmac
import sys

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

MAX_BODY_BYTES = 64 * 1024 * 1024
OPEN_PATHS = frozenset({"/health", "/metrics"})


def log(event: str, **fields: object) -> None:
    """One line on stderr: event=… key=value …, strings quoted where a space would split them."""
    told = " ".join(f"{key}={_quoted(value)}" for key, value in fields.items())
    print(f"event={event} {told}".rstrip(), file=sys.stderr, flush=True)


def _quoted(value: object) -> str:
    text = str(value)
    return msgspec.json.encode(text).decode() if not text or any(c in text for c in ' "=\n\r\t') else text


class RequestError(Exception):
    """A request that gets an answer other than success. `reason` is CamelCase; `message` says what is allowed."""

    def __init__(self, status: int, reason: str, message: str, *, retry_after_s: int | None = None, **more: object):
        super().__init__(message)
        self.status, self.reason, self.message = status, reason, message
        self.retry_after_s, self.more = retry_after_s, more

    def body(self) -> dict[str, object]:
        """`error` is where OpenAI's clients look; reason and message are where ours do."""
        error = {"type": self.reason, "code": self.status, "message": self.message}
        return {"reason": self.reason, "message": self.message, "error": error, **self.more}

    def response(self) -> web.Response:
        headers = {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}
        return json_response(self.body(), status=self.status, headers=headers)


def json_response(body: object, *, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), status=status, headers=headers, content_type="application/json")


async def read_body(request: web.Request, max_bytes: int) -> bytes:
    """The whole body, or a RequestError 413 as soon as it is known to be too long."""
    too_long = RequestError(413, "BodyTooLarge", f"the request body must be at most {max_bytes} bytes")
    if request.content_length is not None and request.content_length > max_bytes:
        raise too_long
    chunks = bytearray()
    async for chunk in request.content.iter_any():
        chunks += chunk
        if len(chunks) > max_bytes:
            raise too_long
    return bytes(chunks)


def decode[T](body: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise RequestError(400, "InvalidBody", f"the body must be a {kind.__name__}: {error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(400, "MalformedJSON", f"the body must be JSON: {error}") from error


def guard(token: str) -> Middleware:
    """A middleware: checks the bearer token on all but the open paths, and turns Problems into answers."""
    want = f"Bearer {token}".encode()

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path not in OPEN_PATHS:
            given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
            if not hmac.compare_digest(given, want):
                return RequestError(
                    401, "Unauthorized", "the Authorization header must be: Bearer <run token>"
                ).response()
        try:
            return await handler(request)
        except RequestError as problem:
            return problem.response()
        except web.HTTPException as error:
            if error.status < 400:
                raise
            return RequestError(error.status, error.reason.replace(" ", ""), error.text or error.reason).response()

    return middleware
