"""GPU architectures and the device classes on them: `configs/archs/*.yaml` as frozen data.

A number in these files is a mapping `{value, source}`, or `{value: null, assumed, source}` for a fact that nobody has
stated: then the plain field here holds what the cost model uses instead, and the field's name is listed in `unknown`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from kgen.config import Node, config_root, find_yaml, read_yaml, yaml_files

MMA_FAMILIES = ("wgmma", "tcgen05", "mma.sync")


@dataclass(frozen=True)
class Fact:
    """One number of an arch file with where it comes from. `value` None: unknown, and `assumed` is used."""

    name: str
    value: int | float | None
    assumed: int | float | None
    source: str

    @property
    def used(self) -> int | float:
        number = self.value if self.value is not None else self.assumed
        assert number is not None  # _fact refuses a fact with neither
        return number


@dataclass(frozen=True)
class DeviceClass:
    """GPUs that share tuning results: same SM count, memory and clocks.

    sms: streaming multiprocessors; dram_gbps: DRAM bandwidth in 1e9 B/s; l2_bytes: as PyTorch reports it where known;
    bf16_tflops: dense peak in 1e12 FLOP/s; sm_clock_mhz: the clock at which that peak holds.
    """

    name: str
    title: str
    match: tuple[str, ...]
    exclude: tuple[str, ...]
    sms: int
    dram_gbps: float
    l2_bytes: int
    bf16_tflops: float
    sm_clock_mhz: int
    facts: tuple[Fact, ...]

    @property
    def unknown(self) -> tuple[str, ...]:
        """Names of the fields that hold an assumption instead of a stated fact."""
        return tuple(fact.name for fact in self.facts if fact.value is None)

    def matches(self, gpu_name: str) -> bool:
        """Whether a GPU's marketing name is of this class: a pattern occurs in it as whole words, no excluded one does.

        Whole words, because "H20" is a part of "H200" and "H200" one of "GH200".
        """
        return any(_has_words(gpu_name, p) for p in self.match) and not any(
            _has_words(gpu_name, p) for p in self.exclude
        )


@dataclass(frozen=True)
class ArchSpec:
    """What a kernel may count on, on every GPU of one compute capability.

    smem_limit: bytes of shared memory that one block may take (opt-in); smem_per_sm: bytes an SM has for all its
    blocks; regs_per_sm: 32-bit registers; max_regs: per thread; max_warps: resident per SM; tmem_columns: columns of
    tensor memory (0: none); target and cuda: the compiler's name of the arch and the first toolkit that knows it.
    """

    name: str
    title: str
    cc: int
    target: str
    cuda: str
    smem_limit: int
    smem_per_sm: int
    regs_per_sm: int
    max_regs: int
    max_warps: int
    mma: str
    tma: bool
    clusters: bool
    tmem_columns: int
    devices: tuple[DeviceClass, ...]
    facts: tuple[Fact, ...]

    @property
    def max_sms(self) -> int:
        """SMs of the largest device class: a restriction that uses it holds for every class."""
        return max(device.sms for device in self.devices)

    def device(self, name: str) -> DeviceClass | None:
        """The device class of that name, or None."""
        return next((device for device in self.devices if device.name == name), None)


def match_device(arch: ArchSpec, gpu_name: str) -> DeviceClass | None:
    """The device class of a GPU by the name that the driver reports (`torch.cuda.get_device_name()`), or None."""
    return next((device for device in arch.devices if device.matches(gpu_name)), None)


def load_arch(name: str, root: Path | None = None) -> ArchSpec:
    """The arch of that name (`sm90`); `root` is a configuration folder, by default `config_root()`."""
    return read_arch(find_yaml((root or config_root()) / "archs", name, "arch"))


def all_archs(root: Path | None = None) -> dict[str, ArchSpec]:
    """Every arch of the configuration folder, by name."""
    return {name: read_arch(path) for name, path in yaml_files((root or config_root()) / "archs").items()}


def read_arch(path: Path) -> ArchSpec:
    """Read one arch file; its stem is the arch's name."""
    document = read_yaml(path)
    integer_facts = {  # name: (low, high)
        "smem_limit": (16 << 10, 1 << 20),
        "smem_per_sm": (16 << 10, 1 << 20),
        "regs_per_sm": (1 << 10, 1 << 20),
        "max_regs": (32, 1024),
        "max_warps": (8, 256),
        "tmem_columns": (0, 4096),
    }
    plain = ("name", "title", "cc", "target", "cuda", "mma", "tma", "clusters", "device_classes")
    fields = document.fields((*plain, *integer_facts))
    name = fields["name"].text()
    if name != path.stem:
        fields["name"].fail(f"the arch is called {name!r} but its file is {path.name}; the two must agree.")
    cc = fields["cc"].integer(70, 199)
    if name != f"sm{cc}":
        fields["cc"].fail(f"compute capability {cc} does not belong to an arch called {name!r}; expected sm{cc}.")
    facts = {key: _fact(fields[key], key, *bounds) for key, bounds in integer_facts.items()}
    if facts["smem_limit"].used > facts["smem_per_sm"].used:
        fields["smem_limit"].fail("one block cannot take more shared memory than the SM has (smem_per_sm).")
    devices = tuple(_device(node, key) for key, node in fields["device_classes"].mapping().items())
    if not devices:
        fields["device_classes"].fail("expected at least one device class.")
    return ArchSpec(
        name=name,
        title=fields["title"].text(),
        cc=cc,
        target=fields["target"].text(),
        cuda=fields["cuda"].text(),
        smem_limit=int(facts["smem_limit"].used),
        smem_per_sm=int(facts["smem_per_sm"].used),
        regs_per_sm=int(facts["regs_per_sm"].used),
        max_regs=int(facts["max_regs"].used),
        max_warps=int(facts["max_warps"].used),
        mma=fields["mma"].choice(MMA_FAMILIES, "MMA family"),
        tma=fields["tma"].boolean(),
        clusters=fields["clusters"].boolean(),
        tmem_columns=int(facts["tmem_columns"].used),
        devices=devices,
        facts=tuple(facts.values()),
    )


def _device(node: Node, name: str) -> DeviceClass:
    fields = node.fields(
        ("title", "match", "sms", "dram_gbps", "l2_bytes", "bf16_tflops", "sm_clock_mhz"), ("exclude",)
    )
    match = tuple(item.text() for item in fields["match"].items())
    if not match:
        fields["match"].fail("expected at least one pattern of the GPU's name.")
    facts = {
        "sms": _fact(fields["sms"], "sms", 1, 1024),
        "dram_gbps": _fact(fields["dram_gbps"], "dram_gbps", 10.0, 1e5),
        "l2_bytes": _fact(fields["l2_bytes"], "l2_bytes", 1 << 20, 1 << 32),
        "bf16_tflops": _fact(fields["bf16_tflops"], "bf16_tflops", 1.0, 1e5),
        "sm_clock_mhz": _fact(fields["sm_clock_mhz"], "sm_clock_mhz", 100, 10_000),
    }
    return DeviceClass(
        name=name,
        title=fields["title"].text(),
        match=match,
        exclude=tuple(item.text() for item in fields["exclude"].items()) if "exclude" in fields else (),
        sms=int(facts["sms"].used),
        dram_gbps=float(facts["dram_gbps"].used),
        l2_bytes=int(facts["l2_bytes"].used),
        bf16_tflops=float(facts["bf16_tflops"].used),
        sm_clock_mhz=int(facts["sm_clock_mhz"].used),
        facts=tuple(facts.values()),
    )


def _fact(node: Node, name: str, low: int | float, high: int | float) -> Fact:
    """`{value, source}` or `{value: null, assumed, source}`; whole numbers where the bounds are whole."""
    fields = node.fields(("value", "source"), ("assumed",))

    def number(child: Node) -> int | float:
        whole = isinstance(low, int) and isinstance(high, int)
        return child.integer(int(low), int(high)) if whole else child.number(low, high)

    unknown = fields["value"].is_null
    if unknown and "assumed" not in fields:
        node.fail("an unknown fact (value: null) needs 'assumed': the number that the cost model uses instead.")
    if not unknown and "assumed" in fields:
        fields["assumed"].fail("only an unknown fact (value: null) has an assumed number.")
    return Fact(
        name=name,
        value=None if unknown else number(fields["value"]),
        assumed=number(fields["assumed"]) if unknown else None,
        source=fields["source"].text(),
    )


def _has_words(text: str, pattern: str) -> bool:
    return re.search(rf"(?<![0-9A-Za-z]){re.escape(pattern)}(?![0-9A-Za-z])", text, re.IGNORECASE) is not None
