"""Layouts: where elements live. Inert here but for what a CTA of a cluster holds (`cluster.split_of`): the compiler checks layouts,
the model only values."""

from __future__ import annotations

from typing import Any


class Layout:
    """Keeps its arguments; `fields` names the positional ones."""

    fields: tuple[str, ...] = ()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.__dict__.update(zip(self.fields, args, strict=False))
        self.__dict__.update(kwargs)

    @classmethod
    def get_default_for(cls, *args: Any, **kwargs: Any) -> Layout:
        return cls()


_FIELDS = {
    "AutoLayout": "",
    "BlockedLayout": "size_per_thread threads_per_warp warps_per_cta order cga_layout",
    "CoalescedLayout": "",
    "SliceLayout": "dim parent",
    "DistributedLinearLayout": "reg_bases lane_bases warp_bases block_bases shape",
    "DotOperandLayout": "operand_index parent k_width",
    "NVMMADistributedLayout": "version warps_per_cta instr_shape cga_layout",
    "NVMMASharedLayout": "swizzle_byte_width element_bitwidth rank transposed fp4_padded cga_layout",
    "SwizzledSharedLayout": "vec per_phase max_phase order cga_layout",
    "PaddedSharedLayout": "interval_padding_pairs offset_bases cga_layout shape",
    "SharedLinearLayout": "offset_bases block_bases alignment",
}
LAYOUTS: dict[str, type[Layout]] = {
    name: type(name, (Layout,), {"fields": tuple(fields.split())}) for name, fields in _FIELDS.items()
}
