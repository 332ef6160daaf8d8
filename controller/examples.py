"""Requests that ``/docs`` shows."""

from __future__ import annotations

from fastapi.openapi.models import Example

SAMPLES: dict[str, Example] = {
    "one server": {
        "value": {
            "samples": [
                {
                    "server_id": "vllm-0",
                    "node": "host-a",
                    "t_s": 1700000000.0,
                    "interval_s": 1.0,
                    "state": "ready",
                    "running": 3,
                    "waiting": 0,
                    "kv_usage_frac": 0.12,
                    "pressure_frac": 0.3,
                }
            ]
        }
    }
}
REGISTRATION: dict[str, Example] = {
    "an island beside vllm-0": {
        "value": {"agent_id": "island-0", "instance": "9f2c41d07a", "node": "host-a", "server_id": "vllm-0"}
    }
}
HEARTBEAT: dict[str, Example] = {
    "training": {
        "value": {
            "instance": "9f2c41d07a",
            "epoch": 2,
            "t_s": 1700000000.0,
            "progress": {
                "step": 640,
                "inner_steps_since_sync": 128,
                "tokens": 655360,
                "tokens_since_sync": 131072,
                "loss": 2.31,
                "loss_at_sync": 2.42,
                "step_time_s": 0.21,
                "round": 4,
                "phase": "inner",
            },
        }
    },
    "after a sync": {
        "value": {
            "instance": "9f2c41d07a",
            "epoch": 2,
            "t_s": 1700000060.0,
            "syncs": [
                {
                    "round": 4,
                    "outcome": "applied",
                    "started_s": 1700000050.0,
                    "pushed_s": 1700000051.0,
                    "finished_s": 1700000052.0,
                    "bytes_pushed": 12000000,
                    "bytes_pulled": 12000000,
                    "inner_steps": 128,
                    "tokens": 131072,
                }
            ],
        }
    },
}
POLICY: dict[str, Example] = {
    "workload-aware": {"value": {"name": "wa_diloco", "params": {"threshold": 0.1}}},
    "matched control": {"value": {"name": "random_deferral", "params": {"seed": 1, "draw": 0}}},
    "at the lowest expected cost": {"value": {"name": "wa_forecast"}},
    "every 256 steps": {"value": {"name": "fixed_h", "params": {"h": 256}}},
}
BUDGET: dict[str, Example] = {
    "eight syncs in ten minutes": {"value": {"outer_syncs": 8, "horizon_s": 600, "min_gap_s": 20}},
    "forty an hour": {"value": {"syncs_per_hour": 40, "max_defer_s": 180}},
}
CONTROL: dict[str, Example] = {
    "pause": {"value": {"action": "pause"}},
    "sync now": {"value": {"action": "sync_now"}},
    "what a drain would do": {"value": {"action": "drain", "slot": 0, "dry_run": True}},
    "let a drained agent in again": {"value": {"action": "resume", "agent_id": "island-0"}},
    "hand a slot to the longest-waiting spare, at once": {"value": {"action": "swap", "slot": 0, "when": "now"}},
}
