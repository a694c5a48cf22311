"""Whether a supervisor in another container or pod is gone, so that its replacement need not wait for its heartbeat to age.

Two things tell. On the same machine: the lease, a file that the supervisor keeps locked; the kernel lets go of the lock when
the process ends, whatever ended it. It counts only between processes of one kernel (the same boot id), because locks of
network file systems may be local to a machine. In Kubernetes: the API server's word about the pod, asked with the pod's own
service account (it needs `get` on `pods`). Where neither tells, nothing is concluded.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
ASK_SECONDS = 5.0
OVER = ("Succeeded", "Failed")


def take_lease(path: Path) -> int | None:
    """Lock this file for as long as the process lives; the descriptor, or None where it cannot be locked."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        return None
    return handle


def is_free(path: Path) -> bool:
    """Whether nobody holds the lease. False where that cannot be found out."""
    try:
        handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except OSError:
        return False
    finally:
        os.close(handle)


class PodWord(NamedTuple):
    """What Kubernetes says about a pod: whether all of its containers have ended, and why."""

    over: bool
    reason: str = ""  # "OOMKilled", "Evicted", "the pod is gone", …


def ask_pod(name: str, environ: Mapping[str, str], *, account: Path = ACCOUNT) -> PodWord | None:
    """The API server's word about a pod of our own namespace; None outside Kubernetes and where it does not say."""
    host, port = environ.get("KUBERNETES_SERVICE_HOST"), environ.get("KUBERNETES_SERVICE_PORT", "443")
    if not host:
        return None
    import ssl  # `status` only looks at leases
    import urllib.error
    import urllib.request

    try:
        token = (account / "token").read_text(encoding="ascii").strip()
        space = (account / "namespace").read_text(encoding="ascii").strip()
        authority = account / "ca.crt"
        scheme = "https" if authority.exists() else environ.get("CHRONICLE_KUBERNETES_SCHEME", "https")
        context = ssl.create_default_context(cafile=str(authority) if authority.exists() else None)
        address = f"[{host}]" if ":" in host else host
        where = f"{scheme}://{address}:{port}/api/v1/namespaces/{space}/pods/{name}"
        request = urllib.request.Request(where, headers={"Authorization": f"Bearer {token}"})
        no_proxy, trusting = urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
        opener = urllib.request.build_opener(no_proxy, trusting)
        with opener.open(request, timeout=ASK_SECONDS) as answer:
            return read_pod(json.loads(answer.read()))
    except urllib.error.HTTPError as problem:
        with problem:
            return PodWord(over=True, reason="the pod is gone") if problem.code == 404 else None
    except (OSError, ValueError):
        return None


def read_pod(pod: Any) -> PodWord | None:
    """What the API's answer means. Pure."""
    status = pod.get("status") if isinstance(pod, dict) else None
    if not isinstance(status, dict):
        return None
    ended = [(one.get("state") or {}).get("terminated") for one in status.get("containerStatuses") or ()]
    reasons = [str(one.get("reason")) for one in ended if isinstance(one, dict) and one.get("reason")]
    over = status.get("phase") in OVER or (bool(ended) and all(ended))
    reason = next((one for one in ("OOMKilled", *reasons) if one in reasons), "")
    return PodWord(over=over, reason=str(status.get("reason") or reason or status.get("phase") or ""))
