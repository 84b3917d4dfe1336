"""One step: what is scheduled, its batch, its size, the buffer that carries it to the device."""
