"""The hub where it cannot be reached: said once, and no request is made."""

import os
import socket

import pytest
from huggingface_hub import constants, is_offline_mode

from lowtide.compat import hub


@pytest.fixture
def asked(monkeypatch):
    """The addresses that are looked at, none of which answers."""
    found: list[tuple[str, int]] = []

    def connect(address, seconds):
        found.append(address)
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "create_connection", connect)
    for name in (*hub.SWITCHES, "HF_ENDPOINT", *hub.PROXIES, *(each.lower() for each in hub.PROXIES)):
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    return found


def test_a_hub_that_does_not_answer_is_asked_nothing(asked, caplog):
    assert hub.go_offline_if_unreachable(["Qwen/Qwen3-8B", None, "."])
    assert asked == [("huggingface.co", 443)]
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    assert is_offline_mode()
    assert "huggingface.co cannot be reached (Name or service not known), so that only a cache" in caplog.text
    assert not hub.go_offline_if_unreachable(["Qwen/Qwen3-8B"])  # the switch is set by now
    assert len(asked) == 1


def test_what_is_here_needs_no_hub(asked, tmp_path):
    assert not hub.go_offline_if_unreachable([str(tmp_path), None])
    assert asked == []


@pytest.mark.parametrize("switch", ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HTTPS_PROXY", "https_proxy"])
def test_who_says_how_the_hub_is_reached_is_believed(asked, switch, monkeypatch):
    monkeypatch.setenv(switch, "http://proxy:3128")
    assert not hub.go_offline_if_unreachable(["a/b"])
    assert asked == []


def test_the_address_is_that_of_the_endpoint(asked, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://mirror.local")
    assert hub.go_offline_if_unreachable(["a/b"])
    assert asked == [("mirror.local", 80)]


def test_a_hub_that_answers_is_left_alone(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        for name in hub.SWITCHES + hub.PROXIES:
            monkeypatch.setenv(name, "")
        monkeypatch.setenv("no_proxy", "")
        for name in hub.PROXIES:
            monkeypatch.setenv(name.lower(), "")
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        assert not hub.go_offline_if_unreachable(["a/b"])
    assert not os.environ["HF_HUB_OFFLINE"]
