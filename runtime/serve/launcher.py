"""`trtpd serve`: starts one Triton with this host's models, keeps it whole, takes it down without a trace.

Order: look before starting anything; the server; every stage model at once; `pd` last, which serves only after
a request has crossed them. Then watch: the server's death ends serving, a dead stub's model is loaded again.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from trtpd.build.found_profile import find_profile
from trtpd.build.gpu_probe import find_gpus
from trtpd.build.manifest import RoleName, read_manifest
from trtpd.build.repository import ROUTER_MODEL
from trtpd.errors import ServeError
from trtpd.kv_transfer.pool import sweep
from trtpd.runtime.serve import rundir
from trtpd.runtime.serve.gpu_binding import Bindings, bind_groups, on_gpus
from trtpd.runtime.serve.preflight import Ports, check_ports, check_repository, check_settings, check_shared_memory
from trtpd.runtime.serve.serve_options import ServeOptions, check_reachable, check_router, check_tag, models_of
from trtpd.runtime.serve.server_package import ServerPackage, find_server
from trtpd.runtime.serve.triton_http import TritonControl
from trtpd.runtime.serve.triton_server import ServerPlan, TritonServer
from trtpd.runtime.worker import roles
from trtpd.runtime.worker.assembly import tagged
from trtpd.runtime.worker.gpus import GpuBinding, write_bindings

LIVE_TIMEOUT_S = 60.0
LOAD_TIMEOUT_S = 600.0
STAGE_UNLOAD_S = 20.0
DEAD_UNLOAD_S = 3.0
WATCH_S = 0.25
RELOAD_BACKOFF_S = (0.0, 1.0, 2.0, 5.0, 10.0)

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """A server that serves: its addresses as HOST:PORT, its models, and how long it took."""

    http: str
    grpc: str
    metrics: str
    models: tuple[str, ...]
    run_dir: str
    seconds: float


def serve(options: ServeOptions, *, on_ready: Callable[[Ready], None], say: Say) -> int:
    """Serves until a signal or the server's death; returns the exit code. `say` gets single lines for the user.

    Raises TrtpdError if serving can't start or the server dies. Installs handlers for SIGINT, SIGTERM and, unless it
    is ignored (nohup), SIGHUP, which a closed terminal sends: call it from the main thread.
    """
    launcher = Launcher(options, on_ready, say)
    signums = [signal.SIGINT, signal.SIGTERM]
    signums += [signal.SIGHUP] if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN else []
    handlers = {signum: signal.signal(signum, launcher.on_signal) for signum in signums}
    try:
        return launcher.run()
    finally:
        for signum, handler in handlers.items():
            signal.signal(signum, handler)


class Launcher:
    """One run. Threads: the caller's waits and watches, a small pool loads and unloads."""

    def __init__(self, options: ServeOptions, on_ready: Callable[[Ready], None], say: Say) -> None:
        self._options = options
        self._on_ready = on_ready
        self._say = say
        self._stop = threading.Event()
        self._signals = 0
        self._server: TritonServer | None = None
        self._run_dir: Path | None = None
        self._models: list[str] = []
        self._ports = Ports(http=options.http, grpc=options.grpc, metrics=options.metrics)
        self._control_key = secrets.token_hex(16)
        self._control = TritonControl(_dialled(options.host), options.http)
        self._pool = ThreadPoolExecutor(max_workers=16, thread_name_prefix="models")
        self._reloads: dict[str, Future[bool]] = {}
        self._dead: set[str] = set()
        self._plan: ServerPlan | None = None
        self._gpus: Mapping[str, GpuBinding] = {}
        self._home_roles: Mapping[str, RoleName] = {}

    def on_signal(self, signum: int, frame: FrameType | None) -> None:
        """The first asks for a drain, the second ends everything at once."""
        self._signals += 1
        self._stop.set()
        if self._signals > 1:
            self._clear_away()
            os._exit(128 + signum)

    def run(self) -> int:
        began_s = time.monotonic()
        build = self._options.build
        manifest = read_manifest(build)
        self._models = models_of(manifest, self._options.only)
        check_tag(self._options, self._models)
        check_settings(build, manifest)
        check_router(self._options, self._models)
        self._home_roles = {name: roles.home_role(manifest, name) for name in self._models if name != ROUTER_MODEL}
        check_reachable(self._options, self._models, self._home_roles)
        check_repository(build, self._models)
        remarks = list(find_profile(build, manifest).remarks) if ROUTER_MODEL in self._models else []
        package = find_server()
        remarks += [package.remark] if package.remark else []
        self._ports = check_ports(self._options.host, self._ports)
        self._control = TritonControl(_dialled(self._options.host), self._ports.http, key=self._control_key)
        rundir.sweep_leftovers()
        sweep()
        check_shared_memory(build, manifest, self._models)
        bindings = bind_groups(build, manifest, self._models, find_gpus()) if on_gpus(manifest) else Bindings()
        self._gpus = bindings.by_instance
        for remark in (*remarks, *bindings.remarks):
            self._say(remark)
        self._say(f"starting tritonserver and {len(self._models)} model{'s' if len(self._models) > 1 else ''}")
        try:
            self._run_dir = rundir.make_run_dir()
            package.link_backend(self._run_dir / "backends")
            self._plan = self._plan_server(package)
            self._start()
            if not self._stop.is_set():
                self._on_ready(self._ready(time.monotonic() - began_s))
                self._watch()
                self._say(f"draining up to {self._options.drain_s:g} s; Ctrl-C again stops at once")
                self._drain()
            return 0
        finally:
            self._stop.set()  # or what loads a model again would go on for ever, and the process with it
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._clear_away()

    # Starting

    def _start(self) -> None:
        """The server and its models. Returns early when asked to stop."""
        assert self._plan is not None
        self._server = TritonServer(self._plan)
        self._server.start()
        deadline_s = time.monotonic() + LIVE_TIMEOUT_S
        while not self._control.live():
            self._server.check()
            if time.monotonic() > deadline_s:
                raise ServeError(f"tritonserver is not up after {LIVE_TIMEOUT_S:g} s{self._server.last_words()}")
            if self._stop.wait(0.05):
                return
        self._load_group([name for name in self._models if name != ROUTER_MODEL])
        if not self._stop.is_set():
            self._load_group([name for name in self._models if name == ROUTER_MODEL])

    def _plan_server(self, package: ServerPackage) -> ServerPlan:
        return ServerPlan(
            package=package,
            host=self._options.host,
            ports=self._ports,
            models=len(self._models),
            repository=rundir.link_repository(self._dir, self._options.build),
            run_dir=self._dir,
            environment=package.environment(os.environ) | self._model_environment(),
            control_key=self._control_key,
            load_timeout_s=LOAD_TIMEOUT_S,
            verbose=self._options.verbose,
        )

    def _model_environment(self) -> dict[str, str]:
        """What the shims read; see pipeline_model.py and stage_model.py."""
        stages = [name for name in self._models if name != ROUTER_MODEL]
        env = {
            "TRTPD_RUN_DIR": str(self._dir),
            "TRTPD_ROUTER": self._options.router or f"ipc://{self._dir / 'router.ipc'}",
            "TRTPD_EXPECT": ",".join(tagged(name, self._options.tag) for name in stages),
            "TRTPD_TAG": self._options.tag,
        }
        env |= write_bindings(self._gpus)
        if self._options.keys is not None:
            env["TRTPD_KEYS"] = str(self._options.keys.resolve())
        return env

    def _load_group(self, names: list[str]) -> None:
        waiting = [self._pool.submit(self._control.load, name, timeout_s=LOAD_TIMEOUT_S) for name in names]
        while waiting and not self._stop.wait(0.02):
            self._running.check()
            for future in [future for future in waiting if future.done()]:
                waiting.remove(future)
                future.result()

    def _ready(self, seconds: float) -> Ready:
        host = _dialled(self._options.host)
        host = f"[{host}]" if ":" in host else host
        return Ready(
            http=f"{host}:{self._ports.http}",
            grpc=f"{host}:{self._ports.grpc}",
            metrics=f"{host}:{self._ports.metrics}",
            models=tuple(self._models),
            run_dir=str(self._dir),
            seconds=round(seconds, 2),
        )

    # Watching

    def _watch(self) -> None:
        """Until asked to stop. Raises ServeError if the server dies; one that dies of a dead stub is started again."""
        while not self._stop.wait(WATCH_S):
            try:
                self._running.check()
            except ServeError as error:
                if not self._dead:
                    raise
                self._start_again(f"{error}; a stub of it had died, so it is started again")
            for name in self._models:
                self._look_after(name)
                self._look_for_wish(name)

    def _look_after(self, name: str) -> None:
        """Triton neither notices a dead stub nor heals it by a load alone: unload, then load."""
        reload = self._reloads.get(name)
        if reload is not None and reload.done():
            del self._reloads[name]
            self._dead.discard(name)
            if not reload.result():
                self._restart(name)
        stub = rundir.stub_of(self._dir, name)
        if stub is not None and not stub.alive and name not in self._reloads:
            self._say(f"the Triton stub of {name} (pid {stub.pid}) died; loading {name} again")
            rundir.forget_stub(self._dir, name)
            self._dead.add(name)
            self._reloads[name] = self._pool.submit(self._reload, name, self._running)

    def _reload(self, name: str, server: TritonServer) -> bool:
        """Until it serves again (True), or it turns out that only a restart of the server helps (False)."""
        attempts = 0
        while not self._stop.wait(RELOAD_BACKOFF_S[min(attempts, len(RELOAD_BACKOFF_S) - 1)]):
            if server is not self._server:
                return True
            attempts += 1
            try:
                if not self._control.unload(name, timeout_s=DEAD_UNLOAD_S) and name == ROUTER_MODEL:
                    return False
                self._control.load(name, timeout_s=LOAD_TIMEOUT_S)
            except ServeError as error:
                self._say(f"{name} did not come back, trying again: {error}")
            else:
                self._say(f"{name} serves again")
                return True
        return True

    def _look_for_wish(self, name: str) -> None:
        """An instance that has drained to take the other role is loaded again as one of that."""
        if name in self._reloads or name == ROUTER_MODEL:
            return
        role = roles.take_wish(self._dir, name)
        if role is not None:
            rundir.forget_stub(self._dir, name)
            self._reloads[name] = self._pool.submit(self._switch, name, role, self._running)

    def _switch(self, name: str, role: RoleName, server: TritonServer) -> bool:
        """Loads it in the new role; if that can't be, in the one it had."""
        former = roles.ordered(self._dir, name)
        roles.order(self._dir, name, None if role == self._home_roles[name] else role)
        self._say(f"{name} takes the {role} role")
        try:
            self._control.unload(name, timeout_s=STAGE_UNLOAD_S)
            self._control.load(name, timeout_s=LOAD_TIMEOUT_S)
        except ServeError as error:
            if self._stop.is_set():
                return True
            self._say(f"{name} can't take the {role} role and goes back to the one it had: {error}")
            roles.order(self._dir, name, former)
            return self._reload(name, server)
        self._say(f"{name} serves in the {role} role")
        return True

    def _restart(self, name: str) -> None:
        """A dead stub's streams never end by themselves: Triton would leave their clients waiting for ever."""
        self._start_again(f"{name} died with streams open; restarting tritonserver to end them")

    def _start_again(self, why: str) -> None:
        self._say(why)
        self._running.kill()
        rundir.sweep_regions(rundir.region_prefix())
        self._reloads.clear()
        self._dead.clear()
        self._start()
        if not self._stop.is_set():
            self._say("tritonserver serves again")

    # Ending

    def _drain(self) -> None:
        """New requests are refused from here on; running ones get `drain_s`."""
        drain_s = self._options.drain_s
        try:
            rundir.announce_drain(self._dir, time.monotonic() + drain_s)
        except OSError as error:  # a full disk: streams still end, or are cut with the server
            self._say(f"the router can't be told to drain ({error.strerror}: {self._dir}); stopping all the same")
        with contextlib.suppress(ServeError):  # what can't be unloaded any more is killed next
            if ROUTER_MODEL in self._models:
                self._control.unload(ROUTER_MODEL, timeout_s=drain_s + STAGE_UNLOAD_S)
            stages = [name for name in self._models if name != ROUTER_MODEL]
            unload = [self._pool.submit(self._control.unload, name, timeout_s=STAGE_UNLOAD_S) for name in stages]
            for future in unload:
                future.result()
        self._running.terminate()

    def _clear_away(self) -> None:
        """No process, no shared memory, no run directory of this run is left. Idempotent."""
        if self._server is not None:
            self._server.kill()
        rundir.sweep_regions(rundir.region_prefix())
        rundir.sweep_leftovers()
        sweep()
        if self._run_dir is not None:
            rundir.remove(self._run_dir)

    @property
    def _dir(self) -> Path:
        assert self._run_dir is not None
        return self._run_dir

    @property
    def _running(self) -> TritonServer:
        assert self._server is not None
        return self._server


def _dialled(host: str) -> str:
    """Where a server that listens on `host` is reached from this host."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
