"""Passwords and access tokens among the options of a run, which no file and no tracker gets to see."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

SECRET = frozenset(
    {"hub_token", "push_to_hub_token", "token", "use_auth_token", "auth_token", "access_token", "hf_token", "api_key",
     "apikey", "password", "passwd", "passphrase", "pwd", "secret", "authorization", "private_key", "passwords",
     "secrets", "credential", "credentials", "auth", "basic_auth", "cookie", "cookies", "signature"}
)  # fmt: skip
"""Names of options, and of entries in options that are mappings (`model_init_kwargs={"token": ...}`), in any case."""
ENDINGS = tuple(
    ending + plural
    for ending in (
        *(
            "_api_key",
            "_access_token",
            "_auth_token",
            "_hub_token",
            "_password",
            "_secret",
            "_access_key",
            "_secret_key",
        ),
        *("_private_key", "_session_token", "_bearer_token", "_hf_token", "_sas_token", "_account_key", "_credential"),
        *("_signature", "_passphrase"),
    )
    for plural in ("", "s")
)
"""How such names end where they begin with the name of a service (`WANDB_API_KEY`)."""


_USER = re.compile(r"(?<=://)([^/?#\s]*:[^/?#\s]*|[^/?#\s@]{16,})@")
"""The user and the password in an address, or a token in their place."""
_TOKEN = re.compile(
    r"\b(hf_[A-Za-z0-9]{20,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{20,}|sk-[A-Za-z0-9_-]{20,}"
    r"|xox[a-z]-[A-Za-z0-9-]{20,}|AIza[\w-]{35}|AKIA[0-9A-Z]{16}(:[^@/\s]+)?)(?![\w-])"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----.*",
    re.DOTALL,
)
"""Texts that are tokens or keys by the look of them: of Hugging Face, GitHub, GitLab, OpenAI, Slack, Google, Amazon."""
_ASSIGNED = re.compile(r"([A-Za-z][\w-]*)=([^\s&;,]+)")
"""A value with its name, in an environment (`WANDB_API_KEY=...`) or an address (`?token=...`)."""


def without_secrets(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options with each secret set to None, those in mappings and lists among them too, and addresses without their
    passwords; the options themselves are left alone."""
    return {name: _cleared(name, value) for name, value in options.items()}


def _cleared(name: str, value: Any) -> Any:
    if isinstance(value, Mapping):
        return None if _is_secret(name) and value else without_secrets(value)
    if isinstance(value, list | tuple | set | frozenset):
        cleared = [_cleared(name, each) for each in value]
        return tuple(cleared) if isinstance(value, tuple) else cleared
    if not isinstance(value, str):
        return value
    if _is_secret(name) or _TOKEN.fullmatch(value.strip()):
        return None
    return _ASSIGNED.sub(_without_value, _TOKEN.sub("", _USER.sub("", value)))


def _is_secret(name: str) -> bool:
    """Whether a name is of what nobody is to see."""
    named = re.sub("(?<=[a-z0-9])(?=[A-Z])", "_", str(name)).replace("-", "_").lower()
    return named in SECRET or f"_{named}".endswith(ENDINGS)


def _without_value(assigned: re.Match[str]) -> str:
    return f"{assigned[1]}=" if _is_secret(assigned[1]) else assigned[0]
