"""The sidecar: one process beside each vLLM server that sees its load, forecasts it, and keeps its SLO accounts.

``source`` scrapes and reads engine steps, ``observer`` makes samples of them, ``forecast`` and ``calibrator`` learn,
``push`` tells the controller. It is never in the path of a request. `schema`, and for
the trainer the gate that ``vllm_plugin`` lays out, is all that others may know of it.
"""
