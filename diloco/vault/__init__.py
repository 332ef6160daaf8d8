"""Snapshots of the ranks of an island in shared memory: what survives a worker, and starts the next one."""
