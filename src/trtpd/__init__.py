"""trtpd: prefill and decode as two engines, two pools and one hand-off behind Triton Inference Server."""

__version__ = "0.1.0"
