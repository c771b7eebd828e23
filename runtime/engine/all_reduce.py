"""The sum over all ranks as a node of an OpenVINO graph."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from trtpd.runtime.engine.ranks import Array

Sum = Callable[[Array, Array], None]


def all_reduce_op(openvino: ModuleType, sum_up: Sum) -> Callable[[Any], Any]:
    """A constructor of nodes: from an f32 output to that of a node which computes `sum_up(input, output)`.

    The CPU plugin calls it in the graph's order, from a thread of its own choice, one call at a time.
    """

    class AllReduce(openvino.Op):  # type: ignore[misc, name-defined]
        """Same shape and type out as in."""

        def __init__(self, inputs: Any = None) -> None:
            super().__init__(self, inputs)

        def validate_and_infer_types(self) -> None:
            self.set_output_type(0, self.get_input_element_type(0), self.get_input_partial_shape(0))

        def clone_with_new_inputs(self, new_inputs: Any) -> Any:
            return AllReduce(new_inputs)

        def has_evaluate(self) -> bool:
            return True

        def evaluate(self, outputs: Any, inputs: Any) -> bool:
            if list(outputs[0].shape) != list(inputs[0].shape):
                outputs[0].set_shape(inputs[0].shape)
            sum_up(inputs[0].data, outputs[0].data)
            return True

    return lambda output: AllReduce([output]).output(0)
