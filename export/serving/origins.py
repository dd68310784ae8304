"""Requests of web pages of other sites, which a browser sends to any server that it reaches, also
to one on this machine.

A page needs no permission for a POST of text or a form; it only cannot read the response.
"""

from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

from ..errors import RequestError

SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
SAME_SITE = (b"same-origin", b"none")  # values of Sec-Fetch-Site; none is a user's own request


def check_origin(method: str, headers: Mapping[bytes, bytes], allowed: Sequence[str]) -> None:
    """Check that a request does not come from a web page of another host.

    Programs send no Origin. That of a browser extension has another scheme than http and https. A
    reverse proxy may replace Host; the browser then reports a page of the same origin in
    Sec-Fetch-Site, or the proxy the original host in X-Forwarded-Host. `allowed` are the origins of
    `--cors-origin`.

    Raises:
        RequestError: 403 if it does.
    """
    origin = headers.get(b"origin", b"").decode("latin-1")
    if method in SAFE_METHODS or not origin or "*" in allowed or origin in allowed:
        return
    if headers.get(b"sec-fetch-site") in SAME_SITE or is_extension(origin):
        return
    hosts = b",".join(headers.get(name, b"") for name in (b"host", b"x-forwarded-host"))
    names = set(map(hostname, hosts.decode("latin-1").split(","))) - {None}
    if hostname(origin) not in names:
        raise RequestError(
            403,
            f"Origin is {origin!r:.200}, expected a page of this server: allow others with "
            "--cors-origin",
        )


def is_extension(origin: str) -> bool:
    """Return True unless `origin` is that of a web page, or "null", which pages can choose."""
    scheme, separator, _ = origin.partition("://")
    return bool(separator) and scheme.lower() not in ("http", "https")


def hostname(origin: str) -> str | None:
    """Return the host of `origin`, or of a header such as Host, without its port; None without
    one."""
    try:
        return urlsplit(origin if "://" in origin else f"//{origin.strip()}").hostname
    except ValueError:  # brackets that do not match
        return None
