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
"""No step repeats the last one."""

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
"""Every step is padded to the largest of its kind, as on a device with captured graphs."""
