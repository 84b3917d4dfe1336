"""The example device as a vendor would install it: a process with this folder on its path finds the entry point."""


def register() -> str:
    """Class of the platform, for vLLM."""
    return "examples.plain_device.PlainPlatform"
