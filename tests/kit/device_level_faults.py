"""Faults in what a device itself does: memory, copies, waits, kernels, graphs."""

from device_fault import DeviceFault, variant

FAULTS = [
    DeviceFault(
        "a copy to the device shares the host's memory",
        12,
        variant(
            ops="""
def to_device(self, array, out=None):
    return torch.from_numpy(array)
"""
        ),
        "test_device_operations",
        "array .* overwritten",
    ),
]
