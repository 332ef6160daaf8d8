"""A rank worker that has all imports done and waits for its configuration: ``python -m diloco.standby``.

Importing torch and taking the first step of a process cost seconds on a busy host, which a worker that takes the place
of a dead one need not wait for. It is prepared on a thread at idle priority, beside whatever trains; the main thread
keeps its own and becomes the worker. The end of stdin means that the agent is gone.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading

from diloco.protocol import StandbyNeeds
from diloco.scheduling import become_idle


def prepare(needs: StandbyNeeds) -> None:
    """Import the worker, take one step of a tiny model and read the data, so that nothing is left to be loaded."""
    become_idle()
    importlib.import_module("diloco.worker")
    for name in needs.modules:
        importlib.import_module(name)
    warming = importlib.import_module("diloco.warm_up")
    warming.warm_up()
    if needs.corpus is not None:
        warming.read_corpus(needs.corpus)


def main() -> int:
    """Prepare, say so, and be the worker that the next line on stdin describes."""
    thread = threading.Thread(target=prepare, args=(StandbyNeeds.model_validate_json(sys.argv[1]),), name="prepare")
    thread.start()
    thread.join()
    from diloco import worker  # torch, which the thread has loaded

    return worker.main(is_standby=True)


if __name__ == "__main__":
    os._exit(main())
