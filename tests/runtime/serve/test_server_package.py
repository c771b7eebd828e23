from __future__ import annotations

import os
import sys

import pytest

from trtpd.errors import ServeError
from trtpd.runtime.serve import server_package
from trtpd.runtime.serve.server_package import find_server

OURS = f"{sys.version_info.major}.{sys.version_info.minor}"


@pytest.fixture
def image(tmp_path, monkeypatch):
    """An image's server in place of the pip-packaged one; call it with the Python its stub is linked to."""

    def make(python: str):
        for name in ("bin/tritonserver", "backends/python/libtriton_python.so"):
            path = tmp_path / "opt" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("")
        (tmp_path / "opt/backends/python/triton_python_backend_utils.py").write_text("")
        stub = tmp_path / "opt/backends/python/triton_python_backend_stub"
        stub.write_bytes(b"\x7fELF libpython" + python.encode() + b".so.1.0")
        monkeypatch.setattr(server_package, "IMAGE_ROOT", tmp_path / "opt")
        monkeypatch.setattr(server_package, "PACKAGE", "no-such-distribution")
        return tmp_path / "opt"

    return make


def test_the_pip_package_is_found_whole():
    package = find_server()
    assert all(path.exists() for path in (package.binary, package.backend, package.stub, package.caches))
    assert package.libraries is not None
    assert package.libraries.is_dir()
    assert package.remark == ""


def test_another_version_is_remarked_in_one_line(monkeypatch):
    monkeypatch.setattr(server_package, "KNOWN_VERSION", "0.6.5")
    remark = find_server().remark
    assert "made for 0.6.5" in remark
    assert "\n" not in remark


def test_without_the_package_the_images_server_is_taken(image):
    root = image(OURS)
    package = find_server()
    assert (package.binary, package.libraries) == (root / "bin" / "tritonserver", None)
    assert "LD_LIBRARY_PATH" not in package.environment({})


def test_an_image_for_another_python_is_refused(image):
    image("3.4")
    with pytest.raises(ServeError, match=rf"for Python 3\.4, this is {OURS}"):
        find_server()


def test_without_any_server_the_mend_is_named(image, tmp_path, monkeypatch):
    image(OURS)
    monkeypatch.setattr(server_package, "IMAGE_ROOT", tmp_path / "nowhere")
    with pytest.raises(ServeError, match="pip install"):
        find_server()


def test_a_stub_without_its_run_bit_is_copied_with_it(image, tmp_path):
    image(OURS)
    find_server().link_backend(tmp_path)
    stub = tmp_path / "python" / "triton_python_backend_stub"
    assert os.access(stub, os.X_OK)
    assert not stub.is_symlink()


def test_the_loaders_path_of_before_is_kept_for_workers():
    env = find_server().environment({"LD_LIBRARY_PATH": "/mine"})
    assert env["TRTPD_LD_LIBRARY_PATH"] == "/mine"
    assert env["LD_LIBRARY_PATH"].endswith(":/mine")
