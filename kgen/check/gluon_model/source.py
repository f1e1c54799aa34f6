"""From the text of a Gluon module to plain Python functions: stub modules in place of triton, and a few rewritten nodes.

Rewritten: `x = 3` makes a run-time integer (in a loop Triton would carry it in a register), and `x = f(...)` tells a
shared-memory allocation its name. Line numbers stay.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import types
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from . import elementwise, hopper, language, state
from . import types as ty
from .cluster import replace_helpers
from .layouts import LAYOUTS
from .memory import Shared, allocate_shared_memory
from .tracer import KERNEL_FILE
from .types import ModelError
from .values import Scalar

_NAMED, _NUMBER = "__named", "__number"


class _Rewrite(ast.NodeTransformer):
    """Inside functions only: at module level a number is a constant."""

    def __init__(self) -> None:
        self._depth = 0

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        self._depth += 1
        self.generic_visit(node)
        self._depth -= 1
        return node

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        self.generic_visit(node)
        if not self._depth or len(node.targets) != 1 or not isinstance(node.targets[0], ast.Name):
            return node
        value = node.value
        wrapped: ast.expr | None = None
        if _is_number(value):
            wrapped = ast.Call(ast.Name(_NUMBER, ast.Load()), [value], [])
        elif isinstance(value, ast.Call):
            name = ast.Constant(node.targets[0].id)
            wrapped = ast.Call(ast.Name(_NAMED, ast.Load()), [value, name], [])
        if wrapped is not None:
            node.value = ast.fix_missing_locations(ast.copy_location(wrapped, value))
        return node


def _is_number(node: ast.expr) -> bool:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        node = node.operand
    return isinstance(node, ast.Constant) and type(node.value) is int


def _named(value: Any, name: str) -> Any:
    """A fresh descriptor of a whole allocation belongs to the variable that it is assigned to in the kernel itself."""
    if (
        isinstance(value, Shared)
        and state.partition() is None
        and value.numel * value.dtype.itemsize == len(value.allocation.bytes)
    ):
        if value.allocation.name.startswith("shared") or not value.allocation.name.isidentifier():
            value.allocation.name = name
        elif value.layout is not None and isinstance(value.layout, hopper.MBarrierLayout):
            value.allocation.name = name  # made by a helper, whose variable is only its own
        state.machine().rename_barriers(value.allocation)
    return value


def _jit(function: Any = None, **_: Any) -> Any:
    return (lambda f: f) if function is None else function


class MissingName(ModelError, AttributeError):
    """So that `hasattr` works on the stubs."""


class _Stub(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        raise MissingName(f"The kernel uses {self.__name__}.{name}, which the model does not have.")


def _stub(name: str, **members: Any) -> types.ModuleType:
    module = _Stub(name)
    module.__dict__.update(members)
    return module


def _removed(*_: Any, **__: Any) -> None:
    raise ModelError("async_copy_global_to_shared has been removed; call async_load.")


def _language(name: str) -> types.ModuleType:
    members = {k: v for k, v in (vars(language) | vars(elementwise)).items() if not k.startswith("_")}
    members |= dict(ty.DTYPES) | LAYOUTS
    members |= {"pointer_type": ty.pointer_type, "allocate_shared_memory": allocate_shared_memory, "dtype": ty.DType}
    return _stub(name, **members)


@lru_cache(maxsize=4)
def _modules(api: str) -> dict[str, types.ModuleType]:
    """The stubs by import name. api 3.9: only the newer names of what was renamed."""
    gl = _language("triton.experimental.gluon.language")
    copies = dict(vars(hopper.async_copy))
    older = api == "3.6"
    reinterpret = {"_reinterpret": Shared._reinterpret} if older else {"reinterpret": Shared.reinterpret}
    gl.__dict__["shared_memory_descriptor"] = types.SimpleNamespace(**reinterpret)
    del gl.__dict__["barrier" if older else "thread_barrier"]
    if older:
        del copies["async_load"]
    else:  # there, but of no use
        copies["async_copy_global_to_shared"] = _removed
    members = {k: getattr(hopper, k) for k in ("mbarrier", "tma", "warpgroup_mma", "warpgroup_mma_wait")}
    members["fence_async_shared"] = hopper.fence_async_shared
    members["async_copy"] = _stub("async_copy", **{k: v for k, v in copies.items() if not k.startswith("_")})
    hopper_module = _stub("triton.experimental.gluon.language.nvidia.hopper", **members)
    ampere = _stub("triton.experimental.gluon.language.nvidia.ampere", **members)
    nvidia = _stub("triton.experimental.gluon.language.nvidia", hopper=hopper_module, ampere=ampere)
    gl.__dict__["nvidia"] = nvidia
    host = _stub("triton.experimental.gluon.nvidia.hopper", TensorDescriptor=hopper.TensorDescriptor)
    host_root = _stub("triton.experimental.gluon.nvidia", hopper=host)
    gluon = _stub("triton.experimental.gluon", jit=_jit, constexpr_function=_jit, language=gl, nvidia=host_root)
    tl = _language("triton.language")
    root = _stub("triton", jit=_jit, language=tl, cdiv=elementwise.cdiv, __version__=f"{api}.0")
    root.__dict__["experimental"] = _stub("triton.experimental", gluon=gluon)
    modules = (root, root.experimental, gluon, gl, nvidia, hopper_module, ampere, host_root, host, tl)
    return {module.__name__: module for module in modules}


@lru_cache(maxsize=64)
def compiled(text: str) -> types.CodeType:
    tree = ast.fix_missing_locations(_Rewrite().visit(ast.parse(text)))
    return builtins.compile(tree, KERNEL_FILE, "exec")


@lru_cache(maxsize=64)
def load(text: str, api: str = "3.6") -> dict[str, Any]:
    """The namespace of the executed module. Triton's modules are stubs, everything else is imported."""
    stubs = _modules(api)

    def importer(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
        if name.split(".")[0] != "triton":
            return builtins.__import__(name, globals, locals, fromlist, level)
        if name not in stubs:
            raise ModelError(f"The kernel imports {name}, which the model does not have.")
        return stubs[name] if fromlist else stubs["triton"]

    space = dict(vars(builtins)) | {"__import__": importer, "range": language.dynamic_range}
    namespace: dict[str, Any] = {"__builtins__": space, "__name__": KERNEL_FILE, "__file__": KERNEL_FILE}
    namespace[_NAMED] = _named
    namespace[_NUMBER] = lambda value: Scalar(value, ty.int32 if -(2**31) <= value < 2**31 else ty.int64)
    exec(compiled(text), namespace)
    replace_helpers(namespace)
    return namespace


def constexpr_names(function: Callable[..., Any]) -> set[str]:
    return {n for n, p in inspect.signature(function).parameters.items() if p.annotation is language.constexpr}
