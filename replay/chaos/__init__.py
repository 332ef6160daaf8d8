"""Faults into a training fleet of this machine, on purpose, and what became of them."""
