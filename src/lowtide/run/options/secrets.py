"""Passwords and access tokens among the options of a run, which no file and no tracker gets to see."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SECRET = frozenset(
    {"hub_token", "push_to_hub_token", "token", "use_auth_token", "auth_token", "access_token", "hf_token", "api_key",
     "password", "secret"}
)  # fmt: skip
"""Names of options, and of entries in options that are mappings (`model_init_kwargs={"token": ...}`), in any case."""
ENDINGS = ("_api_key", "_access_token", "_auth_token", "_hub_token", "_password", "_secret")
"""How such names end where they begin with the name of a service (`WANDB_API_KEY`)."""


def without_secrets(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options with each secret set to None, those in mappings among them too; the options themselves are left alone."""
    return {name: _cleared(name, value) for name, value in options.items()}


def _cleared(name: str, value: Any) -> Any:
    if isinstance(value, Mapping):
        return without_secrets(value)
    is_secret = str(name).lower() in SECRET or str(name).lower().endswith(ENDINGS)
    return None if is_secret and isinstance(value, str) else value
