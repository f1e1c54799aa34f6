"""Which products go into addresses, read from the compiler's first IR: no 32-bit multiply may (B23, decision 18).

A product with a stride, with an index that was loaded (a slot, or the page or request made of it) or with a token number
overflows 32 bits in a large cache or a long prefill, so it must be formed in 64. Products inside a page need not be: the
position in a page, which is written `index - index // page * page` or `index % page`, is small.

The IR is Triton's TTIR (Gluon: TTGIR before any optimisation), as text. `read` makes a graph of it, `faults_of` walks back
from every offset that is added to a pointer (and from every integer that is stored: a slot may be a kernel's result).

Run as a script by test_addresses.py, in a process without TRITON_INTERPRET, which `triton.compile` needs: JSON jobs on
stdin, one JSON answer a line.
"""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SMALL_ARGUMENTS = {"n_heads", "page", "extra_page", "splits"}
"""At most 128 heads; tokens in a page; at most 64 parts."""

BLOCK = 128
"""A block number times at most this is the number of a row, not an offset."""

STRIDE, INDEX, TOKEN, WIDE = "stride", "loaded index", "token", "product"

SAME = {
    "tt.splat", "tt.broadcast", "tt.expand_dims", "tt.reshape", "tt.trans", "ttg.convert_layout", "gluon.set_auto_layout",
    "arith.extsi", "arith.extui", "arith.index_cast",
}  # fmt: skip
"""Ops whose result is their operand in another type or shape."""

SCALARS = {
    "arith.addi", "arith.subi", "arith.muli", "arith.select", "arith.trunci", "arith.maxsi", "arith.maxui", "ttg.local_load",
}  # fmt: skip
"""Ops that are small when all their operands are."""


@dataclass
class Op:
    name: str
    operands: list[int]
    text: str
    type: str
    where: str


@dataclass
class Graph:
    """Values are numbers. A value has an op, or (block arguments, results of control flow) values that flow into it."""

    ops: dict[int, Op] = field(default_factory=dict)
    flows: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    arguments: dict[int, int] = field(default_factory=dict)  # value -> position
    inert: list[Op] = field(default_factory=list)  # ops without a result: stores, copies
    conditions: dict[int, int] = field(default_factory=dict)  # result of an if -> its condition; `flows` has then, else
    lines: dict[str, str] = field(default_factory=dict)


# ------------------------------------------------------------------------------------------------------------ reading

ID = r"%[\w$.-]+"
NAME = re.compile(rf"{ID}(?:#\d+)?")
LOCATION = re.compile(r"\s*loc\(((?:[^()\"]|\"[^\"]*\"|\((?:[^()\"]|\"[^\"]*\")*\))*)\)")
PTX = re.compile(r'(inline_asm )"(?:[^"\\]|\\.)*"')  # whose registers, as %ctaid, are no values
DIVIDES = ("rcp.approx.ftz.f32 b, b;", "mul.lo.s32 r, q, $2;", "sub.s32 r, $1, r;", "mov.b32 $0, q;")
"""Steps of `divided` of sm90_few, x // by in PTX; tests/hopper/test_few.py holds it to that."""

RESULTS = re.compile(rf"^({ID}(?::\d+)?(?:, {ID}(?::\d+)?)*) = ")


class _Reader:
    def __init__(self, text: str) -> None:
        self.graph = Graph()
        self.count = 0
        self.scopes: list[tuple[dict[str, int], str, dict[str, Any]]] = [({}, "module", {})]
        self.blocks: dict[tuple[int, str], list[int]] = {}  # (depth, label) -> arguments
        self.jumps: list[tuple[int, str, list[int]]] = []
        self.special: dict[str, Any] = {}  # the last warp_specialize
        self.places = dict(re.findall(r"^(#loc\d*) = loc\((.*)\)$", text, re.M))
        for line in text.splitlines():
            stripped = line.strip()
            if stripped and not stripped.startswith(("#", "//", "{-#", "#-}")):
                self.line(stripped)
        for depth, label, values in self.jumps:
            for target, value in zip(self.blocks.get((depth, label), []), values, strict=False):
                self.graph.flows[target].append(value)

    def place(self, text: str) -> str:
        """file:line of a location, through names and call sites (the innermost call)."""
        for _ in range(20):
            found = re.match(r'^"([^"]+)":(\d+)', text)
            if found:
                return found[2]
            inner = re.search(r"#loc\d*", text)
            if inner is None or inner[0] not in self.places:
                return "?"
            text = self.places[inner[0]]
        return "?"

    def new(self, name: str) -> int:
        self.count += 1
        self.scopes[-1][0][name] = self.count
        return self.count

    def find(self, name: str) -> int:
        for names, _, _ in reversed(self.scopes):
            if name in names:
                return names[name]
        raise ValueError(f"{name} is used before it is defined")

    def many(self, text: str) -> list[int]:
        return [self.find(name) for name in NAME.findall(text)]

    def line(self, line: str) -> None:
        places = LOCATION.findall(line)
        where = self.place(places[-1]) if places else "?"
        line = PTX.sub(self.named, LOCATION.sub("", line)).strip()
        if line.startswith("}"):
            self.close(line)
            return
        if line.startswith("^"):
            self.block(line)
            return
        results: list[tuple[str, int]] = []
        found = RESULTS.match(line)
        if found:
            for piece in found[1].split(", "):
                name, _, number = piece.partition(":")
                results.append((name, int(number or 1)))
            line = line[found.end() :]
        name = re.match(r'"?([\w.]+)', line)
        if name is None:
            raise ValueError(f"cannot read {line!r}")
        self.op(name[1], line, results, where)

    @staticmethod
    def named(ptx: re.Match[str]) -> str:
        """PTX by its name, if it has one here."""
        return ptx[1] + ("divided" if all(step in ptx[0] for step in DIVIDES) else "")

    def results(self, results: list[tuple[str, int]]) -> list[int]:
        out = []
        for name, number in results:
            if number == 1:
                out.append(self.new(name))
                self.scopes[-1][0][name + "#0"] = out[-1]
            else:
                out += [self.new(f"{name}#{i}") for i in range(number)]
        return out

    def open(self, kind: str, facts: dict[str, Any]) -> None:
        self.scopes.append(({}, kind, facts))

    def op(self, name: str, line: str, results: list[tuple[str, int]], where: str) -> None:
        graph = self.graph
        if name in ("module", "builtin.module"):
            self.open("module", {})
        elif name == "tt.func":
            self.open("func", {})
            if "public" in line:
                for position, argument in enumerate(NAME.findall(line.partition(")")[0])):
                    graph.arguments[self.new(argument)] = position
        elif name == "scf.for":
            head = re.search(rf"scf\.for(?: unsigned)? ({ID}) = (\S+) to \S+ step (\S+)", line)
            assert head is not None, line
            pairs = re.findall(rf"({ID}) = ({ID}(?:#\d+)?)", line.partition("iter_args(")[2].partition(") ->")[0])
            begin = [self.find(head[2]), self.find(head[3])]
            initial = [self.find(value) for _, value in pairs]
            outputs = self.results(results)
            self.open("for", {"results": outputs})
            graph.flows[self.new(head[1])] += begin
            carried = [self.new(argument) for argument, _ in pairs]
            self.scopes[-1][2]["carried"] = carried
            for values in zip(carried, outputs, initial, strict=True):
                for target in values[:2]:
                    graph.flows[target].append(values[2])
        elif name == "scf.while":
            pairs = re.findall(rf"({ID}) = ({ID}(?:#\d+)?)", line.partition(") :")[0])
            initial = [self.find(value) for _, value in pairs]
            outputs = self.results(results)
            self.open("while", {"results": outputs})
            carried = [self.new(argument) for argument, _ in pairs]
            self.scopes[-1][2]["carried"] = carried
            for target, value in zip(carried, initial, strict=True):
                graph.flows[target].append(value)
        elif name == "scf.if":
            outputs = self.results(results)
            graph.conditions |= dict.fromkeys(outputs, self.find(NAME.findall(line)[0]))
            self.open("if", {"results": outputs})
        elif name in ("scf.yield", "scf.condition", "ttg.warp_yield"):
            self.leave(name, self.many(line.partition(" : ")[0]))
        elif name in ("cf.br", "cf.cond_br"):
            for label, values in re.findall(r"\^(\w+)(?:\(([^:)]*))?", line):
                self.jumps.append((len(self.scopes), label, self.many(values)))
        elif name == "ttg.warp_specialize":
            head = line.partition(")")[0]
            self.special = {"operands": self.many(head), "results": self.results(results)}
        elif name == "default":
            self.open("default", self.special)
        elif re.match(r"partition\d+", name):
            operands = self.special["operands"]
            self.open("partition", {})
            for argument, value in zip(re.findall(rf"({ID}): ", line), operands, strict=True):
                graph.flows[self.new(argument)].append(value)
        elif line.endswith("{"):  # tt.reduce and its kind: the result is of the operands
            operands = self.many(line)
            made = Op(name, operands, line, "", where)
            for value in self.results(results):
                graph.ops[value] = made
            self.open("other", {})
        else:
            body, _, kind = line.rpartition(" : ")
            made = Op(name, self.many(body or line), line, kind, where)
            for value in self.results(results):
                graph.ops[value] = made
            if not results:
                graph.inert.append(made)

    def leave(self, name: str, values: list[int]) -> None:
        """Values that a region hands on."""
        inside = [scope for scope in self.scopes if scope[1] in ("for", "if", "default", "while", "do")]
        _, kind, facts = inside[-1]
        if name == "scf.condition":
            values = values[1:]
            facts["after"] = values
            targets = [facts["results"]]
        elif kind == "for":
            targets = [facts["results"], facts["carried"]]
        elif kind == "do":
            targets = [facts["carried"]]
        else:
            targets = [facts["results"]]
        for target in targets:
            for to, value in zip(target, values, strict=True):
                self.graph.flows[to].append(value)

    def block(self, line: str) -> None:
        label = re.match(r"\^(\w+)", line)
        assert label is not None
        kind, facts = self.scopes[-1][1:]
        arguments = [self.new(name) for name in re.findall(rf"({ID}): ", line)]
        if kind == "do":
            for target, value in zip(arguments, facts["after"], strict=True):
                self.graph.flows[target].append(value)
        else:
            self.blocks[len(self.scopes), label[1]] = arguments

    def close(self, line: str) -> None:
        _, kind, facts = self.scopes.pop()
        if line.endswith("{"):
            again = {"while": "do"}.get(kind, kind)
            self.open(again, facts)


def read(text: str) -> Graph:
    return _Reader(text).graph


# ------------------------------------------------------------------------------------------------------------ walking


def width_of(kind: str) -> int:
    """Bits of an integer type or of a tensor's integer elements; 0: no integers."""
    found = re.match(
        r"^(?:tensor<(?:\d+x)+|!tt\.ptr<|!ttg\.memdesc<(?:\d+x)+|tensor<(?:\d+x)+!tt\.ptr<)?i(\d+)\b", kind
    )
    return int(found[1]) if found else 0


class Walk:
    """Facts of every value of a kernel whose run-time arguments are called `names`."""

    def __init__(self, graph: Graph, names: list[str]) -> None:
        self.graph = graph
        self.names = {value: names[position] for value, position in graph.arguments.items()}
        self._small: dict[int, bool] = {}
        self._allocations: dict[int, frozenset[int]] = {}
        self.stored: dict[int, list[int]] = defaultdict(list)  # shared-memory buffer -> values stored there
        self.copied: set[int] = set()  # buffers that are filled from global memory
        for op in graph.inert:
            if op.name == "ttg.local_store":
                for buffer in self.allocations(op.operands[1]):
                    self.stored[buffer].append(op.operands[0])
        for op in [*graph.inert, *graph.ops.values()]:
            if op.name.startswith(("ttg.async_copy", "ttng.async_tma")):
                self.copied |= {buffer for value in op.operands for buffer in self.allocations(value)}
        self.kinds: dict[int, set[str]] = defaultdict(set)
        changed = True
        values = list(dict.fromkeys([*graph.arguments, *graph.ops, *graph.flows]))
        while changed:
            changed = False
            for value in values:
                kinds = self.kinds_of(value)
                if not kinds <= self.kinds[value]:
                    self.kinds[value] |= kinds
                    changed = True

    # structure

    def bare(self, value: int) -> int:
        """The value under splats, broadcasts and extensions."""
        while value in self.graph.ops and self.graph.ops[value].name in SAME:
            value = self.graph.ops[value].operands[0]
        return value

    def op(self, value: int) -> Op | None:
        return self.graph.ops.get(self.bare(value))

    def constant(self, value: int) -> int | None:
        op = self.op(value)
        found = re.search(r"arith\.constant (?:dense<)?(-?\d+)\b", op.text) if op is not None else None
        return int(found[1]) if found else None

    def same(self, a: int, b: int) -> bool:
        a, b = self.bare(a), self.bare(b)
        return a == b or (self.constant(a) is not None and self.constant(a) == self.constant(b))

    def quotient_of(self, quotient: int, divisor: int) -> int | None:
        """x when quotient is x // divisor, also through two selects with one condition (a page size for each cache), and when
        the division is branched over where the divisor is 1."""
        op, other = self.op(quotient), self.op(divisor)
        if op is None:
            divided = self.unless_one(self.bare(quotient), divisor)
            whole = None if divided is None else self.quotient_of(divided[0], divisor)
            return whole if divided is not None and whole is not None and self.same(whole, divided[1]) else None
        if op.name in ("arith.divsi", "arith.divui") or self.divides(op):
            return op.operands[0] if self.same(op.operands[1], divisor) else None
        if op.name == "arith.shrsi" or op.name == "arith.shrui":
            size, shift = self.constant(divisor), self.constant(op.operands[1])
            return op.operands[0] if shift is not None and size == 1 << shift else None
        if op.name == "arith.select" and other is not None and other.name == "arith.select":
            if not self.same(op.operands[0], other.operands[0]):
                return None
            found = [self.quotient_of(a, b) for a, b in zip(op.operands[1:], other.operands[1:], strict=True)]
            if found[0] is not None and found[1] is not None and self.same(found[0], found[1]):
                return found[0]
        return None

    @staticmethod
    def divides(op: Op) -> bool:
        return op.text.startswith("tt.elementwise_inline_asm divided ") and len(op.operands) == 2

    def unless_one(self, value: int, divisor: int) -> tuple[int, int] | None:
        """(then, else) of a result of `if divisor != 1`."""
        branches = self.graph.flows.get(value, [])
        test = self.op(self.graph.conditions.get(value, 0))
        if test is None or len(branches) != 2 or not re.match(r"arith\.cmpi ne,", test.text):
            return None
        number, one = test.operands
        return (branches[0], branches[1]) if self.same(number, divisor) and self.constant(one) == 1 else None

    def floored(self, op: Op) -> int | None:
        """x when the op is x // n * n, which is at most x."""
        if op.name != "arith.muli":
            return None
        a, b = op.operands
        found = self.quotient_of(a, b)
        return self.quotient_of(b, a) if found is None else found

    def in_page(self, op: Op) -> bool:
        """x - x // n * n, or x % n, with a small n."""
        if op.name in ("arith.remsi", "arith.remui"):
            return self.small(op.operands[1])
        if op.name != "arith.subi":
            return False
        product = self.op(op.operands[1])
        if product is None:
            return False
        whole = self.floored(product)
        return whole is not None and self.same(whole, op.operands[0]) and any(map(self.small, product.operands))

    def units_of_16(self, op: Op) -> bool:
        """A cut of x >> 4: an offset in units of 16 bytes, or of 16 numbers of the output, which fits 31 bits where the launcher
        lets a call through (`kgen.runtime.call.MAX_SPAN`, `MAX_OUTPUT_SPAN`). Or of a row of parts, 512 numbers: 2^26 of them
        would take 64 GiB or more."""
        units = self.op(op.operands[0])
        if op.name != "arith.trunci" or units is None:
            return False
        if units.name == "arith.muli":
            return 512 // 16 in map(self.constant, units.operands)
        return units.name == "arith.shrsi" and self.constant(units.operands[1]) == 4

    def block_row(self, op: Op) -> bool:
        """The number of the first row of a block: not an offset yet."""
        sizes = [self.constant(value) for value in op.operands]
        numbers = [self.op(value) for value in op.operands]
        return op.name == "arith.muli" and any(
            size is not None and size <= BLOCK and number is not None and number.name == "tt.get_program_id"
            for size, number in zip(sizes, reversed(numbers), strict=True)
        )

    def allocations(self, buffer: int) -> frozenset[int]:
        """Buffers in shared memory that a view may be of."""
        if buffer not in self._allocations:
            self._allocations[buffer] = frozenset()
            op = self.graph.ops.get(buffer)
            if op is None:
                found = [self.allocations(value) for value in self.graph.flows.get(buffer, [])]
                self._allocations[buffer] = frozenset().union(*found)
            elif op.name == "ttg.local_alloc":
                self._allocations[buffer] = frozenset([buffer])
            elif op.name.startswith("ttg.memdesc"):
                self._allocations[buffer] = self.allocations(op.operands[0])
        return self._allocations[buffer]

    # facts

    def small(self, value: int) -> bool:
        """Whether the value is of the size of a block, a page or a number of heads, whatever the sizes of the tensors."""
        if value not in self._small:
            self._small[value] = False
            self._small[value] = self._is_small(value)
        return self._small[value]

    def _is_small(self, value: int) -> bool:
        op = self.graph.ops.get(value)
        if op is None:
            if value in self.names:
                return self.names[value] in SMALL_ARGUMENTS
            flows = self.graph.flows.get(value, [])
            return bool(flows) and all(map(self.small, flows))
        if op.name in ("arith.constant", "tt.make_range", "arith.cmpi") or self.in_page(op):
            return True
        if op.name in ("tt.get_program_id", "tt.get_num_programs"):
            return not re.search(r"\bx\b", op.text)  # CUDA allows 65,535 programs along the other axes
        if op.name in ("arith.minsi", "arith.minui", "arith.andi"):
            return any(map(self.small, op.operands))
        if op.name in ("arith.divsi", "arith.divui", "arith.shrsi", "arith.shrui"):
            return self.small(op.operands[0])
        data = self.sources(value)
        return op.name in SAME | SCALARS and bool(data) and all(map(self.small, data))

    def sources(self, value: int) -> list[int]:
        """Values that this one is computed from. A load ends the walk: its address is looked at for itself."""
        op = self.graph.ops.get(value)
        if op is None:
            return self.graph.flows.get(value, [])
        if op.name == "arith.select":
            return op.operands[1:]
        if op.name in ("tt.load", "arith.cmpi", "arith.cmpf"):
            return []
        if op.name == "ttg.local_load":
            return [value for buffer in self.allocations(op.operands[0]) for value in self.stored[buffer]]
        return op.operands

    def kinds_of(self, value: int) -> set[str]:
        op = self.graph.ops.get(value)
        if self.small(value):
            return set()
        kinds = set().union(*(self.kinds[source] for source in self.sources(value)))
        if op is None:
            name = self.names.get(value, "")
            return kinds | ({STRIDE} if "stride" in name else set())
        if op.name == "tt.load":
            return {INDEX} if width_of(op.type) >= 32 and not self.is_length(op.operands[0]) else set()
        if op.name == "ttg.local_load":
            unknown = self.allocations(op.operands[0]) & self.copied or not self.sources(value)
            return kinds | ({INDEX} if unknown and width_of(op.type) >= 32 else set())
        if op.name == "tt.get_program_id":
            return {TOKEN} if re.search(r"\bx\b", op.text) else set()
        whole = self.floored(op)
        if whole is not None:
            return set(self.kinds[whole])
        if op.name in ("arith.muli", "arith.shli") and kinds and width_of(op.type) == 64:
            return kinds | {WIDE}
        return kinds

    def is_length(self, pointer: int) -> bool:
        """Whether a pointer is into the lengths, which are counts of keys."""
        bases, todo, seen = set(), [pointer], set()
        while todo:
            value = todo.pop()
            if value in seen:
                continue
            seen.add(value)
            op = self.graph.ops.get(value)
            if op is None:
                if value in self.names:
                    bases.add(self.names[value])
                todo += self.graph.flows.get(value, [])
            elif op.name == "arith.select":
                todo += op.operands[1:]
            else:
                todo.append(op.operands[0])
        return bool(bases) and bases <= {"lengths", "extra_lengths"}

    # verdict

    def reached(self, roots: list[int]) -> set[int]:
        """Everything that goes into the roots."""
        seen: set[int] = set()
        todo = list(roots)
        while todo:
            value = todo.pop()
            if value not in seen:
                seen.add(value)
                todo += self.sources(value)
        return seen

    def faults(self) -> tuple[list[str], int]:
        """(32-bit products that go into an address or a stored integer, number of 64-bit ones that do)."""
        ops = {id(op): op for op in self.graph.ops.values()}.values()
        offsets = [op.operands[1] for op in ops if op.name == "tt.addptr"]
        offsets += [op.operands[0] for op in ops if op.name == "tt.int_to_ptr"]
        stores = [op for op in self.graph.inert if op.name == "tt.store" and width_of(op.type) >= 32]
        addresses = self.reached(offsets)
        found, wide = [], 0
        for value in sorted(addresses | self.reached([op.operands[1] for op in stores])):
            op = self.graph.ops.get(value)
            if op is None:
                continue
            kinds = set().union(*(self.kinds[source] for source in op.operands))
            if op.name in ("arith.muli", "arith.shli") and kinds:
                if width_of(op.type) == 64:
                    wide += 1
                elif self.floored(op) is None and not self.block_row(op):
                    found.append(f"line {op.where}: a 32-bit product of {' and '.join(sorted(kinds))}: {op.text}")
            if op.name == "arith.trunci" and WIDE in kinds and value in addresses and not self.units_of_16(op):
                found.append(f"line {op.where}: a product cut to 32 bits: {op.text}")
        return found, wide


# ---------------------------------------------------------------------------------------------------------- compiling


def first_ir(kernel: Any, signature: dict[str, str], constants: dict[str, Any], gluon: bool, ctas: int) -> str:
    """The IR after the first stage of Triton's compiler for SM90: inlined and simplified, nothing lowered."""
    from triton._C.libtriton import ir
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.compiler.compiler import make_backend

    source_type = ASTSource
    if gluon:
        from triton.experimental.gluon._runtime import GluonASTSource

        source_type = GluonASTSource
    source = source_type(fn=kernel, signature=signature, constexprs=constants, attrs={})
    target = GPUTarget("cuda", 90, 32)
    backend = make_backend(target)
    options = backend.parse_options({"num_warps": 4, "num_ctas": ctas})
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    codegen = backend.get_codegen_implementation(options)
    module = source.make_ir(target, options, codegen, backend.get_module_map(), context)
    stages: dict[str, Any] = {}
    backend.add_stages(stages, options, source.language)
    return str(stages["ttgir" if gluon else "ttir"](module, {}).str())


def look(job: dict[str, Any]) -> dict[str, Any]:
    """The answer to one job: {"faults": [...], "wide": n}, or {"error": why it did not compile}."""
    path = Path(job["path"])
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)
        kernel = getattr(module, job["kernel"])
        constants = {name: job["constants"][name] for name in kernel.arg_names if name in job["constants"]}
        signature = {
            name: "constexpr" if name in constants else job["types"].get(name, "i32") for name in kernel.arg_names
        }
        text = first_ir(kernel, signature, constants, job["gluon"], job["ctas"])
        names = [name for name in kernel.arg_names if signature[name] != "constexpr"]
        faults, wide = Walk(read(text), names).faults()
    except Exception as error:  # a planted change may not compile
        return {"error": f"{type(error).__name__}: {' '.join(str(error).split())[-300:]}"}
    return {"faults": faults, "wide": wide}


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(look(json.loads(line))), flush=True)
