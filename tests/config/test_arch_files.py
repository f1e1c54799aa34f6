"""The shipped arch files against numbers written here by hand, and what a wrong arch file is told."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from kgen.archs import ArchSpec, all_archs, load_arch, match_device
from kgen.config import config_root
from kgen.errors import ConfigError

# name: cc, smem per block, smem per SM, warps, MMA, TMA, clusters, tmem columns
ARCHS = {
    "sm90": (90, 227 * 1024, 228 * 1024, 64, "wgmma", True, True, 0),
    "sm100": (100, 227 * 1024, 228 * 1024, 64, "tcgen05", True, True, 512),
    "sm120": (120, 99 * 1024, 100 * 1024, 48, "mma.sync", True, False, 0),
    "sm121": (121, 99 * 1024, 100 * 1024, 48, "mma.sync", True, False, 0),
}
# (arch, class): SMs, GB/s, L2 MB, TFLOP/s, fields that nobody has stated
DEVICES = {
    ("sm90", "h100"): (132, 3350, 50, 989, ()),
    ("sm90", "h800"): (132, 3350, 50, 989, ()),
    ("sm90", "h200"): (132, 4800, 60, 989, ()),
    ("sm90", "h20"): (78, 4000, 60, 148, ("sm_clock_mhz",)),
    ("sm100", "b200"): (148, 7672, 126, 2250, ()),
    ("sm120", "rtx_pro_6000"): (188, 1792, 128, 188 * 1024 * 2.6e9 / 1e12, ()),
    ("sm120", "rtx_5090"): (170, 1792, 96, 170 * 512 * 2.407e9 / 1e12, ("bf16_tflops", "sm_clock_mhz")),
    ("sm121", "gb10"): (48, 273, 24, 92.3, ("bf16_tflops", "sm_clock_mhz")),
}


def test_archs_equal_the_hardware_table() -> None:
    archs = all_archs()
    assert set(archs) == set(ARCHS)
    for name, expected in ARCHS.items():
        a = archs[name]
        assert (a.cc, a.smem_limit, a.smem_per_sm, a.max_warps, a.mma, a.tma, a.clusters, a.tmem_columns) == expected
        assert (a.regs_per_sm, a.max_regs) == (64 * 1024, 255)
        assert load_arch(name) == a
    assert archs["sm90"].smem_limit == 232_448
    assert archs["sm121"].smem_limit == 101_376


def test_device_classes_equal_the_hardware_table() -> None:
    found = {(a.name, d.name): d for a in all_archs().values() for d in a.devices}
    assert set(found) == set(DEVICES)
    for key, (sms, dram, l2, tflops, unknown) in DEVICES.items():
        device = found[key]
        assert (device.sms, device.dram_gbps, device.l2_bytes) == (sms, dram, l2 * 1024 * 1024)
        assert device.bf16_tflops == pytest.approx(tflops, rel=1e-3)
        assert device.unknown == unknown


def test_peaks_agree_with_clocks() -> None:
    """989 TFLOP/s = SMs * clock * 4096 on Hopper (the H20 is limited), SMs * clock * 8192 on the B200."""
    rates = {"h100": 4096, "h800": 4096, "h200": 4096, "b200": 8192, "rtx_pro_6000": 1024}
    for arch in all_archs().values():
        for device in arch.devices:
            if device.name in rates:
                peak = device.sms * device.sm_clock_mhz * 1e6 * rates[device.name] / 1e12
                assert device.bf16_tflops == pytest.approx(peak, rel=2e-3)


def test_every_number_has_a_source() -> None:
    for arch in all_archs().values():
        for fact in (*arch.facts, *(fact for device in arch.devices for fact in device.facts)):
            assert len(fact.source) > 8, (arch.name, fact)
            assert (fact.value is None) == (fact.assumed is not None)


@pytest.mark.parametrize(
    ("arch", "gpu", "expected"),
    [
        ("sm90", "NVIDIA H100 80GB HBM3", "h100"),
        ("sm90", "NVIDIA H100 PCIe", None),
        ("sm90", "NVIDIA H100 NVL", None),
        ("sm90", "NVIDIA H800", "h800"),
        ("sm90", "NVIDIA H200", "h200"),
        ("sm90", "NVIDIA H20", "h20"),
        ("sm90", "NVIDIA H20-3e", None),
        ("sm90", "NVIDIA GH200 480GB", None),
        ("sm100", "NVIDIA B200", "b200"),
        ("sm100", "NVIDIA GB200", None),
        ("sm120", "NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "rtx_pro_6000"),
        ("sm120", "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", "rtx_pro_6000"),
        ("sm120", "NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtx_pro_6000"),
        ("sm120", "NVIDIA RTX 6000D", None),
        ("sm120", "NVIDIA GeForce RTX 5090", "rtx_5090"),
        ("sm120", "NVIDIA GeForce RTX 5090 D", None),
        ("sm120", "NVIDIA GeForce RTX 5090 Laptop GPU", None),
        ("sm121", "NVIDIA GB10", "gb10"),
        ("sm121", "", None),
    ],
)
def test_device_by_gpu_name(arch: str, gpu: str, expected: str | None) -> None:
    device = match_device(load_arch(arch), gpu)
    assert (device.name if device else None) == expected


def test_unknown_arch_has_a_suggestion() -> None:
    with pytest.raises(ConfigError, match=r"Unknown arch 'sm09'.*did you mean 'sm90'.*sm100, sm120, sm121, sm90"):
        load_arch("sm09")
    with pytest.raises(ConfigError, match="Unknown arch 'sm103'"):
        load_arch("sm103")


def edited(tmp_path: Path, old: str, new: str, name: str = "sm90") -> ArchSpec:
    text = (config_root() / "archs" / f"{name}.yaml").read_text()
    assert old in text
    (tmp_path / "archs").mkdir(exist_ok=True)
    (tmp_path / "archs" / f"{name}.yaml").write_text(text.replace(old, new, 1))
    return load_arch(name, tmp_path)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("cc: 90", "cc: 91", "expected sm91"),
        ("name: sm90", "name: sm91", "the two must agree"),
        ("mma: wgmma", "mma: wgma", "did you mean 'wgmma'"),
        ("tma: true", "tma: maybe", "tma: expected true or false"),
        ("sms: {value: 132", "sms: {value: many", "device_classes.h100.sms.value: expected a whole number"),
        ("sms: {value: 132", "sms: {value: 0", "from 1 to 1024"),
        ("sms: {value: 132", "smms: {value: 132", "did you mean 'sms'"),
        ("sms: {value: 132", "sms: {value: null", "needs 'assumed'"),
        ("sms: {value: 132", "sms: {value: 132, assumed: 2", "only an unknown fact"),
        ("smem_limit: {value: 232448", "smem_limit: {value: 999999", "more shared memory than the SM has"),
        ('match: ["H800"]', "match: []", "at least one pattern"),
        ("  h800:", "  h100:", "'h100' is given twice"),
    ],
)
def test_wrong_arch_files(tmp_path: Path, old: str, new: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        edited(tmp_path, old, new)
    assert words in str(caught.value)
    assert "sm90.yaml:" in str(caught.value)


def test_a_new_arch_is_one_file(tmp_path: Path) -> None:
    """B21 in reverse: an arch that is added is served by its own file alone."""
    root = tmp_path / "configs"
    shutil.copytree(config_root(), root)
    text = (root / "archs" / "sm100.yaml").read_text()
    (root / "archs" / "sm103.yaml").write_text(
        text.replace("sm100", "sm103").replace("cc: 100", "cc: 103").replace("b200", "b300").replace("B200", "B300")
    )
    assert set(all_archs(root)) == {*ARCHS, "sm103"}
    arch = load_arch("sm103", root)
    assert arch.cc == 103 and match_device(arch, "NVIDIA B300 SXM6") is arch.device("b300")
