"""A stand-in for TensorRT-LLM: its module tree with the real names, signatures and defaults, and its refusals.

Made from ../api.json, so that it knows nothing the real one doesn't. It computes nothing on a GPU.
"""

from tensorrt_llm._api import VERSION as __version__

__all__ = ["__version__"]
