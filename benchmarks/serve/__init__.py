"""A whole server on a device that takes no time, under the client of ``vllm bench serve``."""
