"""Names of devices, what the table says of them, and rates that are measured."""

import time

import pytest
import torch

from lowtide.planner import devices
from lowtide.planner.devices import DEVICES, GIB, MIB, Rates, device_named, measured_rates


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("H100-80GB", "H100-80GB"),
        ("h100_80gb", "H100-80GB"),
        ("rtx 4090", "RTX-4090"),
        ("L4", "L4-24GB"),  # and not the L40 or the L40S
        ("L40", "L40-48GB"),
        ("l40s", "L40S-48GB"),
        ("A10", "A10-24GB"),
        ("a10g", "A10G-24GB"),
        ("A100 40", "A100-40GB"),
        ("a100-80", "A100-80GB"),
        ("NVIDIA A100-SXM4-80GB", "A100-80GB"),
        ("NVIDIA A100 80GB PCIe", "A100-PCIe-80GB"),
        ("NVIDIA H100 80GB HBM3", "H100-80GB"),
        ("h100-sxm", "H100-80GB"),
        ("Tesla V100-SXM2-16GB", "V100-16GB"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX-6000-Ada"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "RTX-PRO-6000-96GB"),
        ("apple 64", "Apple-64GB"),
        ("mac 64", "Apple-64GB"),
        ("cpu 64", "CPU-64GB"),
        ("a100-pcie", "A100-PCIe-80GB"),
        ("H200", "H200-141GB"),
        ("h100", "H100-80GB"),
        ("4090", "RTX-4090"),
        ("rtx4090", "RTX-4090"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("A6000", "RTX-A6000"),
        ("a100 80g", "A100-80GB"),
        ("a100-40gb", "A100-40GB"),
        ("6000 ada", "RTX-6000-Ada"),
        ("pro 6000", "RTX-PRO-6000-96GB"),
        ("Tesla T4", "T4-16GB"),
        ("mac 64gb", "Apple-64GB"),
        ("cpu 32 gb", "CPU-32GB"),
    ],
)
def test_names_are_found(text, name):
    assert device_named(text) is DEVICES[name]


def test_half_a_name_is_none():
    with pytest.raises(ValueError, match="'6000' may be any of "):
        device_named("6000")


def test_a_name_of_several_names_them():
    with pytest.raises(ValueError, match=r"'v100' may be any of V100-32GB, V100-16GB: give one"):
        device_named("v100")


def test_an_unknown_name_gets_the_nearest():
    with pytest.raises(ValueError, match=r"unknown device 'H100-8GB'; did you mean 'H100-80GB'\?"):
        device_named("H100-8GB")
    with pytest.raises(ValueError, match=r"unknown device 'a100 48'"):
        device_named("a100 48")
    with pytest.raises(ValueError, match=r"unknown device '64'"):
        device_named("64")
    with pytest.raises(ValueError, match=r"unknown device 'abacus': choose cpu, cuda or one of B200-180GB, "):
        device_named("abacus")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_the_gpu_of_a_machine_without_one():
    with pytest.raises(ValueError, match="torch finds none: name the one that is meant"):
        device_named("cuda")


def test_the_cpu_at_hand(monkeypatch):
    found = device_named("CPU")
    assert found.kind == "cpu"
    assert found.available_bytes == found.memory_bytes > GIB
    assert found.workspaces == ()
    known = Rates({"float32": 1.0}, 1.0, 1.0, 1.0, measured=True)
    monkeypatch.setattr(devices, "measured_rates", {"cpu": known}.__getitem__)
    assert found.rates is known


def test_rates_are_measured_once():
    measured_rates.cache_clear()
    start = time.perf_counter()
    rates = measured_rates("cpu")
    first = time.perf_counter() - start
    assert measured_rates("cpu") is rates
    assert first < 5  # 0.2 s where nothing else runs, and bfloat16 has instructions
    assert rates.measured
    assert 1e8 < rates.flops["float32"] < 1e15
    assert 1e8 < rates.memory_bandwidth < 1e13
    assert 1e-7 < rates.dispatch < 1e-3


@pytest.mark.parametrize("device", [each for each in DEVICES.values() if each.sheet], ids=lambda each: each.name)
def test_rows_of_the_table_are_plausible(device):
    rates = device.rates
    assert not rates.measured
    assert set(rates.flops) == {"float32", "bfloat16", "float16"}
    assert rates.flops["float32"] <= rates.flops["bfloat16"] <= rates.flops["float16"] < 1e16
    assert rates.host_link <= rates.interconnect < rates.memory_bandwidth < 1e13
    named = [int(part.removesuffix("GB")) for part in device.name.split("-") if part.endswith("GB")]
    assert all(0.9 * size * 1e9 < device.memory_bytes < 1.08 * size * 1e9 for size in named)
    assert device.available_bytes < device.memory_bytes


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
def test_each_is_found_by_its_own_name(device):
    assert device_named(device.name) is device
    assert device.listed


def test_a_card_of_another_generation_is_not_taken_for_its_namesake():
    with pytest.raises(ValueError, match="unknown device 'Quadro RTX 6000'"):
        device_named("Quadro RTX 6000")


def test_hopper_has_larger_workspaces():
    assert device_named("H200").workspaces == (32 * MIB, 32 * MIB)
    assert device_named("A100-40GB").workspaces == (8 * MIB + 128 * 1024,) * 2
