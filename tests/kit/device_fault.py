"""A deliberate fault in a vendor's own code, and the row of the kit's table that must say so."""

from dataclasses import dataclass
from textwrap import indent

KINDS = {
    0: "another kind",
    1: "interface of another vLLM",
    2: "recurrent states beside drafts",
    3: "recurrent states and prefix hits",
    4: "drafts at the end of reasoning",
    5: "preemption taken for prefill",
    6: "asynchronous scheduling and preemption",
    7: "penalties under asynchronous scheduling",
    8: "padding leaks",
    9: "null block",
    10: "old cache slots",
    11: "padding writes a slot",
    12: "host buffer overwritten before its copy",
    13: "memory used again too early",
    14: "grammar in a mixed batch",
    15: "greedy requests skip rules",
    16: "random numbers",
    17: "compilation after warm-up",
    18: "ranks diverge",
    19: "encoder outputs freed early",
    20: "identity in caches, and sleep",
}
"""Kinds of bug that runners of vendors have most often; 0 is none of these."""


@dataclass(frozen=True)
class DeviceFault:
    name: str
    kind: int
    """Number in ``KINDS``."""
    module: str
    """Text of a vendor's module with ``PlainPlatform`` and ``PlainWorker``: the example device with a fault in it."""
    selection: str
    """Pytest's -k expression for the checks that should catch it; the first row that they fail must say ``words``."""
    words: str
    """Regular expression that is found in the row's message: what helps a vendor to find the fault."""
    options: tuple[str, ...] = ()
    """Further options of the kit's command."""
    on_both_releases: bool = False
    """Whether both lanes run it. The others run in the lane with torch_xla alone."""
    is_later: bool = False
    """Whether only a later release of vLLM has the feature: then the lane with the newest one runs it, alone."""


def variant(
    ops: str = "", runner: str = "", policy: str = "", attention: str = "", platform: str = "", top: str = ""
) -> str:
    """Text of a module with a variant of the example device.

    All but ``top``, which comes before these, are bodies of classes: of DeviceOps, of the example's runner, of
    BucketPolicy (without it steps run eagerly), of the implementation of attention, and of the example's platform.
    """
    policies = "\n        self.graph_policy = Policy()" if policy else ""
    chosen = """
@classmethod
def get_attn_backend_cls(cls, *args, **kwargs):
    super().get_attn_backend_cls(*args, **kwargs)
    return "faulty_device.Backend"
"""
    return f"""
from examples.plain_device import PlainPlatform as UsualPlatform
class PlainPlatform(UsualPlatform):
    worker_cls = "faulty_device.PlainWorker"
{indent(platform + chosen * bool(attention), "    ")}
from examples.plain_device import PlainModelRunner, PlainWorker as UsualWorker
import numpy as np
import torch
from model_runner_base import BucketPolicy, DeviceOps
from model_runner_base.attention.cache_format import CacheFormat
from model_runner_base.attention.paged import PagedAttentionBackend, PagedAttentionImpl
{top}
class Ops(DeviceOps):
    pass
{indent(ops, "    ")}
class Policy(BucketPolicy):
    pass
{indent(policy, "    ")}
class Impl(PagedAttentionImpl):
    pass
{indent(attention, "    ")}
class Backend(PagedAttentionBackend):
    reads_lines = False
    @staticmethod
    def get_impl_cls():
        return Impl
class Runner(PlainModelRunner):
    def _cache_device_properties(self):
        self.device_ops = Ops(self.device){policies}
{indent(runner, "    ")}
class PlainWorker(UsualWorker):
    model_runner_cls = Runner
"""
