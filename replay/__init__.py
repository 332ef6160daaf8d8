"""Evidence: recorded traffic against real servers, once per policy, with the statistics to compare them.

``traces`` and ``scaling`` make requests, ``loadgen`` sends them, ``fleet`` starts the training beside the servers,
``experiment`` runs it, ``stats``, ``report`` and ``timeline`` say what happened.
"""
