"""Whether Neuron's SDK is here, and whether it is new enough for the kernels."""

NEEDED = "nki 0.6 or newer (Neuron SDK 2.32), from the index that the AWS Neuron documentation names"


def nki_available() -> bool:
    """Whether a real ``nki`` with compiled loops imports: the public index has a placeholder that raises on import."""
    try:
        import nki
        import nki.isa as nisa
        import nki.language as nl
    except Exception:
        return False
    return hasattr(nki, "jit") and hasattr(nisa, "nc_matmul") and hasattr(nl, "fori_loop")


def require_nki() -> None:
    """Raises RuntimeError with what to install."""
    if not nki_available():
        raise RuntimeError(f"paged flash attention needs {NEEDED}")
