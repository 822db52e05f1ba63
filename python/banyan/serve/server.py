"""Sockets and the life of the server: bind, start the engine, answer until a signal comes, stop in bounded time."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import uvicorn

from banyan.errors import UserError
from banyan.serve import admin, routes
from banyan.serve.app import App
from banyan.serve.context import Context
from banyan.serve.limits import Limits
from banyan.serve.protocol import protocol_class
from banyan.serve.stats_log import log_stats

_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_STOP_SECONDS = 10.0


@dataclass(frozen=True)
class Listen:
    """Where to listen, and the keys of each socket."""

    host: str = "127.0.0.1"
    port: int = 8000
    uds: Path | None = None
    keys: tuple[str, ...] = ()
    admin_port: int | None = None
    admin_token: str = ""


def check_listen(listen: Listen) -> None:
    """Raises UserError for an address that others can reach without a key."""
    if listen.uds is None and listen.host not in _LOOPBACK and not listen.keys:
        raise UserError(
            f"--host: wanted 127.0.0.1 or a Unix socket without keys, got {listen.host}; "
            "give --api-key-file to listen elsewhere"
        )
    if listen.admin_port is not None and not listen.admin_token:
        raise UserError("--admin-port: wanted --admin-token-file beside it")


def bind(listen: Listen) -> tuple[socket.socket, socket.socket | None]:
    """Both sockets, bound and not listening yet. Raises UserError for an address that is taken."""
    unix = listen.uds
    public = _bind_unix(unix) if unix else _bind_tcp(listen.host, listen.port)
    control = None if listen.admin_port is None else _bind_tcp("127.0.0.1", listen.admin_port)
    return public, control


def address(bound: socket.socket) -> str:
    """What a client connects to."""
    if bound.family == socket.AF_UNIX:
        return f"unix:{bound.getsockname()}"
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def run(
    context: Context, listen: Listen, sockets: tuple[socket.socket, socket.socket | None]
) -> None:
    """Serves until SIGINT or SIGTERM."""
    _raise_file_limit(context.limits)
    asyncio.run(serve(context, listen, sockets))


async def serve(
    context: Context,
    listen: Listen,
    sockets: tuple[socket.socket, socket.socket | None],
    stop: asyncio.Event | None = None,
) -> None:
    """Serves until `stop` is set, or until a signal."""
    public, control = sockets
    unix = listen.uds is not None
    servers = [
        _server(
            App(context, routes.ROUTES, listen.keys, not unix, control=admin.ROUTES), context.limits
        )
    ]
    bound = [public]
    if control is not None:
        servers.append(_server(App(context, admin.ROUTES, [listen.admin_token]), context.limits))
        bound.append(control)
    context.engine.start()
    for name, *arguments in context.start_calls:
        await context.engine.control(name, *arguments)
    stats = asyncio.create_task(log_stats(context)) if context.log_stats else None
    with _signals(servers, stop):
        await asyncio.gather(
            *(server.serve([own]) for server, own in zip(servers, bound, strict=True))
        )
    if stats is not None:
        stats.cancel()
    await context.engine.stop(_STOP_SECONDS)
    if listen.uds is not None:
        listen.uds.unlink(missing_ok=True)


class _Server(uvicorn.Server):
    """Signals are handled once for both sockets, not by each server."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _server(app: App, limits: Limits) -> _Server:
    return _Server(
        uvicorn.Config(
            app,
            loop="asyncio",
            http=protocol_class(limits),
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            backlog=4096,
            timeout_keep_alive=int(limits.idle_seconds),
            timeout_graceful_shutdown=5,
            h11_max_incomplete_event_size=limits.head_bytes + 1,
        )
    )


@contextlib.contextmanager
def _signals(servers: list[_Server], stop: asyncio.Event | None) -> Iterator[None]:
    def end() -> None:
        for server in servers:
            server.force_exit = server.should_exit  # the second signal does not wait for answers
            server.should_exit = True

    loop = asyncio.get_running_loop()
    if stop is not None:
        watch = loop.create_task(_when(stop, end))
        try:
            yield
        finally:
            watch.cancel()
        return
    numbers = (signal.SIGINT, signal.SIGTERM)
    for number in numbers:
        loop.add_signal_handler(number, end)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


async def _when(stop: asyncio.Event, end) -> None:
    await stop.wait()
    end()


def _bind_tcp(host: str, port: int) -> socket.socket:
    if not 0 <= port < 1 << 16:
        raise UserError(f"cannot listen on port {port}: wanted 0 to 65535")
    try:
        family, kind, _, _, place = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(place)
    except OSError as error:
        raise UserError(f"cannot listen on {host} port {port}: {error.strerror}") from error
    return bound


def _bind_unix(path: Path) -> socket.socket:
    """A socket file that only its owner can open. A file that is in use is not taken over."""
    if path.is_socket():
        probe = socket.socket(socket.AF_UNIX)
        try:
            probe.connect(str(path))
        except OSError:
            path.unlink()
        else:
            raise UserError(f"--uds: {path} is in use")
        finally:
            probe.close()
    bound = socket.socket(socket.AF_UNIX)
    mask = os.umask(0o177)
    try:
        bound.bind(str(path))
    except OSError as error:
        raise UserError(f"cannot listen on {path}: {error.strerror}") from error
    finally:
        os.umask(mask)
    return bound


def _raise_file_limit(limits: Limits) -> None:
    """Every connection takes a file descriptor."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = limits.connections + 512
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
