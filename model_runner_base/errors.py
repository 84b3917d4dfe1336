"""What a runner refuses with."""


class UnsupportedConfigError(ValueError):
    """The engine was configured for something this runner does not do."""
