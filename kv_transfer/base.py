"""KVSource and KVSink: the two sides of a hand-off, as two types.

A source lives beside a prefill engine and a sink beside a decode engine, in the leader's engine thread.
Neither blocks there: a sink copies in a thread of its own and `progress()` says what became of it. Blocks
belong to the engine's allocator; a source asks for a block to be freed by ending the hold, a sink is given
reserved blocks and never frees them itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from trtpd.errors import InternalError
from trtpd.kv_transfer.offer import LEASE_LIMIT_S, Chunk, Offer, Seal

Key = tuple[int, int]
"""(request_id, attempt)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferSettings:
    """What sources and sinks of one instance are made with.

    `lease_s`: how long prefill keeps sealed KV that nobody asks for; a sink renews several times in it.
    `digest_every`: one block in so many is digested; 1 for all, 0 for none. A sink verifies whatever digests
    come. `one_piece_tokens`: shorter prompts are pulled in one go after the seal. `convert_dtype`: a sink takes
    f32 for bf16 and the other way round. `path`: one transport by name, or "auto". `listen`: where ports of the
    data plane are opened, an IP address of this host or a network it is in. `secret`: what all workers of the
    deployment share; needed when `listen` is not loopback. Raises InternalError.
    """

    instance: str
    generation: str
    lease_s: float = 10.0
    digest_every: int = 1
    one_piece_tokens: int = 128
    convert_dtype: bool = False
    path: str = "auto"
    listen: str = "127.0.0.1"
    secret: bytes = field(default=b"", repr=False)

    def __post_init__(self) -> None:
        if not 0.0 < self.lease_s <= LEASE_LIMIT_S or self.digest_every < 0 or self.one_piece_tokens < 0:
            raise InternalError(f"transfer settings out of range: {self}")


@dataclass(frozen=True, slots=True, kw_only=True)
class PullResult:
    """What became of one pull. `error` is None on success, else the message; `retryable` as in TransferError.

    `seconds` is the time spent copying and verifying, waits not counted. `exposed_s` is the time from the seal
    to the end of the pull, which the user waits for: what was still to be copied then, and its turn behind
    other pulls. So it may be more than `seconds`.
    """

    key: Key
    bytes_moved: int
    chunks: int
    seconds: float
    exposed_s: float
    path: str
    error: str | None = None
    code: str = ""
    retryable: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Visits:
    """Connections and notes that a source did not serve, since it was made. `strangers` could not show that they
    belong to the deployment, `stalled` took no more of what they had asked for, `refused` asked for what no peer
    of this version may have."""

    strangers: int = 0
    stalled: int = 0
    refused: int = 0

    def __add__(self, other: Visits) -> Visits:
        return Visits(
            strangers=self.strangers + other.strangers,
            stalled=self.stalled + other.stalled,
            refused=self.refused + other.refused,
        )


class KVSource(Protocol):
    """Prefill's side. Not thread-safe: called from the engine thread only."""

    def offer(self, key: Key, *, prompt_tokens: int, blocks: Sequence[int]) -> Offer:
        """Starts a hold over `blocks` and says where they are. Raises InternalError if `key` holds already,
        CapacityError if nothing more can be held."""

    def publish(self, key: Key, *, ready_tokens: int) -> Chunk:
        """The first `ready_tokens` tokens are final. Computes digests of the blocks finished since."""

    def seal(self, key: Key, *, first_token: int, first_log_prob: float | None, seed: int) -> Seal:
        """The whole prompt is final; from here the lease runs, anew with every renewal received."""

    def end(self, key: Key) -> bool:
        """Ends the hold (acknowledged, withdrawn or cancelled). False if there was none. Idempotent.

        After this the caller may free the blocks at once: a reader that still copies them notices by epoch.
        """

    def lapsed(self, now_s: float) -> list[Key]:
        """Keys whose lease ended by `now_s` (renewals received so far counted); each is reported once
        and its hold is over: the caller frees its blocks. Raises TrtpdError if nobody can be served any more: this
        worker must start anew."""

    def visits(self) -> Visits:
        """What has come to the ports of the data plane that was not served."""

    def holds(self) -> dict[Key, int]:
        """Blocks held per key."""

    def close(self) -> None:
        """Ends every hold and lets go of what was shared."""


class KVSink(Protocol):
    """Decode's side. Methods return at once; the copies run in the sink's own thread."""

    def handshake(self, offer: Offer) -> None:
        """Starts to connect to the offer's pools if they are new. Raises LayoutError, TransferError for what shows
        at once; what only the peer can tell ends the pulls from it."""

    def begin(self, offer: Offer, blocks: Sequence[int], *, present: int = 0) -> None:
        """Starts a pull into the caller's reserved `blocks` (in prompt order; more than the prompt needs may
        be given, and stay untouched). The first `present` of them hold their KV already: they stay untouched as well,
        and only what is missing moves. Raises as `handshake`, InternalError if `key` is being pulled already.
        A hold that is over raises LeaseError where that shows at once, else the pull ends with "lease_lost".
        A pull that failed may be begun again and is then told everything anew.
        """

    def ready(self, chunk: Chunk) -> None:
        """More of the prompt may be copied. Unknown or old keys are ignored."""

    def sealed(self, seal: Seal) -> None:
        """All of it may be copied; when it is, verification follows. Unknown or old keys are ignored."""

    def abort(self, key: Key) -> None:
        """Stops a pull. Its blocks stay busy until `progress` has returned its result, which may be another
        than "aborted" if the pull had ended by itself."""

    def progress(self) -> list[PullResult]:
        """Pulls that ended since the last call, aborted ones included (code "aborted"). Once a result is
        returned no copy touches the reserved blocks any more. Raises InternalError if a bug of ours has ended what
        pulls: this worker must start anew."""

    def busy(self) -> bool:
        """True while any pull is unfinished."""

    def close(self) -> None:
        """Stops all pulls, waits for copies under way, lets go of peers' pools."""
