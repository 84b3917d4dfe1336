"""One step: its schedule, its batch, its size, and the buffer that carries it to the device."""
