"""Shapes of real models' dense projections, for tests and benchmarks."""

from pallas_kernels.packed_lora.shapes import Shape

# A decode step and 16 blocks of prompts; slots times layers. Qwen3-4B (2,560 wide, 9,728 in
# the MLP) and Llama-3-70B (8,192, 28,672) over eight devices.
DECODE = (
    Shape(8, 2560, (4096,), 16, 36 * 64),
    Shape(32, 2560, (9728,), 16, 36 * 64),
    Shape(128, 9728, (2560,), 16, 36 * 64),
    Shape(128, 8192, (3584,), 32, 80 * 16),
    Shape(128, 2560, (4096,), 8, 36 * 1024, "float32"),
    Shape(128, 2560, (4096,), 128, 36 * 8),
    Shape(128, 2560, (4096,), 24, 36 * 64),
)
PREFILL = (Shape(512, 2560, (9728,), 16, 36 * 64), Shape(512, 9728, (2560,), 16, 36 * 64))
