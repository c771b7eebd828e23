"""Finds NVIDIA's perf_analyzer, or gets it: from TRTPD_PERF_ANALYZER, PATH, or its PyPI wheel into the cache.

The wheel needs glibc 2.38. On an older system the binary runs under the C library of a newer Debian, unpacked into the
cache beside it (packages verified by apt with the system's keys; nothing is installed).
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trtpd.build.files import CACHE_MEND, cache_dir, locked, staged, translated
from trtpd.errors import BuildError

VERSION = "2.60.0"
WHEEL = f"perf_analyzer-{VERSION}-py3-none-manylinux_2_38_x86_64.whl"
SHA256 = "23ef56b107ae9233e5cf09fbdf508dd9b936a52f1bae2f63f53c8117087b3f25"
MEMBER = "perf_analyzer/bin/perf_analyzer"
SUITE = "trixie"
PACKAGES = ("libc6", "libgcc-s1", "libstdc++6")
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
TIMEOUT_S = 300.0
LOADER = "ld-linux-x86-64.so.2"

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """How to run it: `command` and then its arguments. `origin` says which one it is."""

    command: tuple[str, ...]
    origin: str


def find_tool(progress: Progress, environ: Mapping[str, str] = os.environ) -> Tool:
    """Blocks while it is downloaded, once. Raises BuildError with what to do if it can't be had."""
    named = environ.get("TRTPD_PERF_ANALYZER") or shutil.which("perf_analyzer")
    if named:
        if not runs((named,)):
            raise BuildError(f"{named} does not run here; name another one with TRTPD_PERF_ANALYZER")
        return Tool(command=(named,), origin=named)
    if platform.machine() != "x86_64":
        raise BuildError("perf_analyzer comes as a wheel for x86_64 only; install it and put it on PATH")
    home = cache_dir() / f"perf-analyzer-{VERSION}"
    with translated("get perf_analyzer", BuildError, CACHE_MEND), locked(home.with_name(f".{home.name}.lock")):
        binary = home / "perf_analyzer"
        if not binary.is_file():
            with staged(home) as new:
                _unpack_wheel(new, progress)
        if runs((str(binary),)):
            return Tool(command=(str(binary),), origin=f"perf_analyzer {VERSION} from PyPI")
        libraries = home.with_name(f"{home.name}-libc")
        if not libraries.is_dir():
            with staged(libraries) as new:
                _unpack_libraries(new, progress)
    command = _under_loader(libraries, binary)
    if not runs(command):
        raise BuildError(
            f"perf_analyzer does not run under the C library in {libraries}; remove that folder, try again"
        )
    return Tool(command=command, origin=f"perf_analyzer {VERSION} from PyPI, with the C library of Debian {SUITE}")


def runs(command: Sequence[str]) -> bool:
    """Whether it starts at all."""
    try:
        done = subprocess.run([*command, "--version"], capture_output=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def _under_loader(libraries: Path, binary: Path) -> tuple[str, ...]:
    """The system's own libraries come last: what the binary needs beside libc is any version's."""
    return (
        str(libraries / LOADER),
        "--library-path",
        f"{libraries}:/usr/lib/x86_64-linux-gnu",
        str(binary),
    )


def _unpack_wheel(folder: Path, progress: Progress) -> None:
    progress("perf_analyzer", 0, 0)
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--quiet", "--python-version", "3.12"]
    command += ["--platform", "manylinux_2_38_x86_64", f"--dest={folder}", f"perf-analyzer=={VERSION}"]
    _run(command, "pip could not download perf-analyzer; check the network and pip's index")
    wheel = folder / WHEEL
    found = hashlib.sha256(wheel.read_bytes()).hexdigest() if wheel.is_file() else "none"
    if found != SHA256:
        raise BuildError(f"{WHEEL} has sha256 {found}, expected {SHA256}; it was not kept")
    with zipfile.ZipFile(wheel) as archive:
        (folder / "perf_analyzer").write_bytes(archive.read(MEMBER))
    (folder / "perf_analyzer").chmod(0o755)
    wheel.unlink()


def _unpack_libraries(folder: Path, progress: Progress) -> None:
    """With apt's own programs and keys, in an apt of our own below `folder`."""
    if not (shutil.which("apt-get") and shutil.which("dpkg-deb") and KEYRING.is_file()):
        raise BuildError(
            "perf_analyzer needs glibc 2.38, this system's is older, and there is no apt-get to get a newer one with; "
            "run it elsewhere and name it with TRTPD_PERF_ANALYZER"
        )
    progress(f"C library of Debian {SUITE}", 0, 0)
    apt = folder / "apt"
    for name in ("lists/partial", "cache/archives/partial", "out"):
        (apt / name).mkdir(parents=True)
    (apt / "status").touch()
    source = f"deb [signed-by={KEYRING}] {_mirror()} {SUITE} main\n"
    (apt / "sources.list").write_text(source)
    options = {
        "Dir::Etc::sourcelist": apt / "sources.list",
        "Dir::Etc::sourceparts": "-",
        "Dir::State::lists": apt / "lists",
        "Dir::State::status": apt / "status",
        "Dir::Cache": apt / "cache",
        "APT::Architecture": "amd64",
        "APT::Sandbox::User": "root",
    }
    flags = [part for name, value in options.items() for part in ("-o", f"{name}={value}")]
    mend = f"apt-get could not get Debian {SUITE}'s C library; run perf_analyzer elsewhere (TRTPD_PERF_ANALYZER)"
    _run(["apt-get", *flags, "update"], mend)
    _run(["apt-get", *flags, "download", *PACKAGES], mend, cwd=apt / "out")
    for package in sorted((apt / "out").glob("*.deb")):
        _run(["dpkg-deb", "-x", str(package), str(apt / "root")], mend)
    for library in sorted((apt / "root").glob("usr/lib/x86_64-linux-gnu/*.so*")):
        shutil.copy2(library, folder / library.name)  # follows links: each name is a file of its own
    shutil.rmtree(apt)


def _mirror() -> str:
    """The Debian archive this system uses. Raises BuildError if it uses none."""
    found = subprocess.run(
        ["apt-get", "indextargets", "--format", "$(REPO_URI)"], capture_output=True, text=True, check=False
    )
    uris = [line.rstrip("/") for line in found.stdout.splitlines()]
    found_at = next((uri for uri in uris if uri.endswith("/debian")), None)
    if found_at is None:
        raise BuildError(
            f"perf_analyzer needs glibc 2.38, this system's is older, and apt here knows no Debian archive to get "
            f"{SUITE}'s from; run it elsewhere and name it with TRTPD_PERF_ANALYZER"
        )
    return found_at


def _run(command: Sequence[str], mend: str, *, cwd: Path | None = None) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, cwd=cwd, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{mend} ({error})") from error
    if done.returncode != 0:
        said = (done.stderr.strip() or done.stdout.strip() or "it said nothing").splitlines()[-1]
        raise BuildError(f"{mend} ({said})")
