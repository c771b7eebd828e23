"""Renders BUILD/model_repo, the Triton model repository: `pd`, and one stage model per instance.

The models find their build as the folder above the repository, so a build directory may be moved.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from string import Template

from trtpd.build.manifest import Manifest
from trtpd.errors import BuildError

ROUTER_MODEL = "pd"
TEMPLATES = Path(__file__).resolve().parents[1] / "model_repo"


def render(build: Path, manifest: Manifest) -> None:
    """Makes BUILD/model_repo anew. Raises BuildError if it can't be written, or two models share a name."""
    names = [name for role in manifest.roles.values() for name in role.instances]
    models = {name: "stage" for name in names} | {ROUTER_MODEL: "pd"}
    if len(models) != len(names) + 1:
        raise BuildError(f"instances {', '.join(names)} and {ROUTER_MODEL}: every model needs a name of its own")
    repository = build / "model_repo"
    try:
        if repository.exists():
            shutil.rmtree(repository)
        for name, template in models.items():
            _render_model(TEMPLATES / template, repository / name, name)
    except OSError as error:
        raise BuildError(f"{repository} can't be written: {error.strerror}; check space and permissions") from error


def _render_model(template: Path, target: Path, name: str) -> None:
    (target / "1").mkdir(parents=True)
    config = Template((template / "config.pbtxt").read_text(encoding="utf-8"))
    (target / "config.pbtxt").write_text(config.substitute(name=name), encoding="utf-8")
    shutil.copyfile(template / "1" / "model.py", target / "1" / "model.py")
