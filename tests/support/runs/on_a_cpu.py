"""Options of a run that a test looks at."""

from typing import Any

ON_A_CPU: dict[str, Any] = {
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "use_cpu": True,
    "bf16": False,
}
"""In float32 on a CPU; each step is logged, and nothing is written."""
