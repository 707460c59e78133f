"""A small asynchronous client for the Kubernetes API: JSON requests and list-then-watch. No models, objects are dictionaries."""

from __future__ import annotations

import asyncio
import base64
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import yaml

Object = dict[str, Any]

MERGE_PATCH = "application/merge-patch+json"
WATCH_TIMEOUT_S = 300
RELIST_DELAY_S = 1.0


class ApiError(RuntimeError):
    """The API server's refusal: its HTTP status, reason and message."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(f"{status} {reason}: {message}")
        self.status = status
        self.reason = reason


@dataclass(frozen=True)
class Access:
    """Where the API server is and how to be let in."""

    server: str
    token: str
    ca_pem: str

    @classmethod
    def from_kubeconfig(cls, path: Path) -> Access:
        """Read a kubeconfig of the shape that ``controlplane.kubeconfig_text`` writes."""
        config = yaml.safe_load(path.read_text())
        cluster = config["clusters"][0]["cluster"]
        ca_pem = base64.b64decode(cluster["certificate-authority-data"]).decode()
        return cls(cluster["server"], config["users"][0]["user"]["token"], ca_pem)


class KubeClient:
    """Requests to one API server. An async context manager."""

    def __init__(self, access: Access) -> None:
        self.access = access
        self._ssl = ssl.create_default_context(cadata=access.ca_pem)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> KubeClient:
        # Watches hold a connection each, so the pool has no limit.
        connector = aiohttp.TCPConnector(limit=0, ssl=self._ssl)
        headers = {"Authorization": f"Bearer {self.access.token}", "Accept": "application/json"}
        self._session = aiohttp.ClientSession(connector=connector, headers=headers)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    @property
    def session(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise RuntimeError("use KubeClient as a context manager")
        return self._session

    async def request(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        params: Mapping[str, str] | None = None,
        content_type: str = "application/json",
    ) -> Object:
        """One request; its answer as JSON.

        Raises:
            ApiError: the server answered with an error.
        """
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": content_type} if data is not None else {}
        timeout = aiohttp.ClientTimeout(total=30)
        async with self.session.request(
            method, self.access.server + path, data=data, params=params, headers=headers, timeout=timeout
        ) as response:
            text = await response.text()
            if response.status >= 400:
                raise _api_error(response.status, text)
            answer: Object = json.loads(text)
            return answer

    async def get(self, path: str, params: Mapping[str, str] | None = None) -> Object:
        return await self.request("GET", path, params=params)

    async def create(self, path: str, body: Mapping[str, Any]) -> Object:
        return await self.request("POST", path, body)

    async def merge_patch(self, path: str, body: Mapping[str, Any]) -> Object:
        return await self.request("PATCH", path, body, content_type=MERGE_PATCH)

    async def delete(self, path: str, body: Mapping[str, Any] | None = None) -> Object:
        return await self.request("DELETE", path, body)

    async def watch(self, path: str, params: Mapping[str, str], resource_version: str) -> AsyncIterator[Object]:
        """Events from ``resource_version`` on, until the server ends the watch."""
        query = {
            **params,
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": resource_version,
            "timeoutSeconds": str(WATCH_TIMEOUT_S),
        }
        timeout = aiohttp.ClientTimeout(total=None, sock_read=WATCH_TIMEOUT_S + 30)
        async with self.session.get(self.access.server + path, params=query, timeout=timeout) as response:
            if response.status >= 400:
                raise _api_error(response.status, await response.text())
            pending = b""
            # Objects may be longer than aiohttp's line limit, so lines are split here.
            async for chunk in response.content.iter_any():
                *lines, pending = (pending + chunk).split(b"\n")
                for line in lines:
                    if line:
                        yield json.loads(line)


def _api_error(status: int, text: str) -> ApiError:
    try:
        answer = json.loads(text)
        return ApiError(status, str(answer.get("reason", "")), str(answer.get("message", text)))
    except (ValueError, AttributeError):
        return ApiError(status, "", text[:300])


Key = tuple[str, str]  # namespace ("" for cluster-scoped objects), name


def key_of(item: Mapping[str, Any]) -> Key:
    return item["metadata"].get("namespace", ""), item["metadata"]["name"]


@dataclass(frozen=True)
class Change:
    """What became of one object: ``new`` is None when it is gone, ``old`` is None when it was not known."""

    key: Key
    old: Object | None
    new: Object | None


class Reflector:
    """A local copy of one resource, kept by list and watch; tells a callback of every change."""

    def __init__(
        self,
        client: KubeClient,
        path: str,
        on_change: Callable[[Change], Awaitable[None] | None],
        params: Mapping[str, str] | None = None,
    ) -> None:
        self.client = client
        self.path = path
        self.params = dict(params or {})
        self.items: dict[Key, Object] = {}
        self.synced = asyncio.Event()
        self._on_change = on_change

    def get(self, namespace: str, name: str) -> Object | None:
        return self.items.get((namespace, name))

    async def run(self) -> None:
        """Follow the resource until cancelled. Errors lead to a new list after a pause."""
        while True:
            try:
                resource_version = await self._list()
                self.synced.set()
                while True:
                    resource_version = await self._watch(resource_version)
            except (ApiError, aiohttp.ClientError, OSError, TimeoutError, ValueError):
                await asyncio.sleep(RELIST_DELAY_S)

    async def _list(self) -> str:
        answer = await self.client.get(self.path, self.params)
        fresh = {key_of(item): item for item in answer.get("items") or ()}
        for key in [key for key in self.items if key not in fresh]:
            await self._apply(key, None)
        for key, item in fresh.items():
            await self._apply(key, item)
        return str(answer["metadata"]["resourceVersion"])

    async def _watch(self, resource_version: str) -> str:
        async for event in self.client.watch(self.path, self.params, resource_version):
            item = event["object"]
            if event["type"] == "ERROR":
                raise ApiError(int(item.get("code", 500)), str(item.get("reason", "")), str(item.get("message", "")))
            resource_version = item["metadata"]["resourceVersion"]
            if event["type"] != "BOOKMARK":
                await self._apply(key_of(item), None if event["type"] == "DELETED" else item)
        return resource_version

    async def _apply(self, key: Key, item: Object | None) -> None:
        old = self.items.get(key)
        if item is None:
            if old is None:
                return
            del self.items[key]
        else:
            if old is not None and old["metadata"]["resourceVersion"] == item["metadata"]["resourceVersion"]:
                return
            self.items[key] = item
        result = self._on_change(Change(key, old, item))
        if result is not None:
            await result
