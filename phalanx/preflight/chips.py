"""What chips can do: published figures, each with the page that it is from.

Memory that programs can use is what libtpu's compiler says is available (it keeps a part to itself). A program
sees `devices`: one for each chip, or two where each of the chip's cores has a memory of its own. The rate of an
ICI link is in one direction: the published figure for a chip, which counts both, divided by twice its links.
Cloud TPU's pages give no data-center bandwidth for v2, v3 and v4: v5e's is taken, the lowest that is published.
"""

from __future__ import annotations

from dataclasses import dataclass, field

GIB = 2**30
_CLOUD = "https://cloud.google.com/tpu/docs/"


@dataclass(frozen=True)
class Chip:
    """One generation of TPUs; rates are those of a whole chip, per second."""

    name: str
    devices: int
    """How many devices JAX sees in one chip."""
    hbm_bytes: int
    """Built in, for a chip."""
    usable_bytes: int
    """For one device's program."""
    flops: dict[str, float]
    """Peak matrix arithmetic by dtype; float32 matmuls run as bfloat16 unless a precision is asked for."""
    hbm_bandwidth: float
    ici_links: int
    ici_link_bandwidth: float
    dcn_bandwidth: float
    """Of a chip, to other slices."""
    chips_per_host: int
    shapes: tuple[str, ...]
    """Of slices that are offered."""
    source: str
    options: dict[str, str] = field(default_factory=dict)
    """For libtpu, where its default is not what machines are set up with."""

    def __hash__(self) -> int:
        return hash(self.name)

    @property
    def dimensions(self) -> int:
        """Of its torus."""
        return len(self.shapes[0].split("x"))


_FLAT = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_CUBES = "2x2x1 2x2x2 2x2x4 2x4x4 4x4x4 4x4x8 4x8x8 8x8x8 8x8x16 8x16x16 16x16x16".split()

CHIPS: dict[str, Chip] = {
    chip.name: chip
    for chip in (
        Chip(
            name="v2",
            devices=2,
            hbm_bytes=16 * GIB,
            usable_bytes=int(7.48 * GIB),
            flops={"bfloat16": 46e12},
            hbm_bandwidth=600e9,
            ici_links=4,
            ici_link_bandwidth=62e9,
            dcn_bandwidth=3.1e9,
            chips_per_host=4,
            shapes=("2x2", "4x4", "8x8", "8x16", "16x16"),
            source=_CLOUD + "v2; links: Norrie et al., IEEE Micro 41(2), 2021",
        ),
        Chip(
            name="v3",
            devices=2,
            hbm_bytes=32 * GIB,
            usable_bytes=int(15.48 * GIB),
            flops={"bfloat16": 123e12},
            hbm_bandwidth=900e9,
            ici_links=4,
            ici_link_bandwidth=70e9,
            dcn_bandwidth=3.1e9,
            chips_per_host=4,
            shapes=("2x2", "4x4", "8x8", "8x16", "16x16", "16x32", "32x32"),
            source=_CLOUD + "v3; links: Jouppi et al., ISCA 2023 (table 4)",
        ),
        Chip(
            name="v4",
            devices=1,
            hbm_bytes=32 * GIB,
            usable_bytes=int(31.25 * GIB),
            flops={"bfloat16": 275e12, "int8": 275e12},
            hbm_bandwidth=1200e9,
            ici_links=6,
            ici_link_bandwidth=50e9,
            dcn_bandwidth=3.1e9,
            chips_per_host=4,
            shapes=tuple(_CUBES),
            source=_CLOUD + "v4; links: Jouppi et al., ISCA 2023 (table 4)",
            options={"chip_config_name": "megacore"},
        ),
        Chip(
            name="v5e",
            devices=1,
            hbm_bytes=16 * GIB,
            usable_bytes=int(15.75 * GIB),
            flops={"bfloat16": 197e12, "int8": 393e12},
            hbm_bandwidth=819e9,
            ici_links=4,
            ici_link_bandwidth=50e9,
            dcn_bandwidth=3.1e9,
            chips_per_host=8,
            shapes=_FLAT,
            source=_CLOUD + "v5e",
        ),
        Chip(
            name="v5p",
            devices=1,
            hbm_bytes=95 * GIB,
            usable_bytes=int(95.73 * GIB),
            flops={"bfloat16": 459e12, "int8": 918e12},
            hbm_bandwidth=2765e9,
            ici_links=6,
            ici_link_bandwidth=100e9,
            dcn_bandwidth=6.25e9,
            chips_per_host=4,
            shapes=(*_CUBES, "16x16x24"),
            source=_CLOUD + "v5p",
        ),
        Chip(
            name="v6e",
            devices=1,
            hbm_bytes=32 * GIB,
            usable_bytes=int(31.24 * GIB),
            flops={"bfloat16": 918e12, "int8": 1836e12, "float8": 918e12},
            hbm_bandwidth=1638e9,
            ici_links=4,
            ici_link_bandwidth=100e9,
            dcn_bandwidth=12.5e9,
            chips_per_host=8,
            shapes=_FLAT,
            source=_CLOUD + "v6e",
        ),
        Chip(
            name="tpu7x",
            devices=2,
            hbm_bytes=192 * GIB,
            usable_bytes=int(94.74 * GIB),
            flops={"bfloat16": 2307e12, "float8": 4614e12},
            hbm_bandwidth=7380e9,
            ici_links=6,
            ici_link_bandwidth=100e9,
            dcn_bandwidth=12.5e9,
            chips_per_host=4,
            shapes=tuple(_CUBES),
            source=_CLOUD + "tpu7x",
        ),
    )
}
