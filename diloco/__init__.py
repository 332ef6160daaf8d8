"""Training: islands that take inner steps, and the synchronizer that takes outer ones.

``island`` and ``inner`` are the arithmetic of one worker, ``worker`` its process, ``agent`` its keeper; ``outer`` and
``synchronizer`` the global side; ``fragment``, ``digest`` and ``transport`` what goes between them. `schema` is all
that others may know of it.
"""
