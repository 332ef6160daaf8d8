"""The controller's dashboard: one page at ``/``, kept up to date by the events of ``GET /v1/events``.

`picture` looks at the state once per tick, `difference` says what changed, `feed` keeps the encoded events of the last
ticks for all clients together, `stream` writes them to one client, `pages` serves the static files.
"""
