"""vLLM on the devices of Tarn, an imaginary company.

They are as unlike Acme's as can be. A request's cache is one piece of memory, in which the numbers of a head follow
each other by slots. Models are in
bfloat16 alone; operators take float32 and int32, too. A compiler makes a few graphs at start, and no more later.
"""


def register() -> str | None:
    """Names the platform's class to vLLM. On a machine without the device, return None."""
    return "tarn_device.platform.TarnPlatform"
