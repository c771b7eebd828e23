"""A stage model: hands everything to trtpd.runtime.serve.stage_model."""

import logging

import triton_python_backend_utils as pb_utils

from trtpd.errors import TrtpdError
from trtpd.runtime.serve.stage_model import StageModel


class TritonPythonModel:
    """Owns the worker of the instance it is named after."""

    def initialize(self, args):
        name = args["model_name"]
        logging.basicConfig(level=logging.INFO, format=f"%(asctime)s {name} %(levelname)s %(name)s: %(message)s")
        try:
            self.model = StageModel(pb_utils, args)
        except TrtpdError as error:
            raise pb_utils.TritonModelException(f"{type(error).__name__}: {error}") from error

    def execute(self, requests):
        self.model.execute(requests)

    def finalize(self):
        if hasattr(self, "model"):
            self.model.finalize()
