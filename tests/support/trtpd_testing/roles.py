"""Registrations of instances that differ by name and role alone."""

from __future__ import annotations

from trtpd.runtime.core.events import Hello, Role


def hello(name: str, role: Role, generation: str = "g1") -> Hello:
    return Hello(
        instance=name,
        generation=generation,
        role=role,
        model="m",
        fingerprint="f",
        pairing_key="k",
        host="h",
        kv_blocks=64,
        tokens_per_block=16,
        max_seq_tokens=512,
        max_batch=8,
        bytes_per_token=8,
        prefill_tokens_per_s=1e6,
    )
