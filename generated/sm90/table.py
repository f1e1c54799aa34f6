"""Dispatch table of sm90, Emitted by kgen 0.1.0.

Templates (hash): portable 07323bda6d0dcddd, combine 6c4c20e7d0525908,
cache_ops 19a17b444330d2aa, index_ops ffa2d885667e243d.

One entry per line: the shapes it was made for (ranges inclusive), the kernel module, its constants, and where
they come from: measured µs of the anchor's token count, or "static": ranked by a cost model, never timed.
"""

from dataclasses import replace

from ..table import Entry, Provenance, config

# patterns on the GPU's name; a leading ! excludes
DEVICE_CLASSES = {
    'h100': ('H100 80GB HBM3', 'H100 SXM5', 'H100 SXM', '!PCIe', '!NVL'),
    'h20': ('H20', '!H20-3e'),
    'h200': ('H200',),
    'h800': ('H800', '!PCIe'),
}

# kernel constants and launch options
C0 = config(4, 2, block_h=16, block_k=64, chunk=128, partial='fp32', prefetch=True, scale_site='operand', specialise=False, splits=1, swap_ab=False)
C1 = config(4, 2, block_h=16, block_k=64, chunk=64, partial='fp32', prefetch=True, scale_site='operand', specialise=True, splits=1, swap_ab=False)
C2 = config(4, 2, block_h=16, block_k=64, chunk=128, partial='fp32', prefetch=True, scale_site='operand', specialise=True, splits=1, swap_ab=False)
C3 = config(8, 2, block_h=64, block_k=64, chunk=128, partial='fp32', prefetch=True, scale_site='operand', specialise=False, splits=1, swap_ab=False)
C4 = config(4, 2, block_h=16, block_k=64, chunk=64, partial='fp32', prefetch=True, scale_site='operand', specialise=False, splits=32, swap_ab=False)
C5 = config(4, 3, block_h=16, block_k=64, chunk=128, partial='fp32', prefetch=True, scale_site='operand', specialise=False, splits=8, swap_ab=False)
C6 = config(4, 2, block_h=16, block_k=64, chunk=64, partial='fp32', prefetch=True, scale_site='operand', specialise=False, splits=1, swap_ab=False)
C7 = config(4, 2, block_h=16, block_k=64, chunk=128, partial='fp32', prefetch=True, scale_site='operand', specialise=False, splits=32, swap_ab=False)
C8 = config(8, 2, block_h=64, block_k=64, chunk=64, partial='fp32', prefetch=True, scale_site='operand', specialise=True, splits=8, swap_ab=False)
C9 = config(8, 2, block_h=64, block_k=64, chunk=128, partial='fp32', prefetch=True, scale_site='operand', specialise=True, splits=1, swap_ab=False)
C10 = config(8, 2, block_h=64, block_k=64, chunk=64, partial='fp32', prefetch=True, scale_site='operand', specialise=True, splits=1, swap_ab=False)
C11 = config(4, 2, block_h=16, block_k=64, chunk=128, partial='fp32', prefetch=True, scale_site='operand', specialise=False, splits=16, swap_ab=False)
C12 = config(8, 2, block_h=64, block_k=64, chunk=64, partial='fp32', prefetch=True, scale_site='operand', specialise=True, splits=4, swap_ab=False)
C13 = config(8, 2, block_h=64, block_k=64, chunk=64, partial='fp32', prefetch=True, scale_site='operand', specialise=False, splits=1, swap_ab=False)
C14 = config(8, 2, block_h=16, block_k=64, chunk=128, partial='fp32', prefetch=True, scale_site='operand', specialise=False, splits=32, swap_ab=False)
C15 = config(4, 3, block_h=16, block_k=64, chunk=128, partial='fp32', prefetch=False, scale_site='operand', specialise=False, splits=1, swap_ab=False)
C16 = config(8, 2, block_h=64, block_k=64, chunk=128, partial='bf16', prefetch=True, scale_site='operand', specialise=False, splits=32, swap_ab=False)
C17 = config(8, 3, block_h=64, block_k=64, chunk=128, partial='fp32', prefetch=True, scale_site='operand', specialise=False, splits=8, swap_ab=False)
C18 = config(8, 3, block_h=64, block_k=64, chunk=128, partial='fp32', prefetch=True, scale_site='operand', specialise=False, splits=1, swap_ab=False)
C19 = config(8, 3, block_h=64, block_k=64, chunk=128, partial='fp32', prefetch=True, scale_site='operand', specialise=False, splits=4, swap_ab=False)
C20 = config(4, 1, block_h=16, block_k=32, chunk=64, partial='fp32', prefetch=True, scale_site='operand', specialise=False, splits=4, swap_ab=False)
C21 = config(4, 2, block_h=16, block_k=32, chunk=64, partial='fp32', prefetch=True, scale_site='operand', specialise=False, splits=4, swap_ab=False)
C22 = config(8, 2, block_h=16, block_k=64, chunk=64, partial='fp32', prefetch=True, scale_site='operand', specialise=False, splits=2, swap_ab=False)
C23 = config(4, 2, block_h=16, block_k=64, chunk=64, partial='fp32', prefetch=True, scale_site='operand', specialise=True, splits=2, swap_ab=False)
C24 = config(8, 2, block_h=64, block_k=64, chunk=64, partial='bf16', prefetch=True, scale_site='operand', specialise=False, splits=2, swap_ab=False)
C25 = config(8, 2, block_h=64, block_k=64, chunk=64, partial='fp32', prefetch=True, scale_site='operand', specialise=False, splits=2, swap_ab=False)
C26 = config(8, 2, block_h=16, block_k=64, chunk=64, partial='fp32', prefetch=True, scale_site='operand', specialise=False, splits=8, swap_ab=False)
C27 = config(2, 2, block_h=16, block_k=16, chunk=64, partial='fp32', prefetch=True, scale_site='operand', specialise=False, splits=32, swap_ab=False)
C28 = config(8, 2, block_h=16, block_k=64, chunk=64, partial='fp32', prefetch=True, scale_site='operand', specialise=False, splits=16, swap_ab=False)
C29 = config(4, 2, block_h=16, block_k=64, chunk=64, partial='fp32', prefetch=True, scale_site='operand', specialise=False, splits=16, swap_ab=False)
C30 = config(8, 2, block_h=64, block_k=64, chunk=64, partial='bf16', prefetch=True, scale_site='operand', specialise=False, splits=8, swap_ab=False)
C31 = config(8, 2, block_h=64, block_k=64, chunk=64, partial='bf16', prefetch=True, scale_site='operand', specialise=False, splits=16, swap_ab=False)
C32 = config(8, 3, block_h=64, block_k=64, chunk=64, partial='fp32', prefetch=True, scale_site='operand', specialise=False, splits=1, swap_ab=False)
C33 = config(8, 2, block_h=64, block_k=64, chunk=64, partial='fp32', prefetch=True, scale_site='operand', specialise=False, splits=4, swap_ab=False)
C34 = config(2, 2, block_h=16, block_k=16, chunk=256, partial='fp32', prefetch=True, scale_site='operand', specialise=False, splits=32, swap_ab=False)
C35 = config(4, 2, block_h=16, block_k=128, chunk=128, partial='fp32', prefetch=True, scale_site='operand', specialise=False, splits=1, swap_ab=False)
C36 = config(8, 2, block_h=16, block_k=64, chunk=128, partial='fp32', prefetch=True, scale_site='operand', specialise=False, splits=8, swap_ab=False)
C37 = config(8, 2, block_h=64, block_k=64, chunk=128, partial='bf16', prefetch=True, scale_site='operand', specialise=False, splits=8, swap_ab=False)
C38 = config(8, 2, block_h=64, block_k=64, chunk=128, partial='fp32', prefetch=True, scale_site='operand', specialise=False, splits=8, swap_ab=False)
C39 = config(8, 2, block_h=64, block_k=64, chunk=128, partial='fp32', prefetch=True, scale_site='operand', specialise=True, splits=8, swap_ab=False)
C40 = config(8, 2, block_h=32, block_k=32, chunk=256, partial='fp32', prefetch=True, scale_site='operand', specialise=False, splits=16, swap_ab=False)

# where entries come from
P0 = Provenance(source='measured', device_class='h200', gpu='NVIDIA H200', triton='3.6.0')
P1 = Provenance(source='inherited', device_class='h200', gpu='NVIDIA H200', triton='3.6.0')


def _e(layout, dual, heads, topk, extra_topk, page, extra_page, tokens, module, config, origin, **facts):
    return Entry(
        layout, dual, heads, topk, extra_topk, page, extra_page, tokens, module, config, replace(origin, **facts)
    )


ENTRIES: tuple[Entry, ...] = (
    _e('bf16_d512', False, 8, (512, 512), (0, 0), None, None, (65, 256), 'portable_bf16_d512_c128', C0, P0, us=32.1, roofline=0.068, anchor_tokens=256),
    _e('bf16_d512', False, 8, (512, 512), (0, 0), None, None, (257, 2147483647), 'portable_bf16_d512_c64', C1, P0, us=475.74, roofline=0.073, anchor_tokens=4096),
    _e('bf16_d512', False, 8, (640, 640), (0, 0), None, None, (65, 256), 'portable_bf16_d512_c128', C0, P0, us=38.48, roofline=0.071, anchor_tokens=256),
    _e('bf16_d512', False, 8, (640, 640), (0, 0), None, None, (257, 2147483647), 'portable_bf16_d512_c64', C1, P0, us=663.33, roofline=0.065, anchor_tokens=4096),
    _e('bf16_d512', False, 16, (1024, 1024), (0, 0), None, None, (65, 256), 'portable_bf16_d512_c128', C2, P0, us=56.78, roofline=0.153, anchor_tokens=256),
    _e('bf16_d512', False, 16, (1024, 1024), (0, 0), None, None, (257, 2147483647), 'portable_bf16_d512_c128', C2, P0, us=852.67, roofline=0.163, anchor_tokens=4096),
    _e('bf16_d512', False, 16, (1152, 1152), (0, 0), None, None, (65, 256), 'portable_bf16_d512_c128', C2, P0, us=63.35, roofline=0.154, anchor_tokens=256),
    _e('bf16_d512', False, 16, (1152, 1152), (0, 0), None, None, (257, 2147483647), 'portable_bf16_d512_c128', C0, P0, us=937.15, roofline=0.167, anchor_tokens=4096),
    _e('bf16_d512', False, 64, (512, 512), (0, 0), None, None, (65, 256), 'portable_bf16_d512_c128', C3, P0, us=82.69, roofline=0.21, anchor_tokens=256),
    _e('bf16_d512', False, 64, (512, 512), (0, 0), None, None, (257, 2147483647), 'portable_bf16_d512_c128', C3, P0, us=1203.78, roofline=0.231, anchor_tokens=4096),
    _e('bf16_d512', False, 64, (640, 640), (0, 0), None, None, (65, 256), 'portable_bf16_d512_c128', C3, P0, us=98.73, roofline=0.22, anchor_tokens=256),
    _e('bf16_d512', False, 64, (640, 640), (0, 0), None, None, (257, 2147483647), 'portable_bf16_d512_c128', C3, P0, us=1474.94, roofline=0.236, anchor_tokens=4096),
    _e('bf16_d512', False, 128, (1024, 1024), (0, 0), None, None, (65, 256), 'portable_bf16_d512_c128', C3, P0, us=278.1, roofline=0.25, anchor_tokens=256),
    _e('bf16_d512', False, 128, (1024, 1024), (0, 0), None, None, (257, 2147483647), 'portable_bf16_d512_c128', C3, P0, us=4300.8, roofline=0.258, anchor_tokens=4096),
    _e('bf16_d512', False, 128, (1152, 1152), (0, 0), None, None, (65, 256), 'portable_bf16_d512_c128', C3, P0, us=309.13, roofline=0.253, anchor_tokens=256),
    _e('bf16_d512', False, 128, (1152, 1152), (0, 0), None, None, (257, 2147483647), 'portable_bf16_d512_c128', C3, P0, us=4770.4, roofline=0.262, anchor_tokens=4096),
    _e('bf16_d576', False, 8, (2048, 2048), (0, 0), None, None, (1, 1), 'portable_bf16_d576_c64', C4, P0, us=7.92, roofline=0.005, anchor_tokens=1),
    _e('bf16_d576', False, 8, (2048, 2048), (0, 0), None, None, (2, 16), 'portable_bf16_d576_c128', C5, P0, us=17.0, roofline=0.034, anchor_tokens=16),
    _e('bf16_d576', False, 8, (2048, 2048), (0, 0), None, None, (17, 256), 'portable_bf16_d576_c64', C6, P0, us=111.04, roofline=0.083, anchor_tokens=256),
    _e('bf16_d576', False, 8, (2048, 2048), (0, 0), None, None, (257, 2147483647), 'portable_bf16_d576_c64', C6, P0, us=1707.9, roofline=0.086, anchor_tokens=4096),
    _e('bf16_d576', False, 16, (2048, 2048), (0, 0), None, None, (1, 1), 'portable_bf16_d576_c64', C4, P0, us=8.91, roofline=0.008, anchor_tokens=1),
    _e('bf16_d576', False, 16, (2048, 2048), (0, 0), None, None, (2, 16), 'portable_bf16_d576_c128', C5, P0, us=18.78, roofline=0.061, anchor_tokens=16),
    _e('bf16_d576', False, 16, (2048, 2048), (0, 0), None, None, (17, 256), 'portable_bf16_d576_c64', C6, P0, us=111.59, roofline=0.165, anchor_tokens=256),
    _e('bf16_d576', False, 16, (2048, 2048), (0, 0), None, None, (257, 2147483647), 'portable_bf16_d576_c64', C6, P0, us=1850.82, roofline=0.16, anchor_tokens=4096),
    _e('bf16_d576', False, 64, (2048, 2048), (0, 0), None, None, (1, 1), 'portable_bf16_d576_c128', C7, P0, us=10.26, roofline=0.028, anchor_tokens=1),
    _e('bf16_d576', False, 64, (2048, 2048), (0, 0), None, None, (2, 16), 'portable_bf16_d576_c64', C8, P0, us=43.18, roofline=0.107, anchor_tokens=16),
    _e('bf16_d576', False, 64, (2048, 2048), (0, 0), None, None, (17, 256), 'portable_bf16_d576_c128', C9, P0, us=313.77, roofline=0.235, anchor_tokens=256),
    _e('bf16_d576', False, 64, (2048, 2048), (0, 0), None, None, (257, 2147483647), 'portable_bf16_d576_c64', C10, P0, us=4963.3, roofline=0.238, anchor_tokens=4096),
    _e('bf16_d576', False, 128, (2048, 2048), (0, 0), None, None, (1, 1), 'portable_bf16_d576_c128', C11, P0, us=13.19, roofline=0.044, anchor_tokens=1),
    _e('bf16_d576', False, 128, (2048, 2048), (0, 0), None, None, (2, 16), 'portable_bf16_d576_c64', C12, P0, us=51.32, roofline=0.18, anchor_tokens=16),
    _e('bf16_d576', False, 128, (2048, 2048), (0, 0), None, None, (17, 256), 'portable_bf16_d576_c128', C9, P0, us=580.17, roofline=0.254, anchor_tokens=256),
    _e('bf16_d576', False, 128, (2048, 2048), (0, 0), None, None, (257, 2147483647), 'portable_bf16_d576_c64', C13, P0, us=9047.97, roofline=0.261, anchor_tokens=4096),
    _e('v32', False, 8, (2048, 2048), (0, 0), 64, None, (1, 1), 'portable_v32_c128', C14, P0, us=13.31, roofline=0.023, anchor_tokens=1),
    _e('v32', False, 8, (2048, 2048), (0, 0), 64, None, (2, 16), 'portable_v32_c128', C11, P0, us=32.71, roofline=0.152, anchor_tokens=16),
    _e('v32', False, 8, (2048, 2048), (0, 0), 64, None, (17, 256), 'portable_v32_c128', C15, P0, us=335.1, roofline=0.238, anchor_tokens=256),
    _e('v32', False, 8, (2048, 2048), (0, 0), 64, None, (257, 2147483647), 'portable_v32_c128', C15, P0, us=5342.66, roofline=0.238, anchor_tokens=4096),
    _e('v32', False, 16, (2048, 2048), (0, 0), 64, None, (1, 1), 'portable_v32_c128', C14, P0, us=13.66, roofline=0.023, anchor_tokens=1),
    _e('v32', False, 16, (2048, 2048), (0, 0), 64, None, (2, 16), 'portable_v32_c128', C11, P0, us=34.96, roofline=0.142, anchor_tokens=16),
    _e('v32', False, 16, (2048, 2048), (0, 0), 64, None, (17, 256), 'portable_v32_c128', C15, P0, us=335.14, roofline=0.238, anchor_tokens=256),
    _e('v32', False, 16, (2048, 2048), (0, 0), 64, None, (257, 2147483647), 'portable_v32_c128', C15, P0, us=5358.82, roofline=0.238, anchor_tokens=4096),
    _e('v32', False, 64, (2048, 2048), (0, 0), 64, None, (1, 1), 'portable_v32_c128', C16, P0, us=14.92, roofline=0.021, anchor_tokens=1),
    _e('v32', False, 64, (2048, 2048), (0, 0), 64, None, (2, 16), 'portable_v32_c128', C17, P0, us=50.05, roofline=0.099, anchor_tokens=16),
    _e('v32', False, 64, (2048, 2048), (0, 0), 64, None, (17, 256), 'portable_v32_c128', C18, P0, us=368.46, roofline=0.216, anchor_tokens=256),
    _e('v32', False, 64, (2048, 2048), (0, 0), 64, None, (257, 2147483647), 'portable_v32_c128', C18, P0, us=5867.68, roofline=0.217, anchor_tokens=4096),
    _e('v32', False, 128, (2048, 2048), (0, 0), 64, None, (1, 1), 'portable_v32_c128', C16, P0, us=16.41, roofline=0.035, anchor_tokens=1),
    _e('v32', False, 128, (2048, 2048), (0, 0), 64, None, (2, 16), 'portable_v32_c128', C19, P0, us=64.42, roofline=0.143, anchor_tokens=16),
    _e('v32', False, 128, (2048, 2048), (0, 0), 64, None, (17, 256), 'portable_v32_c128', C18, P0, us=730.78, roofline=0.202, anchor_tokens=256),
    _e('v32', False, 128, (2048, 2048), (0, 0), 64, None, (257, 2147483647), 'portable_v32_c128', C18, P0, us=11684.9, roofline=0.202, anchor_tokens=4096),
    _e('v4', False, 8, (128, 128), (0, 0), 64, None, (1, 1), 'portable_v4_c64', C20, P0, us=9.17, roofline=0.002, anchor_tokens=1),
    _e('v4', False, 8, (128, 128), (0, 0), 64, None, (2, 16), 'portable_v4_c64', C21, P0, us=14.35, roofline=0.019, anchor_tokens=16),
    _e('v4', False, 8, (128, 128), (0, 0), 64, None, (17, 2147483647), 'portable_v4_c64', C6, P0, us=31.5, roofline=0.141, anchor_tokens=256),
    _e('v4', False, 16, (128, 128), (0, 0), 64, None, (1, 1), 'portable_v4_c64', C21, P0, us=9.28, roofline=0.002, anchor_tokens=1),
    _e('v4', False, 16, (128, 128), (0, 0), 64, None, (2, 16), 'portable_v4_c64', C22, P0, us=15.36, roofline=0.018, anchor_tokens=16),
    _e('v4', False, 16, (128, 128), (0, 0), 64, None, (17, 2147483647), 'portable_v4_c64', C6, P0, us=32.69, roofline=0.136, anchor_tokens=256),
    _e('v4', False, 64, (128, 128), (0, 0), 64, None, (1, 1), 'portable_v4_c64', C23, P0, us=14.0, roofline=0.001, anchor_tokens=1),
    _e('v4', False, 64, (128, 128), (0, 0), 64, None, (2, 16), 'portable_v4_c64', C24, P0, us=19.31, roofline=0.014, anchor_tokens=16),
    _e('v4', False, 64, (128, 128), (0, 0), 64, None, (17, 2147483647), 'portable_v4_c64', C13, P0, us=49.62, roofline=0.089, anchor_tokens=256),
    _e('v4', False, 128, (128, 128), (0, 0), 64, None, (1, 1), 'portable_v4_c64', C24, P0, us=14.78, roofline=0.002, anchor_tokens=1),
    _e('v4', False, 128, (128, 128), (0, 0), 64, None, (5, 16), 'portable_v4_c64', C25, P0, us=19.13, roofline=0.028, anchor_tokens=16),
    _e('v4', False, 128, (128, 128), (0, 0), 64, None, (65, 256), 'portable_v4_c64', C13, P0, us=92.86, roofline=0.094, anchor_tokens=256),
    _e('v4', False, 128, (128, 128), (0, 0), 64, None, (1025, 2147483647), 'portable_v4_c64', C13, P1, us=92.86, roofline=0.094, anchor_tokens=256),
    _e('v4', True, 8, (128, 128), (512, 512), 64, 32, (1, 1), 'portable_v4_c64', C26, P0, us=23.06, roofline=0.004, anchor_tokens=1),
    _e('v4', True, 8, (128, 128), (512, 512), 64, 32, (2, 16), 'portable_v4_c64', C26, P0, us=25.88, roofline=0.053, anchor_tokens=16),
    _e('v4', True, 8, (128, 128), (512, 512), 64, 32, (17, 256), 'portable_v4_c64', C6, P0, us=132.89, roofline=0.167, anchor_tokens=256),
    _e('v4', True, 8, (128, 128), (512, 512), 64, 32, (257, 2147483647), 'portable_v4_c64', C6, P0, us=2154.27, roofline=0.165, anchor_tokens=4096),
    _e('v4', True, 8, (128, 128), (512, 512), 64, 64, (1, 1), 'portable_v4_c64', C26, P0, us=23.1, roofline=0.004, anchor_tokens=1),
    _e('v4', True, 8, (128, 128), (512, 512), 64, 64, (2, 16), 'portable_v4_c64', C27, P0, us=23.97, roofline=0.058, anchor_tokens=16),
    _e('v4', True, 8, (128, 128), (512, 512), 64, 64, (17, 256), 'portable_v4_c64', C6, P0, us=132.63, roofline=0.167, anchor_tokens=256),
    _e('v4', True, 8, (128, 128), (512, 512), 64, 64, (257, 2147483647), 'portable_v4_c64', C6, P0, us=2188.13, roofline=0.162, anchor_tokens=4096),
    _e('v4', True, 8, (128, 128), (512, 512), 256, 64, (1, 1), 'portable_v4_c64', C26, P0, us=23.08, roofline=0.004, anchor_tokens=1),
    _e('v4', True, 8, (128, 128), (512, 512), 256, 64, (2, 16), 'portable_v4_c64', C27, P0, us=23.97, roofline=0.058, anchor_tokens=16),
    _e('v4', True, 8, (128, 128), (512, 512), 256, 64, (17, 256), 'portable_v4_c64', C6, P0, us=132.6, roofline=0.167, anchor_tokens=256),
    _e('v4', True, 8, (128, 128), (512, 512), 256, 64, (257, 2147483647), 'portable_v4_c64', C6, P0, us=2171.97, roofline=0.163, anchor_tokens=4096),
    _e('v4', True, 16, (128, 128), (1024, 1024), 64, 64, (1, 1), 'portable_v4_c64', C28, P0, us=24.27, roofline=0.006, anchor_tokens=1),
    _e('v4', True, 16, (128, 128), (1024, 1024), 64, 64, (2, 16), 'portable_v4_c64', C29, P0, us=35.7, roofline=0.07, anchor_tokens=16),
    _e('v4', True, 16, (128, 128), (1024, 1024), 64, 64, (17, 256), 'portable_v4_c64', C6, P0, us=232.71, roofline=0.171, anchor_tokens=256),
    _e('v4', True, 16, (128, 128), (1024, 1024), 64, 64, (257, 2147483647), 'portable_v4_c64', C6, P0, us=3761.09, roofline=0.17, anchor_tokens=4096),
    _e('v4', True, 16, (128, 128), (1024, 1024), 256, 64, (1, 1), 'portable_v4_c64', C28, P0, us=24.29, roofline=0.006, anchor_tokens=1),
    _e('v4', True, 16, (128, 128), (1024, 1024), 256, 64, (2, 16), 'portable_v4_c64', C27, P0, us=34.91, roofline=0.071, anchor_tokens=16),
    _e('v4', True, 16, (128, 128), (1024, 1024), 256, 64, (17, 256), 'portable_v4_c64', C6, P0, us=233.61, roofline=0.171, anchor_tokens=256),
    _e('v4', True, 16, (128, 128), (1024, 1024), 256, 64, (257, 2147483647), 'portable_v4_c64', C6, P0, us=3786.11, roofline=0.168, anchor_tokens=4096),
    _e('v4', True, 64, (128, 128), (512, 512), 64, 32, (1, 1), 'portable_v4_c64', C30, P0, us=22.99, roofline=0.004, anchor_tokens=1),
    _e('v4', True, 64, (128, 128), (512, 512), 64, 32, (2, 16), 'portable_v4_c64', C8, P0, us=37.94, roofline=0.036, anchor_tokens=16),
    _e('v4', True, 64, (128, 128), (512, 512), 64, 32, (17, 256), 'portable_v4_c64', C13, P0, us=174.61, roofline=0.127, anchor_tokens=256),
    _e('v4', True, 64, (128, 128), (512, 512), 64, 32, (257, 2147483647), 'portable_v4_c64', C10, P0, us=2673.82, roofline=0.133, anchor_tokens=4096),
    _e('v4', True, 64, (128, 128), (512, 512), 64, 64, (1, 1), 'portable_v4_c64', C30, P0, us=23.23, roofline=0.004, anchor_tokens=1),
    _e('v4', True, 64, (128, 128), (512, 512), 64, 64, (2, 16), 'portable_v4_c64', C8, P0, us=37.7, roofline=0.037, anchor_tokens=16),
    _e('v4', True, 64, (128, 128), (512, 512), 64, 64, (17, 256), 'portable_v4_c64', C13, P0, us=170.6, roofline=0.13, anchor_tokens=256),
    _e('v4', True, 64, (128, 128), (512, 512), 64, 64, (257, 2147483647), 'portable_v4_c64', C10, P0, us=2632.38, roofline=0.135, anchor_tokens=4096),
    _e('v4', True, 64, (128, 128), (512, 512), 256, 64, (1, 1), 'portable_v4_c64', C30, P0, us=22.91, roofline=0.004, anchor_tokens=1),
    _e('v4', True, 64, (128, 128), (512, 512), 256, 64, (2, 16), 'portable_v4_c64', C8, P0, us=37.56, roofline=0.037, anchor_tokens=16),
    _e('v4', True, 64, (128, 128), (512, 512), 256, 64, (17, 256), 'portable_v4_c64', C10, P0, us=173.56, roofline=0.128, anchor_tokens=256),
    _e('v4', True, 64, (128, 128), (512, 512), 256, 64, (257, 2147483647), 'portable_v4_c64', C13, P0, us=2698.46, roofline=0.131, anchor_tokens=4096),
    _e('v4', True, 128, (128, 128), (1024, 1024), 64, 64, (1, 1), 'portable_v4_c64', C31, P0, us=24.72, roofline=0.012, anchor_tokens=1),
    _e('v4', True, 128, (128, 128), (1024, 1024), 64, 64, (2, 16), 'portable_v4_c64', C12, P0, us=53.12, roofline=0.092, anchor_tokens=16),
    _e('v4', True, 128, (128, 128), (1024, 1024), 64, 64, (17, 256), 'portable_v4_c64', C10, P0, us=544.22, roofline=0.144, anchor_tokens=256),
    _e('v4', True, 128, (128, 128), (1024, 1024), 64, 64, (257, 2147483647), 'portable_v4_c64', C32, P0, us=8484.9, roofline=0.147, anchor_tokens=4096),
    _e('v4', True, 128, (128, 128), (1024, 1024), 256, 64, (1, 1), 'portable_v4_c64', C31, P0, us=24.73, roofline=0.012, anchor_tokens=1),
    _e('v4', True, 128, (128, 128), (1024, 1024), 256, 64, (2, 16), 'portable_v4_c64', C33, P0, us=54.05, roofline=0.09, anchor_tokens=16),
    _e('v4', True, 128, (128, 128), (1024, 1024), 256, 64, (17, 256), 'portable_v4_c64', C13, P0, us=543.43, roofline=0.144, anchor_tokens=256),
    _e('v4', True, 128, (128, 128), (1024, 1024), 256, 64, (257, 2147483647), 'portable_v4_c64', C13, P0, us=8543.17, roofline=0.146, anchor_tokens=4096),
    _e('v41_footer', True, 8, (128, 128), (512, 512), 128, 64, (1, 1), 'portable_v41_footer_c256', C34, P0, us=17.94, roofline=0.004, anchor_tokens=1),
    _e('v41_footer', True, 8, (128, 128), (512, 512), 128, 64, (5, 16), 'portable_v41_footer_c256', C34, P0, us=21.61, roofline=0.058, anchor_tokens=16),
    _e('v41_footer', True, 8, (128, 128), (512, 512), 128, 64, (65, 256), 'portable_v41_footer_c128', C35, P0, us=134.67, roofline=0.149, anchor_tokens=256),
    _e('v41_footer', True, 8, (128, 128), (512, 512), 128, 64, (1025, 2147483647), 'portable_v41_footer_c128', C35, P1, us=134.67, roofline=0.149, anchor_tokens=256),
    _e('v41_footer', True, 8, (128, 128), (512, 512), 128, 128, (1, 1), 'portable_v41_footer_c256', C34, P0, us=17.97, roofline=0.004, anchor_tokens=1),
    _e('v41_footer', True, 8, (128, 128), (512, 512), 128, 128, (5, 16), 'portable_v41_footer_c128', C36, P0, us=21.62, roofline=0.058, anchor_tokens=16),
    _e('v41_footer', True, 8, (128, 128), (512, 512), 128, 128, (65, 256), 'portable_v41_footer_c128', C35, P0, us=134.79, roofline=0.149, anchor_tokens=256),
    _e('v41_footer', True, 8, (128, 128), (512, 512), 128, 128, (1025, 2147483647), 'portable_v41_footer_c128', C35, P1, us=134.79, roofline=0.149, anchor_tokens=256),
    _e('v41_footer', True, 64, (128, 128), (512, 512), 128, 64, (1, 1), 'portable_v41_footer_c128', C37, P0, us=21.29, roofline=0.004, anchor_tokens=1),
    _e('v41_footer', True, 64, (128, 128), (512, 512), 128, 64, (5, 16), 'portable_v41_footer_c128', C38, P0, us=35.08, roofline=0.039, anchor_tokens=16),
    _e('v41_footer', True, 64, (128, 128), (512, 512), 128, 64, (65, 256), 'portable_v41_footer_c128', C3, P0, us=154.19, roofline=0.141, anchor_tokens=256),
    _e('v41_footer', True, 64, (128, 128), (512, 512), 128, 64, (1025, 2147483647), 'portable_v41_footer_c128', C3, P1, us=154.19, roofline=0.141, anchor_tokens=256),
    _e('v41_footer', True, 64, (128, 128), (512, 512), 128, 128, (1, 1), 'portable_v41_footer_c128', C37, P0, us=20.68, roofline=0.004, anchor_tokens=1),
    _e('v41_footer', True, 64, (128, 128), (512, 512), 128, 128, (5, 16), 'portable_v41_footer_c128', C39, P0, us=34.87, roofline=0.039, anchor_tokens=16),
    _e('v41_footer', True, 64, (128, 128), (512, 512), 128, 128, (65, 256), 'portable_v41_footer_c128', C9, P0, us=151.5, roofline=0.143, anchor_tokens=256),
    _e('v41_footer', True, 64, (128, 128), (512, 512), 128, 128, (1025, 2147483647), 'portable_v41_footer_c128', C9, P1, us=151.5, roofline=0.143, anchor_tokens=256),
    _e('v41_inline', True, 8, (128, 128), (512, 512), 256, 64, (1, 1), 'portable_v41_inline_c128', C36, P0, us=19.3, roofline=0.004, anchor_tokens=1),
    _e('v41_inline', True, 8, (128, 128), (512, 512), 256, 64, (5, 16), 'portable_v41_inline_c128', C36, P0, us=21.78, roofline=0.057, anchor_tokens=16),
    _e('v41_inline', True, 8, (128, 128), (512, 512), 256, 64, (65, 256), 'portable_v41_inline_c128', C35, P0, us=138.92, roofline=0.144, anchor_tokens=256),
    _e('v41_inline', True, 8, (128, 128), (512, 512), 256, 64, (1025, 2147483647), 'portable_v41_inline_c128', C35, P1, us=138.92, roofline=0.144, anchor_tokens=256),
    _e('v41_inline', True, 8, (128, 128), (2048, 2048), 256, 64, (1, 1), 'portable_v41_inline_c128', C14, P0, us=20.72, roofline=0.013, anchor_tokens=1),
    _e('v41_inline', True, 8, (128, 128), (2048, 2048), 256, 64, (5, 16), 'portable_v41_inline_c128', C36, P0, us=44.7, roofline=0.095, anchor_tokens=16),
    _e('v41_inline', True, 8, (128, 128), (2048, 2048), 256, 64, (65, 256), 'portable_v41_inline_c128', C35, P0, us=446.86, roofline=0.152, anchor_tokens=256),
    _e('v41_inline', True, 8, (128, 128), (2048, 2048), 256, 64, (1025, 2147483647), 'portable_v41_inline_c128', C35, P1, us=446.86, roofline=0.152, anchor_tokens=256),
    _e('v41_inline', True, 64, (128, 128), (512, 512), 256, 64, (1, 1), 'portable_v41_inline_c256', C40, P0, us=18.89, roofline=0.004, anchor_tokens=1),
    _e('v41_inline', True, 64, (128, 128), (512, 512), 256, 64, (5, 16), 'portable_v41_inline_c128', C39, P0, us=35.32, roofline=0.038, anchor_tokens=16),
    _e('v41_inline', True, 64, (128, 128), (512, 512), 256, 64, (65, 256), 'portable_v41_inline_c128', C18, P0, us=156.51, roofline=0.139, anchor_tokens=256),
    _e('v41_inline', True, 64, (128, 128), (512, 512), 256, 64, (1025, 2147483647), 'portable_v41_inline_c128', C18, P1, us=156.51, roofline=0.139, anchor_tokens=256),
    _e('v41_inline', True, 64, (128, 128), (2048, 2048), 256, 64, (1, 1), 'portable_v41_inline_c128', C16, P0, us=22.2, roofline=0.013, anchor_tokens=1),
    _e('v41_inline', True, 64, (128, 128), (2048, 2048), 256, 64, (5, 16), 'portable_v41_inline_c128', C38, P0, us=58.29, roofline=0.079, anchor_tokens=16),
    _e('v41_inline', True, 64, (128, 128), (2048, 2048), 256, 64, (65, 256), 'portable_v41_inline_c128', C18, P0, us=481.56, roofline=0.153, anchor_tokens=256),
    _e('v41_inline', True, 64, (128, 128), (2048, 2048), 256, 64, (1025, 2147483647), 'portable_v41_inline_c128', C18, P1, us=481.56, roofline=0.153, anchor_tokens=256),
)
