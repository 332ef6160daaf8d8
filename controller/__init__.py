"""The controller: one process per fleet that decides when its islands sync.

``loop`` ticks: ``view`` of the fleet → ``policy`` → decision → ``journal`` → directives. ``registry`` knows the
islands, ``rounds`` and ``budget`` what was spent. `schema` is all that others may know of it.
"""
