"""Variants of the example device, as modules of a vendor's: text, since the platform comes before what asks vLLM."""

FROM_SCRATCH = """
from examples.plain_device import PlainPlatform
from examples.plain_device import PlainModelRunner, PlainWorker as Usual
class Runner(PlainModelRunner):
    def _pack(self, batch):
        packed = super()._pack(batch)
        self.parts.repeat.stop()
        return packed
class PlainWorker(Usual):
    model_runner_cls = Runner
"""
"""Device on which no step repeats the last one."""

PADDED = """
from examples.plain_device import PlainPlatform
from examples.plain_device import PlainModelRunner, PlainWorker as Usual
from model_runner_base import BucketPolicy
class LargestAlone(BucketPolicy):
    def configure(self, limits):
        super().configure(limits)
        self.set_sizes(limits.largest_sizes)
class Runner(PlainModelRunner):
    def _cache_device_properties(self):
        self.graph_policy = LargestAlone()
class PlainWorker(Usual):
    model_runner_cls = Runner
"""
"""Device that pads every step to the largest size of its kind, as one with captured graphs does."""

COMPILING = """
import time
from examples.plain_device import PlainPlatform
from examples.plain_device import PlainModelRunner, PlainWorker as Usual
from model_runner_base import BucketPolicy
class Compiling(BucketPolicy):
    def __init__(self):
        self.compiled, self.traced = set(), None
    def configure(self, limits):
        super().configure(limits)
        self.set_sizes([*limits.largest_sizes, limits.decode_size(1, 2), limits.decode_size(2, 4)])
    def first_sizes(self, sizes):
        return self.largest_sizes(sizes)
    def wrap(self, function, state):
        def call(*args):
            graph = id(function), tuple(getattr(arg, "shape", None) or arg for arg in args)
            if self.is_serving and self.traced is None:
                assert graph in self.compiled, "a step runs a graph that is not compiled"
            elif self.is_serving:
                self.traced.add(graph)
            else:
                self.compiled.add(graph)
            return function(*args)
        return call
    is_serving = False
    def compile_in_background(self, run):
        self.is_serving, self.traced = True, set()
        run()
        graphs, self.traced = self.traced, None
        def wait():
            time.sleep(0.3)
            self.compiled |= graphs
        return wait
class Runner(PlainModelRunner):
    def _cache_device_properties(self):
        self.graph_policy = Compiling()
    def capture_model(self):
        self.warm_up(self.graph_policy.sizes)
class PlainWorker(Usual):
    model_runner_cls = Runner
"""
"""Device that compiles graphs of two smaller decode sizes, which takes a while, during steps at the largest sizes."""

TILED = """
from examples.plain_device import PlainPlatform
from examples.plain_device import PlainModelRunner, PlainWorker as Usual
class Runner(PlainModelRunner):
    def _cache_device_properties(self):
        self.device_ops.towers_as_graphs = True
class PlainWorker(Usual):
    model_runner_cls = Runner
"""
"""Device whose towers that take images by tiles run as graphs do."""

MODULES = {"padded_device": PADDED, "compiling_device": COMPILING, "tiled_device": TILED}
"""Variants that deliberate faults run on, by name."""

IN_INFERENCE_MODE = """
import torch
from examples.plain_device import PlainPlatform
from examples.plain_device import PlainModelRunner, PlainWorker as Usual
from model_runner_base import GraphPolicy
class InInferenceMode(GraphPolicy):
    def wrap(self, function, state):
        def call(*args):
            assert torch.is_inference_mode_enabled(), "a wrapped function is called outside of inference mode"
            return function(*args)
        return call
class Runner(PlainModelRunner):
    def _cache_device_properties(self):
        self.graph_policy = InInferenceMode()
class PlainWorker(Usual):
    model_runner_cls = Runner
"""
"""Device whose wrapped functions run in inference mode alone."""
