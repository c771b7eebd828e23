"""Every error trtpd raises, one tree.

TrtpdError                 anything of ours; `code` is its reason in metrics, messages and status
├─ InputError              what the user gave is wrong (CLI exit 2)
│  ├─ SpecError            a pipeline file
│  ├─ CheckpointError      a model folder or file
│  └─ RequestError         one request (Triton INVALID_ARG)
├─ BuildError              a build could not be made, or was left incomplete
├─ EngineError             an engine could not load, or a step failed
├─ TransferError           KV could not be moved; `retryable` says whether the same offer may be tried again
│  ├─ LayoutError          the two layouts can't be converted
│  ├─ LeaseError           the lease ended, or the blocks changed under the copy
│  ├─ PeerGoneError        the process that holds the KV has died
│  ├─ TransferTimeoutError the process that holds the KV doesn't answer
│  ├─ IntegrityError       a digest differs
│  ├─ HandOffError         what the router passed on of a hand-off can't be used (worker/pulls.py)
│  └─ HandOffStateError    an executor's state in an offer can't be used (engine/tensorrt_llm/hand_off.py)
├─ CapacityError           no room now
│  ├─ SaturatedError       try again after `retry_after_s`
│  ├─ NoInstanceError      nothing serves this now
│  └─ NoKVError            no KV blocks free on this instance (worker/pulls.py)
├─ ServeError              a server, a port, a process
│  ├─ DrainingError        this instance takes nothing new (worker/jobs.py)
│  └─ UnsupportedError     this instance's role does not do this (worker/jobs.py)
├─ WireError               a message between router and leader is malformed or too long (worker/messages.py)
├─ BottleneckError         the measuring client could not keep up (perf/client_health.py)
├─ DisturbedError          other work, or a late client, spoiled all that was measured (perf/compare_runs.py)
├─ InterruptedEarlyError   Ctrl-C before there was anything to report (perf/compare.py)
└─ InternalError           a bug of ours

Messages say what was wrong, the value, where, and what to do. Errors of libraries are translated once, where
the library is called, with `raise ... from`.
"""

from __future__ import annotations


class TrtpdError(Exception):
    """Base of all errors of trtpd. `exit_code` is what the command line exits with."""

    code = "error"
    exit_code = 1


class InputError(TrtpdError):
    """What the user gave is wrong; nothing was started."""

    code = "invalid_argument"
    exit_code = 2


class SpecError(InputError):
    """A pipeline file has an unknown key, a wrong type or a value that can't work."""

    code = "invalid_pipeline"


class CheckpointError(InputError):
    """A model folder or file is missing, truncated, contradictory or of an unsupported kind."""

    code = "invalid_checkpoint"


class RequestError(InputError):
    """One request can't be served as asked; others are not affected."""


class BuildError(TrtpdError):
    """A build failed; the former build, if any, is untouched."""

    code = "build_failed"


class EngineError(TrtpdError):
    """An engine could not be loaded, or one of its steps failed."""

    code = "engine_failed"


class TransferError(TrtpdError):
    """KV could not be moved. `retryable`: the same offer may be pulled again."""

    code = "transfer_failed"
    retryable = True


class LayoutError(TransferError):
    """Two KV layouts can't be converted into each other."""

    code = "layout_mismatch"
    retryable = False


class LeaseError(TransferError):
    """The lease ended, or a block's epoch changed before its copy was used."""

    code = "lease_lost"
    retryable = False


class PeerGoneError(TransferError):
    """The process that held the KV has died before all of it was there."""

    code = "peer_gone"
    retryable = False


class TransferTimeoutError(TransferError):
    """The process that holds the KV took too long to answer: it hangs, or the network between is cut."""

    code = "transfer_timeout"
    retryable = False


class IntegrityError(TransferError):
    """The bytes that arrived are not the bytes that were sealed."""

    code = "digest_mismatch"


class CapacityError(TrtpdError):
    """There is no room for this now."""

    code = "capacity"


class SaturatedError(CapacityError):
    """Refused under load; `retry_after_s` says when to come back."""

    code = "saturated"

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class NoInstanceError(CapacityError):
    """No healthy instance can serve this."""

    code = "no_instance"


class ServeError(TrtpdError):
    """A server, a port or a process did not do what serving needs."""

    code = "serve_failed"


class InternalError(TrtpdError):
    """A bug of ours: an invariant did not hold."""

    code = "internal"
