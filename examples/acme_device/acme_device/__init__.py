"""vLLM on the devices of Acme."""


def register() -> str | None:
    """Names the platform's class to vLLM. On a machine without the device, return None."""
    return "acme_device.platform.AcmePlatform"
