"""The example device as a vendor would install it: whoever has this folder on its path finds the entry point beside."""


def register() -> str:
    """The platform's class, for vLLM."""
    return "examples.plain_device.PlainPlatform"
