"""Tools for a CUDA host: the conformance kit, stand-ins where vLLM has no kernels, wheels where there is no network."""
