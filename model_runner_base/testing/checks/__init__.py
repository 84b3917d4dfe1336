"""The checks, one file a group; the first line of a check's docstring is the promise that it holds a device to."""
