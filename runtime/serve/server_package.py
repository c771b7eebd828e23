"""Which Triton Inference Server there is, and how it wants to be started."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from trtpd.errors import ServeError

PACKAGE = "nvidia-pytriton"
KNOWN_VERSION = "0.7.0"
IMAGE_ROOT = Path("/opt/tritonserver")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerPackage:
    """One installation of tritonserver with its Python backend.

    `libraries` must be on the loader's path; None where it finds them. `remark` is a line for the user.
    """

    name: str
    binary: Path
    backend: Path
    stub: Path
    caches: Path
    libraries: Path | None
    remark: str = ""

    def link_backend(self, directory: Path) -> None:
        """Makes `directory`/python as tritonserver expects it, with the stub of the Python that runs now."""
        target = directory / "python"
        target.mkdir()
        for name in ("libtriton_python.so", "triton_python_backend_utils.py"):
            (target / name).symlink_to(self.backend / name)
        stub = target / "triton_python_backend_stub"
        if os.access(self.stub, os.X_OK):
            stub.symlink_to(self.stub)
        else:
            shutil.copyfile(self.stub, stub)
            stub.chmod(0o755)

    def environment(self, base: Mapping[str, str]) -> dict[str, str]:
        """`base` with what the server and its stubs need. The loader's path as it was is kept for workers."""
        env = dict(base)
        if self.libraries is not None:
            env["TRTPD_LD_LIBRARY_PATH"] = base.get("LD_LIBRARY_PATH", "")
            env["LD_LIBRARY_PATH"] = _joined(self.libraries, base.get("LD_LIBRARY_PATH"))
        env["PATH"] = _joined(Path(sys.executable).parent, base.get("PATH"))
        env["PYTHONPATH"] = _joined(_source_root(), sysconfig.get_path("purelib"), base.get("PYTHONPATH"))
        return env


def find_server() -> ServerPackage:
    """The pip-packaged server, else the image's. Raises ServeError with the mend if there is neither."""
    packaged = _packaged()
    if packaged is not None:
        return packaged
    if (IMAGE_ROOT / "bin" / "tritonserver").exists():
        return _image(IMAGE_ROOT)
    raise ServeError(
        f"no Triton Inference Server: neither the package {PACKAGE} nor {IMAGE_ROOT} is there; "
        f"install it with `pip install {PACKAGE}=={KNOWN_VERSION}`"
    )


def _packaged() -> ServerPackage | None:
    try:
        distribution = importlib.metadata.distribution(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return None
    site = Path(str(distribution.locate_file("")))
    root = site / "pytriton" / "tritonserver"
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    stub = root / "python_backend_stubs" / python / "triton_python_backend_stub"
    if not stub.exists():
        raise ServeError(
            f"{PACKAGE} {distribution.version} has no stub for Python {python} ({stub} is missing); use "
            f"Python 3.11 to 3.13, or `pip install --force-reinstall {PACKAGE}=={KNOWN_VERSION}`"
        )
    remark = ""
    if distribution.version != KNOWN_VERSION:
        remark = f"{PACKAGE} {distribution.version} found, made for {KNOWN_VERSION}: trying it as it is"
    return ServerPackage(
        name=f"{PACKAGE} {distribution.version}",
        binary=root / "bin" / "tritonserver",
        backend=root / "backends" / "python",
        stub=stub,
        caches=root / "caches",
        libraries=site / "nvidia_pytriton.libs",
        remark=remark,
    )


def _image(root: Path) -> ServerPackage:
    backend = root / "backends" / "python"
    stub = backend / "triton_python_backend_stub"
    try:
        linked = re.search(rb"libpython(3\.\d+)", stub.read_bytes())
    except OSError as error:
        raise ServeError(f"{root} has no Python backend ({error}); use an image that has one") from error
    ours = f"{sys.version_info.major}.{sys.version_info.minor}"
    theirs = linked[1].decode() if linked else ours
    if theirs != ours:
        raise ServeError(f"the Python backend of {root} is for Python {theirs}, this is {ours}; use that one")
    return ServerPackage(
        name=str(root),
        binary=root / "bin" / "tritonserver",
        backend=backend,
        stub=stub,
        caches=root / "caches",
        libraries=None,
    )


def _source_root() -> Path:
    """The folder to import trtpd from: a source tree's `src`, or site-packages."""
    import trtpd

    return Path(str(trtpd.__file__)).parent.parent


def _joined(*parts: Path | str | None) -> str:
    return os.pathsep.join(str(part) for part in parts if part)
