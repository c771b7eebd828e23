"""A profile of the builds in emulated_build.py, as plain data."""

from __future__ import annotations

from typing import Any

RESIDUALS = {"points": 6, "p50": 0.01, "p95": 0.05, "worst": 0.06}


def fit(**terms: float) -> dict[str, Any]:
    """1 ms a prompt token; 10 ms a decode step and 1 ms a sequence in it."""
    return {
        "fixed_s": 0.0,
        "prefill_step_s": 0.0,
        "prefill_token_s": 0.001,
        "prefill_pair_s": 0.0,
        "decode_step_s": 0.01,
        "decode_sequence_s": 0.001,
        "decode_kv_token_s": 0.0,
        "residuals": RESIDUALS,
    } | terms


def engine(role: str) -> dict[str, Any]:
    return {
        "fingerprint": f"toy-{role}",
        "engine": "emulated",
        "precision": "f32",
        "tp": 1,
        "threads": 1,
        "cores": [],
        "chunk_tokens": 16,
        "points": [
            {
                "kind": "decode", "tokens": 64, "batch": 2, "seconds": 0.012, "spread": 0.0, "runs": 3, "steps": 1,
                "prefill_steps": 0, "prefill_tokens": 0, "prefill_pairs": 0.0, "decode_steps": 1,
                "decode_sequences": 2, "decode_kv_tokens": 141,
            }
        ],
        "fit": fit(),
    }  # fmt: skip


def profile_data() -> dict[str, Any]:
    """Of prefill and decode, measured on "a CPU", where shm moves 2 GB/s."""
    return {
        "format": 1,
        "trtpd": "0.1.0",
        "model": "toy",
        "pair_fingerprint": "toy",
        "environment": {
            "made_at": "2026-11-29 12:00:00 +0000",
            "cpu": "a CPU",
            "cpus": 2,
            "cpus_usable": 2,
            "memory_gib": 8.0,
            "system": "Linux",
            "python": "3.11",
            "packages": {},
            "load_average": 0.0,
            "gpus": [],
        },
        "complete": True,
        "engines": {"prefill": engine("prefill"), "decode": engine("decode")},
        "transfers": {
            "shm": {
                "digest_every": 1,
                "source_cores": [],
                "sink_cores": [],
                "points": [{"tokens": 64, "bytes": 4096, "seconds": 0.001, "spread": 0.0, "runs": 3}],
                "fit": {"fixed_s": 0.001, "bytes_per_s": 2e9, "residuals": RESIDUALS},
            }
        },
        "unavailable": {},
    }
