"""The chassis of every WA-DiLoCo process: settings, HTTP application, background tasks, errors, logging.

It knows nothing of load, decisions or training; every other package may import it, and it imports none of them.
"""
