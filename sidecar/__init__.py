"""The sidecar: one process beside each vLLM server that sees its load, forecasts it, and keeps its SLO accounts.

``source`` scrapes and reads engine steps, ``observer`` makes samples of them, ``forecast`` and ``calibrator`` learn,
``push`` tells the controller. It is never in the path of a request, and `schema` is all that others may know of it.
"""
