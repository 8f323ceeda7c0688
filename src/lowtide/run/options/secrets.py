"""Passwords and access tokens among the options of a run, which no file and no tracker gets to see."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

SECRET = frozenset(
    {"hub_token", "push_to_hub_token", "token", "use_auth_token", "auth_token", "access_token", "hf_token", "api_key",
     "password", "passwd", "passphrase", "secret", "authorization", "private_key", "passwords", "secrets"}
)  # fmt: skip
"""Names of options, and of entries in options that are mappings (`model_init_kwargs={"token": ...}`), in any case."""
ENDINGS = (
    *("_api_key", "_access_token", "_auth_token", "_hub_token", "_password", "_secret", "_access_key", "_secret_key"),
    *("_private_key", "_session_token", "_bearer_token", "_hf_token", "_passwords", "_secrets"),
)
"""How such names end where they begin with the name of a service (`WANDB_API_KEY`)."""


_USER = re.compile(r"(?<=://)[^/?#\s@]*:[^/?#\s@]*@")
"""The user and the password in an address."""
_TOKEN = re.compile(r"\b(hf_[A-Za-z0-9]{20,}|gh[pousr]_[A-Za-z0-9]{20,}|sk-[A-Za-z0-9_-]{20,}|AKIA[0-9A-Z]{16})\b")
"""Texts that are tokens by the look of them: of Hugging Face, GitHub, OpenAI and Amazon."""


def without_secrets(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options with each secret set to None, those in mappings and lists among them too, and addresses without their
    passwords; the options themselves are left alone."""
    return {name: _cleared(name, value) for name, value in options.items()}


def _cleared(name: str, value: Any) -> Any:
    if isinstance(value, Mapping):
        return without_secrets(value)
    if isinstance(value, list | tuple):
        cleared = [_cleared(name, each) for each in value]
        return cleared if isinstance(value, list) else tuple(cleared)
    if not isinstance(value, str):
        return value
    named = re.sub("(?<=[a-z0-9])(?=[A-Z])", "_", str(name)).replace("-", "_").lower()
    if named in SECRET or named.endswith(ENDINGS) or _TOKEN.fullmatch(value.strip()):
        return None
    return _USER.sub("", value)
