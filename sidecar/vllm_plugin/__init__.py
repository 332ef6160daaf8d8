"""What runs inside vLLM's own processes: a stat logger and an ASGI middleware that say how busy the server is.

It imports nothing but the standard library (the stat logger: vLLM too), because it is also built as a distribution of
its own, ``wadiloco-vllm-plugin``, for vLLM's environment. `records` and `gate_reader` are the binary wire contract:
the trainer reads the gate through them.

Files are written with ``pwrite`` and read with ``pread``, not mapped: whoever truncates a mapped file kills the
process that touches it next (SIGBUS), and here that process would be vLLM. A read costs 0.5 µs, a write 1.5 µs.
"""

from .middleware import InFlightMiddleware

__all__ = ["InFlightMiddleware"]
