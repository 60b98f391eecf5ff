"""Pictures that a client names in place of sending: by URL, as a data URL, or in base64."""

from __future__ import annotations

import asyncio
import base64
import binascii
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote_to_bytes, urljoin

import httpx
from starlette.concurrency import run_in_threadpool

from sglang.multimodal_gen import __version__
from sglang.multimodal_gen.runtime.entrypoints.http.errors import ApiError, invalid
from sglang.multimodal_gen.runtime.managers.url_policy import (
    UrlPolicy,
    UrlRefused,
    check_url,
    resolve,
)
from sglang.multimodal_gen.runtime.server_args.guard_section import FetchArgs
from sglang.multimodal_gen.runtime.utils.errors import OutputError

_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_TYPES = re.compile(r"image/[a-z0-9.+-]+|application/octet-stream|binary/octet-stream")
_DATA = re.compile(r"data:([^,;]*)((?:;[^,;]*)*),", re.IGNORECASE)
_BASE64 = re.compile(r"[A-Za-z0-9+/_-]+={0,2}\Z")
_SHORTEST_PICTURE = 64  # characters; what is shorter is a name, and no picture in base64
_HEADERS = {
    "accept": "image/*",
    "accept-encoding": "identity",
    "user-agent": f"sglang/{__version__}",
}


@dataclass(frozen=True, slots=True)
class ImageFetcher:
    """Gets pictures by what clients say of them; nothing that they say is a path here."""

    args: FetchArgs
    policy: UrlPolicy = field(init=False)

    def __post_init__(self) -> None:
        args = self.args
        policy = UrlPolicy(
            schemes=args.fetch_schemes,
            ports=args.fetch_ports,
            hosts=args.fetch_hosts,
            networks=args.fetch_allow_networks,
        )
        object.__setattr__(self, "policy", policy)

    @property
    def max_bytes(self) -> int:
        """The most that one picture may have."""
        return int(self.args.fetch_max_mb * 2**20)

    async def fetch(self, source: str, place: Path, param: str) -> None:
        """Write the picture that ``source`` names into the new file ``place``.

        Raises:
            ApiError: it is none of the three forms, or a rule is broken; says which.
        """
        data = await self._bytes_of(source, param)
        await run_in_threadpool(_write, place, data)

    async def _bytes_of(self, source: str, param: str) -> bytes:
        match = _DATA.match(source)
        if match is not None:
            return self._data_url(match, source[match.end() :], param)
        if "://" in source[:16]:
            return await self._url(source, param)
        if len(source) >= _SHORTEST_PICTURE and _BASE64.match(source):
            return self._base64(source, param)
        message = f"{param}: must be an uploaded file, an http(s) or data URL, or base64"
        raise invalid(param, message, code="fetch_not_allowed")

    def _data_url(self, match: re.Match[str], body: str, param: str) -> bytes:
        kind = match[1].strip().lower()
        if kind and not _TYPES.fullmatch(kind):
            raise invalid(param, f"{param}: the data URL is no picture", code="invalid_image")
        if match[2].lower().endswith(";base64"):
            return self._base64(body, param)
        self._check_size(len(body) // 3, param)
        data = unquote_to_bytes(body)
        self._check_size(len(data), param)
        return data

    def _base64(self, text: str, param: str) -> bytes:
        self._check_size(len(text) // 4 * 3 - 2, param)
        plain = text.replace("-", "+").replace("_", "/").rstrip("=")
        try:
            return base64.b64decode(plain + "=" * (-len(plain) % 4), validate=True)
        except (binascii.Error, ValueError) as error:
            message = f"{param}: is not valid base64"
            raise invalid(param, message, code="invalid_image") from error

    async def _url(self, url: str, param: str) -> bytes:
        if not self.args.fetch_urls:
            message = f"{param}: this server fetches no URLs; upload the picture"
            raise invalid(param, message, code="fetch_not_allowed")
        try:
            async with asyncio.timeout(self.args.fetch_timeout):
                return await self._follow(url, param)
        except TimeoutError as error:
            message = f"did not arrive within {self.args.fetch_timeout:g} s"
            raise _failed(param, message) from error
        except UrlRefused as error:
            raise invalid(param, f"{param}: {error}", code="fetch_not_allowed") from error
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
            # Not its words: they say whether something listens there.
            raise _failed(param, "could not be fetched") from error

    async def _follow(self, url: str, param: str) -> bytes:
        """The picture at ``url``, or where it leads to, each step by the whole rule."""
        # No proxy or credentials of this machine's environment, and no cookies.
        async with httpx.AsyncClient(trust_env=False, follow_redirects=False) as client:
            for _ in range(self.args.fetch_max_redirects + 1):
                checked = check_url(url, self.policy)
                address = await run_in_threadpool(resolve, checked, self.policy)
                request = client.build_request(
                    "GET",
                    checked.at(address),
                    headers={"host": checked.authority, **_HEADERS},
                    # The certificate must be the name's, though the address is connected to.
                    extensions={"sni_hostname": checked.host},
                    timeout=self.args.fetch_timeout,
                )
                response = await client.send(request, stream=True)
                try:
                    if response.status_code not in _REDIRECTS:
                        return await self._body(response, param)
                    url = urljoin(url, response.headers.get("location", ""))
                finally:
                    await response.aclose()
                client.cookies.clear()
        most = self.args.fetch_max_redirects
        raise _failed(param, f"leads on more than {most} times")

    async def _body(self, response: httpx.Response, param: str) -> bytes:
        if response.status_code != 200:
            raise _failed(param, f"was answered with {response.status_code}")
        kind = response.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind and not _TYPES.fullmatch(kind):
            raise _failed(param, "is no picture by its content type")
        if response.headers.get("content-encoding", "identity").lower() != "identity":
            raise _failed(param, "is compressed, which was not asked for")
        declared = response.headers.get("content-length", "")
        if declared.isascii() and declared.isdigit() and len(declared) < 19:
            self._check_size(int(declared), param)
        parts, size = [], 0
        async for part in _raw(response):
            size += len(part)
            self._check_size(size, param)
            parts.append(part)
        return b"".join(parts)

    def _check_size(self, size: int, param: str) -> None:
        if size > self.max_bytes:
            message = f"{param}: is larger than {self.args.fetch_max_mb:g} MiB"
            raise invalid(param, message, code="too_large")


def _raw(response: httpx.Response) -> AsyncIterator[bytes]:
    return response.aiter_raw(2**16)


def _failed(param: str, problem: str) -> ApiError:
    return invalid(param, f"{param}: the URL {problem}", code="fetch_failed")


def _write(place: Path, data: bytes) -> None:
    try:
        with place.open("xb") as file:
            file.write(data)
    except OSError as error:
        raise OutputError(f"an upload could not be stored ({error.strerror})") from error
