"""What a check looks at, a pipeline file or a build alike, and what it finds there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from trtpd.build.engines import EngineName
from trtpd.build.manifest import Accuracy, Architecture
from trtpd.build.resolve import ResolvedPipeline, ResolvedRole

Severity = Literal["error", "warning"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something that can't work (error) or likely isn't meant (warning). `values` are the two that clash,
    `where` is a key of the pipeline file or a path inside a build."""

    code: str
    severity: Severity
    where: str
    values: tuple[str, str]
    message: str
    mend: str

    def __str__(self) -> str:
        return f"{self.severity} [{self.code}] {self.where}: {self.message}; {self.mend}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """What the checks look at: the same for a pipeline file and for a build. `accuracy` is what the build measured."""

    engine: EngineName
    architecture: Architecture
    max_seq_tokens: int
    roles: tuple[ResolvedRole, ...]
    accuracy: Mapping[str, Accuracy] = field(default_factory=dict)
    elastic: bool = False
    convert_dtype: bool = False

    @classmethod
    def of(cls, pipeline: ResolvedPipeline) -> Deployment:
        return cls(
            engine=pipeline.engine,
            architecture=pipeline.architecture,
            max_seq_tokens=pipeline.max_seq_tokens,
            roles=tuple(pipeline.roles.values()),
            elastic=pipeline.spec.pools.elastic,
            convert_dtype=pipeline.spec.transfer.convert_dtype,
        )

    @property
    def converts(self) -> bool:
        """Whether its roles may differ in KV dtype, as far as one can be made of the other."""
        return self.convert_dtype and self.engine != "tensorrt_llm"


def error(code: str, where: str, values: tuple[object, object], message: str, mend: str) -> Finding:
    pair = (str(values[0]), str(values[1]))
    return Finding(code=code, severity="error", where=where, values=pair, message=message, mend=mend)


def warning(code: str, where: str, values: tuple[object, object], message: str, mend: str) -> Finding:
    pair = (str(values[0]), str(values[1]))
    return Finding(code=code, severity="warning", where=where, values=pair, message=message, mend=mend)
