"""Inline PTX: a small interpreter over registers that hold bits, for straight-line elementwise code.

A register is an int64 tensor of unsigned bits, one entry per instance of the text. With `pack`, an operand takes
`pack * bits / 32` registers and neighbours along the last dimension share an instance, as they share a thread. A forward branch
switches instances off until its label; a vote is the instance's own predicate, which is right where the branch only
skips work that would change nothing. Unknown instructions raise a sentence that names the function and the instruction.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch

from . import state
from . import types as ty
from .ptx_ops import OPERATIONS, Bits, number
from .types import DType, ModelError
from .values import Scalar, Tensor, as_tensor, broadcast_shape

_TOKEN = re.compile(r"\{[^{}]*\}|\[[^\]]*\]|[^,\s{}\[\]]+")


HINTS = ("prefetch", "prefetchu", "discard", "griddepcontrol")


def _caller() -> str:
    return sys._getframe(2).f_code.co_name


def inline_asm_elementwise(
    asm: str, constraints: str, args: Sequence[Any], dtype: Any, is_pure: bool, pack: int
) -> Any:
    function = _caller()
    kinds = list(dtype) if isinstance(dtype, (tuple, list)) else [dtype]
    blocks = [as_tensor(arg) for arg in args]
    shape = broadcast_shape(*(block.data.shape for block in blocks))
    made: list[Any]
    if any(block.data.is_meta for block in blocks):
        made = [Tensor(torch.empty(shape, dtype=kind.carrier, device="meta"), kind) for kind in kinds]
    else:
        made = _run(asm, constraints, blocks, kinds, shape, int(pack), function)
        if not shape:  # integers that are left alone are scalars
            made = [Scalar(int(m.data), m.dtype) if m.dtype.integral else m for m in made]
    return tuple(made) if isinstance(dtype, (tuple, list)) else made[0]


def _run(
    asm: str, constraints: str, blocks: list[Tensor], kinds: list[DType], shape: torch.Size, pack: int, function: str
) -> list[Tensor]:
    count = max(1, shape.numel())
    if count % pack:
        raise ModelError(f"{function} packs {pack} elements of a block of {count}.")
    instances = count // pack
    registers: dict[str, Bits] = {}
    outputs = constraints.replace(" ", "").split(",")
    n_out = sum(c.startswith("=") for c in outputs)
    inputs: list[Bits] = []
    for block in blocks:
        flat = block.data.expand(shape).reshape(instances, pack)
        inputs += _to_registers(flat, block.dtype)
    named = [c for c in outputs[n_out:] if not c.startswith("~")]
    if len(named) != len(inputs):
        raise ModelError(f"{function} has {len(inputs)} input registers but {len(named)} input constraints.")
    for i, bits in enumerate(inputs):
        registers[f"${n_out + i}"] = bits
        if named[i].isdigit():  # tied: the output register starts with the input's value
            registers[f"${named[i]}"] = bits
    Program(asm, function).run(registers, instances)
    results, at = [], 0
    for kind in kinds:
        width = max(1, pack * kind.bits // 32) if kind.bits < 64 else pack
        missing = [f"${i}" for i in range(at, at + width) if f"${i}" not in registers]
        if missing:
            raise ModelError(f"{function} never writes its output {missing[0]}.")
        parts = [registers[f"${i}"] for i in range(at, at + width)]
        results.append(Tensor(_from_registers(parts, kind, instances, pack).reshape(shape), kind))
        at += width
    return results


def _to_registers(flat: torch.Tensor, dtype: DType) -> list[Bits]:
    """[instances, pack] of a type -> registers."""
    words = {8: ty.uint8, 16: ty.uint16, 32: ty.uint32, 64: ty.int64}
    bits = ty.bitcast(flat, dtype, words[dtype.bits]).to(torch.int64)
    per = max(1, min(flat.shape[1], 32 // dtype.bits))
    grouped = bits.reshape(flat.shape[0], -1, per)
    shifts = torch.arange(per) * dtype.bits
    return list((grouped << shifts).sum(2).unbind(1)) if per > 1 else list(grouped[:, :, 0].unbind(1))


def _from_registers(bits: list[Bits], dtype: DType, instances: int, pack: int) -> torch.Tensor:
    per = max(1, min(pack, 32 // dtype.bits))
    stacked = torch.stack([b.expand(instances) for b in bits], dim=1)[:, :, None]
    parts = (stacked >> (torch.arange(per) * dtype.bits)) if per > 1 else stacked
    words = {8: ty.uint8, 16: ty.uint16, 32: ty.uint32, 64: ty.int64}
    word = words[dtype.bits]
    raw = parts.reshape(instances, pack)
    raw = raw if dtype.bits == 64 else raw & ((1 << dtype.bits) - 1)
    return ty.bitcast(raw.to(word.carrier), word, dtype)


def _special(register: str) -> int | None:
    """Registers of the grid, whose CTAs lie side by side in clusters."""
    machine = state.machine()
    ctas = 1 if machine.peer is None else 2
    base, _, axis = register.partition(".")
    at = "xyz".find(axis or "x")
    scale = ctas if at == 0 else 1
    if base == "%ctaid":
        return machine.program[at] * scale + (machine.rank if at == 0 else 0) if at < len(machine.program) else 0
    if base == "%nctaid":
        return machine.grid[at] * scale if at < len(machine.grid) else 1
    return machine.rank if register == "%cluster_ctarank" else None


@dataclass(frozen=True)
class _Instruction:
    """One statement, or several with the same opcode and guard that do not touch each other's registers (`rows`)."""

    text: str
    label: str  # a label and nothing else
    guard: str  # "p" or "!p"
    opcode: str
    rows: tuple[tuple[str, ...], ...]  # operands, the target first


def _clean(part: str) -> str:
    """Without the braces of scopes; those of vectors stand between operands."""
    part = part.strip()
    while part[:1] in ("{", "}") and not re.match(r"\{[^{}]*\}\s*,", part):
        part = part[1:].strip()
    return part


@lru_cache(maxsize=256)
def _parse(asm: str) -> tuple[_Instruction, ...]:
    text = re.sub(r"//[^\n]*|/\*.*?\*/", " ", asm, flags=re.S)
    steps: list[_Instruction] = []
    for part in text.split(";"):
        statement = _clean(part)
        label = re.match(r"([\w$]+)\s*:\s*", statement)
        while label:
            steps.append(_Instruction(statement, label.group(1), "", "", ()))
            statement = _clean(statement[label.end() :])
            label = re.match(r"([\w$]+)\s*:\s*", statement)
        if not statement or statement.startswith(".reg"):
            continue
        guard = re.match(r"@(!?[%\w$]+)\s+", statement)
        rest = statement[guard.end() :] if guard else statement
        opcode, _, operands = rest.partition(" ")
        row = tuple(_TOKEN.findall(operands))
        step = _Instruction(statement, "", guard.group(1) if guard else "", opcode, (row,))
        if steps and _independent(steps[-1], step):
            steps[-1] = replace(steps[-1], rows=(*steps[-1].rows, row))
        else:
            steps.append(step)
    return tuple(steps)


def _independent(before: _Instruction, step: _Instruction) -> bool:
    """Whether the step may run together with those before it: elementwise, and no register of one is written by the other."""
    row = step.rows[0]
    if (before.opcode, before.guard) != (step.opcode, step.guard) or any(o[0] in "{[" for o in row):
        return False
    if step.opcode.split(".")[0] not in ("mul", "add", "sub", "fma") or len(before.rows[0]) != len(row):
        return False
    written = {r[0] for r in before.rows}
    read = {o for r in before.rows for o in r}
    return row[0] not in read and not written & set(row)


class Program:
    """One asm block of a function, run for all instances at once."""

    def __init__(self, asm: str, function: str) -> None:
        self.function = function
        self.steps = _parse(asm)
        self._off: dict[str, torch.Tensor] = {}  # label -> instances that jumped to it

    def run(self, registers: dict[str, Bits], instances: int) -> None:
        for step in self.steps:
            if step.label:
                self._off.pop(step.label, None)
            else:
                self._execute(step, registers, instances)

    def _active(self, step: _Instruction, registers: dict[str, Bits]) -> torch.Tensor | None:
        """Instances for which the step takes effect; None: all."""
        active: torch.Tensor | None = None
        for jumped in self._off.values():
            active = ~jumped if active is None else active & ~jumped
        if step.guard:
            holds = registers[step.guard.lstrip("!")] != 0
            holds = ~holds if step.guard[0] == "!" else holds
            active = holds if active is None else active & holds
        return active

    def _execute(self, step: _Instruction, registers: dict[str, Bits], instances: int) -> None:
        active = self._active(step, registers)
        name = step.opcode.split(".")[0]
        if name == "bra":
            label = step.rows[0][0]
            taken = torch.ones(instances, dtype=torch.bool) if active is None else active
            self._off[label] = self._off[label] | taken if label in self._off else taken
            return
        if step.opcode.startswith("cp.async.bulk.prefetch") or name in HINTS:
            return  # hints, and the order of kernels, which run one after the other here: no value changes
        operation = OPERATIONS.get(step.opcode) or self._without_modifiers(step.opcode)
        if operation is None:
            raise ModelError(
                f"{self.function} uses the PTX instruction {step.opcode!r}, which the model does not know."
            )
        sources = [[self._read(operand, registers, instances) for operand in row[1:]] for row in step.rows]
        try:
            if len(sources) == 1:
                results = [operation(*sources[0])]
            else:
                results = list(operation(*(torch.stack(column) for column in zip(*sources, strict=True))))
        except ModelError as error:
            raise ModelError(f"{self.function}, {step.text!r}: {error}") from error
        for row, result in zip(step.rows, results, strict=True):
            self._write(row[0], result, active, registers)

    @staticmethod
    def _without_modifiers(opcode: str) -> Any:
        """The operation without modifiers that change at most the last bit or subnormals."""
        parts = [p for p in opcode.split(".") if p not in ("ftz", "approx", "sync", "uni", "full")]
        return OPERATIONS.get(".".join(parts))

    def _read(self, operand: str, registers: dict[str, Bits], instances: int) -> Any:
        if operand[0] in "{[":
            return [self._read(part, registers, instances) for part in _TOKEN.findall(operand[1:-1])]
        if operand in registers:
            return registers[operand]
        value = _special(operand) if operand[0] == "%" else number(operand)
        if value is None:
            raise ModelError(
                f"{state.where()}: {self.function} reads the PTX register {operand}, which was never written."
            )
        return torch.full((instances,), value, dtype=torch.int64)

    def _write(self, target: str, result: Any, active: torch.Tensor | None, registers: dict[str, Bits]) -> None:
        names = _TOKEN.findall(target[1:-1]) if target[0] == "{" else target.split("|")
        values = result if isinstance(result, (list, tuple)) else [result]
        if target[0] == "{" and len(values) == 1:
            width = 32 // len(names)
            values = [(values[0] >> (i * width)) & ((1 << width) - 1) for i in range(len(names))]
        for name, value in zip(names, values, strict=False):
            before = registers.get(name)
            registers[name] = value if before is None or active is None else torch.where(active, value, before)
