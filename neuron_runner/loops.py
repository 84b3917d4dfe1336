"""Loop of a graph that is traced lazily: XLA's While, built with torch_xla's builder.

The body is traced once, on placeholders, and lowered to a computation of its own. ``torch.while_loop`` is no way to it
here: torch_xla's loop puts a body's constants among the state, whose shapes then do not agree. Compilers for Neuron
take no loops of unknown length, so there the rounds are traced one by one.
"""

import torch
import torch_xla.core.xla_builder as xb
from torch_xla import _XLAC

from model_runner_base.step.rounds import Body, Loop, State, unrolled
from neuron_runner.communicator import run_on_host


def loop_of_device() -> Loop:
    """The loop that graphs of this process's device have."""
    return while_loop if run_on_host() else unrolled


def while_loop(rounds: torch.Tensor, most: int, body: Body, state: State, reads: State) -> State:
    """XLA's While, as the type ``Loop`` says: ``body`` is called once, and run ``rounds`` times."""
    zero = torch.zeros_like(rounds)
    inputs = [zero, rounds, *state, *reads]
    lowered = _XLAC.lowering.LoweringContext("body")
    placeholders = {
        place: xb.create_placeholder_tensor(inputs[place].shape, inputs[place].dtype)
        for place in range(len(inputs))
        if place != 1
    }
    first, *others = placeholders.values()
    after = body(first, tuple(others[: len(state)]), tuple(others[len(state) :]))
    lowered.build(list(after))
    computation = xb.computation_from_module_proto("body", lowered.hlo())

    # Parameters of the body, by number: inputs of the loop, or constants that its tracing made.
    places = {lowered.tensor_parameter_id(tensor): place for place, tensor in placeholders.items()}
    for parameter, constant in lowered.device_parameter_id_tensor_mapping().items():
        if parameter not in places:
            places[parameter] = len(inputs)
            inputs.append(constant.to(rounds.device))
    order = [places[parameter] for parameter in sorted(places) if parameter >= 0]

    def goes_on(piece: xb.Op, end: xb.Op, *others: xb.Op) -> xb.Op:
        return piece < end

    def once(piece: xb.Op, end: xb.Op, *others: xb.Op) -> tuple[xb.Op, ...]:
        values = piece, end, *others
        results = xb.Op.call(computation, [values[place] for place in order])
        one = xb.Op.scalar(piece.builder(), 1, dtype=xb.Type.S32)
        next_state = [results.get_tuple_element(index) for index in range(len(state))]
        return piece + one, end, *next_state, *others[len(state) :]

    builder = xb.create_builder("while_loop")
    operands = [xb.mkparam(builder, place, xb.tensor_shape(tensor)) for place, tensor in enumerate(inputs)]
    loop = xb.Op.mkwhile(operands, goes_on, once).build("while_loop")
    results = _XLAC._xla_user_computation("neuron_runner::while_loop", tuple(inputs), loop)
    return tuple(results[2 : 2 + len(state)])
