"""From a build directory to a worker that can run: engine, both sides of the hand-off, links, leader."""

from __future__ import annotations

import os
import secrets
import socket
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import msgspec

from trtpd.build.manifest import (
    EngineConfig,
    Manifest,
    RoleEntry,
    RoleName,
    check_loadable,
    read_engine_config,
    read_manifest,
    rebuild,
    settings_as,
)
from trtpd.build.roles import split_cores
from trtpd.errors import EngineError, LeaseError, TransferError
from trtpd.kv_transfer.base import KVSink, KVSource, TransferSettings
from trtpd.kv_transfer.factory import make_sink, make_source, transports_of
from trtpd.kv_transfer.opaque import TRANSPORT as OPAQUE
from trtpd.kv_transfer.opaque import OpaqueSink, OpaqueSource
from trtpd.kv_transfer.ranks import RankPools
from trtpd.runtime.core.events import Hello
from trtpd.runtime.engine.base import Engine, RankFollower, SelfMovingEngine
from trtpd.runtime.engine.factory import join_engine, load_engine
from trtpd.runtime.engine.group import check_group
from trtpd.runtime.engine.ranks import Ranks
from trtpd.runtime.worker.gpus import own_binding
from trtpd.runtime.worker.leader import Leader
from trtpd.runtime.worker.leader_link import LeaderLink
from trtpd.runtime.worker.local import LocalDesk
from trtpd.runtime.worker.roles import RoleSwitch, entry_of
from trtpd.runtime.worker.session import fresh_id
from trtpd.runtime.worker.sockets import transfer_secret
from trtpd.runtime.worker.warmup import warm_up


def tagged(instance: str, tag: str) -> str:
    """What an instance of a tagged launcher registers as."""
    return f"{instance}.{tag}" if tag else instance


class _TransferSection(msgspec.Struct, frozen=True):
    """What a manifest's settings say of transfer; what else they say is for others."""

    lease_s: float = 10.0
    digests: bool = True
    digest_every: int = 1
    convert_dtype: bool = False
    one_piece_tokens: int = 128
    path: str = "auto"
    listen: str = "127.0.0.1"


class _Settings(msgspec.Struct, frozen=True):
    transfer: _TransferSection = _TransferSection()


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Which worker of which build this is, and where it finds the others. `keys` as in sockets.py. `role`: the one it
    serves (None: that which it is named after). `tag` tells it from an instance of another build by the same name."""

    build: Path
    instance: str
    router: str
    run_dir: Path
    keys: Path | None
    role: RoleName | None = None
    tag: str = ""

    @property
    def name(self) -> str:
        """What the router knows it by."""
        return tagged(self.instance, self.tag)

    @property
    def local_address(self) -> str:
        """Where the stage model reaches its worker."""
        return f"ipc://{self.run_dir}/{self.instance}.local"


@dataclass(slots=True, kw_only=True)
class Worker:
    """A worker ready to run. `close` ends what it has in the right order; idempotent."""

    leader: Leader
    link: LeaderLink
    hello: Hello
    local_address: str
    load_s: float
    parts: ExitStack

    def close(self, reason: str) -> None:
        """Tells the router first, then lets go of peers' memory, then of its own."""
        self.link.close(reason)
        self.parts.close()


def assemble(place: Place, ranks: Ranks | None = None) -> Worker:
    """Loads the engine, warms it up and opens the links; in a group this is rank 0. Raises TrtpdError; then nothing is
    left open."""
    began_s = time.monotonic()
    found = settle(place, ranks)
    manifest, config = found.manifest, found.config
    generation = fresh_id(time.time_ns(), secrets.token_hex(4))
    if ranks is not None:
        ranks.exchange(generation.encode())
    with ExitStack() as parts:
        engine = load_engine(found.directory, pool_name=place.instance, generation=generation, ranks=ranks)
        parts.callback(engine.shutdown)
        check_unchanged(found)
        rate = warm_up(engine)
        settings = transfer_settings(place, generation, manifest)
        transports = transports_between(engine, settings)
        hello = hello_of(settings, config, engine, transports, prefill_tokens_per_s=rate)
        pools = pools_of(engine, place.instance)
        if pools is not None:
            parts.callback(pools.close_attached)
        source, sink = hand_off_of(engine, pools, hello, settings)
        if source is not None:
            parts.callback(source.close)
        if sink is not None:
            parts.callback(sink.close)
        link = LeaderLink(hello, place.router, wake=engine.wake, keys=place.keys)
        parts.callback(link.close)
        local = LocalDesk(
            place.local_address,
            instance=place.name,
            generation=generation,
            max_seq_tokens=engine.limits.max_seq_tokens,
            wake=engine.wake,
            busy_s=link.busy_s,
        )
        parts.callback(local.close)
        switch = RoleSwitch(place.run_dir, place.instance)
        leader = Leader(engine, source=source, sink=sink, link=link, local=local, role_switch=switch)
        link.start()
        local.start()
        load_s = time.monotonic() - began_s
        return Worker(
            leader=leader,
            link=link,
            hello=hello,
            local_address=place.local_address,
            load_s=load_s,
            parts=parts.pop_all(),
        )


def assemble_follower(place: Place, ranks: Ranks) -> RankFollower:
    """Loads the part of a rank other than the first. Raises TrtpdError; then nothing is left open."""
    found = settle(place, ranks)
    generation = ranks.exchange(b"")[0].decode()
    follower = join_engine(found.directory, pool_name=place.instance, generation=generation, ranks=ranks)
    with ExitStack() as undo:
        undo.callback(follower.close)
        check_unchanged(found)
        undo.pop_all()
    return follower


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a build says of an instance."""

    manifest: Manifest
    directory: Path
    config: EngineConfig


def ranks_of(place: Place) -> int:
    """How many ranks the instance is started as. Raises InputError, EngineError."""
    entry = entry_of(read_manifest(place.build), place.instance, place.role)
    return read_engine_config(place.build / entry.directory).processes


def settle(place: Place, ranks: Ranks | None) -> Found:
    """Reads what the build says of this instance, and keeps this process to its cores. Raises TrtpdError."""
    manifest = read_manifest(place.build)
    entry = entry_of(manifest, place.instance, place.role)
    home = entry_of(manifest, place.instance, None)
    directory = place.build / entry.directory
    config = read_engine_config(directory)
    check_same_build(directory, manifest, entry, config)
    check_loadable(config, place.build)
    check_group(config, ranks)
    cores = tuple(home.cores.get(place.instance) or read_engine_config(place.build / home.directory).profile.cores)
    if cores and ranks is not None:
        cores = split_cores(cores, ranks.size)[ranks.rank]
    cores = cores or own_binding().cores_of(0 if ranks is None else ranks.rank)
    settle_on_cores(cores, place.instance)
    return Found(manifest=manifest, directory=directory, config=config)


def check_same_build(directory: Path, manifest: Manifest, entry: RoleEntry, config: EngineConfig) -> None:
    """Raises EngineError if an engine directory is not the one that its build's manifest was written with."""
    pairs = (
        ("fingerprint", config.fingerprint, entry.fingerprint),
        ("pair_fingerprint", config.pair_fingerprint, manifest.pair_fingerprint),
    )
    for name, found, wanted in pairs:
        if found != wanted:
            raise EngineError(
                f"{directory}: its {name} is {found!r}, the manifest says {wanted!r}: it is of another build; "
                f"{rebuild(directory.parent)}"
            )


def check_unchanged(found: Found) -> None:
    """Raises EngineError if another build took the directory's place meanwhile, so that what was loaded may be of
    either."""
    now = read_engine_config(found.directory).fingerprint
    if now != found.config.fingerprint:
        raise EngineError(
            f"{found.directory}: was built again while it was being loaded (its fingerprint was "
            f"{found.config.fingerprint!r} and is {now!r}); start the worker again"
        )


def settle_on_cores(cores: tuple[int, ...], instance: str) -> None:
    """Keeps this process to its cores (none: any). Raises EngineError if one of them isn't there."""
    allowed = os.sched_getaffinity(0)
    if missing := sorted(set(cores) - allowed):
        raise EngineError(
            f"{instance} was built for cores {sorted(cores)}, of which {missing} may not be used here; "
            f"set `cores` in the pipeline file to some of {sorted(allowed)} and build again"
        )
    if cores:
        os.sched_setaffinity(0, cores)


def hello_of(
    settings: TransferSettings,
    config: EngineConfig,
    engine: Engine,
    transports: tuple[str, ...],
    *,
    prefill_tokens_per_s: float,
) -> Hello:
    """How this instance registers: as what it has loaded, whatever its build's manifest says by now."""
    limits, gpus = engine.limits, own_binding()
    return Hello(
        instance=settings.instance,
        generation=settings.generation,
        role=config.role,
        model=config.model,
        fingerprint=config.pair_fingerprint,
        pairing_key=config.layout.pairing_key_for(convert_dtype=settings.convert_dtype),
        host=socket.gethostname(),
        kv_blocks=limits.kv_blocks,
        tokens_per_block=limits.tokens_per_block,
        max_seq_tokens=limits.max_seq_tokens,
        max_batch=limits.max_batch,
        bytes_per_token=config.layout.bytes_per_token,
        prefill_tokens_per_s=prefill_tokens_per_s,
        transports=transports,
        capabilities=engine.capabilities,
        gpus=gpus.devices,
        gpu_links=gpus.links,
        prefix_cache=config.profile.prefix_cache,
    )


def transfer_settings(place: Place, generation: str, manifest: Manifest) -> TransferSettings:
    """How this instance moves KV. Raises ServeError for unreadable keys."""
    section = settings_as(manifest.settings, _Settings).transfer
    return TransferSettings(
        instance=place.name,
        generation=generation,
        lease_s=section.lease_s,
        digest_every=section.digest_every if section.digests else 0,
        convert_dtype=section.convert_dtype,
        one_piece_tokens=section.one_piece_tokens,
        path=section.path,
        listen=section.listen,
        secret=transfer_secret(place.keys),
    )


def transports_between(engine: Engine, settings: TransferSettings) -> tuple[str, ...]:
    """How this instance's KV can move. Raises TransferError for settings that name no transport, or one that an engine
    which moves its KV itself doesn't have."""
    transports = transports_of(settings)
    if engine.kv is not None:
        return transports
    if settings.path != "auto":
        raise TransferError(
            f"transfer.path is {settings.path!r}, and the engine of {settings.instance} moves its KV itself: leave it "
            "at auto, and choose with tensorrt_llm.transceiver"
        )
    return (OPAQUE,)


def pools_of(engine: Engine, instance: str) -> RankPools | None:
    """The pools of all ranks of this engine's group, None where it moves its KV itself; `close_attached` lets go of the
    others'. Raises EngineError where they are on other hosts."""
    if engine.kv is None:
        return None
    try:
        return RankPools.of_group(engine.kv.pool, engine.kv.others)
    except LeaseError as error:
        raise EngineError(
            f"{instance}: rank 0 moves the KV of all its ranks and can't map that of another ({error}); ranks may be "
            "on other hosts (pools.*.hosts) only where all see one /dev/shm: give each host an instance of its own"
        ) from error


def hand_off_of(
    engine: Engine, pools: RankPools | None, hello: Hello, settings: TransferSettings
) -> tuple[KVSource | None, KVSink | None]:
    """The sides of a hand-off that this role has; a mixed instance has both. Raises TransferError."""
    gives, takes = hello.role != "decode", hello.role != "prefill"
    if pools is None:
        return _own_hand_off(engine, settings, gives=gives, takes=takes)
    with ExitStack() as parts:
        source = make_source(pools, settings) if gives else None
        if source is not None:
            parts.callback(source.close)
        sink = make_sink(pools, settings, wake=engine.wake) if takes else None
        parts.pop_all()
    return source, sink


def _own_hand_off(
    engine: Engine, settings: TransferSettings, *, gives: bool, takes: bool
) -> tuple[KVSource | None, KVSink | None]:
    """Of an engine that moves its KV itself."""
    if not isinstance(engine, SelfMovingEngine):
        raise EngineError(f"the engine of {settings.instance} has no KV blocks and doesn't move its KV itself")
    source = OpaqueSource(engine.layout, settings, state_of=engine.hand_off_of) if gives else None
    return source, OpaqueSink(engine.layout, wake=engine.wake) if takes else None
