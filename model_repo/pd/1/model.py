"""The model `pd`: hands everything to trtpd.runtime.serve.pipeline_model."""

import logging
import os
import sys

import triton_python_backend_utils as pb_utils

# The stub's interpreter does not look at PYTHONPATH; the launcher has set it to where trtpd is.
sys.path[:0] = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path not in ("", *sys.path)]

from trtpd.errors import TrtpdError  # noqa: E402
from trtpd.runtime.serve.pipeline_model import PipelineModel  # noqa: E402
from trtpd.runtime.serve.processes import end_with_parent  # noqa: E402


class TritonPythonModel:
    """One instance per server: the router."""

    def initialize(self, args):
        end_with_parent()
        logging.basicConfig(level=logging.INFO, format="%(asctime)s pd %(levelname)s %(name)s: %(message)s")
        try:
            self.model = PipelineModel(pb_utils, args)
        except TrtpdError as error:
            raise pb_utils.TritonModelException(f"{type(error).__name__}: {error}") from error

    def execute(self, requests):
        self.model.execute(requests)

    def finalize(self):
        if hasattr(self, "model"):
            self.model.finalize()
