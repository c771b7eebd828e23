"""The model `pd`: hands everything to trtpd.runtime.serve.pipeline_model."""

import logging

import triton_python_backend_utils as pb_utils

from trtpd.errors import TrtpdError
from trtpd.runtime.serve.pipeline_model import PipelineModel


class TritonPythonModel:
    """One instance per server: the router."""

    def initialize(self, args):
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
