"""The synchronizer: global parameters and outer momentum of a run, and the rounds that move them.

An island uploads its local parameters in chunks (`upload`, `contribution`); verified and on disk they count. A round
closes by quorum or timeout (`rounds`), the outer step runs in a thread (`step`) and becomes visible as a new generation
once that is on disk (`generation`, `published`), and everybody pulls it by byte ranges (`app`). `outer_run` ties these.
"""
