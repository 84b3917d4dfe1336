"""One step: its schedule, requests, batch and size, and the buffer that carries it to the device."""
