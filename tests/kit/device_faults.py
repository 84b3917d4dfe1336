"""Deliberate faults of foreign devices, each of which the conformance kit must catch."""

import device_level_faults
import engine_level_faults
import kernel_faults
import process_faults

FAULTS = [*device_level_faults.FAULTS, *kernel_faults.FAULTS, *engine_level_faults.FAULTS, *process_faults.FAULTS]
"""Deliberate faults in the order of the table in docs/tables/faults.md."""
