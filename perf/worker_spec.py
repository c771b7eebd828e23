"""What a simulated instance is, and what requests are to it: values that its driver gives."""

from __future__ import annotations

from dataclasses import dataclass, field

from trtpd.runtime.core.events import Capabilities, FinishReason, Hello, Role


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """What an instance registers with, and its step limits. `cache_blocks`: prompt blocks it remembers, beside its
    KV pool; what it remembers of a prompt it does not compute again."""

    name: str
    role: Role
    kv_blocks: int = 1024
    tokens_per_block: int = 32
    max_seq_tokens: int = 8192
    max_batch: int = 16
    max_step_tokens: int = 2048
    chunk_tokens: int = 512
    prefill_tokens_per_s: float = 1000.0
    bytes_per_token: int = 23040
    model: str = "m"
    fingerprint: str = "f"
    pairing_key: str = "k"
    host: str = "h"
    transports: tuple[str, ...] = ("sim",)
    capabilities: Capabilities = field(default_factory=Capabilities)
    cache_blocks: int = 0
    gpus: tuple[str, ...] = ()
    gpu_links: tuple[tuple[str, str], ...] = ()

    def hello(self, generation: str) -> Hello:
        return Hello(
            instance=self.name,
            generation=generation,
            role=self.role,
            model=self.model,
            fingerprint=self.fingerprint,
            pairing_key=self.pairing_key,
            host=self.host,
            kv_blocks=self.kv_blocks,
            tokens_per_block=self.tokens_per_block,
            max_seq_tokens=self.max_seq_tokens,
            max_batch=self.max_batch,
            bytes_per_token=self.bytes_per_token,
            prefill_tokens_per_s=self.prefill_tokens_per_s,
            transports=self.transports,
            capabilities=self.capabilities,
            gpus=self.gpus,
            gpu_links=self.gpu_links,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Truth:
    """What a request is, and what its answer is whoever computes it: `output_tokens` tokens of
    `true_token`."""

    request_id: int
    prompt_tokens: int
    max_tokens: int
    output_tokens: int
    block_hashes: tuple[int, ...] = ()

    @property
    def finish(self) -> FinishReason:
        return "length" if self.output_tokens >= self.max_tokens else "stop"


def true_token(request_id: int, index: int) -> int:
    """The token at an output index: a function of both alone, as with greedy or counter-based sampling."""
    return (request_id * 2654435761 + (index + 1) * 40503) % 49152
