"""The processor, from recorded texts of several systems."""

from __future__ import annotations

import os

from edgellama.monitor import processor

X86 = """processor\t: 0
model name\t: AMD EPYC 7763
flags\t\t: fpu pni ssse3 sse4_1 sse4_2 avx avx2 fma f16c bmi2 avx512f amx_tile

processor\t: 1
model name\t: AMD EPYC 7763
flags\t\t: fpu pni ssse3 sse4_1 sse4_2 avx avx2 fma f16c bmi2 avx512f
"""
PI5 = """processor\t: 0
BogoMIPS\t: 108.00
Features\t: fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp
CPU implementer\t: 0x41
CPU part\t: 0xd0b

Revision\t: d04170
Model\t\t: Raspberry Pi 5 Model B Rev 1.0
"""
RISCV = "processor\t: 0\nisa\t\t: rv64imafdcv_zicsr_zvfh\nmmu\t\t: sv48\n"
MAC = """machdep.cpu.brand_string: Apple M2
hw.optional.arm.FEAT_DotProd: 1
hw.optional.arm.FEAT_I8MM: 1
hw.optional.arm.FEAT_SME: 0
hw.optional.AdvSIMD: 1
"""


def test_features_that_only_some_cores_have_do_not_count() -> None:
    name, features = processor.parse_cpuinfo(X86)
    assert name == "AMD EPYC 7763"
    assert features is not None
    assert "sse3" in features
    assert "avx512f" in features
    assert "amx_tile" not in features


def test_a_raspberry_pi() -> None:
    name, features = processor.parse_cpuinfo(PI5)
    assert name == "Raspberry Pi 5 Model B Rev 1.0"
    assert features == ("asimd", "asimdhp", "asimddp", "fphp")


def test_risc_v_with_vectors() -> None:
    assert processor.parse_cpuinfo(RISCV)[1] == ("rvv", "zvfh")


def test_a_mac() -> None:
    assert processor.parse_sysctl(MAC) == ("Apple M2", ("asimd", "asimddp", "i8mm"))


def test_nothing_known_is_none_not_empty() -> None:
    assert processor.parse_cpuinfo("") == ("", None)
    assert processor.parse_sysctl("") == ("", None)


def test_this_machine() -> None:
    found = processor.read()
    assert found.logical_cores == os.cpu_count()
    assert 1 <= found.usable_cores <= found.logical_cores
    assert found.name
