"""The XID errors of NVIDIA GPUs: what each number means, and whether the node must be drained.

An XID is the number of an error that NVIDIA's driver reports for a GPU, in the kernel log and by
NVML. Source: NVIDIA, "Analyzing Xid Errors with the Xid Catalog",
docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html, read in November 2026. The catalog
gives an immediate action for each XID. An XID has `drain` here if that action is a reset of the
GPU or a restart of the machine, or a workflow that usually ends in one: no new work may start on
the GPU before. The meanings and causes are in our own words.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Cause = Literal["script", "driver", "memory of the GPU", "GPU", "link or PCIe", "another error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Xid:
    """One XID error.

    Attributes:
        number: The number in the kernel log and in NVML's events.
        meaning: What happened.
        cause: The usual cause.
        drain: Whether the GPU must be reset before it is used again, so that the node is drained.
    """

    number: int
    meaning: str
    cause: Cause
    drain: bool = False


XIDS = (
    Xid(number=13, meaning="A kernel failed, usually by an access out of bounds", cause="script"),
    Xid(number=31, meaning="A kernel accessed an address that is not mapped", cause="script"),
    Xid(number=32, meaning="The stream of commands to the GPU is damaged", cause="link or PCIe"),
    Xid(number=43, meaning="A process stopped after a fault of its own", cause="script"),
    Xid(number=45, meaning="The work of a process was removed as it ended", cause="another error"),
    Xid(number=46, meaning="The GPU no longer processes work", cause="GPU", drain=True),
    Xid(
        number=48,
        meaning="Uncorrectable ECC error (two bits)",
        cause="memory of the GPU",
        drain=True,
    ),
    Xid(number=54, meaning="The board lacks its auxiliary power", cause="GPU"),
    Xid(number=62, meaning="A controller inside the GPU has halted", cause="GPU", drain=True),
    Xid(number=63, meaning="A row of memory is to be remapped", cause="memory of the GPU"),
    Xid(
        number=64,
        meaning="A row of memory could not be remapped",
        cause="memory of the GPU",
        drain=True,
    ),
    Xid(number=69, meaning="A kernel used the GPU in an illegal way", cause="script"),
    Xid(
        number=74,
        meaning="An NVLink connection failed, here or at its other end",
        cause="link or PCIe",
        drain=True,
    ),
    Xid(number=79, meaning="The GPU fell off the PCIe bus", cause="link or PCIe", drain=True),
    Xid(number=92, meaning="Many correctable ECC errors", cause="memory of the GPU"),
    Xid(
        number=94,
        meaning="Uncorrectable memory error that hit one process only",
        cause="memory of the GPU",
    ),
    Xid(
        number=95,
        meaning="Uncorrectable memory error that may have hit any process",
        cause="memory of the GPU",
        drain=True,
    ),
    Xid(number=109, meaning="A switch between two contexts timed out", cause="GPU", drain=True),
    Xid(number=110, meaning="A security check of the GPU failed", cause="GPU", drain=True),
    Xid(
        number=119,
        meaning="The GPU's system processor (GSP) does not answer the driver",
        cause="driver",
        drain=True,
    ),
    Xid(
        number=120,
        meaning="Error in the GPU's system processor (GSP)",
        cause="driver",
        drain=True,
    ),
    Xid(number=136, meaning="An NVLink could not be trained", cause="link or PCIe", drain=True),
    Xid(number=137, meaning="Illegal access to another GPU over NVLink", cause="script"),
    Xid(
        number=140,
        meaning="Uncorrectable memory error that the driver could not isolate",
        cause="memory of the GPU",
        drain=True,
    ),
    Xid(number=143, meaning="The GPU could not be initialized", cause="GPU", drain=True),
    *(
        Xid(
            number=number,
            meaning=f"NVLink error of a Blackwell GPU ({part}); XID 154 names the action",
            cause="link or PCIe",
        )
        for number, part in (
            (144, "SAW"),
            (145, "RLW"),
            (146, "TLW"),
            (147, "TREX"),
            (148, "NVLPW"),
        )
    ),
    Xid(
        number=149,
        meaning="An NVLink of a Blackwell GPU is down",
        cause="link or PCIe",
        drain=True,
    ),
    Xid(
        number=150,
        meaning="NVLink error of a Blackwell GPU (MSE); XID 154 names the action",
        cause="link or PCIe",
    ),
    Xid(
        number=154,
        meaning="The driver names the reset that another XID needs",
        cause="another error",
    ),
    Xid(number=155, meaning="Software took an NVLink down", cause="link or PCIe", drain=True),
    Xid(number=156, meaning="A faulty unit of the GPU is to be retired", cause="GPU", drain=True),
    Xid(number=158, meaning="A fatal timeout inside the GPU", cause="GPU", drain=True),
)
BY_NUMBER = {xid.number: xid for xid in XIDS}
# XIDs after which the node must be drained, as the label `xid` has them.
DRAIN_XIDS = frozenset(str(xid.number) for xid in XIDS if xid.drain)


def describe(number: int) -> str:
    """Return the meaning of an XID, and what to do about it, for a log line.

    Examples:
        >>> describe(79)
        'The GPU fell off the PCIe bus; drain the node'
    """
    xid = BY_NUMBER.get(number)
    if xid is None:
        return "not in our table; see NVIDIA's Xid catalog"
    return f"{xid.meaning}; drain the node" if xid.drain else f"{xid.meaning}; cause: {xid.cause}"
