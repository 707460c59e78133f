"""A small asynchronous client of the API server: list, get, create, apply, patch, delete.

The `kubernetes` package reads kubeconfigs for the command line, and does no more: it blocks, cannot say server-side apply plainly,
and holds about 80 MiB more in memory than these lines on aiohttp, which the operator needs anyway to ask routers and trainers.
"""

from __future__ import annotations

import base64
import json
import os
import ssl
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import yaml
from motley_api import API_GROUP, API_VERSION, keys

Json = dict[str, Any]

ENV_SERVICE_ACCOUNT_DIR = "MOTLEY_SERVICE_ACCOUNT_DIR"
SERVICE_ACCOUNT_DIR = "/var/run/secrets/kubernetes.io/serviceaccount"
PAGE = 250  # objects of one page of a list
TIMEOUT_S = 30.0
CONNECTIONS = 32
METADATA_LIST = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"

# kind -> (path prefix, plural)
_CORE, _OURS = "api/v1", f"apis/{API_GROUP}/{API_VERSION}"
RESOURCES: dict[str, tuple[str, str]] = {
    "ConfigMap": (_CORE, "configmaps"),
    "Event": (_CORE, "events"),
    "Node": (_CORE, "nodes"),
    "Pod": (_CORE, "pods"),
    "Secret": (_CORE, "secrets"),
    "Service": (_CORE, "services"),
    "Deployment": ("apis/apps/v1", "deployments"),
    "Job": ("apis/batch/v1", "jobs"),
    "Lease": ("apis/coordination.k8s.io/v1", "leases"),
    "ResourceSlice": ("apis/resource.k8s.io/v1", "resourceslices"),
    "RLRun": (_OURS, "rlruns"),
    "SamplerGroup": (_OURS, "samplergroups"),
}


class ApiError(Exception):
    """The API server said no."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(f"{status} {reason}: {message}")
        self.status, self.reason, self.message = status, reason, message


@dataclass(frozen=True)
class Credentials:
    """Where the API server is, and who we are."""

    server: str
    namespace: str = "default"
    ca: str = ""  # PEM
    insecure: bool = False
    token: str = ""
    token_file: str = ""
    certificate: str = ""  # PEM
    key: str = ""  # PEM

    def bearer(self) -> str:
        """The token now: a service account's file changes while we run."""
        return Path(self.token_file).read_text().strip() if self.token_file else self.token

    def ssl_context(self) -> ssl.SSLContext:
        context = ssl.create_default_context(cadata=self.ca or None)
        if self.insecure:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        if self.certificate:
            with tempfile.TemporaryDirectory() as folder:  # ssl reads files only
                pair = Path(folder, "certificate"), Path(folder, "key")
                for path, text in zip(pair, (self.certificate, self.key), strict=True):
                    path.touch(mode=0o600)
                    path.write_text(text)
                context.load_cert_chain(*map(str, pair))
        return context


class NoClusterError(Exception):
    """No kubeconfig, and not in a cluster."""


class KubeconfigError(NoClusterError):
    """A kubeconfig that is there, or was named, and cannot be used."""


def load_credentials(env: Mapping[str, str] = os.environ) -> Credentials:
    """From KUBECONFIG, then the pod's service account, then ~/.kube/config."""
    account = Path(env.get(ENV_SERVICE_ACCOUNT_DIR, SERVICE_ACCOUNT_DIR))
    if path := env.get("KUBECONFIG", ""):
        return from_kubeconfig(Path(path.split(os.pathsep)[0]))
    if env.get("KUBERNETES_SERVICE_HOST") and (account / "token").exists():
        host, port = env["KUBERNETES_SERVICE_HOST"], env.get("KUBERNETES_SERVICE_PORT", "443")
        return Credentials(
            server=f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}",
            namespace=(account / "namespace").read_text().strip(),
            ca=(account / "ca.crt").read_text(),
            token_file=str(account / "token"),
        )
    home = Path(env.get("HOME", "~")).expanduser() / ".kube" / "config"
    if home.exists():
        return from_kubeconfig(home)
    raise NoClusterError("no cluster: set KUBECONFIG, or run in a pod with a service account token")


def from_kubeconfig(path: Path) -> Credentials:
    """Raises KubeconfigError, with the file."""
    try:
        return _from_kubeconfig(path, yaml.safe_load(path.read_text()))
    except OSError as error:
        raise KubeconfigError(
            f"{path}: {error}" if error.filename != str(path) else f"{path}: {error.strerror}"
        ) from error
    except (yaml.YAMLError, ValueError, AttributeError, TypeError, KeyError) as error:
        raise KubeconfigError(f"{path}: not a kubeconfig: {' '.join(str(error).split())}") from error


def _from_kubeconfig(path: Path, document: object) -> Credentials:
    if not isinstance(document, dict):
        raise KubeconfigError(f"{path}: not a kubeconfig: it must be an object with clusters, users and contexts")

    def named(kind: str, name: str) -> Json:
        found = next((item for item in document.get(f"{kind}s") or [] if item["name"] == name), None)
        if found is None:
            raise KubeconfigError(f"{path}: no {kind} named {name!r}")
        return dict(found.get(kind) or {})

    def pem(holder: Json, key: str) -> str:
        if data := holder.get(f"{key}-data"):
            return base64.b64decode(data).decode()
        return (path.parent / holder[key]).read_text() if holder.get(key) else ""

    current = document.get("current-context") or ""
    if not current:
        raise KubeconfigError(f"{path}: no current-context")
    context = named("context", current)
    cluster, user = named("cluster", context["cluster"]), named("user", context["user"])
    if "exec" in user or "auth-provider" in user:
        raise KubeconfigError(f"{path}: the operator takes a token or certificates, not a credential plugin")
    return Credentials(
        server=cluster["server"].rstrip("/"),
        namespace=context.get("namespace", "default"),
        ca=pem(cluster, "certificate-authority"),
        insecure=bool(cluster.get("insecure-skip-tls-verify", False)),
        token=user.get("token", ""),
        token_file=user.get("tokenFile", ""),
        certificate=pem(user, "client-certificate"),
        key=pem(user, "client-key"),
    )


def user_credentials(env: Mapping[str, str] = os.environ) -> Credentials:
    """Of a person at a terminal: any kubeconfig, exec credential plugins of the clouds and files of several clusters included.

    Read by the `kubernetes` package, which knows them all. In a pod without a kubeconfig: its service account.
    """
    paths = env.get("KUBECONFIG", "") or str(Path(env.get("HOME", "~")).expanduser() / ".kube" / "config")
    if not any(Path(path).exists() for path in paths.split(os.pathsep)):
        return load_credentials(env)
    from kubernetes import client, config

    try:
        _, context = config.list_kube_config_contexts(config_file=paths)
        configuration = client.Configuration()
        config.load_kube_config(config_file=paths, client_configuration=configuration)
    except (config.ConfigException, OSError, KeyError, TypeError, yaml.YAMLError) as error:
        raise KubeconfigError(f"{paths}: {' '.join(str(error).split())}") from error

    def text(path: str | None) -> str:
        return Path(path).read_text() if path else ""

    bearer = configuration.get_api_key_with_prefix("authorization") or configuration.get_api_key_with_prefix(
        "BearerToken"
    )
    return Credentials(
        server=str(configuration.host).rstrip("/"),
        namespace=context["context"].get("namespace") or "default",
        ca=text(configuration.ssl_ca_cert),
        insecure=not configuration.verify_ssl,
        token=(bearer or "").removeprefix("Bearer "),
        certificate=text(configuration.cert_file),
        key=text(configuration.key_file),
    )


def path_of(kind: str, namespace: str | None = None, name: str = "", subresource: str = "") -> str:
    prefix, plural = RESOURCES[kind]
    parts = [prefix, *(("namespaces", namespace) if namespace else ()), plural, name, subresource]
    return "/" + "/".join(part for part in parts if part)


class Kube:
    """One session with the API server. `requests` counts what was asked, by method, for metrics."""

    def __init__(self, credentials: Credentials) -> None:
        self.credentials = credentials
        self.requests: Counter[str] = Counter()
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                ssl=credentials.ssl_context() if credentials.server.startswith("https") else False, limit=CONNECTIONS
            ),
            timeout=aiohttp.ClientTimeout(total=TIMEOUT_S),
        )

    async def close(self) -> None:
        await self._session.close()

    async def call(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, str] | None = None,
        body: Any = None,
        content_type: str = "application/json",
        accept: str = "application/json",
    ) -> Any:
        """One request; the answer's JSON. Raises ApiError on a refusal, aiohttp's errors when there is no answer."""
        self.requests[method] += 1
        headers = {"Content-Type": content_type, "Accept": accept}
        if token := self.credentials.bearer():
            headers["Authorization"] = f"Bearer {token}"
        data = None if body is None else json.dumps(body)
        async with self._session.request(
            method, self.credentials.server + path, params=params, data=data, headers=headers
        ) as answer:
            text = await answer.text()
            if answer.status >= 400:
                try:
                    said = json.loads(text)
                except ValueError:
                    said = {}
                raise ApiError(answer.status, said.get("reason", ""), said.get("message", text[:300]))
            return json.loads(text)

    async def get(self, kind: str, namespace: str | None, name: str) -> Json | None:
        """The object, or None when there is none."""
        try:
            found: Json = await self.call("GET", path_of(kind, namespace, name))
        except ApiError as error:
            if error.status == 404:
                return None
            raise
        return found

    async def list(
        self,
        kind: str,
        namespace: str | None = None,
        *,
        labels: str = "",
        fields: str = "",
        page: int = PAGE,
        names_only: bool = False,
    ) -> AsyncIterator[Json]:
        """Objects page by page, so that few are in memory at once. `names_only`: their metadata alone.

        Never with resourceVersion=0: the API server would ignore the page's size.
        """
        params = {"limit": str(page)}
        if labels:
            params["labelSelector"] = labels
        if fields:
            params["fieldSelector"] = fields
        accept = METADATA_LIST if names_only else "application/json"
        while True:
            found = await self.call("GET", path_of(kind, namespace), params=params, accept=accept)
            for item in found["items"] or ():  # null, in an empty list of metadata
                item["kind"], item["apiVersion"] = kind, found["apiVersion"]
                yield item
            if not found["metadata"].get("continue"):
                return
            params["continue"] = found["metadata"]["continue"]

    async def create(self, manifest: Mapping[str, Any]) -> Json:
        metadata = manifest["metadata"]
        created: Json = await self.call("POST", path_of(manifest["kind"], metadata.get("namespace")), body=manifest)
        return created

    async def apply(
        self, manifest: Mapping[str, Any], *, subresource: str = "", manager: str = keys.FIELD_MANAGER
    ) -> Json:
        """Server-side apply; fields of ours that another writer took are taken back."""
        metadata = manifest["metadata"]
        applied: Json = await self.call(
            "PATCH",
            path_of(manifest["kind"], metadata.get("namespace"), metadata["name"], subresource),
            params={"fieldManager": manager, "force": "true"},
            body=manifest,
            content_type="application/apply-patch+yaml",
        )
        return applied

    async def patch(
        self, kind: str, namespace: str | None, name: str, body: Mapping[str, Any], *, subresource: str = ""
    ) -> Json:
        patched: Json = await self.call(
            "PATCH",
            path_of(kind, namespace, name, subresource),
            params={"fieldManager": keys.FIELD_MANAGER},
            body=body,
            content_type="application/merge-patch+json",
        )
        return patched

    async def replace(self, manifest: Mapping[str, Any]) -> Json:
        """PUT: refused with 409 when the object has changed since it was read."""
        metadata = manifest["metadata"]
        replaced: Json = await self.call(
            "PUT", path_of(manifest["kind"], metadata.get("namespace"), metadata["name"]), body=manifest
        )
        return replaced

    async def delete(self, kind: str, namespace: str | None, name: str, *, uid: str = "") -> None:
        """With its dependents, in the background. An object that is gone, or another one of that name, is no error."""
        body: Json = {"propagationPolicy": "Background"}
        if uid:
            body["preconditions"] = {"uid": uid}
        try:
            await self.call("DELETE", path_of(kind, namespace, name), body=body)
        except ApiError as error:
            if error.status not in (404, 409):
                raise
