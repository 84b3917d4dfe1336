"""The example device as a vendor would install it: with this folder on its path, a process finds the entry point in
it."""


def register() -> str:
    """Class of the platform, for vLLM."""
    return "examples.plain_device.PlainPlatform"
